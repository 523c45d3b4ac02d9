# SPDX-License-Identifier: Apache-2.0
"""`vllm-ddtree check`: findings, refusals and exit statuses; its numbers are the engine's."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention

from tests.conftest import NANO, Pair
from tests.engine import models
from tests.engine.harness import ddtree, open_engine
from tests.engine.known import model_runner
from vllm_ddtree.cli.check.findings import Finding, State, as_json
from vllm_ddtree.cli.check.memory import kv_bytes, state_bytes
from vllm_ddtree.cli.check.pair import WrongOptions, check_pair, speculative_config

SHORT = ["--max-model-len", "256"]


def run(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command, on the test bed."""
    command = [sys.executable, "-c", "from vllm_ddtree.cli.app import app; app()", "check"]
    return subprocess.run(
        [*command, *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=300,
    )


def by_topic(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.topic: finding for finding in findings}


def test_a_pair_that_fits() -> None:
    done = run(NANO.target, NANO.drafter, *SHORT, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["fits"]
    texts = {entry["topic"]: entry["text"] for entry in found["findings"]}
    assert "vllm-ddtree" in texts["plugin"]
    assert "Qwen3ForCausalLM, 4 layers of size 128" in texts["target"]
    assert "DFlash, 2 layers" in texts["drafter"] and "block of 8" in texts["drafter"]
    assert "auto, up to 63 nodes" in texts["budget"]


def test_a_plugin_that_is_left_out() -> None:
    done = run(VLLM_PLUGINS="others")
    assert done.returncode == 1
    assert "VLLM_PLUGINS=others leaves ddtree out" in done.stdout
    assert "VLLM_PLUGINS=others,ddtree" in done.stdout
    assert "ok: plugin" in done.stdout and "target" not in done.stdout


def test_a_target_alone() -> None:
    done = run(NANO.target)
    assert done.returncode == 2
    assert "give a drafter as well as a target" in done.stderr
    assert "Traceback" not in done.stderr


def test_wrong_options() -> None:
    with pytest.raises(WrongOptions, match="--max-num-seqs"):
        check_pair(str(NANO.target), str(NANO.drafter), ["--max-num-seqs", "many"])


def test_a_swapped_pair() -> None:
    done = run(NANO.drafter, NANO.target)
    assert done.returncode == 1
    assert "give a DFlash drafter; this is no draft model" in done.stdout
    assert "Traceback" not in done.stderr


def test_refusals_are_the_products_own() -> None:
    for options, words in (
        (["--pipeline-parallel-size", "2"], "--pipeline-parallel-size=2: set it to 1"),
        (["-sc", '{"budgets": 31}'], "did you mean 'budget'?"),
        (['--speculative-config={"budget": 999}'], "budget=999"),
    ):
        (found,) = check_pair(str(NANO.target), str(NANO.drafter), [*SHORT, *options])
        assert found.state is State.REFUSED and words in found.text


def test_a_target_that_is_not_there() -> None:
    (found,) = check_pair("no/such-target", str(NANO.drafter), [])
    assert found.state is State.REFUSED
    assert found.text.startswith("target 'no/such-target' cannot be read")


def test_a_drafter_for_another_target(tmp_path: Path) -> None:
    """Whatever the product refuses of a pair; and what it warns of is a finding, too."""
    folder = shutil.copytree(NANO.drafter, tmp_path / "drafter")
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["dflash_config"]["target_layer_ids"] = [0, 40]
    file.write_text(json.dumps(config))
    (found,) = check_pair(str(NANO.target), str(folder), SHORT)
    assert found.state is State.REFUSED and "name layer 40" in found.text
    config["dflash_config"]["target_layer_ids"] = [2, 0]
    file.write_text(json.dumps(config))
    warnings = [
        found
        for found in check_pair(str(NANO.target), str(folder), SHORT)
        if found.state is State.WARNING and found.topic == "pair"
    ]
    assert any("not in ascending order" in found.text for found in warnings)


def test_schedules_and_other_options() -> None:
    options = ["-sc", '{"budget": 31}', "--max-num-batched-tokens", "256", "--port", "8001"]
    found = by_topic(check_pair(str(NANO.target), str(NANO.drafter), [*SHORT, *options]))
    assert "31 with 1 to 6 requests, 15 with 7 to" in found["budget"].text
    assert "--port 8001" in found["options"].text


def test_keys_of_the_speculative_config() -> None:
    given, rest = speculative_config("d", ["--seed", "1", "-sc", '{"budget": 7}', "--dtype=half"])
    assert json.loads(given) == {"method": "ddtree", "model": "d", "budget": 7}
    assert rest == ["--seed", "1", "--dtype=half"]
    for wrong in (["-sc"], ["-sc", "7"], ["--speculative-config={"]):
        with pytest.raises(WrongOptions):
            speculative_config("d", wrong)


def test_json_says_whether_it_fits() -> None:
    good, bad = Finding("a", State.WARNING, "b"), Finding("c", State.REFUSED, "d", "e")
    assert json.loads(as_json([good]))["fits"]
    assert not json.loads(as_json([good, bad]))["fits"]


@pytest.mark.parametrize("make", [models.qwen3_5, models.nemotron_h])
def test_memory_is_the_engines(make: Callable[..., Pair], tmp_path: Path) -> None:
    """What follows from configurations is what the engine has: keys, values, states."""
    pair = make(tmp_path)
    keys: dict[str, Any] = {"max_model_len": 192, "block_size": 32, "max_num_seqs": 4}
    with open_engine(pair.target, ddtree(pair, 15), skip_tokenizer_init=True, **keys) as llm:
        runner = model_runner(llm)
        config = runner.vllm_config
        recurrent = runner.model_state.recurrent
        assert state_bytes(config) == (len(recurrent.layers), recurrent.state_bytes)
        layers = get_layers_from_vllm_config(config, Attention)
        sizes = {
            name: 2 * layer.num_kv_heads * layer.head_size * config.model_config.dtype.itemsize
            for name, layer in layers.items()
        }
        drafters = runner.speculator.draft_attn_layer_names
    spec = config.speculative_config
    for model, parallel, names in (
        (config.model_config, config.parallel_config, sizes.keys() - drafters),
        (spec.draft_model_config, spec.draft_parallel_config, drafters),
    ):
        assert names
        assert kv_bytes(model, parallel, "auto") == sum(sizes[name] for name in names)
