# SPDX-License-Identifier: Apache-2.0
"""The plugin's entry point (group `vllm.general_plugins`).

`register()` runs in every process of every vLLM, so it does little: it checks vLLM's seams and lets
`method: ddtree` through the configuration. All else is replaced when a DDTree configuration exists;
`patches.table` lists it.
"""

from vllm.logger import init_logger

from vllm_ddtree import integration, presence
from vllm_ddtree.patches import table

logger = init_logger("vllm.ddtree")


def register() -> None:
    """Add `method: ddtree` to vLLM. Idempotent.

    On a vLLM this plugin does not know it changes nothing but the answer to `method: ddtree`, which
    is then refused with one line.
    """
    try:
        integration.check()
        presence.when_present(table.configured)
    except integration.SeamError as error:
        logger.warning("vllm-ddtree: %s. Method 'ddtree' is refused.", error)
    try:
        table.install(table.When.REGISTERED)
    except (ImportError, AttributeError) as error:
        logger.error("vllm-ddtree: cannot hook vLLM's EngineArgs (%s); not active.", error)
