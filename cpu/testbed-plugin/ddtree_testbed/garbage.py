# SPDX-License-Identifier: Apache-2.0
"""Many engines in one process, without collecting garbage in all of its modules each time.

vLLM collects garbage some 14 times an engine, and freezes what is there from its start to its end.
Each collection looks through the modules of PyTorch and vLLM: four seconds an engine.
"""

from __future__ import annotations

import atexit
import functools
import gc


@functools.cache  # once a process
def keep_modules() -> None:
    """Freezes what is there now, for good; later engines' objects stay free to be collected.

    For the moment when an engine has imported what it needs and is gone.
    """
    from vllm.v1.engine import core
    from vllm.v1.worker import gpu_worker

    for module in (core, gpu_worker):
        module.freeze_gc_heap = _nothing
    atexit.register(
        gc.unfreeze
    )  # else Python ends without its modules, and bindings call that a leak
    gc.unfreeze = _nothing
    gc.collect()
    gc.freeze()


def _nothing() -> None:
    pass
