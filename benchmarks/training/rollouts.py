# SPDX-License-Identifier: Apache-2.0
"""Texts that a target writes, for the scripts that train its drafters.

usage: python -m benchmarks.training.rollouts TARGET CORPUS.npz OUT.npz --until TIME
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from benchmarks.training.common import (
    DEVICE,
    beside_corpus,
    generate,
    held_out,
    load_tokens,
    say,
    setup,
)
from benchmarks.training.nets import load_target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", type=Path)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--until", type=float, required=True, help="seconds since 1970")
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--held", type=int, default=48)
    args = parser.parse_args()
    setup(1)
    target = load_target(args.target, [], DEVICE).requires_grad_(False).eval()
    prompt = min(128, args.length // 2)
    held = load_tokens(args.corpus, "held")
    texts = held_out(target, held, args.held, prompt, args.length)
    prompts = [p for p in [64, 128, 32, 192, 96, 256] * 3 if p < args.length - 32]
    tokens = load_tokens(args.corpus, "train")
    ids, lengths = generate(target, tokens, prompts, args.length, args.batch, args.until)
    ids, lengths = beside_corpus(ids, lengths, tokens, 2)
    waiting = args.out.with_name(f".{args.out.name}")
    np.savez(
        waiting,
        ids=ids.cpu().numpy().astype(np.uint16),
        prompts=lengths.cpu().numpy(),
        held=texts.cpu().numpy().astype(np.uint16),
        held_prompt=prompt,
    )
    waiting.rename(args.out)
    say(len(ids), "rollouts of", args.length)


if __name__ == "__main__":
    main()
