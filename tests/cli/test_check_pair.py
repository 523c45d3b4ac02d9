# SPDX-License-Identifier: Apache-2.0
"""`vllm-ddtree check`: what it finds of pairs, by configuration alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.running import command
from tests.config.building import DRAFTER, TARGET, edited
from tests.config.checkpoints import as_speculators
from vllm_ddtree.cli.check.findings import Finding, State, refused
from vllm_ddtree.cli.check.graphs import reach
from vllm_ddtree.cli.check.pair import check_pair, speculative_config
from vllm_ddtree.cli.errors import WrongUsage


def by_topic(found: list[Finding]) -> dict[str, Finding]:
    return {finding.topic: finding for finding in found}


@pytest.fixture(scope="module")
def fitting() -> dict[str, Finding]:
    options = ["--max-num-seqs=8", "--max-model-len", "256", "-sc", '{"budget": 31}']
    return by_topic(check_pair(str(TARGET), str(DRAFTER), options))


def test_a_pair_that_fits(fitting: dict[str, Finding]) -> None:
    assert not refused(list(fitting.values()))
    assert "Qwen3ForCausalLM, 4 layers of size 128" in fitting["target"].text
    assert "block of 8, trees up to 7 deep, 16 candidates" in fitting["drafter"].text
    assert "size 128 before layers 1, 2, 3 of 4, and proposes 2048" in fitting["fit"].text
    assert fitting["budget"].text.startswith("31 nodes")


def test_graphs_as_on_a_gpu(fitting: dict[str, Finding]) -> None:
    assert "on a GPU: " in fitting["graphs"].text
    assert "31 nodes up to 8" in fitting["graphs"].text
    # 8 requests of 8 queries each; 2048 tokens of 2 or 4 bytes.
    assert "at least 0 MiB" in fitting["graph memory"].text


def test_memory_of_keys_and_values(fitting: dict[str, Finding]) -> None:
    config = json.loads((TARGET / "config.json").read_text())
    item = 4 if "float32" in str(config.get("dtype", config.get("torch_dtype"))) else 2
    size = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    assert f"about {size * item / 1024:.1f} KiB a token of the target" in fitting["KV cache"].text


def test_refusals_are_the_products_own(tmp_path: Path) -> None:
    deep = edited(DRAFTER, tmp_path / "deep", num_target_layers=4)
    config = json.loads((deep / "config.json").read_text())
    config["dflash_config"]["target_layer_ids"] = [0, 40]
    (deep / "config.json").write_text(json.dumps(config))
    found = by_topic(check_pair(str(TARGET), str(deep), ["--max-model-len=256"]))
    assert found["pair"].state is State.REFUSED
    assert "name layer 40, and the target's 4 layers end with 3" in found["pair"].text


def test_odd_pairs_are_warned_of(tmp_path: Path) -> None:
    odd = edited(DRAFTER, tmp_path / "odd", num_target_layers=9)
    found = check_pair(str(TARGET), str(odd), ["--max-model-len=256"])
    assert not refused(found)
    assert any(f.state is State.WARNING and "made for one of 9 layers" in f.text for f in found)


def test_the_speculators_format(tmp_path: Path) -> None:
    both = as_speculators(DRAFTER, tmp_path / "both", TARGET)
    found = by_topic(check_pair(str(TARGET), str(both), ["--max-model-len=256"]))
    assert "speculators library" in found["drafter"].text


def test_options_that_are_none_of_the_engines() -> None:
    found = by_topic(check_pair(str(TARGET), str(DRAFTER), ["--port", "9000", "--enforce-eager"]))
    assert "--port 9000" in found["options"].text
    assert found["graphs"].state is State.WARNING and "--enforce-eager" in found["graphs"].fix


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--max-num-seqs", "x"], "--max-num-seqs"),
        (["--max-num-sequs", "4"], "did you mean --max-num-seqs?"),
        (["-sc", "[]"], "give a JSON object"),
        (["-sc"], "needs a value"),
        (["-sc", '{"method": "dflash"}'], "'dflash' is not 'ddtree'"),
    ],
)
def test_wrong_options(options: list[str], says: str) -> None:
    with pytest.raises(WrongUsage) as caught:
        check_pair(str(TARGET), str(DRAFTER), options)
    assert says in str(caught.value)


def test_keys_of_the_speculative_config_count() -> None:
    spec, rest = speculative_config("d", ["--x", '-sc={"budget": 3}', "--y"])
    assert json.loads(spec) == {"method": "ddtree", "model": "d", "budget": 3}
    assert rest == ["--x", "--y"]


def test_the_reach_of_graphs() -> None:
    # 768 is 32 requests of 24 rows; 1024 would be 43, which is more than 1024 tokens.
    assert reach([768, 1024], [23], 128) == {23: 32}
    assert reach([8, 16], [7, 31], 128) == {7: 2, 31: 0}
    assert reach([8, 16, 64], [7], 4) == {7: 2}


def test_without_gpu_and_test_bed() -> None:
    """As on a machine that only has the wheel: no interpreter, so no Triton for the CPU."""
    bed = dict.fromkeys(("TRITON_INTERPRET", "VLLM_DDTREE_CPU_TESTBED"))
    pair = (str(TARGET), str(DRAFTER), "--json")
    done = command("check", *pair, PYTHONPATH=str(TARGET.parents[1]), **bed)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["fits"] and {"model runner", "fit", "graphs"} <= {
        finding["topic"] for finding in said["findings"]
    }


def test_a_plugin_that_is_left_out() -> None:
    done = command("check", VLLM_PLUGINS="another")
    assert done.returncode == 1
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("refused")]
    assert "VLLM_PLUGINS=another" in line and "set VLLM_PLUGINS=another,ddtree" in line
