# SPDX-License-Identifier: Apache-2.0
"""The table of patches: every row is there, delegates, is installed once and can be removed.

A row's delegation is tried on its wrapper, around a stand-in for vLLM's function, with objects of
an engine that is not DDTree's.
"""

from __future__ import annotations

import ast
import copy
import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import vllm_ddtree
from tests.integration.test_usage import VLLM
from vllm_ddtree import presence
from vllm_ddtree.integration.replace import MARK, function_in, resolve
from vllm_ddtree.patches import table
from vllm_ddtree.patches.table import OBJECTS, PATCHES, Patch, When

OURS = Path(vllm_ddtree.__file__).parent
IDS = [patch.target.partition(":")[2] for patch in PATCHES]
OTHER = SimpleNamespace(num_speculative_tokens=3, auto_budget=True, block_size=99)
CONFIG = SimpleNamespace(
    speculative_config=OTHER, parallel_config=SimpleNamespace(world_size=1), budget=5
)
ENGINE = SimpleNamespace(
    vllm_config=CONFIG, speculative_config=OTHER, model_state="untouched", stat_loggers=[]
)
SCHEDULER = SimpleNamespace()
ARGS = SimpleNamespace(
    model="target",
    speculative_config={"method": "dflash"},
    spec_method=None,
    spec_model=None,
    spec_tokens=None,
)

# Target -> what the replacement is called with. The original must get exactly the same.
CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "EngineArgs.create_speculative_config": (
        (ARGS,),
        {"target_model_config": "model", "target_parallel_config": "parallel"},
    ),
    "EngineArgs.create_engine_config": ((ARGS, "context"), {"headless": True}),
    "VllmConfig.num_lookahead_tokens": ((CONFIG,), {}),
    "InputProcessor.process_inputs": ((ENGINE, "id", "prompt"), {"priority": 1}),
    "StatLoggerManager.__init__": ((ENGINE, CONFIG, [0]), {"client_count": 2}),
    "StatLoggerManager.record": ((ENGINE, "scheduler", "iteration", "cache", 1), {}),
    "SpecDecodingProm.__init__": ((ENGINE, OTHER, ["names"]), {"is_diffusion": False}),
    "EngineCore.__init__": ((ENGINE, CONFIG, "executor"), {"log_stats": True}),
    "Scheduler.schedule": ((SCHEDULER,), {"throttle_prefills": True}),
    "Scheduler.update_from_output": ((SCHEDULER, "scheduled", "output"), {}),
    "Scheduler.make_spec_decoding_stats": ((SCHEDULER, "stats"), {"request_id": "a"}),
    "Scheduler.make_stats": ((SCHEDULER, "stats", "connector"), {"perf_stats": 1}),
    "init_speculator": ((CONFIG, "device", "states"), {}),
    "init_model_state": ((CONFIG, "model", "cache", "device"), {}),
    "GPUModelRunner.execute_model": ((ENGINE, "step"), {"dummy_run": True}),
    "GPUModelRunner.sample_tokens": ((ENGINE, "grammar"), {}),
    "LoRAModelRunnerMixin._set_active_loras": ((ENGINE, (0, 1), (0, 1, 1)), {"mapping_type": 1}),
    "AuxOutputWorkerConnector.prepare_output": ((SCHEDULER, "batch"), {}),
    "GPUModelRunner.capture_model": ((ENGINE,), {"profile_only": True}),
    "CudaGraphManager._init_candidates": ((ENGINE,), {}),
    "build_dynamic_sd_schedule_lookup": (([(1, 2, 3)],), {"vllm_max_batch_size": 2}),
    "ModelCudaGraphManager.capture": ((ENGINE, "model", "state", 1), {"has_lora": False}),
    "MambaBase.get_kv_cache_spec": ((ENGINE, CONFIG), {}),
    "Platform._align_hybrid_block_size": ((ENGINE, CONFIG, "backend"), {}),
    "Worker.sleep": ((ENGINE, 2), {}),
    "Worker.wake_up": ((ENGINE, ["weights"]), {}),
    "AsyncOutput.get_output": ((SimpleNamespace(sampler_output=SimpleNamespace()),), {}),
}
RETURN_NOTHING = (
    *("__init__", "_align_hybrid_block_size", "_init_candidates", "_set_active_loras"),
    *("capture", "record", "sleep", "wake_up"),
)


