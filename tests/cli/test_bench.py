# SPDX-License-Identifier: Apache-2.0
"""`vllm-ddtree bench` without engines: names, commands, tables, recommendation."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from vllm_ddtree.cli.bench import client, servers
from vllm_ddtree.cli.bench.client import Server, last_words
from vllm_ddtree.cli.bench.command import prompt_options, read_loads, read_urls
from vllm_ddtree.cli.bench.methods import fixed_budget, is_method, speculation, usual
from vllm_ddtree.cli.bench.recommend import Advice, budgets_by_load, recommend
from vllm_ddtree.cli.bench.record import Results, Run
from vllm_ddtree.cli.bench.show import as_json, plot, show
from vllm_ddtree.cli.errors import CommandError, WrongUsage


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("plain", None),
        ("chain-7", {"method": "dspark", "model": "d", "num_speculative_tokens": 7}),
        (
            "chain-7-adaptive",
            {
                "method": "dspark",
                "model": "d",
                "num_speculative_tokens": 7,
                "enable_adaptive_verification": True,
            },
        ),
        ("tree-31", {"method": "ddtree", "model": "d", "budget": 31}),
        ("tree-auto", {"method": "ddtree", "model": "d", "budget": "auto"}),
    ],
)
def test_methods(name: str, spec: dict[str, Any] | None) -> None:
    assert is_method(name) and speculation(name, "d", "dspark") == spec


@pytest.mark.parametrize("name", ["", "tree", "tree-x", "chain-0", "tree-7-adaptive", "plainly"])
def test_no_methods(name: str) -> None:
    assert not is_method(name) and fixed_budget(name) is None
    with pytest.raises(WrongUsage, match="give plain, chain-K"):
        speculation(name, "d", "dflash")


def test_usual_methods_know_the_version() -> None:
    assert usual((0, 32, 0)) == ["plain", "chain-7", "tree-auto"]
    assert usual((0, 33, 1)) == ["plain", "chain-7", "chain-7-adaptive", "tree-auto"]
    budgets = [fixed_budget(name) for name in ("plain", "tree-7", "tree-auto", "chain-7")]
    assert budgets == [0, 7, None, None]


def test_loads_and_urls() -> None:
    assert read_loads("8, 1,8") == [1, 8]
    for wrong in ("", "0", "1,x", "-1"):
        with pytest.raises(WrongUsage, match="--load"):
            read_loads(wrong)
    assert read_urls(["a=http://h:1", "b=https://h"]) == {"a": "http://h:1", "b": "https://h"}
    for entries in (["http://h"], ["a=h:1"], ["=http://h"], ["a=http://h", "a=http://i"]):
        with pytest.raises(WrongUsage, match="--url"):
            read_urls(entries)


SERVER = Server("tree", "http://h:1", "nano", "models/nano")


def test_the_command_of_a_load(tmp_path: Path) -> None:
    made = client.arguments(SERVER, 8, 32, ["--temperature=1", "--ignore-eos"], tmp_path / "r.json")
    assert made[:2] == ["bench", "serve"] and made[-2:] == ["--temperature=1", "--ignore-eos"]
    assert "--temperature" not in made
    pairs = dict(itertools.pairwise(made))
    for option, value in (
        ("--base-url", "http://h:1"),
        ("--model", "models/nano"),
        ("--served-model-name", "nano"),
        ("--max-concurrency", "8"),
        ("--num-prompts", "32"),
        ("--result-filename", "r.json"),
    ):
        assert pairs[option] == value


def test_the_command_of_a_server() -> None:
    spec = {"method": "ddtree", "model": "d"}
    made = servers.arguments("t", spec, 9, ["--dtype", "float32"])
    assert made[:2] == ["serve", "t"] and json.loads(made[-1]) == spec
    assert "--speculative-config" not in servers.arguments("t", None, 9, [])


def test_a_stopped_server_leaves_nothing_behind(tmp_path: Path) -> None:
    """Its engine is a process of its own, and may not hear that the server is stopped."""
    code = "(trap '' TERM; exec sleep 600) & trap 'exit 0' TERM; sleep 0.2; echo $!; wait"
    server = subprocess.Popen(
        ["bash", "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert server.stdout is not None
    engine = int(server.stdout.readline())
    os.kill(engine, signal.SIGTERM)  # it is ignored
    os.kill(engine, 0)
    servers.stop(server)
    assert server.returncode == 0
    # It is gone when nobody holds the pipe any more.
    assert server.stdout.read() == ""


def test_last_words(tmp_path: Path) -> None:
    log = tmp_path / "log"
    for text, words in (
        ("", "it said nothing"),
        ("one\n two \n", "two"),
        ("ValueError: first\nbye\n", "ValueError: first"),
        ("ValueError: method ddtree\nRuntimeError: engine\n", "ValueError: method ddtree"),
    ):
        log.write_text(text)
        assert last_words(log) == words


def test_a_server_that_is_not_there() -> None:
    with pytest.raises(CommandError, match=r"a=http://127\.0\.0\.1:9: no vLLM server"):
        client.find_server("a", "http://127.0.0.1:9/v1/")


def test_prompts_become_a_data_set(tmp_path: Path) -> None:
    text = tmp_path / "p.txt"
    text.write_text("one\ntwo\n")
    options = prompt_options(text, tmp_path)
    data = Path(options[options.index("--dataset-path") + 1])
    assert options[:2] == ["--dataset-name", "custom"]
    lines = [json.loads(line) for line in data.read_text().splitlines()]
    assert lines == [{"prompt": "one"}, {"prompt": "two"}]


def run(name: str, load: int, tokens_s: float, repeat: int = 0) -> Run:
    acceptance = None if name == "plain" else 2.5
    return Run(name, load, repeat, tokens_s, 1.0, 2.0, acceptance, 4, 0)


def results(**speeds: list[float]) -> Results:
    """Of methods at 1, 2, 3, ... times 8 requests; underscores for hyphens."""
    return Results(
        [
            run(name.replace("_", "-"), 8 * place, speed)
            for name, own in speeds.items()
            for place, speed in enumerate(own, 1)
        ],
        {},
    )


def test_a_run_of_a_result_file() -> None:
    result = {
        "output_throughput": 10.0,
        "mean_tpot_ms": 3.0,
        "median_ttft_ms": 7.0,
        "completed": 4,
        "failed": 1,
    }
    assert Run.of("plain", 8, 1, result) == Run("plain", 8, 1, 10.0, 3.0, 7.0, None, 4, 1)
    with_drafts = Run.of("tree", 8, 1, {**result, "spec_decode_acceptance_length": 2.0})
    assert with_drafts.acceptance == 2.0


def test_medians() -> None:
    found = Results([run("a", 1, speed, i) for i, speed in enumerate((1.0, 9.0, 2.0))], {})
    assert found.median("a", 1) == 2.0 and found.median("a", 2) is None
    assert found.median("b", 1) is None
    plain = Results([run("plain", 1, 3.0)], {})
    assert plain.median("plain", 1, "acceptance") is None


def advised(found: Results, drafter: str | None = "d") -> Advice:
    advice = recommend(found, drafter, "dflash")
    assert advice is not None
    return advice


def test_the_best_mean_is_recommended() -> None:
    advice = advised(results(plain=[100, 200], chain_7=[200, 300], tree_auto=[300, 290]))
    assert advice.name == "tree-auto"
    assert advice.best == {8: "tree-auto", 16: "chain-7"}
    assert advice.gain == pytest.approx((3 * 1.45) ** 0.5)
    assert advice.line() == (
        """--speculative-config '{"method": "ddtree", "model": "d", "budget": "auto"}'"""
    )


def test_a_chain_or_nothing_may_be_best() -> None:
    advice = advised(results(plain=[100], chain_7=[200], tree_auto=[150]))
    assert '"method": "dflash"' in advice.line() and '"num_speculative_tokens": 7' in advice.line()
    advice = advised(results(plain=[100], tree_auto=[90]))
    assert (advice.name, advice.gain) == ("plain", 1.0)
    assert advice.line() == "leave --speculative-config out"


def test_auto_wins_where_the_difference_is_noise() -> None:
    assert advised(results(tree_31=[101], tree_auto=[100])).name == "tree-auto"
    assert advised(results(tree_31=[103], tree_auto=[100])).name == "tree-31"


def test_budgets_by_load() -> None:
    found = results(plain=[100, 200, 400], tree_31=[300, 210, 100], tree_7=[200, 300, 200])
    advice = advised(found)
    assert advice.name == "budgets by load" and advice.spec is not None
    ranges = advice.spec["budget_per_batch_size"]
    assert ranges == [[1, 11, 31], [12, 19, 7], [20, 24, 0]]
    from vllm_ddtree.config.keys import parse

    assert parse(advice.spec).schedule == [tuple(each) for each in ranges]


def test_no_schedule_where_one_budget_is_as_good() -> None:
    advice = advised(results(plain=[100, 100], tree_31=[200, 199], tree_7=[150, 200]))
    assert advice.spec == {"method": "ddtree", "model": "d", "budget": 31}
    assert budgets_by_load({"plain": [1.0], "chain-7": [2.0]}, [8]) == []


def test_servers_of_unknown_configuration() -> None:
    advice = advised(results(fast=[200], plain=[100]))
    assert advice.line().startswith("use fast (give TARGET and DRAFTER")
    advice = advised(results(tree_31=[200], plain=[100]), drafter=None)
    assert not advice.known and advice.spec is None


def test_methods_that_did_not_run_everywhere() -> None:
    found = results(plain=[100, 100], tree_31=[200])
    assert advised(found).name == "plain"
    assert recommend(results(a=[1], b=[]), None, "dflash") is not None
    assert recommend(Results([run("a", 1, 1.0), run("b", 2, 1.0)], {}), None, "dflash") is None


def test_tables(capsys: pytest.CaptureFixture[str]) -> None:
    found = results(plain=[100, 200], tree_auto=[250, 210])
    found.failures["chain-7"] = "chain-7 does not start: [why]"
    show(found, advised(found), Console(width=100, force_terminal=False))
    said = capsys.readouterr().out
    lines = [line.split() for line in said.splitlines()]
    assert ["method", "8", "16"] in lines
    assert ["plain", "100.0", "(1.00x)", "200.0", "(1.00x)"] in lines
    assert ["tree-auto", "250.0", "(2.50x)", "210.0", "(1.05x)"] in lines
    assert ["tree-auto", "2.50", "2.50"] in lines and ["plain", "2.50", "2.50"] not in lines
    assert "chain-7: chain-7 does not start: [why]" in said
    assert said.splitlines()[-1].startswith("--speculative-config '{")
    written = json.loads(as_json(found, advised(found), {"target": "t"}))
    assert written["recommendation"]["name"] == "tree-auto" and len(written["runs"]) == 4
    assert written["target"] == "t" and "chain-7" in written["failures"]


def test_the_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "bench.png"
    assert plot(results(plain=[100, 200], tree_auto=[250]), path)
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    assert not plot(results(plain=[100]), tmp_path / "bench.png")
    assert not list(tmp_path.iterdir())
