# SPDX-License-Identifier: Apache-2.0
"""The load benchmark's bookkeeping is right, with an engine that only counts."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import report
from benchmarks.prompts import dataset_prompts, file_prompts, python_prompts
from benchmarks.serve_load import drive, llm_arguments, num_requests, parse, speculation
from benchmarks.server import read_counters
from tests.conftest import Pair

PROMPTS = [[i + 1] * 3 for i in range(7)]


class CountingEngine:
    """Answers the oldest request at every second step; knows how many were in flight."""

    def __init__(self) -> None:
        self.waiting: list[tuple[str, list[int]]] = []
        self.served: list[list[int]] = []
        self.in_flight: list[int] = []
        self.steps = 0
        self.llm_engine = self

    def add_request(self, request_id: str, prompt: dict[str, Any], params: Any) -> None:
        assert request_id not in {r for r, _ in self.waiting} and params.ignore_eos
        self.tokens = params.max_tokens
        self.waiting.append((request_id, prompt["prompt_token_ids"]))

    def has_unfinished_requests(self) -> bool:
        return bool(self.waiting)

    def step(self) -> list[Any]:
        self.steps += 1
        self.in_flight.append(len(self.waiting))
        if self.steps % 2:
            return []
        self.served.append(self.waiting.pop(0)[1])
        times = {"first_token_latency": 0.5, "first_token_ts": 10.0, "last_token_ts": 12.0}
        sample = SimpleNamespace(token_ids=[7] * self.tokens)
        output = SimpleNamespace(
            finished=True, outputs=[sample], metrics=SimpleNamespace(**times), prompt=None
        )
        return [output]

    def get_metrics(self) -> list[Any]:
        def counter(name: str, value: int) -> SimpleNamespace:
            return SimpleNamespace(name=f"vllm:{name}", value=value, count=value)

        return [
            counter("spec_decode_num_drafts", 3 * self.steps),
            counter("spec_decode_num_accepted_tokens", 6 * self.steps),
            counter("iteration_tokens_total", self.steps),
        ]


@pytest.mark.parametrize("concurrency", [1, 3, 20])
def test_requests_in_flight(concurrency: int) -> None:
    engine: Any = CountingEngine()
    drive(engine, PROMPTS[:2], 4, 1, "warm-up")  # counters of earlier runs do not count
    engine.in_flight.clear()
    engine.served.clear()
    run = drive(engine, PROMPTS, 5, concurrency, "tree-7")
    assert engine.served == PROMPTS
    limit = min(concurrency, len(PROMPTS))
    ramp_down = [min(limit, len(PROMPTS) - i // 2) for i in range(2 * len(PROMPTS))]
    assert engine.in_flight == ramp_down
    assert (run["tokens"], run["requests"], run["steps"], run["rounds"]) == (35, 7, 14, 42)
    assert run["acceptance"] == 3.0  # accepted and bonus token
    assert run["tpot_ms"] == pytest.approx(2000 / 4) and run["ttft_ms"] == 500
    assert run["ms_round"] == pytest.approx(7 * 2000 / 42)


def test_plain_rounds_are_tokens() -> None:
    run = report.run_record("plain", 2, 2.0, [(5, 0.1, 2.0), (3, 0.3, 1.0)], 0, 0, 6)
    assert (run["rounds"], run["ms_round"], run["acceptance"]) == (6, 500, 1.0)
    assert run["tokens_s"] == 4 and run["tpot_ms"] == 500


def example_runs() -> list[report.Run]:
    runs = []
    for engine, speeds in {"chain-15": [100, 300, 110], "tree-31": [130, 121, 500]}.items():
        for repeat, speed in enumerate(speeds):
            run = report.run_record(engine, 8, 10.0, [(10 * speed, 0.1, 1.0)], 10, 30, 12)
            runs.append({**run, "cycle": 0, "repeat": repeat})
    return runs


def test_sampled_runs_compare_with_sampled_runs() -> None:
    runs = example_runs()
    # As records name them now, and as they did before.
    runs += [{**run, "traffic": "sampled", "tokens_s": 50} for run in runs[:3]]
    runs += [{**run, "engine": f"{run['engine']} sampled", "tokens_s": 50} for run in runs[3:6]]
    ratios = report.ratios(runs, "chain-15")
    assert ratios["tree-31", "sampled", 8] == 1.0
    assert ratios["tree-31", "", 8] == pytest.approx(130 / 110)


def test_best_static_and_regret() -> None:
    """Each repeat is compared with the same repeat of the engine that is best in the median."""
    speeds = {"plain": [50, 90, 60], "chain-7": [70, 71, 72], "tree-auto": [77, 70, 66]}
    runs = [
        {**report.timed_record(engine, "mixed", 32, 1.0, speed, 1.5, 4, 8, 30), "repeat": repeat}
        for engine, row in speeds.items()
        for repeat, speed in enumerate(row)
    ]
    assert report.best_static(runs) == {("mixed", 32): "chain-7"}
    over = report.over_best_static(runs)
    best, share = over["tree-auto", "mixed", 32]
    assert best == "chain-7" and share == pytest.approx(70 / 71)
    assert over["chain-7", "mixed", 32] == ("chain-7", 1.0)
    header, _, *rows = report.markdown(runs).splitlines()
    assert "traffic" in header and "/ best static" in header
    assert any("| 32 | mixed | tree-auto |" in row and "| chain-7 | 0.99 |" in row for row in rows)
    # Nothing static ran at this load: no regret.
    assert report.over_best_static(runs[-1:]) == {}


def test_a_timed_run_counts_its_own_seconds() -> None:
    run = report.timed_record("plain", "code", 4, 2.0, 800, 2.5, 0, 0, 250)
    assert (run["tokens_s"], run["tpot_ms"], run["ms_round"]) == (400, 10.0, 10.0)
    assert run["acceptance"] == 1.0


def test_medians_and_range() -> None:
    chain, tree = report.summarise(example_runs())
    assert (chain["tokens_s"], chain["min"], chain["max"], chain["runs"]) == (110, 100, 300, 3)
    assert tree["tokens_s"] == 130
    assert report.ratios(example_runs(), "chain-15")["tree-31", "", 8] == pytest.approx(130 / 110)
    table = report.markdown(example_runs()).splitlines()
    assert len(table) == 4 and "| 8 | tree-31 | 3 | 130 | 121-500 | 1.18 |" in table[3]
    assert "plain" not in table[0]  # did not run


def test_reports_merge_and_machines_do_not_mix(tmp_path: Path) -> None:
    runs = example_runs()
    info = {"gpu": "A", "vllm": "1", "torch": "2", "arguments": {}}
    parts = [("a", info, runs[:3]), ("b", info, runs[3:]), ("c", {**info, "gpu": "B"}, runs)]
    for name, own, some in parts:
        report.write({"info": own, "engines": {name: {"x": 1}}, "runs": some}, tmp_path / name)
    files = [tmp_path / name / "load.json" for name in "abc"]
    merged = report.merge(files[:2])
    assert merged["runs"] == runs and set(merged["engines"]) == {"a", "b"}
    with pytest.raises(ValueError, match="different machines"):
        report.merge(files)


def test_engine_names() -> None:
    assert speculation("plain", "d", {}) == (None, 1)
    chain = {"method": "dflash", "model": "d", "num_speculative_tokens": 7}
    assert speculation("chain-7", "d", {}) == (chain, 8)
    adaptive = {**chain, "enable_adaptive_verification": True}
    assert speculation("chain-7-adaptive", "d", {}) == (adaptive, 8)
    assert speculation("tree-31", "d", {})[1] == 32
    named = {"mine": {"method": "ddtree", "budget": 9}}
    assert speculation("mine", "d", named)[0] == {"method": "ddtree", "model": "d", "budget": 9}
    for name in ("tree", "chain-x", "plain-1", "tree-7-adaptive", "plain-adaptive", "unary"):
        with pytest.raises(ValueError):
            speculation(name, "d", {})


def test_engines_of_conditional_drafters(tmp_path: Path) -> None:
    unary = {"method": "ddtree", "model": "d", "budget": 31, "conditional": False}
    assert speculation("unary-31", "d", {}) == (unary, 32)
    for config, method in (
        ({"architectures": ["Qwen3DSparkModel"]}, "dspark"),
        ({"architectures": ["DFlash2DraftModel"]}, "dflash"),
        ({"architectures": ["x"], "speculators_model_type": "dspark"}, "dspark"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        spec, _ = speculation("chain-7", str(tmp_path), {})
        assert spec is not None and spec["method"] == method


def test_every_engine_gets_graphs_for_the_same_requests() -> None:
    line = ["t", "d", "--out", "o", "--capture-requests", "1", "8"]
    args = parse([*line, "--llm", '{"seed": 1}', "--engine-llm", '{"tree-31": {"seed": 2}}'])
    tree, plain = llm_arguments(args, "tree-31", 32), llm_arguments(args, "plain", 1)
    assert tree["compilation_config"] == {"cudagraph_capture_sizes": [32, 256]}
    assert plain["compilation_config"] == {"cudagraph_capture_sizes": [1, 8]}
    assert (tree["seed"], plain["seed"], plain["max_num_seqs"]) == (2, 1, 128)
    assert num_requests(1, args) == 8 and num_requests(64, args) == 128


def test_prompts(tmp_path: Path) -> None:
    tokenizer = SimpleNamespace(encode=lambda text: list(text.encode()))
    prompts = python_prompts(tokenizer, 50, 40)
    assert {len(p) for p in prompts} == {40} and len({tuple(p) for p in prompts}) == 50
    assert python_prompts(tokenizer, 50, 40) == prompts
    file = tmp_path / "p.jsonl"
    file.write_text(json.dumps({"prompt": "ab"}) + "\n" + json.dumps({"prompt": [5]}) + "\n")
    assert file_prompts(tokenizer, 2, file) == [[97, 98], [5]]
    with pytest.raises(ValueError, match="has 2 prompts"):
        file_prompts(tokenizer, 3, file)


def test_a_data_set_of_vllm_bench(tmp_path: Path, nano_pair: Pair) -> None:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(nano_pair.target)
    file = tmp_path / "own.jsonl"
    texts = ["def main():", "import os"]
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    options = {
        "dataset-name": "custom",
        "dataset_path": str(file),
        "skip-chat-template": True,
        "disable-shuffle": True,
    }
    expected = [tokenizer.encode(text) for text in texts]
    assert dataset_prompts(tokenizer, 2, options) == expected


def test_server_counters() -> None:
    page = """# HELP vllm:spec_decode_num_drafts_total x
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 41.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 1.0
vllm:spec_decode_num_drafts_created{engine="0"} 1.7e9
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 9.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 8.0
vllm:iteration_tokens_total_bucket{le="1.0"} 3.0
vllm:iteration_tokens_total_count{engine="0"} 77.0
"""
    assert read_counters(page) == {"drafts": 42, "accepted": 9, "steps": 77}


def test_servers_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same prompts to each, in turns; another one is first in the next repeat."""
    from benchmarks import serve_load, server

    calls: list[tuple[str, str, tuple[int, ...]]] = []

    def drive_server(
        url: str, model: str, prompts: Any, max_tokens: int, concurrency: int, name: str, *_: Any
    ) -> dict[str, Any]:
        if max_tokens == 5:
            calls.append((url, name, tuple(prompts[0])))
        requests = [(5, 0.1, 0.4)] * len(prompts)
        return report.run_record(name, concurrency, 1.0, requests, drafts=1, accepted=3, steps=2)

    monkeypatch.setattr(server, "drive_server", drive_server)
    prompts = [[[n, repeat] for n in range(4)] for repeat in range(2)]
    monkeypatch.setattr(serve_load, "read_prompts", lambda args, traffic: prompts)
    given = "target --server one two --label a b --concurrency 2 --repeats 2 --max-tokens 5"
    args = serve_load.parse([*given.split(), "--min-requests", "4", "--out", str(tmp_path)])
    out: dict[str, Any] = {"info": {}, "engines": {}, "runs": []}
    serve_load.load_server(args, out)
    assert calls == [
        ("one", "a", (0, 0)),
        ("two", "b", (0, 0)),
        ("two", "b", (0, 1)),
        ("one", "a", (0, 1)),
    ]
    assert [run["engine"] for run in out["runs"]] == ["a", "b", "b", "a"]


def test_servers_need_names(tmp_path: Path) -> None:
    from benchmarks import serve_load

    with pytest.raises(SystemExit):
        serve_load.parse(["t", "--server", "one", "two", "--label", "a", "--out", str(tmp_path)])
