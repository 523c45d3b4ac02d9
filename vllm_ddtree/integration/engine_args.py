# SPDX-License-Identifier: Apache-2.0
"""Where configurations are made."""

from collections.abc import Callable
from typing import Any

from vllm_ddtree.integration.replace import replace


def _method(engine_args: Any) -> str | None:
    """The speculative method that EngineArgs ask for."""
    keys = engine_args.speculative_config
    return engine_args.spec_method or (keys.get("method") if isinstance(keys, dict) else None)


def hook_engine_args(
    make_config: Callable[[dict[str, Any], Any, Any], Any],
    is_ddtree: Callable[[Any], bool],
    begin: Callable[[Any], None],
    finish: Callable[[Any, Any], None],
) -> None:
    """Let `method: ddtree` through where configurations are made.

    Args:
        make_config: (user's keys, target ModelConfig, target ParallelConfig) -> speculative config.
        is_ddtree: whether a speculative config is DDTree's.
        begin: (EngineArgs) -> None; checks what vLLM would answer with advice that misleads.
        finish: (EngineArgs, VllmConfig) -> None; checks the whole configuration, raising
        ValueError.

    """
    from vllm.config.vllm import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

    def create_speculative_config(original: Callable[..., Any]) -> Callable[..., Any]:
        def create(self: Any, target_model_config: Any, target_parallel_config: Any) -> Any:
            if _method(self) != "ddtree":
                return original(
                    self,
                    target_model_config=target_model_config,
                    target_parallel_config=target_parallel_config,
                )
            if not isinstance(self.speculative_config, (dict, type(None))):
                raise ValueError(
                    f"--speculative-config={self.speculative_config!r} is not valid for method "
                    "ddtree: give a JSON object"
                )
            keys = dict(self.speculative_config or {})
            for flag, key, value in (
                ("--spec-method", "method", self.spec_method),
                ("--spec-model", "model", self.spec_model),
                ("--spec-tokens", "num_speculative_tokens", self.spec_tokens),
            ):
                if value is None:
                    continue
                if key in keys:
                    raise ValueError(
                        f"{flag} and --speculative-config['{key}'] are mutually exclusive"
                    )
                keys[key] = value
            return make_config(keys, target_model_config, target_parallel_config)

        return create

    def create_engine_config(original: Callable[..., Any]) -> Callable[..., Any]:
        def create(self: Any, *args: Any, **kwargs: Any) -> Any:
            if _method(self) == "ddtree":
                begin(self)
            vllm_config = original(self, *args, **kwargs)
            if is_ddtree(vllm_config.speculative_config):
                finish(self, vllm_config)
            return vllm_config

        return create

    def add_cli_args(original: Callable[..., Any]) -> Callable[..., Any]:
        def add(parser: Any) -> Any:
            parser = original(parser)
            for action in parser._actions:
                if "--spec-method" in action.option_strings and action.choices:
                    action.choices = [*action.choices, "ddtree"]
            return parser

        return add

    def num_lookahead_tokens(original: Callable[[Any], int]) -> Callable[[Any], int]:
        def lookahead(self: Any) -> int:
            if is_ddtree(self.speculative_config):
                # vLLM reserves num_speculative_tokens + 1 = budget + 1; the draft block may be
                # longer.
                return max(original(self), self.speculative_config.block_size)
            return original(self)

        return lookahead

    replace(EngineArgs, "create_speculative_config", create_speculative_config)
    replace(EngineArgs, "create_engine_config", create_engine_config)
    replace(EngineArgs, "add_cli_args", add_cli_args)
    replace(VllmConfig, "num_lookahead_tokens", num_lookahead_tokens)
