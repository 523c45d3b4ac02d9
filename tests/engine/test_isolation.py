# SPDX-License-Identifier: Apache-2.0
"""Engines one after another in a process leave nothing behind, and a plugin that is not used
changes nothing."""

from __future__ import annotations

import copy
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from tests.conftest import NANO, Pair
from tests.engine.harness import PROMPTS, Result, ddtree, dflash, greedy, run_engine

LENGTH = 8
NGRAM: dict[str, Any] = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 2,
}
CHOSEN = [PROMPTS[0], PROMPTS[3], PROMPTS[5]]


def run(pair: Pair, spec: dict[str, Any] | None) -> Result:
    params = [greedy(LENGTH), greedy(LENGTH, temperature=0.7, seed=2), greedy(LENGTH)]
    return run_engine(pair.target, spec, CHOSEN, params, max_num_seqs=4, block_size=32)


def counts(result: Result) -> list[Any]:
    c = result.counters
    return [c.num_drafts, c.num_draft_tokens, c.num_accepted_tokens, list(c.per_position)]


def other_methods(pair: Pair) -> dict[str, dict[str, Any]]:
    """Tokens and counters of vLLM's own methods; run in this process and in one without plugin."""
    specs = {"none": None, "dflash": dflash(pair), "ngram": NGRAM}
    results = {name: run(pair, spec) for name, spec in specs.items()}
    return {name: {"tokens": r.token_ids, "counts": counts(r)} for name, r in results.items()}


def in_new_process(code: str, given: str = "", **environment: str) -> Any:
    """The JSON that `code`, which may read what is given, prints last in a process of its own."""
    root = Path(__file__).resolve().parents[2]
    paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environment},
        cwd=root,
        input=given,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


OTHERS = """
import json, sys
import ddtree_testbed
ddtree_testbed.set_environment()
from tests.conftest import NANO
from tests.engine.test_isolation import other_methods
result = other_methods(NANO)
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.worker.gpu import model_runner
result["hooked"] = {
    "EngineArgs": hasattr(EngineArgs.create_engine_config, "_vllm_ddtree_original"),
    "model_runner": hasattr(model_runner.init_speculator, "_vllm_ddtree_original"),
    "imported": sorted(name for name in sys.modules if name.startswith("vllm_ddtree.")),
}
print()
print(json.dumps(result))
"""


@pytest.fixture(scope="module")
def without() -> dict[str, Any]:
    """vLLM's own methods in a process that never knew DDTree."""
    return in_new_process(OTHERS, VLLM_PLUGINS="")


def test_an_unused_plugin_changes_nothing(without: dict[str, Any]) -> None:
    unused = in_new_process(
        "import ddtree_testbed\nddtree_testbed.set_environment()\n"
        "from vllm_ddtree.plugin import register\nregister()\nregister()\n" + OTHERS,
        VLLM_PLUGINS="",
    )
    hooked_without, hooked = without["hooked"], unused["hooked"]
    assert not hooked_without["EngineArgs"] and not hooked_without["model_runner"]
    assert hooked["EngineArgs"]
    # The model runner is hooked, and the rest of the plugin imported, by a DDTree configuration.
    assert not hooked["model_runner"]
    ours = {name.split(".")[1] for name in hooked["imported"]}
    assert ours == {"integration", "patches", "plugin", "presence", "testing"}
    for name in ("none", "dflash", "ngram"):
        assert unused[name] == without[name]
    assert without["none"]["counts"][0] == 0
    assert min(without["dflash"]["counts"][0], without["ngram"]["counts"][0]) > 0


def test_engines_one_after_another(without: dict[str, Any]) -> None:
    pair = NANO
    sequence = {
        "tree": ddtree(pair, 12),
        "none": None,
        "smaller": ddtree(pair, 5, num_speculative_tokens=3),
        "dflash": dflash(pair),
        "ngram": NGRAM,
        "tree again": ddtree(pair, 12),
    }
    results, own = {}, {}
    for name, spec in sequence.items():
        results[name] = run(pair, spec)
        # What the process would show in /metrics.
        own[name] = [m.name for m in REGISTRY.collect() if m.name.startswith("vllm:ddtree_")]
    for name, metrics in own.items():
        assert bool(metrics) == (name in ("tree", "smaller", "tree again")), name
    from vllm_ddtree.round import runtime

    plain = results["none"].token_ids
    for name, result in results.items():
        if name not in ("dflash", "ngram"):
            assert result.token_ids == plain, name
    assert counts(results["tree"]) == counts(results["tree again"])
    assert results["none"].counters.num_drafts == 0
    for name, budget, depth in (("tree", 12, 7), ("smaller", 5, 3), ("dflash", 7, 7)):
        counters = results[name].counters
        assert counters.num_draft_tokens == budget * counters.num_drafts, name
        assert len(counters.per_position) == depth, name
        assert sum(counters.per_position) == counters.num_accepted_tokens > 0, name
    # vLLM's own methods do here what they do in a process that never knew DDTree.
    for name in ("none", "dflash", "ngram"):
        assert counts(results[name]) == without[name]["counts"], name
        assert results[name].token_ids == without[name]["tokens"], name
    assert not runtime._runtimes  # each was handed over to its engine


UNPICKLE = """
import json, pickle, sys
import ddtree_testbed
ddtree_testbed.set_environment()
spec = pickle.loads(bytes.fromhex(sys.stdin.read()))
from vllm.v1.engine.core import EngineCore
from vllm.v1.worker.gpu import model_runner
hooked = [EngineCore.__init__, model_runner.init_speculator]
print(json.dumps([repr(spec), *(hasattr(f, "_vllm_ddtree_original") for f in hooked)]))
"""


def test_a_configuration_brings_the_patches_along() -> None:
    """To a process that has it before vLLM loads any plugin there, as an engine core does."""
    from vllm.engine.arg_utils import EngineArgs

    from vllm_ddtree.plugin import register

    register()
    args = EngineArgs(model=str(NANO.target), speculative_config=ddtree(NANO, 12), dtype="float32")
    spec = args.create_engine_config().speculative_config
    sent = pickle.dumps(spec)
    assert in_new_process(UNPICKLE, sent.hex(), VLLM_PLUGINS="") == [repr(spec), True, True]
    # A copy in this process is a configuration like any other.
    assert vars(pickle.loads(sent)).keys() == vars(copy.deepcopy(spec)).keys() == vars(spec).keys()
