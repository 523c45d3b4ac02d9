# SPDX-License-Identifier: Apache-2.0
"""The plugin, registered."""

import pytest

import ddtree_testbed


@pytest.fixture(scope="session", autouse=True)
def _registered() -> None:
    ddtree_testbed.prepare()
    from vllm_ddtree import plugin

    plugin.register()
