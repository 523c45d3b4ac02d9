# SPDX-License-Identifier: Apache-2.0
"""Environment, models and device of all tests.

With the CPU test bed (cpu/README.md) the tests run on the CPU, Triton kernels in the interpreter,
and tests/gpu is not collected. Without it they run on a CUDA device, and tests/config, tests/cpu
and tests/engine, made for the CPU engine, are not collected.

Fixtures: `nano_pair`; `small_pair`; `pair`, each pair in turn; `device`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import pytest

from vllm_ddtree.testing import testbed

BED = testbed()
ON_CPU = BED is not None
if BED is not None:
    BED.set_environment()  # before anything imports torch, triton or vllm
collect_ignore = ["gpu"] if ON_CPU else ["config", "cpu", "engine"]

MODELS = Path(__file__).resolve().parent.parent / "models"


class Pair(NamedTuple):
    """A target and its DFlash drafter (folders) and the drafter's block size."""

    name: str
    target: Path
    drafter: Path
    block_size: int


NANO = Pair("nano", MODELS / "nano", MODELS / "nano-dflash", 8)
SMALL_FOLDER = os.environ.get("VLLM_DDTREE_SMALL")
SMALL: Pair | None = None
if SMALL_FOLDER:
    _folder = Path(SMALL_FOLDER)
    SMALL = Pair("small", _folder / "small", _folder / "small-dflash", 16)


def pytest_report_header() -> list[str]:
    where = "CPU, Triton interpreter" if ON_CPU else "CUDA"
    small = SMALL_FOLDER or "not given (VLLM_DDTREE_SMALL), its tests are deselected"
    return [f"vllm-ddtree: {where}; small pair: {small}"]


def pytest_configure() -> None:
    if SMALL is not None and not (SMALL.target.is_dir() and SMALL.drafter.is_dir()):
        raise pytest.UsageError(
            f"VLLM_DDTREE_SMALL={SMALL_FOLDER}: no small/ and small-dflash/ there"
        )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "pair" in metafunc.fixturenames:
        pairs = [pytest.param(NANO, id="nano")]
        if SMALL is not None:
            pairs.append(pytest.param(SMALL, id="small", marks=pytest.mark.small))
        metafunc.parametrize("pair", pairs, scope="session")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects the tests of a pair that is not there, and marks tests by their folder."""
    dropped = []
    for item in items:
        for marker in ("engine", "gpu"):
            if Path(__file__).parent / marker in item.path.parents:
                item.add_marker(marker)
        needs_small = item.get_closest_marker("small") or "small_pair" in getattr(
            item, "fixturenames", ()
        )
        if needs_small and SMALL is None:
            dropped.append(item)
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if item not in dropped]


@pytest.fixture(scope="session")
def nano_pair() -> Pair:
    return NANO


@pytest.fixture(scope="session")
def small_pair() -> Pair:
    assert SMALL is not None, "tests of the small pair are deselected without it"
    return SMALL


@pytest.fixture(scope="session")
def device() -> str:
    """Where kernel tests put their tensors."""
    if BED is None:
        return "cuda"
    BED.prepare_interpreter()
    return "cpu"
