# SPDX-License-Identifier: Apache-2.0
"""The command in a process of its own, as a user starts it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CALL = "import sys; sys.argv[0] = 'vllm-ddtree'; from vllm_ddtree.cli.app import app; app()"


def command(*arguments: str, **environment: str | None) -> subprocess.CompletedProcess[str]:
    """Run it. A variable that is None is taken away."""
    own = {**os.environ, **environment}
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    kept = {"PYTHONPATH": path, **{k: v for k, v in own.items() if v is not None}}
    kept["PYTHONPATH"] = environment.get("PYTHONPATH") or path
    return subprocess.run(
        [sys.executable, "-c", CALL, *arguments],
        capture_output=True,
        text=True,
        env=kept,
        cwd=ROOT,
    )
