# SPDX-License-Identifier: Apache-2.0
"""The quickened interpreter gives what Triton's own gives, bit for bit: vLLM's sampler
kernel with its noise, and arithmetic between numbers and blocks of every type.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def digests(quick: bool) -> dict[str, str]:
    """What `quick_cases` prints in a process with, or without, the quickened interpreter."""
    command = [sys.executable, "-m", "tests.cpu.quick_cases", *(["quick"] if quick else [])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_the_same_bits() -> None:
    usual, quick = digests(False), digests(True)
    assert usual.pop("interpreter") == "triton.runtime.interpreter"
    assert quick.pop("interpreter") == "ddtree_testbed.quick"
    assert len(usual) == 19
    assert quick == usual
