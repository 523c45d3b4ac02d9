# SPDX-License-Identifier: Apache-2.0
"""The plugin's entry point (group `vllm.general_plugins`).

`register()` runs in every process of every vLLM, so it does little: it checks vLLM's seams and lets
`method: ddtree` through the configuration. What hooks the model runner is in `hooks`.
"""

from typing import Any

from vllm.logger import init_logger

from vllm_ddtree import integration
from vllm_ddtree.patches.hooks import is_ddtree

logger = init_logger("vllm.ddtree")


def register() -> None:
    """Add `method: ddtree` to vLLM. Idempotent.

    On a vLLM this plugin does not know it changes nothing but the answer to `method: ddtree`, which
    is then refused with one line.
    """
    try:
        integration.check()
    except integration.SeamError as error:
        logger.warning("vllm-ddtree: %s. Method 'ddtree' is refused.", error)
    try:
        integration.hook_engine_args(_make_config, is_ddtree, _begin, _finish)
    except (ImportError, KeyError) as error:
        logger.error("vllm-ddtree: cannot hook vLLM's EngineArgs (%s); not active.", error)


def _make_config(keys: dict[str, Any], target_model: Any, target_parallel: Any) -> Any:
    from vllm_ddtree.patches.hooks import install

    install()
    from vllm_ddtree.config.speculative import make_config

    return make_config(keys, target_model, target_parallel)


def _begin(engine_args: Any) -> None:
    from vllm_ddtree.config.engine import check_engine_args

    check_engine_args(engine_args)


def _finish(engine_args: Any, vllm_config: Any) -> None:
    from vllm_ddtree.config.engine import finish_engine_config

    finish_engine_config(engine_args, vllm_config)
