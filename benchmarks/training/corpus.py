# SPDX-License-Identifier: Apache-2.0
"""Tokens of the .py files of this Python installation: a corpus without a download.

usage: python -m benchmarks.training.corpus OUT --tokenizer NAME=FOLDER [--megabytes 100]

Writes OUT/NAME.npz with `train` and `held` (one file of forty, never trained on).
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

END = 0  # token between files


def python_files() -> list[Path]:
    """All .py files that can be imported here, in a fixed random order."""
    roots = {os.path.dirname(os.__file__)}
    roots |= {p for p in sys.path if p and Path(p).is_dir() and p != os.getcwd()}
    found = {str(file) for root in roots for file in Path(root).rglob("*.py")}
    files = sorted(found)
    random.Random(0).shuffle(files)
    return [Path(file) for file in files]


def read_texts(files: list[Path], characters: int) -> list[str]:
    """Texts of ordinary size, in ASCII, up to `characters` in all; equal ones once."""
    texts: dict[str, None] = {}
    total = 0
    for file in files:
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if 400 < len(text) < 200_000 and text.isascii() and text not in texts:
            texts[text] = None
            total += len(text)
            if total > characters:
                break
    return list(texts)


def encode(texts: list[str], tokenizer: Tokenizer) -> np.ndarray:
    parts = [np.array([*e.ids, END], np.uint16) for e in tokenizer.encode_batch_fast(texts)]
    return np.concatenate(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokenizer", action="append", required=True, metavar="NAME=FOLDER")
    parser.add_argument("--megabytes", type=float, default=100)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    texts = read_texts(python_files(), int(args.megabytes * 1e6))
    held = max(1, len(texts) // 40)
    print(f"{len(texts)} files, {sum(map(len, texts)) / 1e6:.0f} MB", flush=True)
    for option in args.tokenizer:
        name, folder = option.split("=", 1)
        tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
        tokens = {"held": encode(texts[:held], tokenizer), "train": encode(texts[held:], tokenizer)}
        waiting = args.out / f".{name}.npz"
        np.savez(waiting, **tokens)
        waiting.rename(args.out / f"{name}.npz")
        print(f"{name}: {len(tokens['train']) / 1e6:.1f} M tokens", flush=True)


if __name__ == "__main__":
    main()
