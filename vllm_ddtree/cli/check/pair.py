# SPDX-License-Identifier: Apache-2.0
"""Whether a pair fits: its configuration is made as `vllm serve` makes it, and looked at.

What cannot work is refused by the product itself, in its own words. Weights are not read.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from vllm_ddtree.cli.check.findings import Finding, State
from vllm_ddtree.cli.check.memory import memory

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

OPTION = "--speculative-config"


class WrongOptions(ValueError):
    """Options whose values `vllm serve` does not take."""


def speculative_config(drafter: str, options: Sequence[str]) -> tuple[str, list[str]]:
    """The speculative_config of a pair as JSON, and the options without it.

    Args:
        drafter: the drafter.
        options: of `vllm serve`; keys of a `--speculative-config` among them count.

    Raises:
        WrongOptions: it is no JSON object.

    """
    keys: dict[str, Any] = {}
    rest: list[str] = []
    left = list(options)
    while left:
        option = left.pop(0)
        name, equals, value = option.partition("=")
        if name not in (OPTION, "-sc"):
            rest.append(option)
            continue
        if not equals and not left:
            raise WrongOptions(f"{name} needs a value: a JSON object")
        value = value if equals else left.pop(0)
        try:
            given = json.loads(value)
        except ValueError:
            given = None
        if not isinstance(given, dict):
            raise WrongOptions(f"{name}={value}: give a JSON object")
        keys.update(given)
    return json.dumps({"method": "ddtree", "model": drafter, **keys}), rest


@contextmanager
def heard() -> Iterator[list[str]]:
    """Warnings of vLLM and the plugin, which are kept from the terminal meanwhile."""
    said: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logger, keep = logging.getLogger("vllm"), Keep(logging.WARNING)
    before, logger.handlers = logger.handlers, [keep]
    propagates, logger.propagate = logger.propagate, False
    try:
        yield said
    finally:
        logger.handlers, logger.propagate = before, propagates


def make_config(target: str, drafter: str, options: Sequence[str]) -> tuple[VllmConfig, list[str]]:
    """The engine's configuration, and the options that are none of the engine's.

    Raises:
        WrongOptions: a value is not of its option's kind.
        ValueError: the pair is refused.

    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    def wrong(message: str) -> NoReturn:
        raise WrongOptions(message)

    spec, rest = speculative_config(drafter, options)
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser(prog="vllm serve"))
    parser.error = wrong
    arguments, others = parser.parse_known_args(["--model", target, OPTION, spec, *rest])
    engine_args = AsyncEngineArgs.from_cli_args(arguments)
    return engine_args.create_engine_config(UsageContext.OPENAI_API_SERVER), others


def check_pair(target: str, drafter: str, options: Sequence[str]) -> list[Finding]:
    """All that the configuration of a pair tells.

    Raises:
        WrongOptions: a value is not of its option's kind.

    """
    from huggingface_hub.errors import StrictDataclassError

    with heard() as said:
        try:
            vllm_config, others = make_config(target, drafter, options)
        except WrongOptions:
            raise
        except OSError as error:
            # Of the drafter's files the product speaks itself.
            text = f"target {target!r} cannot be read: {' '.join(str(error).split())}"
            found = [Finding("pair", State.REFUSED, text, "give a folder or a hub name")]
        except (ValueError, StrictDataclassError) as error:
            found = [refusal(error)]
        else:
            found = [*describe(vllm_config), *memory(vllm_config)]
            if others:
                text = f"not looked at, since they are none of the engine's: {' '.join(others)}"
                found.append(Finding("options", State.NOTE, text))
    ours = [line for line in dict.fromkeys(said) if "ddtree" in line]
    return [*found, *(Finding("pair", State.WARNING, line) for line in ours)]


def refusal(error: Exception) -> Finding:
    """What the product, or vLLM, says of a pair that it does not run."""
    details = getattr(error, "errors", None)
    text = str(details()[0]["msg"] if callable(details) else error)
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    reason = (lines or [type(error).__name__])[0].removeprefix("Value error, ")
    if "device type" in reason:
        return Finding(
            "pair", State.REFUSED, f"vLLM makes no configuration here: {reason}", "use a GPU"
        )
    return Finding("pair", State.REFUSED, reason)


def describe(vllm_config: VllmConfig) -> Iterator[Finding]:
    """The parts of a pair that fits."""
    spec: Any = vllm_config.speculative_config
    yield Finding("target", State.GOOD, target_words(vllm_config.model_config))
    draft = spec.draft_model_config.hf_config
    size = getattr(draft, "draft_vocab_size", None) or draft.vocab_size
    yield Finding(
        "drafter",
        State.GOOD,
        f"{spec.family}, {draft.num_hidden_layers} layers of size {draft.hidden_size}, block of "
        f"{spec.block_size}, {size} tokens; trees up to {spec.depth_limit} deep, {spec.top_k} "
        "candidates a position",
    )
    yield Finding("attention", State.GOOD, backend_words(vllm_config))
    yield Finding("budget", State.GOOD, budget_words(vllm_config))
    yield graphs(vllm_config)


def target_words(model: ModelConfig) -> str:
    """Architecture, sizes and kinds of layers."""
    kind = "latent attention" if model.use_mla else "attention"
    recurrent = " and recurrent layers" if model.is_hybrid else ""
    return (
        f"{model.architecture}, {model.get_total_num_hidden_layers()} layers of size "
        f"{model.get_hidden_size()}, {kind}{recurrent}, {model.get_vocab_size()} tokens"
    )


def backend_words(vllm_config: VllmConfig) -> str:
    """The target's attention backend, and who chose it."""
    from vllm_ddtree import integration

    chosen = vllm_config.attention_config.backend
    if chosen is not None:
        return f"{chosen.name} for the target"
    return f"{integration.target_backend(vllm_config, None)} for the target, vLLM's choice"


def budget_words(vllm_config: VllmConfig) -> str:
    """What requests get, by load."""
    spec: Any = vllm_config.speculative_config
    if spec.auto_budget:
        return f"auto, up to {spec.budget} nodes, chosen by load while it serves"
    schedule = spec.num_speculative_tokens_per_batch_size
    if not schedule:
        return f"{spec.budget} nodes at every load"
    ranges = (f"{nodes} with {first} to {last} requests" for first, last, nodes in schedule)
    return f"nodes: {', '.join(ranges)}"


def graphs(vllm_config: VllmConfig) -> Finding:
    """Up to how many requests each budget has CUDA graphs."""
    from vllm_ddtree.budget.tiers import TIERS

    spec: Any = vllm_config.speculative_config
    sizes = vllm_config.compilation_config.cudagraph_capture_sizes or []
    if not sizes:
        text = "none: every kernel is launched by itself, and auto has nothing to measure"
        return Finding("graphs", State.WARNING, text, "leave --enforce-eager out, on a GPU")
    schedule = spec.num_speculative_tokens_per_batch_size or [(1, 1, spec.budget)]
    budgets = TIERS if spec.auto_budget else sorted({nodes for _, _, nodes in schedule})
    limit = vllm_config.scheduler_config.max_num_seqs
    reach = {
        nodes: min(limit, max((size // (nodes + 1) for size in sizes), default=0))
        for nodes in budgets
    }
    words = ", ".join(f"{nodes} nodes up to {most}" for nodes, most in reach.items() if most)
    return Finding(
        "graphs", State.GOOD, f"{len(sizes)} sizes of the verify step; requests with one: {words}"
    )
