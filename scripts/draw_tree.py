# SPDX-License-Identifier: Apache-2.0
"""Draws one round of the embedded pair as an SVG: the README's picture.

usage: .venv-cpu/bin/python -m scripts.draw_tree [--out docs/tree.svg]

The target continues a prompt greedily. At one of its tokens, the root, the drafter is asked for its
candidates, `tree.reference` grows the tree, and the target's own text says which path is accepted.
Drafter and target run in plain PyTorch (`tests/oracle`), so no engine is started.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from tests.oracle import Drafter, Target, Trace, greedy
from tests.oracle.replay import candidates
from vllm_ddtree.tree.reference import Tree, accepted_path, build_tree

ROOT = Path(__file__).resolve().parent.parent
MODELS = ROOT / "models"
PICTURE = ROOT / "docs" / "tree.svg"
PROMPT = "class Error(Exception):\n    def __init__(self, message):\n"
TEXT_LENGTH = 15
"""Tokens of the target's text before the root."""
NODES = 15
TOP_K = 16

CHAR, LINE, COLUMN, MARGIN = 7.8, 42, 124, 24
"""Pixels: width of a character, between two lines, between two depths, around the picture."""
BOX = 24
INK, PALE, ACCEPTED, CHAIN, PAPER = "#24292f", "#6e7781", "#1a7f37", "#0969da", "#ffffff"


@dataclass(frozen=True)
class Picture:
    """What is drawn of a round."""

    tree: Tree
    words: list[str]
    """Text of each row's token, the root's first."""
    path: list[int]
    """Rows that the target accepted, in path order."""
    bonus: str
    """Text of the bonus token."""


def make_round(prompt: str, text_length: int, nodes: int) -> Picture:
    """The round whose root is the token behind `text_length` tokens of the target's text."""
    target = Target.load(MODELS / "nano")
    drafter = Drafter.load(MODELS / "nano-dflash", target)
    tokenizer = Tokenizer.from_file(str(MODELS / "nano" / "tokenizer.json"))
    prompt_ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    text = greedy(target, prompt_ids, text_length + 1 + drafter.block_size)
    trace = Trace(target, drafter, prompt_ids, text)
    root = len(prompt_ids) + text_length
    log_probs, token_ids = candidates(trace.draft(root, None, None), TOP_K)
    tree = build_tree(log_probs.numpy(), token_ids.numpy(), nodes)
    # Only the rows on the target's path are looked at, and there its choice is its own text.
    choices = np.array([trace.tokens[root + 1 + depth] for depth in tree.depths])
    path, bonus = accepted_path(tree, choices)
    ids = [trace.tokens[root], *tree.tokens[1:].tolist()]
    return Picture(
        tree, [word(tokenizer.decode([i])) for i in ids], path, word(tokenizer.decode([bonus]))
    )


def word(text: str) -> str:
    """A token as it is drawn: spaces and line breaks are made visible."""
    return text.replace(" ", "␣").replace("\n", "⏎").replace("\t", "⇥")


def lines_of(tree: Tree) -> list[float]:
    """The line of each row: leaves one below the other, a parent in the middle of its children."""
    lines = [0.0] * len(tree.parents)
    free = 0

    def place(row: int) -> None:
        nonlocal free
        children = np.flatnonzero(tree.parents == row).tolist()
        if not children:
            lines[row], free = free, free + 1
            return
        for child in children:
            place(child)
        lines[row] = (lines[children[0]] + lines[children[-1]]) / 2

    place(0)
    return lines


