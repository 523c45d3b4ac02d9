# SPDX-License-Identifier: Apache-2.0
"""vLLM's sampler outside a worker."""

from __future__ import annotations

import pytest

from vllm_ddtree.testing import testbed


@pytest.fixture(scope="session", autouse=True)
def _worker_environment() -> None:
    """On the CPU: the test bed's work-arounds, and ordinary memory for vLLM's pinned buffers."""
    if bed := testbed():
        bed.prepare()
        import vllm.v1.worker.cpu.shm  # noqa: F401  vLLM's CPU worker imports it for its effects
