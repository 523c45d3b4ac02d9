# SPDX-License-Identifier: Apache-2.0
"""The plugin's entry point (group `vllm.general_plugins`).

`register()` runs in every process of every vLLM, so it does little: it checks vLLM's seams and lets
`method: ddtree` through the configuration. `install()` hooks the model runner and runs only where a
DDTree configuration exists.
"""

from typing import Any

from vllm.logger import init_logger

from vllm_ddtree import compat

logger = init_logger("vllm.ddtree")

_refusal: str | None = None


def register() -> None:
    """Add `method: ddtree` to vLLM. Idempotent.

    On a vLLM this plugin does not know it changes nothing but the answer to `method: ddtree`, which
    is then refused with one line.
    """
    global _refusal
    try:
        compat.check()
    except compat.SeamError as error:
        _refusal = str(error)
        logger.warning("vllm-ddtree: %s. Method 'ddtree' is refused.", _refusal)
    try:
        compat.hook_engine_args(_make_config, _is_ddtree, _begin, _finish)
    except (ImportError, KeyError) as error:
        logger.error("vllm-ddtree: cannot hook vLLM's EngineArgs (%s); not active.", error)


def install() -> None:
    """Hook Model Runner V2 in this process. Idempotent.

    Raises:
        ValueError: this vLLM is not supported.

    """
    if _refusal is not None:
        raise ValueError(f"method 'ddtree' cannot be used: {_refusal}")
    compat.hook_runner(_is_ddtree, _make_speculator, _make_model_state, _core_ready, _auto_tiers)


def _is_ddtree(speculative_config: Any) -> bool:
    # By the attribute, so that processes without DDTree never import its configuration class.
    return type(speculative_config).__name__ == "DDTreeConfig"


def _make_config(keys: dict[str, Any], target_model: Any, target_parallel: Any) -> Any:
    if _refusal is not None:
        raise ValueError(f"method 'ddtree' cannot be used: {_refusal}")
    from vllm_ddtree.config import make_config

    return make_config(keys, target_model, target_parallel)


def _begin(engine_args: Any) -> None:
    from vllm_ddtree.checks import check_engine_args

    check_engine_args(engine_args)


def _finish(engine_args: Any, vllm_config: Any) -> None:
    from vllm_ddtree.checks import check_engine_config

    check_engine_config(engine_args, vllm_config)


def _make_speculator(vllm_config: Any, device: Any) -> Any:
    from vllm_ddtree.proposer.speculator import make_speculator

    return make_speculator(vllm_config, device)


def _make_model_state(vllm_config: Any, model: Any, encoder_cache: Any, device: Any) -> Any:
    from vllm_ddtree.model_state import make_model_state

    return make_model_state(vllm_config, model, encoder_cache, device)


def _core_ready(engine_core: Any) -> None:
    if engine_core.vllm_config.speculative_config.auto_budget:
        from vllm_ddtree.budget import auto, cost

        auto.attach(engine_core, engine_core.model_executor.collective_rpc(cost.measure)[0])


def _auto_tiers(schedule: Any) -> list[int] | None:
    from vllm_ddtree.budget.auto import TIERS
    from vllm_ddtree.config import AUTO_SCHEDULE

    if [tuple(entry) for entry in schedule] != AUTO_SCHEDULE:
        return None
    return [0, *TIERS]
