# SPDX-License-Identifier: Apache-2.0
"""What every training on a frozen pair is given: arguments, pair, rollouts."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.training.common import DEVICE, Rollouts, say, setup, wait_for, with_features
from benchmarks.training.nets import Drafter, Target, load_drafter, load_target, read_config

RANKS = {"small": 64, "nano": 32}


class Task(NamedTuple):
    """A pair and the texts to train on."""

    config: dict[str, Any]
    """Of the drafter."""
    block: int
    target: Target
    """Frozen."""
    drafter: Drafter
    rollouts: Rollouts
    """With features."""
    held: Tensor
    """int32 [texts, length], held out."""
    prompt: int
    """Length of their prompts."""


def add_arguments(parser: argparse.ArgumentParser, batch: int, anchors: int) -> None:
    """Add the pair, the rollouts, where results go, when to end, and the batch by default."""
    parser.add_argument("name", choices=RANKS)
    parser.add_argument("target", type=Path)
    parser.add_argument("drafter", type=Path)
    parser.add_argument("rollouts", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--until", type=float, required=True, help="seconds since 1970")
    parser.add_argument("--batch", type=int, default=batch)
    parser.add_argument("--anchors", type=int, default=anchors)
    parser.add_argument("--steps", type=int, default=0, help="instead of a time: for a trial")


def load(args: argparse.Namespace, seed: int) -> Task:
    """Seed all generators and load what the arguments name; waits for the rollouts' file."""
    setup(seed)
    config = read_config(args.drafter)
    states = config["dflash_config"]["target_layer_ids"]
    target = load_target(args.target, states, DEVICE).requires_grad_(False).eval()
    drafter = load_drafter(args.drafter, DEVICE)
    data = np.load(wait_for(args.rollouts))
    ids = torch.from_numpy(data["ids"].astype(np.int32)).to(DEVICE)
    prompts = torch.from_numpy(data["prompts"]).to(DEVICE)
    held = torch.from_numpy(data["held"].astype(np.int32)).to(DEVICE)
    rollouts = with_features(target, ids, prompts)
    say("features", tuple(rollouts.features.shape))
    return Task(
        config, config["block_size"], target, drafter, rollouts, held, int(data["held_prompt"])
    )
