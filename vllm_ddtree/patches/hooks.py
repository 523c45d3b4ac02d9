# SPDX-License-Identifier: Apache-2.0
"""Puts DDTree into the model runner, the metrics and the taking in of requests of a process in
which a DDTree configuration exists."""

from typing import Any

from vllm_ddtree import integration


def install() -> None:
    """Hook Model Runner V2 in this process. Idempotent.

    Raises:
        ValueError: this vLLM is not supported.

    """
    try:
        integration.check()
    except integration.SeamError as error:
        raise ValueError(f"method 'ddtree' cannot be used: {error}") from error
    integration.hook_runner(
        is_ddtree,
        _make_speculator,
        _make_model_state,
        _core_ready,
        _auto_tiers,
        _captured,
        _before_step,
    )
    integration.hook_capture(is_ddtree)
    integration.hook_requests(is_ddtree, _check_request)
    integration.hook_metrics(is_ddtree, _make_metrics, _max_depth)
    if _checks():
        integration.hook_checks(is_ddtree, _step_done)


def is_ddtree(speculative_config: Any) -> bool:
    """Whether a speculative configuration is DDTree's; by name, so that it need not be imported."""
    return type(speculative_config).__name__ == "DDTreeConfig"


def _make_speculator(vllm_config: Any, device: Any) -> Any:
    from vllm_ddtree.config.loaded_drafter import check_draft_backend, check_loaded_drafter
    from vllm_ddtree.config.loaded_target import check_target_class
    from vllm_ddtree.proposer.speculator import make_speculator

    check_target_class(vllm_config)
    check_draft_backend(vllm_config)
    return make_speculator(vllm_config, device, check_loaded_drafter)


def _make_model_state(vllm_config: Any, model: Any, encoder_cache: Any, device: Any) -> Any:
    from vllm_ddtree.metrics.rounds import with_facts
    from vllm_ddtree.model_state import make_model_state
    from vllm_ddtree.workarounds import sleep

    # Here, in a worker, vLLM's worker class is loaded already.
    integration.hook_sleep(is_ddtree, sleep.keep, sleep.restore)
    integration.hook_outputs(with_facts)
    return make_model_state(vllm_config, model, encoder_cache, device)


def _core_ready(engine_core: Any) -> None:
    from vllm_ddtree.budget import auto, cost
    from vllm_ddtree.invariants import stop
    from vllm_ddtree.metrics import scheduler as metrics
    from vllm_ddtree.workarounds.prompt_logprobs import drop_padded

    observers: list[integration.Observer | None] = []
    if _checks():
        observers.append(stop.observer(engine_core.scheduler))
    if engine_core.vllm_config.speculative_config.auto_budget:
        costs = engine_core.model_executor.collective_rpc(cost.measure)[0]
        observers.append(auto.attach(engine_core, costs))
    observers += [metrics.attach(engine_core), drop_padded]
    integration.observe_steps(engine_core.scheduler, filter(None, observers))


def _checks() -> bool:
    from vllm_ddtree import invariants

    return invariants.enabled()


def _step_done(model_state: Any, output: Any) -> None:
    from vllm_ddtree.invariants import stop

    stop.put(model_state, output)


def _auto_tiers(schedule: Any) -> list[int] | None:
    from vllm_ddtree.budget.auto import SCHEDULE, TIERS

    return [0, *TIERS] if [tuple(entry) for entry in schedule] == SCHEDULE else None


def _captured(manager: Any, model_state: Any, capture_again: Any) -> None:
    if manager.vllm_config.speculative_config.auto_budget and model_state.chains_allowed:
        from vllm_ddtree.budget.auto import chain_budget
        from vllm_ddtree.graphs.chains import capture_chains

        rt = model_state.runtime
        if (budget := chain_budget(rt.max_depth)) is not None:
            capture_chains(manager, rt, budget, capture_again)


def _before_step(model_state: Any, scheduler_output: Any) -> None:
    from vllm_ddtree.graphs.chains import asks_for_chains

    model_state.runtime.chains_asked = asks_for_chains(scheduler_output)


def _check_request(sampling_params: Any) -> None:
    from vllm_ddtree.workarounds import request_limits

    request_limits.check(sampling_params)


def _make_metrics(stat_loggers: list[Any], speculative_config: Any) -> Any:
    from vllm_ddtree.metrics.frontend import TreeMetrics

    return TreeMetrics(stat_loggers, speculative_config)


def _max_depth(speculative_config: Any) -> int:
    from vllm_ddtree.metrics.frontend import max_depth

    return max_depth(speculative_config)
