# SPDX-License-Identifier: Apache-2.0
"""Token limits of a step: one request's verify step, and the draft forward of all, must fit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.logger import init_logger

from vllm_ddtree.budget.fit import StepTokens, fit_schedule

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

    from vllm_ddtree.config.speculative import DDTreeConfig

logger = init_logger("vllm.ddtree")

FEW_TOKENS = 8192
"""vLLM warns of steps with fewer tokens than this (config/vllm.py, `max_num_scheduled_tokens`)."""


def check_token_budget(vllm_config: VllmConfig) -> None:
    """Raise ValueError for a limit under which a tree or a draft would never run whole."""
    spec: DDTreeConfig = vllm_config.speculative_config
    scheduler = vllm_config.scheduler_config
    tokens, rows = scheduler.max_num_batched_tokens, spec.budget + 1
    budget, lower = f"budget={spec.budget}", "lower budget"
    if spec.auto_budget:
        budget, lower = f"budget=auto (up to {spec.budget})", "set budget to a number"
    # vLLM 0.32 takes the draft's slots off every request's share of a batch.
    slots = spec.max_num_new_slots_for_drafting
    needed = max(rows + slots, spec.block_size)
    if tokens < needed:
        raise ValueError(
            f"--max-num-batched-tokens={tokens} is too small for method ddtree with "
            f"{budget}: a request needs {needed} tokens a step; raise it to at least {needed} or "
            f"{lower}"
        )
    for flag, value in (
        ("--max-num-scheduled-tokens", scheduler.max_num_scheduled_tokens),
        ("--long-prefill-token-threshold", scheduler.long_prefill_token_threshold),
    ):
        if value and value < rows:
            raise ValueError(
                f"{flag}={value} is too small for method ddtree with {budget}: a request verifies "
                f"{rows} tokens a step; leave it out, raise it to at least {rows} or {lower}"
            )


def explain_advice(vllm_config: VllmConfig) -> None:
    """Say what vLLM's advice to decrease num_speculative_tokens means here, after it was given."""
    spec: DDTreeConfig = vllm_config.speculative_config
    tokens = vllm_config.scheduler_config.max_num_scheduled_tokens
    if tokens is not None and tokens < FEW_TOKENS:
        logger.info(
            "ddtree: the num_speculative_tokens of vLLM's warning above is the budget here, which "
            "is %s. A step has %d tokens for trees and prefills; raise --max-num-batched-tokens if "
            "prefills are slow",
            f"auto (up to {spec.budget})" if spec.auto_budget else spec.budget,
            tokens,
        )


def set_active_requests(engine_args: EngineArgs, vllm_config: VllmConfig) -> None:
    """Set the most running requests to what the user asked for, as far as the drafts fit a step.

    vLLM has lowered it as if every request drafted its lookahead, budget + 1 tokens.

    Args:
        engine_args: as the user gave them.
        vllm_config: made from them; changed.

    """
    spec: DDTreeConfig = vllm_config.speculative_config
    scheduler = vllm_config.scheduler_config
    asked = engine_args.max_num_active_seqs or scheduler.max_num_seqs
    # vLLM's buffers hold the drafts of this many requests.
    most_drafts = scheduler.max_num_batched_tokens // spec.block_size
    scheduler.max_num_active_seqs = min(asked, most_drafts)


def set_fitting_schedule(vllm_config: VllmConfig) -> None:
    """Let budgets shrink where the trees of all running requests would not fit a step.

    A budget that always fits, and a schedule whose budgets do, stay as they are. A target with
    recurrent layers always gets a schedule: without one vLLM gives a new request of one token a
    draft of placeholders, and these rows are not among those that fit.

    Args:
        vllm_config: changed: a fixed budget that does not always fit becomes a schedule.

    """
    spec: DDTreeConfig = vllm_config.speculative_config
    tokens, limit = StepTokens.of(vllm_config), vllm_config.scheduler_config.max_num_seqs
    given = spec.num_speculative_tokens_per_batch_size or [(1, limit, spec.budget)]
    fitted = fit_schedule(given, tokens, limit)
    if fitted == list(given):
        if vllm_config.model_config.is_hybrid:
            spec.num_speculative_tokens_per_batch_size = list(given)
        return
    spec.num_speculative_tokens_per_batch_size = fitted
    if not spec.auto_budget:
        logger.info(
            "ddtree: a step has room for %d tokens of trees; so that all running requests fit, "
            "the budget is %s (first, last request, nodes)",
            min(tokens.scheduled, tokens.tree_rows),
            fitted,
        )
