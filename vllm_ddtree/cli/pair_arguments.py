# SPDX-License-Identifier: Apache-2.0
"""TARGET and DRAFTER, and the options of vLLM that may follow them."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import typer

Target: TypeAlias = Annotated[
    str | None, typer.Argument(help="The target: a folder or a hub name.", show_default=False)
]
Drafter: TypeAlias = Annotated[
    str | None, typer.Argument(help="The drafter, the same.", show_default=False)
]


def split_pair(
    context: typer.Context, target: str | None, drafter: str | None
) -> tuple[str | None, str | None, list[str]]:
    """TARGET, DRAFTER and the rest, where typer took options of vLLM for one of the two.

    Args:
        context: of a command that lets options pass.
        target: as typer read it.
        drafter: the same.

    """
    given = [each for each in (target, drafter) if each is not None] + context.args
    pair: list[str | None] = []
    while given and len(pair) < 2 and not given[0].startswith("-"):
        pair.append(given.pop(0))
    found = [*pair, None, None]
    return found[0], found[1], given
