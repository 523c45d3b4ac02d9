# SPDX-License-Identifier: Apache-2.0
"""Ending a server that was started in a session of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from typing import Any

STOP_SECONDS = 60
"""How long a server may take to end by itself."""


def stop(process: subprocess.Popen[Any]) -> None:
    """End a server and all that it has started.

    A server that is stopped while it starts leaves its engine behind. The group is the server's
    own, so nothing else is in it.

    Args:
        process: the first of a session of its own.

    """
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
