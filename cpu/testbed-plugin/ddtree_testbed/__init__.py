# SPDX-License-Identifier: Apache-2.0
"""Makes vLLM's CPU engine usable (cpu/README.md). The plugin itself never imports it.

`set_environment()` before anything imports torch, triton or vllm; `prepare()` for an engine in this
process. A server's processes inherit the environment, and vLLM calls `register()` in each of them.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

VARIABLES = {
    "TRITON_INTERPRET": "1",  # Triton kernels run in Python
    "OMP_NUM_THREADS": "1",  # more threads are far slower on models this small
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core in this process
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else vLLM wants a NUMA node for every rank
    "VLLM_DDTREE_CPU_TESTBED": "1",  # register() acts
}


def set_environment() -> None:
    """Sets what must stand before torch, triton and vllm are imported, for this process and its
    children.

    A variable that is already set keeps its value.

    Raises:
        RuntimeError: the Triton backend is missing, or triton was imported before without its
            interpreter.

    """
    folder = Path(sys.prefix) / "testbed"  # holds the Triton backend (scripts/cpu_env.py)
    if not folder.is_dir():
        raise RuntimeError(
            "the CPU test bed is missing: run through ./demo or ./test (cpu/README.md)"
        )
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("set_environment() must run before triton is imported")
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
        inherited = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = str(folder) + (os.pathsep + inherited if inherited else "")


def prepare() -> None:
    """`set_environment()`, then every work-around in this process. Idempotent."""
    set_environment()
    _apply()


def register() -> None:
    """vLLM's entry point: the work-arounds where the test bed is switched on."""
    if os.environ.get("VLLM_DDTREE_CPU_TESTBED") == "1":
        _apply()


def prepare_interpreter() -> None:
    """The work-arounds for Triton alone; vllm is not imported."""
    from ddtree_testbed import interpreter, quick

    interpreter.mend()
    quick.quicken()


def _apply() -> None:
    from ddtree_testbed import engine, recurrent, vision

    vision.stand_in()
    engine.patch()
    recurrent.patch()
    prepare_interpreter()
