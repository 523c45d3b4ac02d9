# SPDX-License-Identifier: Apache-2.0
"""The plugin's entry point (group `vllm.general_plugins`).

`register()` runs in every process of every vLLM, so it does next to nothing. It hooks the class
that makes configurations, once that class is imported, to let `method: ddtree` through. vLLM's
seams are checked, and all else is replaced, when a DDTree configuration is asked for or arrives;
`patches.table` lists it.
"""

import contextlib

from vllm_ddtree import presence
from vllm_ddtree.integration import when_imported


def register() -> None:
    """Add `method: ddtree` to vLLM. Idempotent.

    On a vLLM that this plugin does not know it changes nothing but the answer to `method: ddtree`,
    which is then refused with one line.
    """
    with contextlib.suppress(ValueError):  # said where a configuration was made or arrived
        presence.when_present(configured)
    when_imported("vllm.engine.arg_utils", hook_engine_args)


def configured() -> None:
    """A DDTree configuration exists in this process (listener of `presence`).

    Raises:
        ValueError: this vLLM is not supported.

    """
    from vllm_ddtree.patches import table

    table.configured()


def hook_engine_args() -> None:
    """Let vLLM's `EngineArgs` know `method: ddtree`."""
    from vllm_ddtree.patches import table

    try:
        table.install(table.When.REGISTERED)
    except (ImportError, AttributeError) as error:
        from vllm.logger import init_logger

        init_logger("vllm.ddtree").error(
            "vllm-ddtree: cannot hook vLLM's EngineArgs (%s); not active.", error
        )
