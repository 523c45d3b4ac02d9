# SPDX-License-Identifier: Apache-2.0
"""Options of vLLM's own commands, refused as ours are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from vllm_ddtree.cli.errors import WrongUsage

if TYPE_CHECKING:
    from vllm.utils.argparse_utils import FlexibleArgumentParser


def vllm_parser(prog: str, of: str = "", **keywords: Any) -> FlexibleArgumentParser:
    """A parser of vLLM's kind that raises WrongUsage where vLLM's ends the process.

    Args:
        prog: vLLM's command.
        of: ours, in front of the message.
        keywords: more for `FlexibleArgumentParser`.

    """
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise WrongUsage(f"{of}: {message}" if of else message)

    return Parser(prog=prog, **keywords)
