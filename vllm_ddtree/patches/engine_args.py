# SPDX-License-Identifier: Apache-2.0
"""Where configurations are made."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_ddtree import integration
from vllm_ddtree.presence import is_ddtree

if TYPE_CHECKING:
    from vllm.config.vllm import VllmConfig
    from vllm.engine.arg_utils import EngineArgs


def _method(engine_args: EngineArgs) -> str | None:
    """The speculative method that EngineArgs ask for."""
    keys = engine_args.speculative_config
    return engine_args.spec_method or (keys.get("method") if isinstance(keys, dict) else None)


def _keys(engine_args: EngineArgs) -> dict[str, Any]:
    """The user's keys of the speculative configuration, those of flags of their own included.

    Raises:
        ValueError: they are no keys, or one is given twice.

    """
    if not isinstance(engine_args.speculative_config, (dict, type(None))):
        raise ValueError(
            f"--speculative-config={engine_args.speculative_config!r} is not valid for method "
            "ddtree: give a JSON object"
        )
    keys = dict(engine_args.speculative_config or {})
    for flag, key, value in (
        ("--spec-method", "method", engine_args.spec_method),
        ("--spec-model", "model", engine_args.spec_model),
        ("--spec-tokens", "num_speculative_tokens", engine_args.spec_tokens),
    ):
        if value is None:
            continue
        if key in keys:
            raise ValueError(f"{flag} and --speculative-config['{key}'] are mutually exclusive")
        keys[key] = value
    return keys


def create_speculative_config(original: Callable[..., Any]) -> Callable[..., Any]:
    """`EngineArgs.create_speculative_config`."""

    def create(self: EngineArgs, target_model_config: Any, target_parallel_config: Any) -> Any:
        if _method(self) != "ddtree":
            return original(
                self,
                target_model_config=target_model_config,
                target_parallel_config=target_parallel_config,
            )
        keys = _keys(self)
        integration.require()
        from vllm_ddtree.config.speculative import make_config

        return make_config(keys, target_model_config, target_parallel_config)

    return create


def create_engine_config(original: Callable[..., Any]) -> Callable[..., Any]:
    """`EngineArgs.create_engine_config`."""

    def create(self: EngineArgs, *args: Any, **kwargs: Any) -> VllmConfig:
        if _method(self) == "ddtree":
            from vllm_ddtree.config.engine import check_engine_args

            check_engine_args(self)
        vllm_config = original(self, *args, **kwargs)
        if is_ddtree(vllm_config.speculative_config):
            from vllm_ddtree.config.engine import check_engine_config

            check_engine_config(self, vllm_config)
        return vllm_config

    return create


def add_cli_args(original: Callable[..., Any]) -> Callable[..., Any]:
    """`EngineArgs.add_cli_args`."""

    def add(parser: Any) -> Any:
        parser = original(parser)
        for action in parser._actions:
            if "--spec-method" in action.option_strings and action.choices:
                action.choices = [*action.choices, "ddtree"]
        return parser

    return add


def num_lookahead_tokens(original: Callable[[Any], int]) -> Callable[[Any], int]:
    """`VllmConfig.num_lookahead_tokens`."""

    def lookahead(self: VllmConfig) -> int:
        if is_ddtree(self.speculative_config):
            # vLLM reserves num_speculative_tokens + 1 = budget + 1; the draft block may be longer.
            return max(original(self), self.speculative_config.block_size)
        return original(self)

    return lookahead
