# SPDX-License-Identifier: Apache-2.0
"""Lets vLLM import models with a vision tower (Qwen3-VL, Qwen3.5) without torchvision.

Their modules import one function of Transformers' image processor, whose own module imports
torchvision at its head. Nothing of torchvision is run for text, nor for images that come processed.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType


def stand_in() -> None:
    """Puts an empty torchvision in its place where there is none. Idempotent."""
    from transformers.utils.import_utils import is_torchvision_available

    # Asked once and remembered: Transformers goes on without torchvision wherever it can.
    if is_torchvision_available() or importlib.util.find_spec("torchvision"):
        return
    parent = None
    for name in ("torchvision", "transforms", "v2", "functional"):
        path = f"{parent.__name__}.{name}" if parent else name
        module = ModuleType(path, "Empty, in the place of torchvision.")
        module.__spec__ = ModuleSpec(path, None, is_package=True)
        module.__path__ = []
        sys.modules[path] = module
        if parent:
            setattr(parent, name, module)
        parent = module
