# SPDX-License-Identifier: Apache-2.0
"""Whether a pair fits: its configuration is made as `vllm serve` makes it, and looked at.

What cannot work is refused by the product itself, in its own words. Weights are not read.
"""

from __future__ import annotations

import difflib
import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from vllm_ddtree.cli.check.findings import Finding, State
from vllm_ddtree.cli.check.graphs import graphs
from vllm_ddtree.cli.check.memory import memory
from vllm_ddtree.cli.check.no_gpu import without_gpu
from vllm_ddtree.cli.check.worker import worker_checks
from vllm_ddtree.cli.errors import WrongUsage
from vllm_ddtree.cli.options import vllm_parser

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

OPTION = "--speculative-config"


def speculative_config(drafter: str, options: Sequence[str]) -> tuple[str, list[str]]:
    """The speculative_config of a pair as JSON, and the options without it.

    Args:
        drafter: the drafter.
        options: of `vllm serve`; keys of a `--speculative-config` among them count.

    Raises:
        WrongUsage: it is no JSON object.

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
            raise WrongUsage(f"{name} needs a value: a JSON object")
        value = value if equals else left.pop(0)
        try:
            given = json.loads(value)
        except ValueError:
            given = None
        if not isinstance(given, dict):
            raise WrongUsage(f"{name}={value}: give a JSON object")
        keys.update(given)
    for key, own in (("method", "ddtree"), ("model", drafter)):
        if keys.setdefault(key, own) != own:
            raise WrongUsage(f"{OPTION}: {key}={keys[key]!r} is not {own!r}: leave it out")
    return json.dumps(keys), rest


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
        WrongUsage: a value is not of its option's kind.
        ValueError: the pair is refused.

    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    from vllm_ddtree.attention.registry import supported

    spec, rest = speculative_config(drafter, options)
    parser = AsyncEngineArgs.add_cli_args(vllm_parser("vllm serve"))
    arguments, others = parser.parse_known_args(["--model", target, OPTION, spec, *rest])
    known = [name for action in parser._actions for name in action.option_strings]
    for option in others:
        near = difflib.get_close_matches(option.partition("=")[0], known, 1, 0.9)
        if option.startswith("--") and near:
            raise WrongUsage(f"there is no option {option}: did you mean {near[0]}?")
    engine_args = AsyncEngineArgs.from_cli_args(arguments)
    if without_gpu() and engine_args.create_model_config().use_mla:
        # vLLM has no such backend for a CPU. One that is named is not asked of the device.
        named = "--attention-backend" in " ".join(rest)
        if not named:
            cache = engine_args.kv_cache_dtype
            engine_args.attention_backend = supported(True, cache)[0]
    return engine_args.create_engine_config(UsageContext.OPENAI_API_SERVER), others


def check_pair(target: str, drafter: str, options: Sequence[str]) -> list[Finding]:
    """All that the configuration of a pair tells.

    Raises:
        WrongUsage: a value is not of its option's kind.

    """
    from huggingface_hub.errors import StrictDataclassError

    with heard() as said:
        try:
            vllm_config, others = make_config(target, drafter, options)
            classes = list(worker_checks(vllm_config))
        except WrongUsage:
            raise
        except OSError as error:
            # Of the drafter's files the product speaks itself.
            text = f"target {target!r} cannot be read: {' '.join(str(error).split())}"
            found = [Finding("pair", State.REFUSED, text, "give a folder or a hub name")]
        except (ValueError, StrictDataclassError) as error:
            found = [refusal(error)]
        else:
            found = [*describe(vllm_config), *classes, *memory(vllm_config)]
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
    yield Finding("drafter", State.GOOD, drafter_words(spec))
    yield Finding("fit", State.GOOD, fit_words(spec))
    yield backend(vllm_config)
    yield Finding("budget", State.GOOD, budget_words(vllm_config))
    yield from graphs(vllm_config)


def target_words(model: ModelConfig) -> str:
    """Architecture, sizes and kinds of layers."""
    kind = "latent attention" if model.use_mla else "attention"
    recurrent = " and recurrent layers" if model.is_hybrid else ""
    return (
        f"{model.architecture}, {model.get_total_num_hidden_layers()} layers of size "
        f"{model.get_hidden_size()}, {kind}{recurrent}, {model.get_vocab_size()} tokens"
    )


def drafter_words(spec: Any) -> str:
    """Family, format, sizes, windows."""
    from vllm_ddtree import integration

    draft = spec.draft_model_config
    config = draft.hf_config
    checkpoint = integration.checkpoint_config(draft.model, draft.revision)
    kind = "the speculators library's" if "speculators_config" in checkpoint else "the plain"
    windows = (getattr(config, "layer_types", None) or []).count("sliding_attention")
    nested = getattr(config, "dflash_config", None) or {}
    window = nested.get("swa_window_size", getattr(config, "sliding_window", None))
    if nested.get("use_swa"):
        windows = config.num_hidden_layers
    said = f", {windows} of them with a window of {window}" if windows else ", no windows"
    return (
        f"{spec.family}, {config.num_hidden_layers} layers of size {config.hidden_size}{said}, in "
        f"{kind} format; block of {spec.block_size}, trees up to {spec.depth_limit} deep, "
        f"{spec.top_k} candidates a position"
    )


def fit_words(spec: Any) -> str:
    """What drafter and target share."""
    from vllm_ddtree import integration
    from vllm_ddtree.config.pair import draft_vocab_size

    target, layers = spec.target_model_config, integration.aux_layers(spec) or ()
    return (
        f"the drafter reads the target's hidden states of size {target.get_hidden_size()} before "
        f"layers {', '.join(map(str, layers))} of {target.get_total_num_hidden_layers()}, and "
        f"proposes {draft_vocab_size(spec.draft_model_config.hf_config)} of its "
        f"{target.get_vocab_size()} tokens"
    )


def backend(vllm_config: VllmConfig) -> Finding:
    """The target's attention backend, and who chose it."""
    from vllm_ddtree import integration
    from vllm_ddtree.attention.registry import one_of, supported

    model = vllm_config.model_config
    if without_gpu():
        known = supported(model.use_mla, vllm_config.cache_config.cache_dtype)
        names = one_of(tuple(name for name in known if not name.startswith("CPU")))
        text = f"chosen where the GPU is; trees are verified on {names}"
        return Finding("attention", State.NOTE, text)
    chosen = vllm_config.attention_config.backend
    if chosen is not None:
        return Finding("attention", State.GOOD, f"{chosen.name} for the target")
    own = integration.target_backend(vllm_config, None)
    return Finding("attention", State.GOOD, f"{own} for the target, vLLM's choice")


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
