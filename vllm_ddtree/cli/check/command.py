# SPDX-License-Identifier: Apache-2.0
"""The command `vllm-ddtree check`."""

from __future__ import annotations

import os
from typing import Annotated

import typer


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

    from vllm_ddtree.cli.check import findings
    from vllm_ddtree.cli.check.installed import installed
    from vllm_ddtree.cli.check.pair import WrongOptions, check_pair, heard

    if target is not None and drafter is None:
        raise typer.BadParameter("give a drafter as well as a target", param_hint="DRAFTER")
    with heard():
        found = list(installed())
    if target is not None and drafter is not None and not findings.refused(found):
        try:
            found += check_pair(target, drafter, context.args)
        except WrongOptions as error:
            raise typer.BadParameter(str(error), param_hint="options of vllm serve") from error
    if as_json:
        print(findings.as_json(found))
    else:
        findings.show(found, Console())
    raise typer.Exit(1 if findings.refused(found) else 0)
