# SPDX-License-Identifier: Apache-2.0
"""What requests of a load benchmark are about: kinds of text, and how they are sampled.

A kind is one long text, of which prompts are windows at random places. All texts come with the
installed packages, so nothing is downloaded. A traffic is one kind or several in turn, with
sampling parameters.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

MOST_CHARACTERS = 500_000
"""Of a kind's text."""


@dataclass(frozen=True)
class Traffic:
    """Kinds of text, which prompts take in turn, and how their requests are sampled."""

    kinds: tuple[str, ...]
    sampling: dict[str, Any] = field(default_factory=dict)
    """SamplingParams beside the defaults of the benchmark; empty: greedy."""


MIXED = ("code", "prose", "json", "chat")
TRAFFIC = {
    **{kind: Traffic((kind,)) for kind in MIXED},
    "mixed": Traffic(MIXED),
    "sampled": Traffic(MIXED, {"temperature": 0.8}),
    "easy": Traffic(("repeated",)),
    "hard": Traffic(("prose", "chat"), {"temperature": 1.0}),
    # Noise, and as hot as vLLM samples: hardly a token can be predicted.
    "random": Traffic(("random",), {"temperature": 2.0}),
}
"""Traffic by name."""


def _shuffled(rng: random.Random, suffix: str) -> Iterator[str]:
    """The texts of the installed vLLM's files, in random order."""
    import vllm

    files = sorted(Path(vllm.__path__[0]).rglob(f"*{suffix}"))
    rng.shuffle(files)
    return (file.read_text(errors="replace") for file in files)


def _sentences(rng: random.Random) -> list[str]:
    """Paragraphs in which the installed packages describe themselves."""
    found = set()
    for package in metadata.distributions():
        text = package.read_text("METADATA") or ""
        for paragraph in text.partition("\n\n")[2].split("\n\n"):
            words = " ".join(paragraph.split())
            if len(words) > 80 and sum(c.isalpha() or c == " " for c in words) > 0.85 * len(words):
                found.add(words)
    sentences = sorted(found)
    rng.shuffle(sentences)
    return sentences


def _prose(rng: random.Random) -> Iterator[str]:
    return (f"{sentence}\n\n" for sentence in _sentences(rng))


def _chat(rng: random.Random) -> Iterator[str]:
    sentences = _sentences(rng)
    for question, answer in zip(sentences[::2], sentences[1::2], strict=False):
        about = " ".join(question.split()[:12])
        yield f"User: What does this mean: {about}?\nAssistant: {answer}\n"


def _json(rng: random.Random) -> Iterator[str]:
    for _ in range(4000):
        record = {
            "id": rng.randrange(10_000),
            "name": rng.choice(["Ada", "Ben", "Cleo", "Dora", "Emil", "Finn", "Gina", "Hugo"]),
            "active": rng.random() < 0.5,
            "score": round(rng.random(), 3),
            "tags": rng.sample(["red", "green", "blue", "small", "large", "old", "new"], 2),
        }
        yield json.dumps(record, indent=rng.choice((None, 2))) + ",\n"


def _repeated(rng: random.Random) -> Iterator[str]:
    for _ in range(100):
        name = rng.choice(["value", "total", "count", "index", "width", "height"])
        for _ in range(60):
            yield f"    self.{name} = {name}\n"


TEXTS: dict[str, Callable[[random.Random], Iterator[str]]] = {
    "code": lambda rng: _shuffled(rng, ".py"),
    "prose": _prose,
    "json": _json,
    "chat": _chat,
    "repeated": _repeated,
}
"""Pieces of a kind's text, in random order."""


def _kind_prompts(
    tokenizer: Any, kind: str, count: int, tokens: int, seed: int
) -> Iterator[list[int]]:
    rng = random.Random(f"{kind} {seed}")
    if kind == "random":
        for _ in range(count):
            yield [rng.randrange(tokenizer.vocab_size) for _ in range(tokens)]
        return
    text = ""
    for piece in TEXTS[kind](rng):
        text += piece
        if len(text) > MOST_CHARACTERS:
            break
    ids = tokenizer.encode(text)
    if len(ids) < 2 * tokens:
        raise ValueError(f"the text of kind {kind} has {len(ids)} tokens, 2 x {tokens} are needed")
    for _ in range(count):
        start = rng.randrange(len(ids) - tokens)
        yield ids[start : start + tokens]


def traffic_prompts(
    tokenizer: Any, name: str, count: int, tokens: int, seed: int = 0
) -> list[list[int]]:
    """`count` prompts of `tokens` token ids of a traffic, its kinds in turn.

    Args:
        tokenizer: the target's.
        name: of the traffic.
        count: prompts.
        tokens: of each prompt.
        seed: other prompts with another seed.

    Raises:
        ValueError: a kind's text is shorter than two prompts.

    """
    kinds = TRAFFIC[name].kinds
    each = -(-count // len(kinds))
    found = [_kind_prompts(tokenizer, kind, each, tokens, seed) for kind in kinds]
    return [prompt for turn in zip(*found, strict=True) for prompt in turn][:count]