def wrapper(patch: Patch) -> Callable[[Any], Any]:
    module, _, name = patch.wrapper.partition(":")
    return getattr(importlib.import_module(module), name)


def delegates(patch: Patch) -> None:
    """Called once, with the same arguments, and nothing is changed of what it gives back."""
    seen: list[Any] = []
    given, keywords = CALLS[patch.target.partition(":")[2]]

    def original(*args: Any, **kwargs: Any) -> Any:
        seen.append((args, kwargs))
        return answer

    answer = SimpleNamespace(speculative_config=OTHER, sampling_params="left alone")
    got = wrapper(patch)(original)(*given, **keywords)
    assert seen == [(given, keywords)]
    assert got is answer or patch.target.rpartition(".")[2] in RETURN_NOTHING


def delegates_parser(patch: Patch) -> None:
    """All but the choices of one flag is as vLLM made it."""
    actions = [
        SimpleNamespace(option_strings=["--spec-method", "-m"], choices=["ngram"]),
        SimpleNamespace(option_strings=["--spec-method"], choices=None),
        SimpleNamespace(option_strings=["--other"], choices=["ngram"]),
    ]
    parser = SimpleNamespace(_actions=actions)
    assert wrapper(patch)(lambda given: given)(parser) is parser
    assert [action.choices for action in actions] == [["ngram", "ddtree"], None, ["ngram"]]


def delegates_context(patch: Patch) -> None:
    """Outside a DDTree runner's capture every context is vLLM's, entered and left in its place."""
    from contextlib import contextmanager

    log: list[Any] = []

    @contextmanager
    def original(*args: Any, **kwargs: Any) -> Iterator[str]:
        log.append((args, kwargs))
        yield "stream"
        log.append("left")

    for _ in range(2):
        with wrapper(patch)(original)("device", key=1) as stream:
            assert stream == "stream"
    assert log == [(("device",), {"key": 1}), "left"] * 2


OTHERWISE = {"EngineArgs.add_cli_args": delegates_parser, "graph_capture": delegates_context}


@pytest.mark.parametrize("patch", PATCHES, ids=IDS)
def test_a_row_delegates(patch: Patch) -> None:
    objects = (OTHER, CONFIG, ENGINE, SCHEDULER, ARGS)
    before = copy.deepcopy(objects)
    OTHERWISE.get(patch.target.partition(":")[2], delegates)(patch)
    assert objects == before


def test_every_delegation_is_of_a_row() -> None:
    assert {*CALLS, *OTHERWISE} == set(IDS) and len(IDS) == len(set(IDS))
    assert not set(CALLS) & set(OTHERWISE)


def held(patch: Patch) -> Any:
    owner, name = resolve(patch.target)
    return vars(owner)[name]


def marked(patch: Patch) -> Any:
    """The original behind what is there, None if it is vLLM's own."""
    function, _ = function_in(held(patch))
    return getattr(function, MARK, None)


@pytest.fixture
def removed() -> Iterator[None]:
    """Nothing of ours in vLLM; afterwards what was there before."""
    before = [patch.when for patch in PATCHES if marked(patch) is not None]
    table.remove()
    yield
    table.remove()
    for when in When:
        if when in before:
            table.install(when)


@pytest.mark.usefixtures("removed")
def test_rows_are_installed_once_and_removed() -> None:
    for patch in PATCHES:
        for user in patch.users:
            importlib.import_module(user)
    own = {patch.target: held(patch) for patch in PATCHES}
    assert not any(marked(patch) for patch in PATCHES), "removed"
    for when in When:
        table.install(when)
        for patch in PATCHES:
            there = [w for w in When if list(When).index(w) <= list(When).index(when)]
            assert (held(patch) is not own[patch.target]) == (patch.when in there), patch
    first = {patch.target: held(patch) for patch in PATCHES}
    for when in When:
        table.install(when)
    for patch in PATCHES:
        assert held(patch) is first[patch.target]
        original = marked(patch)
        function, _ = function_in(held(patch))
        assert original is function_in(own[patch.target])[0]
        assert function.__name__ == original.__name__ and original.__module__.startswith("vllm.")
        assert type(held(patch)) is type(own[patch.target])
        name = patch.target.rpartition(":")[2]
        assert all(getattr(sys.modules[user], name) is function for user in patch.users)
    table.remove()
    for patch in PATCHES:
        assert held(patch) is own[patch.target], patch.target
        name = patch.target.rpartition(":")[2]
        assert all(getattr(sys.modules[u], name) is own[patch.target] for u in patch.users)
    table.remove()


