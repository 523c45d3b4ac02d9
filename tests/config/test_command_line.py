# SPDX-License-Identifier: Apache-2.0
"""The ways in which a user gives the keys: JSON, dotted flags, short flags, a YAML file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.config.building import DRAFTER, TARGET, refusal


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


def parse(arguments: list[str]) -> Any:
    """The speculative config of a `vllm serve` command line."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    base = ["--model", str(TARGET), "--dtype", "float32", "--max-model-len", "256"]
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