def draw(picture: Picture) -> str:
    """The SVG."""
    tree = picture.tree
    lines = lines_of(tree)
    last = picture.path[-1] if picture.path else 0
    on_path = {0, *picture.path}
    chain = chain_of(tree)
    width = 2 * MARGIN + (int(tree.depths.max()) + 1) * COLUMN
    top = MARGIN + 22
    height = top + (max(lines) + 1) * LINE + 48

    def x(depth: int) -> float:
        return MARGIN + depth * COLUMN

    def y(line: float) -> float:
        return top + line * LINE + BOX / 2

    def size(text: str) -> float:
        return max(26.0, len(text) * CHAR + 14)

    def box(left: float, middle: float, text: str, ink: str, fill: str, style: str) -> str:
        style = f'fill="{fill}" {style}'
        return (
            f'<rect x="{left:.1f}" y="{middle - BOX / 2:.1f}" width="{size(text):.1f}" '
            f'height="{BOX}" rx="5" {style}/>'
            f'<text x="{left + size(text) / 2:.1f}" y="{middle + 4.5:.1f}" text-anchor="middle" '
            f'fill="{ink}">{escape(text)}</text>'
        )

    def edge(start: tuple[float, float], end: tuple[float, float], color: str, wide: float) -> str:
        middle = (start[0] + end[0]) / 2
        return (
            f'<path d="M{start[0]:.1f} {start[1]:.1f} C{middle:.1f} {start[1]:.1f} '
            f'{middle:.1f} {end[1]:.1f} {end[0]:.1f} {end[1]:.1f}" fill="none" '
            f'stroke="{color}" stroke-width="{wide}"/>'
        )

    edges, boxes = [], []
    for row, text in enumerate(picture.words):
        depth, accepted = int(tree.depths[row]), row in on_path
        color = ACCEPTED if accepted else PALE
        border = f'stroke="{CHAIN}" stroke-width="2.5"' if row in chain else f'stroke="{color}"'
        ink, fill = (PAPER, ACCEPTED) if accepted else (INK, PAPER)
        boxes.append(box(x(depth), y(lines[row]), text, ink, fill, border))
        if row == 0:
            continue
        parent = int(tree.parents[row])
        start = x(depth - 1) + size(picture.words[parent]), y(lines[parent])
        edges.append(edge(start, (x(depth), y(lines[row])), color, 2 if accepted else 1))
        boxes.append(
            f'<text x="{x(depth) + size(text) / 2:.1f}" y="{y(lines[row]) + BOX / 2 + 10:.1f}" '
            f'text-anchor="middle" font-size="9" fill="{PALE}">{np.exp(tree.scores[row]):.2f}'
            "</text>"
        )
    depth = int(tree.depths[last]) + 1
    # Beside the children of the last accepted node, above the first or below the last of them.
    line = bonus_line(tree, lines, last)
    start = x(depth - 1) + size(picture.words[last]), y(lines[last])
    edges.append(edge(start, (x(depth), y(line)), ACCEPTED, 2))
    border = f'stroke="{ACCEPTED}" stroke-dasharray="4 3"'
    boxes.append(box(x(depth), y(line), picture.bonus, ACCEPTED, PAPER, border))
    heads = [
        f'<text x="{x(depth):.1f}" y="{MARGIN + 4}" fill="{INK}" font-size="11">{name}</text>'
        for depth, name in enumerate(
            ["root", *(f"depth {depth}" for depth in range(1, int(tree.depths.max()) + 1))]
        )
    ]
    legend = [
        f'<text x="{MARGIN}" y="{height - up:.1f}" fill="{INK}" font-size="11">{text}</text>'
        for up, text in (
            (28, "green: accepted by the target; dashed: its bonus token"),
            (12, "blue border: the chain; number: the drafter's probability of the path"),
        )
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height:.0f}" '
            f'viewBox="0 0 {width} {height:.0f}" font-size="13" '
            'font-family="DejaVu Sans Mono, Menlo, Consolas, monospace">',
            f'<rect width="{width}" height="{height:.0f}" rx="8" fill="{PAPER}"/>',
            *heads,
            *edges,
            *boxes,
            *legend,
            "</svg>\n",
        ]
    )


def chain_of(tree: Tree) -> set[int]:
    """The rows of the tree that the chain has too: rank 0 at every depth."""
    rows = {0}
    for row in range(1, len(tree.parents)):
        if int(tree.parents[row]) in rows and tree.ranks[row] == 0:
            rows.add(row)
    return rows - {0}


def bonus_line(tree: Tree, lines: list[float], last: int) -> float:
    """A line for the bonus token, free at its depth: the nearest to the last accepted node's."""
    depth = tree.depths[last] + 1
    taken = {lines[row] for row in np.flatnonzero(tree.depths == depth)}
    free = [
        line / 2
        for line in range(2 * int(max(lines)) + 1)
        if all(abs(line / 2 - other) >= 1 for other in taken)
    ]
    return min(free, key=lambda line: abs(line - lines[last]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompt", default=PROMPT, help="Python code that the target continues")
    parser.add_argument(
        "--text", type=int, default=TEXT_LENGTH, help="tokens of the text before the root"
    )
    parser.add_argument("--nodes", type=int, default=NODES, help="nodes of the tree")
    parser.add_argument("--out", type=Path, default=PICTURE, help="SVG file")
    arguments = parser.parse_args()
    picture = make_round(arguments.prompt, arguments.text, arguments.nodes)
    arguments.out.write_text(draw(picture))


if __name__ == "__main__":
    main()
