# SPDX-License-Identifier: Apache-2.0
"""Every way in which a user gives the keys comes to the same: JSON, dotted flags, short flags, a
YAML file, and a target that names its drafter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.config.building import DRAFTER, TARGET, build, refusal
from tests.config.checkpoints import as_speculators


def test_short_flags() -> None:
    from vllm.engine.arg_utils import EngineArgs

    def args(**more: Any) -> EngineArgs:
        return EngineArgs(model=str(TARGET), dtype="float32", max_model_len=256, **more)

    spec = (
        args(spec_method="ddtree", spec_model=str(DRAFTER), spec_tokens=3)
        .create_engine_config()
        .speculative_config
    )
    assert (spec.budget, spec.depth_limit) == (63, 3)
    mixed = args(spec_method="ddtree", spec_model=str(DRAFTER), speculative_config={"budget": 9})
    assert mixed.create_engine_config().speculative_config.budget == 9
    for flag, more in (
        ("--spec-model", {"spec_model": str(DRAFTER)}),
        ("--spec-method", {"spec_method": "ddtree"}),
        ("--spec-tokens", {"spec_tokens": 3}),
    ):
        both = {"method": "ddtree", "model": str(DRAFTER), "num_speculative_tokens": 3}
        message = refusal(args(speculative_config=both, **more).create_engine_config)
        assert flag in message and "mutually exclusive" in message


def parse(arguments: list[str], target: Path = TARGET) -> Any:
    """The speculative config of a `vllm serve` command line."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    base = ["--model", str(target), "--dtype", "float32", "--max-model-len", "256"]
    args = EngineArgs.from_cli_args(parser.parse_args([*base, *arguments]))
    return args.create_engine_config().speculative_config


def test_command_line_and_yaml(tmp_path: Path) -> None:
    given = {"method": "ddtree", "model": str(DRAFTER), "budget": 12, "top_k": 5}
    for flag in ("--speculative-config", "-sc"):
        spec = parse([flag, json.dumps(given)])
        assert (spec.budget, spec.top_k, spec.depth_limit) == (12, 5, 7)
    spec = parse(["--spec-method", "ddtree", "--spec-model", str(DRAFTER), "--spec-tokens", "2"])
    assert (spec.budget, spec.depth_limit) == (63, 2)
    dotted = [f"--speculative-config.{key}={value}" for key, value in given.items()]
    assert parse(dotted).budget == 12
    config = tmp_path / "serve.yaml"
    config.write_text(
        "speculative-config:\n"
        f"  method: ddtree\n  model: {DRAFTER}\n  budget: 12\n  num-speculative-tokens: 4\n"
    )
    spec = parse(["--config", str(config)])
    assert (spec.budget, spec.depth_limit) == (12, 4)


@pytest.fixture
def both(tmp_path: Path) -> Path:
    """Nano's drafter, in the format that names its target: vLLM takes it as the target argument."""
    return as_speculators(DRAFTER, tmp_path / "both", TARGET)


def check(spec: Any, drafter: Path | str, budget: int = 12) -> None:
    assert type(spec).__name__ == "DDTreeConfig"
    assert spec.target_model_config.model == str(TARGET)
    assert spec.model == spec.draft_model_config.model == str(drafter)
    assert (spec.budget, spec.depth_limit, spec.block_size) == (budget, 7, 8)


def test_a_target_that_names_its_drafter(both: Path, tmp_path: Path) -> None:
    given = {"method": "ddtree", "budget": 12}
    for arguments in (
        ["--speculative-config", json.dumps(given)],
        [f"--speculative-config.{key}={value}" for key, value in given.items()],
        ["--spec-method", "ddtree", "--speculative-config.budget=12"],
        ["--speculative-config", json.dumps({**given, "model": str(both)})],
        ["--spec-model", str(both), "--speculative-config", json.dumps(given)],
    ):
        check(parse(arguments, both), both)
    check(parse(["--spec-method", "ddtree"], both), both, budget=63)
    slash = f"{both}/"
    check(parse(["--speculative-config", json.dumps({**given, "model": slash})], both), slash)
    config = tmp_path / "serve.yaml"
    config.write_text("speculative-config:\n  method: ddtree\n  budget: 12\n")
    check(parse(["--config", str(config)], both), both)


def test_such_a_target_from_python(both: Path) -> None:
    from vllm.engine.arg_utils import EngineArgs

    keys: dict[str, Any] = {"dtype": "float32", "max_model_len": 256}
    args = EngineArgs(
        model=str(both), speculative_config={"method": "ddtree", "budget": 12}, **keys
    )
    # vLLM writes the target into the arguments: what comes of them again is the same.
    for _ in range(2):
        config = args.create_engine_config()
        check(config.speculative_config, both)
        assert config.model_config.model == config.model_config.tokenizer == str(TARGET)
    short = EngineArgs(model=str(both), spec_method="ddtree", **keys)
    for _ in range(2):
        check(short.create_engine_config().speculative_config, both, budget=63)


def test_what_such_a_target_refuses(both: Path) -> None:
    message = refusal(lambda: build({"budgets": 7, "model": str(both)}, model=both))
    assert "budgets=7" in message and "did you mean 'budget'" in message
    message = refusal(lambda: build({"model": str(DRAFTER)}, model=both))
    for part in (f"model={str(DRAFTER)!r}", f"{str(both)!r} names its own drafter", "leave it out"):
        assert part in message


def test_such_a_target_with_other_methods(both: Path) -> None:
    """vLLM's own short form stays as it is."""
    for given in (None, {"method": "dflash"}, {"attention_backend": "CPU_ATTN"}):
        from vllm.engine.arg_utils import EngineArgs

        keys: dict[str, Any] = {"dtype": "float32", "max_model_len": 256}
        args = EngineArgs(model=str(both), speculative_config=given, **keys)
        spec: Any = args.create_engine_config().speculative_config
        assert type(spec).__name__ == "SpeculativeConfig"
        assert (spec.method, spec.num_speculative_tokens) == ("dflash", 7)


@pytest.mark.parametrize("dropped", [False, True])
def test_the_finished_configuration_is_what_was_asked(
    monkeypatch: pytest.MonkeyPatch, dropped: bool
) -> None:
    """Whatever on the way makes another method of it, or none."""
    from vllm.engine.arg_utils import EngineArgs

    create = EngineArgs.create_speculative_config

    def another(self: Any, *args: Any, **kwargs: Any) -> Any:
        spec = create(self, *args, **kwargs)
        if dropped:
            return None
        chain = {"method": "dflash", "model": str(DRAFTER), "num_speculative_tokens": 7}
        return type(spec).__mro__[1](
            **chain,
            target_model_config=spec.target_model_config,
            target_parallel_config=spec.target_parallel_config,
        )

    monkeypatch.setattr(EngineArgs, "create_speculative_config", another)
    message = refusal(build)
    assert "method ddtree" in message and ("none" if dropped else "'dflash'") in message
