# SPDX-License-Identifier: Apache-2.0
"""Configurations of engines, made without an engine."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import NANO

TARGET, DRAFTER = NANO.target, NANO.drafter


def build(spec: dict[str, Any] | None = None, model: str | Path = TARGET, **more: Any) -> Any:
    """The VllmConfig of an engine with this speculative_config, over the small defaults here."""
    from vllm.engine.arg_utils import EngineArgs

    given = {"method": "ddtree", "model": str(DRAFTER), **(spec or {})}
    keys = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 8, **more}
    args = EngineArgs(model=str(model), speculative_config=given, **keys)
    return args.create_engine_config()


def refusal(make: Callable[[], Any]) -> str:
    """The one line with which it is refused: a plain ValueError, not a validator's report."""
    with pytest.raises(ValueError) as caught:
        make()
    assert type(caught.value) is ValueError
    message = str(caught.value)
    assert "\n" not in message
    return message


def edited(source: Path, folder: Path, **changes: Any) -> Path:
    """A copy of a checkpoint's folder, empty files for weights, with changes in its config.json."""
    skip = shutil.ignore_patterns("*.safetensors", "*.pt")
    shutil.copytree(source, folder, ignore=skip)
    (folder / "model.safetensors").write_bytes(b"\2" + b"\0" * 7 + b"{}")  # no tensors
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


def other_target(folder: Path, **config: Any) -> Path:
    shutil.copytree(TARGET, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    (folder / "config.json").write_text(json.dumps(config))
    return folder
