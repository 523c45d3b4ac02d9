# SPDX-License-Identifier: Apache-2.0
"""What the workers refuse of a pair before they load any weight."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vllm_ddtree.cli.check.findings import Finding, State
from vllm_ddtree.cli.check.no_gpu import without_gpu

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def worker_checks(vllm_config: VllmConfig) -> Iterator[Finding]:
    """Ask the same of the target's class, and of the drafter's attention where a GPU is.

    Raises:
        ValueError: the pair is refused.

    """
    try:
        from vllm_ddtree.config.loaded_drafter import check_draft_backend
        from vllm_ddtree.config.loaded_target import check_target_class
    except ImportError as error:
        text = f"the models' classes cannot be imported here, so they were not looked at: {error}"
        yield Finding("classes", State.NOTE, text, "check again where a GPU is")
        return
    check_target_class(vllm_config)
    said = "the target's class gives a drafter its hidden states"
    if without_gpu():
        yield Finding("classes", State.GOOD, said)
        return
    check_draft_backend(vllm_config)
    yield Finding("classes", State.GOOD, f"{said}; vLLM has a backend for the drafter's attention")
