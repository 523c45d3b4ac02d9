# SPDX-License-Identifier: Apache-2.0
"""Where configurations are made."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_ddtree import integration
from vllm_ddtree.presence import is_ddtree

if TYPE_CHECKING:
    from vllm.config.vllm import VllmConfig
    from vllm.engine.arg_utils import EngineArgs


@dataclass(frozen=True)
class _Asked:
    """What the user gave, before vLLM reads a drafter into it.

    Where the target argument is a checkpoint of the speculators library, vLLM takes that
    checkpoint's target instead, and locks method and drafter to what it names
    (transformers_utils/config.py, `maybe_override_with_speculators`).
    """

    target: str
    config: Any
    """The speculative_config."""
    flags: tuple[tuple[str, str, Any], ...]
    """(flag, key, value) of the short flags that were given."""

    @classmethod
    def of(cls, engine_args: EngineArgs) -> _Asked:
        flags = (
            ("--spec-method", "method", engine_args.spec_method),
            ("--spec-model", "model", engine_args.spec_model),
            ("--spec-tokens", "num_speculative_tokens", engine_args.spec_tokens),
        )
        given = tuple(flag for flag in flags if flag[2] is not None)
        return cls(engine_args.model, engine_args.speculative_config, given)

    def method(self) -> Any:
        """As given, None if none is."""
        methods = [value for _, key, value in self.flags if key == "method"]
        if isinstance(self.config, dict):
            methods.append(self.config.get("method"))
        return methods[0] if methods else None

    def is_ddtree(self) -> bool:
        return self.method() == "ddtree"

    def is_given(self) -> bool:
        """Whether the user asked for speculation of any method."""
        return bool(self.flags) or bool(self.config)

    def keys(self) -> dict[str, Any]:
        """The speculative_config and the short flags together.

        Raises:
            ValueError: the config is no object, or a flag says again what it says.

        """
        if not isinstance(self.config, (dict, type(None))):
            raise ValueError(
                f"--speculative-config={self.config!r} is not valid for method "
                "ddtree: give a JSON object"
            )
        keys = dict(self.config or {})
        for flag, key, value in self.flags:
            if key in keys:
                raise ValueError(f"{flag} and --speculative-config['{key}'] are mutually exclusive")
            keys[key] = value
        return keys


_asked: ContextVar[_Asked | None] = ContextVar("asked", default=None)
"""Set while an engine's configuration is made."""
_made: ContextVar[Any] = ContextVar("made", default=None)
"""The speculative configuration made in the course of it."""


def _same_drafter(one: Any, other: Any) -> bool:
    """Whether two values of `model` name one drafter; a folder may be written in several ways."""
    if one == other:
        return True
    paths = [path for path in (one, other) if isinstance(path, str) and os.path.isdir(path)]
    return len(paths) == 2 and os.path.samefile(*paths)


def _take_named_drafter(engine_args: EngineArgs, asked: _Asked, keys: dict[str, Any]) -> None:
    """Let the drafter be the one that the target argument turned out to be, if it did.

    Raises:
        ValueError: the user named another one, too.

    """
    made = engine_args.speculative_config
    if made is asked.config or not isinstance(made, dict) or "model" not in made:
        return
    drafter = made["model"]
    given = keys.setdefault("model", drafter)
    if not _same_drafter(given, drafter):
        raise ValueError(
            f"speculative_config: model={given!r} is not valid for method ddtree: target "
            f"{asked.target!r} names its own drafter; leave it out, or give the target itself"
        )
    # The target argument is the target now; a configuration made again must find its drafter.
    flags = {key for _, key, _ in asked.flags}
    engine_args.speculative_config = {k: v for k, v in keys.items() if k not in flags}


def create_speculative_config(original: Callable[..., Any]) -> Callable[..., Any]:
    """`EngineArgs.create_speculative_config`."""

    def create_another(self: EngineArgs, asked: _Asked, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(self, *args, **kwargs)
        except ValueError as error:
            if not asked.is_given():
                raise
            from vllm_ddtree.config.hints import meant

            given = asked.config if isinstance(asked.config, dict) else {}
            named = {key: value for _, key, value in asked.flags}
            refused = meant(asked.method(), {**given, **named}, error)
            if refused is None:
                raise
            raise refused from error

    def create(self: EngineArgs, *args: Any, **kwargs: Any) -> Any:
        asked = _asked.get() or _Asked.of(self)
        if not asked.is_ddtree():
            return create_another(self, asked, *args, **kwargs)
        integration.require()
        return create_tree(self, asked, *args, **kwargs)

    def create_tree(
        self: EngineArgs, asked: _Asked, target_model_config: Any, target_parallel_config: Any
    ) -> Any:
        keys = asked.keys()
        _take_named_drafter(self, asked, keys)
        from vllm_ddtree.config.speculative import make_config

        spec = make_config(keys, target_model_config, target_parallel_config)
        _made.set(spec)
        return spec

    return create


def create_engine_config(original: Callable[..., Any]) -> Callable[..., Any]:
    """`EngineArgs.create_engine_config`."""

    def create(self: EngineArgs, *args: Any, **kwargs: Any) -> VllmConfig:
        asked = _Asked.of(self)
        if not asked.is_ddtree():
            return original(self, *args, **kwargs)
        from vllm_ddtree.config import engine

        engine.check_watermark(self)
        tokens = _asked.set(asked), _made.set(None)
        try:
            vllm_config = original(self, *args, **kwargs)
        except ValueError as error:
            if "max_num_batched_tokens" in str(error):
                engine.check_adapters(self, _made.get())
            from vllm_ddtree.config.hints import advice

            refused = advice(error)
            if refused is None:
                raise
            raise refused from error
        finally:
            _asked.reset(tokens[0])
            _made.reset(tokens[1])
        engine.finish_engine_config(self, vllm_config)
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
