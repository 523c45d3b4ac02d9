# SPDX-License-Identifier: Apache-2.0
"""The application: one module a command, imported when the application is built.

A command's module keeps PyTorch, vLLM and plots for the moment it runs: `--help` answers at once.
"""

from __future__ import annotations

from importlib.metadata import version as installed_version

import typer

from vllm_ddtree.cli.check.command import check

app = typer.Typer(
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
