# SPDX-License-Identifier: Apache-2.0
"""Errors that end a command with one line."""

from __future__ import annotations


class CommandError(Exception):
    """A command cannot do what was asked: one line, and a status."""

    status = 1


class WrongUsage(CommandError):
    """The arguments do not fit."""

    status = 2
