# SPDX-License-Identifier: Apache-2.0
"""The command `vllm-ddtree demo`: `./demo` of a clone, where the models are."""

from __future__ import annotations

import contextlib
import io

import typer

from vllm_ddtree.cli.errors import CommandError, WrongUsage

PAIR = ("--target", "--drafter")


def demo(context: typer.Context) -> None:
    """Complete Python code three ways and compare: DDTree, DFlash's chain, plain decoding.

    The same as ./demo of a clone, with the same options. The wheel has no models.
    """
    from vllm_ddtree.demo.arguments import find_models, parse_arguments

    arguments = context.args
    given = {argument.partition("=")[0] for argument in arguments}
    if not given & {"-h", "--help"} and not given.issuperset(PAIR):
        models = find_models()
        if not (models / "nano").is_dir():
            raise CommandError(
                f"demo: there are no models in {models}: run ./demo in a clone of this repository "
                "or in its source distribution, which have models/, or give --target and --drafter"
            )
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            parse_arguments(arguments)
    except SystemExit as stop:
        if stop.code:
            line = said.getvalue().strip().splitlines()[-1]
            raise WrongUsage(line.replace("demo: error:", "demo:")) from None
        raise typer.Exit from None
    from vllm_ddtree.demo.__main__ import main

    raise typer.Exit(main(arguments))
