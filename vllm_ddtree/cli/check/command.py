# SPDX-License-Identifier: Apache-2.0
"""The command `vllm-ddtree check`."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from vllm_ddtree.cli.errors import WrongUsage


def check(
    context: typer.Context,
    target: Annotated[
        str | None, typer.Argument(help="The target: a folder or a hub name.", show_default=False)
    ] = None,
    drafter: Annotated[
        str | None, typer.Argument(help="The drafter, the same.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable findings.")] = False,
) -> None:
    """Say whether a pair fits, from its configurations alone; options of `vllm serve` may follow.

    Without a pair: whether the installed plugin is active, and why not. The exit status is 0 if all
    fits, 1 if something is refused, 2 if the arguments are wrong.
    """
    # Its messages are findings here. Set before vLLM is imported.
    os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")
    from rich.console import Console

    if (target or "").startswith("-") or (drafter or "").startswith("-"):
        raise WrongUsage("check: give TARGET and DRAFTER first, then the options of vllm serve")
    if target is not None and drafter is None:
        raise WrongUsage("check: give a drafter as well as a target")
    from vllm_ddtree.cli.check import findings, no_gpu

    from vllm_ddtree.cli.check.installed import installed
    from vllm_ddtree.cli.check.pair import check_pair, heard

    with heard():
        if target is not None and no_gpu.without_gpu():
            no_gpu.stand_in()
        found = list(installed())
    if target is not None and drafter is not None and not findings.refused(found):
        found += check_pair(target, drafter, context.args)
    if as_json:
        print(findings.as_json(found))
    else:
        findings.show(found, Console())
    raise typer.Exit(1 if findings.refused(found) else 0)