@pytest.mark.usefixtures("removed")
def test_what_others_put_in_place_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    patch = PATCHES[0]
    table.install(patch.when)
    owner, name = resolve(patch.target)
    theirs = functools.wraps(held(patch))(lambda *args: "theirs")
    monkeypatch.setattr(owner, name, theirs)
    table.install(patch.when)
    assert held(patch) is theirs
    table.remove()
    assert held(patch) is theirs


def test_a_target_that_is_not_there_replaces_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    absent: list[tuple[str, type[Exception]]] = [
        ("vllm.no_such_module:name", ImportError),
        ("vllm.engine.arg_utils:NoClass.name", AttributeError),
        ("vllm.engine.arg_utils:EngineArgs.no_name", AttributeError),
    ]
    good = Patch(
        "vllm.logger:init_logger", "vllm_ddtree.patches.runner:sample_tokens", When.WORKER, ""
    )
    for target, error in absent:
        bad = good._replace(target=target)
        monkeypatch.setattr(table, "PATCHES", (good, bad))
        with pytest.raises(error):
            table.install(When.WORKER)
        assert marked(good) is None


def test_users_of_a_function_are_listed() -> None:
    """Every module of vLLM that imports a replaced function by name when it is loaded."""
    for patch in PATCHES:
        module, _, name = patch.target.partition(":")
        if "." in name or name in ("graph_capture", "build_dynamic_sd_schedule_lookup"):
            continue  # methods; and what is meant in one module alone
        users = []
        for path in VLLM.rglob("*.py"):
            text = path.read_text()
            if name not in text:
                continue
            for node in ast.parse(text).body:
                if not isinstance(node, ast.ImportFrom) or node.module != module:
                    continue
                if name in [alias.name for alias in node.names]:
                    parts = path.relative_to(VLLM).with_suffix("").parts
                    users.append(".".join(("vllm", *parts)))
        assert tuple(users) == patch.users


@pytest.mark.parametrize("change", OBJECTS, ids=[change.attribute for change in OBJECTS])
def test_an_objects_change_is_where_it_says(change: table.Change) -> None:
    module, _, path = change.by.partition(":")
    source = OURS.parent.joinpath(*module.split(".")).with_suffix(".py").read_text()
    body: list[ast.stmt] = ast.parse(source).body
    for part in path.split("."):
        (found,) = (
            node
            for node in body
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == part
        )
        body = found.body
    assert change.attribute.rpartition(".")[2] in ast.unparse(found) or "_ATTRIBUTE" in ast.unparse(
        found
    )


def assigned(tree: ast.AST) -> Iterator[str]:
    """Attributes of other objects than `self` that are set to a function or a class."""
    made = {
        node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))
    }
    for node in ast.walk(tree):
        match node:
            case ast.Assign([ast.Attribute(ast.Name("self") | ast.Name("cls"), _)], _):
                continue
            case ast.Assign([ast.Attribute(_, attribute)], ast.Lambda()):
                yield attribute
            case ast.Assign([ast.Attribute(_, attribute)], ast.Name(value)) if value in made:
                yield attribute


def test_nothing_else_sets_methods_on_objects() -> None:
    listed = {change.attribute.rpartition(".")[2] for change in OBJECTS}
    for path in OURS.rglob("*.py"):
        if path.relative_to(OURS).parts[0] in ("demo", "testing"):
            continue
        assert set(assigned(ast.parse(path.read_text()))) <= listed, path
    example = ast.parse(
        "def f(): ...\nscheduler.schedule = f\nself.g = f\nx.y = lambda: 1\nx.z = 1"
    )
    assert list(assigned(example)) == ["schedule", "y"]


def test_listeners_are_called_for_every_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "_listeners", [])
    monkeypatch.setattr(presence, "_present", False)
    calls: list[str] = []
    early = functools.partial(calls.append, "early")
    late = functools.partial(calls.append, "late")
    presence.when_present(early)
    assert calls == []
    presence.announce()
    assert calls == ["early"]
    presence.when_present(late)
    assert calls == ["early", "late"], "at once"
    presence.announce()
    assert calls == ["early", "late", "early", "late"]
    assert presence.listeners() == [early, late]
