# SPDX-License-Identifier: Apache-2.0
"""The plugin, registered."""

import pytest

from vllm_ddtree.testing import cpu


@pytest.fixture(scope="session", autouse=True)
def _registered() -> None:
    cpu.prepare()
    from vllm_ddtree import plugin

    plugin.register()
