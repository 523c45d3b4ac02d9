# SPDX-License-Identifier: Apache-2.0
"""Makes vLLM's CPU engine usable for tests and the demo (test bed: cpu/README.md). Never used by
the plugin.

`set_environment()` before anything imports torch, triton or vllm; `prepare()` for an engine in this
process. A server's processes inherit the environment, and the test bed's own plugin calls
`register()` in each of them.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

_VARIABLES = {
    "TRITON_INTERPRET": "1",  # Triton kernels run in Python
    "OMP_NUM_THREADS": "1",  # more threads are far slower on models this small
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core in this process
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else vLLM wants a NUMA node for every rank
    "VLLM_DDTREE_CPU_TESTBED": "1",  # register() acts
}


def _testbed_folder() -> Path | None:
    """The folder of the test-bed packages in this environment, or None."""
    for name in ("testbed", "triton-interp"):
        if (folder := Path(sys.prefix) / name).is_dir():
            return folder
    return None


def available() -> bool:
    """True if this environment has the CPU test bed."""
    return (
        importlib.util.find_spec("triton_cpu_interp") is not None or _testbed_folder() is not None
    )


def set_environment() -> None:
    """Sets what must stand before torch, triton and vllm are imported, for this process and its
    children.

    A variable that is already set keeps its value. Raises RuntimeError without the test bed, or if
    triton was imported before without the interpreter.
    """
    if not available():
        raise RuntimeError(
            "the CPU test bed is missing: run through ./demo or ./test (cpu/README.md)"
        )
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("set_environment() must run before triton is imported")
    for name, value in _VARIABLES.items():
        os.environ.setdefault(name, value)
    if importlib.util.find_spec("triton_cpu_interp") is None:
        folder = str(_testbed_folder())
        sys.path.insert(0, folder)
        inherited = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = folder + (os.pathsep + inherited if inherited else "")


def prepare() -> None:
    """`set_environment()`, then `patch_vllm()`. Idempotent."""
    set_environment()
    patch_vllm()


def patch_vllm() -> None:
    """Replaces two vLLM functions that are at fault on the CPU, in this process.

    - `v1/sample/ops/topk_topp_sampler.py`: the Triton top-k/top-p kernel does not run in the
      interpreter; vLLM's own PyTorch form takes its place.
    - `models/qwen3_dflash.py` `_normalize_context_k`: the CPU `rms_norm` reads row 0 of its 2-D
      weight for every layer, so a drafter of several layers drafts worse than it should.

    Also mends and quickens Triton's interpreter.
    """
    import torch
    from vllm import _custom_ops as ops
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model
    from vllm.v1.sample.ops import topk_topp_sampler

    def normalize_context_k(self: DFlashQwen3Model, all_k: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(all_k)
        for layer in range(all_k.shape[0]):
            ops.rms_norm(out[layer], all_k[layer], self._k_norm_weights[layer], self._rms_norm_eps)
        return out

    topk_topp_sampler.apply_top_k_top_p_triton = topk_topp_sampler.apply_top_k_top_p_pytorch
    DFlashQwen3Model._normalize_context_k = normalize_context_k
    _mend_interpreter()
    _quicken_interpreter()


@functools.cache
def _mend_interpreter() -> None:
    """Lets loads, stores and atomics take the masks of vLLM's grammar and n-gram kernels, and ours.

    The interpreter keeps some int1 results as wider integers, and then refuses them as masks. It
    also stops at the maximum of nothing but NaN, of which a GPU takes some element.
    """
    import numpy as np
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store
    atomic = builder.create_atomic_rmw

    def as_bool(mask: Any) -> Any:
        if mask.data.dtype == bool:
            return mask
        return interpreter.TensorHandle((mask.data & 1).astype(bool), mask.dtype)

    def masked_load(self: Any, ptrs: Any, mask: Any, *args: Any) -> Any:
        return load(self, ptrs, as_bool(mask), *args)

    def masked_store(self: Any, ptrs: Any, value: Any, mask: Any, cache_policy: Any) -> Any:
        return store(self, ptrs, value, as_bool(mask), cache_policy)

    def atomic_rmw(self: Any, op: Any, ptr: Any, val: Any, mask: Any, *args: Any) -> Any:
        return atomic(self, op, ptr, val, as_bool(mask), *args)

    builder.create_masked_load, builder.create_masked_store = masked_load, masked_store
    builder.create_atomic_rmw = atomic_rmw

    min_max = interpreter.ReduceOps.min_max

    def without_nan(self: Any, data: Any, val_reduce_op: Any, idx_reduce_op: Any = None) -> Any:
        if idx_reduce_op is np.nanargmax:
            idx_reduce_op = argmax
        return min_max(self, data, val_reduce_op, idx_reduce_op)

    def argmax(data: Any, **where: Any) -> Any:
        return np.argmax(np.where(np.isnan(data), -np.inf, data), **where)

    interpreter.ReduceOps.min_max = without_nan


@functools.cache  # once: a second time would wrap what the first put there
def _quicken_interpreter() -> None:
    """Spares Triton's interpreter work it repeats; results stay the same.

    Triton looks through `triton.language` for functions to remap at every launch and again at every
    call of one jitted function by another, inside a launch that has remapped them already. Here a
    launch remaps all there is, from a list made once.
    """
    import dataclasses
    import inspect
    from types import SimpleNamespace

    from triton import language
    from triton.language import core
    from triton.runtime import interpreter

    modules = SimpleNamespace(__globals__={"tl": language, "core": core})
    patch_lang = interpreter._patch_lang
    builtins: dict[Any, list[tuple[str, Any]]] = {}

    def patch_builtin(pkg: Any, builder: Any, scope: Any) -> None:
        if pkg not in builtins:
            members = inspect.getmembers(pkg)
            builtins[pkg] = [(name, member) for name, member in members if core.is_builtin(member)]
        for name, member in builtins[pkg]:
            interpreter._patch_attr(pkg, name, member, builder, scope)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.rewrite()(*args, **kwargs)

    # The check for integer overflow does each addition three times over.
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    interpreter._patch_builtin = patch_builtin
    interpreter._patch_lang = lambda fn: patch_lang(modules)
    interpreter.InterpretedFunction.__call__ = call


def register() -> None:
    """Entry point of cpu/testbed-plugin: `patch_vllm()` where the test bed is switched on."""
    if os.environ.get("VLLM_DDTREE_CPU_TESTBED") == "1":
        patch_vllm()
