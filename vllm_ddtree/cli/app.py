# SPDX-License-Identifier: Apache-2.0
"""The application: one module a command, imported when the application is built.

A command's module keeps PyTorch, vLLM and plots for the moment it runs: `--help` answers at once.
"""

from __future__ import annotations

import sys
from importlib.metadata import version as installed_version
from typing import Any

import typer

from vllm_ddtree.cli.check.command import check
from vllm_ddtree.cli.errors import CommandError

REFUSED = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")
"""What typer raises for wrong usage. Some releases bring a copy of click, others use click."""


class App(typer.Typer):
    """Typer's application, in which an error is one line."""

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        """Run a command; ends the process with its status."""
        try:
            status = super().__call__(*args, standalone_mode=False, **keywords)
        except CommandError as error:
            status = complain("vllm-ddtree", str(error), error.status)
        except typer.Abort:
            status = complain("vllm-ddtree", "interrupted", 130)
        except REFUSED as error:
            status = refused(error)
        sys.exit(status if isinstance(status, int) else 0)


def complain(command: str, message: str, status: int) -> int:
    """Say what is wrong; returns the status."""
    print(f"{command}: {' '.join(message.split())}", file=sys.stderr)
    return status


def refused(error: Any) -> int:
    """Say what typer has refused; returns the status."""
    if error.__class__.__name__ == "NoArgsIsHelpError":
        error.show()
        return 2
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "vllm-ddtree"
    hint = f"; {command} --help explains"
    return complain(command, error.format_message().rstrip(".") + hint, error.exit_code)


app = App(
    name="vllm-ddtree",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Tree speculative decoding for vLLM: does it fit, does it help, what does it do.",
)


def version(wanted: bool) -> None:
    if wanted:
        typer.echo(installed_version("vllm-ddtree"))
        raise typer.Exit


@app.callback()
def main(
    _version: bool = typer.Option(
        False, "--version", callback=version, is_eager=True, help="The version, and exit."
    ),
) -> None:
    """Only options that every command has."""


app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(check)
