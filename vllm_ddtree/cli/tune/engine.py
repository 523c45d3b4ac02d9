# SPDX-License-Identifier: Apache-2.0
"""An engine in this process that writes its rounds."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vllm_ddtree.cli.errors import CommandError
from vllm_ddtree.cli.options import vllm_parser

QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "TORCH_CPP_LOG_LEVEL": "ERROR"}


def prepare(rounds: Path) -> None:
    """Set the environment for such an engine. Before vLLM is imported."""
    from vllm_ddtree.testing import testbed

    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_DDTREE_ROUNDS"] = str(rounds)
    if bed := testbed():
        bed.prepare()


def engine_options(options: Sequence[str]) -> dict[str, Any]:
    """Options of `vllm serve` as arguments of `vllm.LLM`: those that are given.

    Raises:
        WrongUsage: there is no such option, or no such value.

    """
    from vllm.engine.arg_utils import AsyncEngineArgs

    parser = AsyncEngineArgs.add_cli_args(vllm_parser("vllm serve", of="tune"))
    given = vars(parser.parse_args(list(options)))
    return {name: value for name, value in given.items() if value != parser.get_default(name)}


def write_rounds(
    target: str,
    spec: dict[str, Any],
    prompts: Sequence[Any],
    sampling: dict[str, Any],
    options: dict[str, Any],
    progress: Callable[[int], object],
) -> None:
    """Complete the prompts.

    Args:
        target: the target.
        spec: the speculative_config.
        prompts: of all requests.
        sampling: of SamplingParams.
        options: of `vllm.LLM`.
        progress: called with the new tokens of a step.

    Raises:
        CommandError: the engine does not start.

    """
    from vllm import SamplingParams

    from vllm_ddtree.testing import testbed
    from vllm_ddtree.testing.engine import generate, open_engine

    own: dict[str, Any] = {"disable_log_stats": False, "use_tqdm_on_load": False}
    if testbed() is not None:
        own |= {"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": 64 << 20}
    try:
        with open_engine(target, spec, **{**own, **options}) as llm:
            generate(llm, prompts, SamplingParams(**sampling), on_tokens=progress)
    except (ValueError, OSError, RuntimeError) as error:
        raise CommandError(str(error)) from error
