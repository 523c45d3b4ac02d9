# SPDX-License-Identifier: Apache-2.0
"""What the demo draws, from rounds that are written down here."""

from __future__ import annotations

import io
import subprocess
import sys

from rich.console import Console

from vllm_ddtree.demo import show
from vllm_ddtree.trace.read import Request, Round

# a -> b -> c and a -> d -> e; the target wants d, e, then f.
TREE = Round(
    form="tree",
    reason="",
    emitted=(4, 5, 6),
    root=1,
    tokens=(1, 2, 3, 4, 5),
    parents=(-1, 0, 1, 0, 3),
    probabilities=(1.0, 0.5, 0.25, 0.2, 0.125),
    chain=(2, 3),
    path=(0, 3, 4),
)
LATER = Round(form="none", reason="budget 0", emitted=(7,), root=6)


def word(token: int) -> str:
    return "?abcdefg"[token]


def drawn(what: object, **options: object) -> str:
    out = io.StringIO()
    Console(file=out, width=120, **options).print(what)  # type: ignore[arg-type]
    return out.getvalue()


def test_a_tree() -> None:
    text = drawn(show.draw_tree(TREE, word, 0))
    lines = text.splitlines()
    assert lines[0] == "a  (root)"
    assert [line.lstrip("├─│└ ") for line in lines[1:5]] == [
        "b  rank 0, p 0.50  chain",
        "c  rank 0, p 0.25  chain",
        "✓ d  rank 1, p 0.20",
        "✓ e  rank 0, p 0.12",
    ]
    assert "The target accepts 2 of 4 nodes and adds f: 3 tokens in one pass." in text
    assert "The chain would have given 1 (it is b c)" in text
    assert "\x1b[" in drawn(show.draw_tree(TREE, word, 0), force_terminal=True)


def test_texts_by_round() -> None:
    writing = show.Writing("def ")
    for text, count in (("ma", 1), ("main(", 3), ("main(", 3), ("main(x)", 5)):
        writing.take(text, count)
    assert writing.pieces == ["ma", "in(", "x)"] and writing.counts == [1, 2, 2]
    # The first token comes with the prompt's own pass.
    assert (writing.num_rounds, writing.num_tokens) == (2, 4)
    assert "def |ma|in(|x)" in drawn(show.texts([writing], True))
    colored = drawn(show.texts([writing], False), force_terminal=True)
    assert "|" not in colored and "\x1b[1;33min(" in colored


def test_the_table_counts_what_was_emitted() -> None:
    """Nodes that were accepted beyond the last token that was asked for are nobody's."""
    one, other = show.Writing(""), show.Writing("")
    for tokens in (1, 4, 5):
        one.take("x" * tokens, tokens)
    other.take("x", 1)
    text = drawn(show.table([("tree", [one, one]), ("nothing", [other])]))
    assert text.splitlines()[1].split() == ["tree", "4", "2.00", "2.0"]
    assert text.splitlines()[2].split() == ["nothing", "0", "-", "0.0"]


def test_rounds_that_tell_most() -> None:
    chain = Round(
        "chain",
        "faster",
        (2, 3, 9),
        1,
        False,
        (1, 2, 3),
        (-1, 0, 1),
        (1, 0.5, 0.2),
        (2, 3),
        (0, 1, 2),
    )
    alike = Round("tree", "", (2, 9), 1, False, (1, 2), (-1, 0), (1.0, 0.5), (2,), (0, 1))
    requests = [Request("x", [alike, chain, TREE, LATER]), Request("y", [TREE])]
    found = show.telling_rounds(requests, 2)
    assert [(request.name, number) for request, number in found] == [("x", 2), ("x", 0)]


def test_an_interruption_is_one_line() -> None:
    code = (
        "from vllm_ddtree.demo.__main__ import interruptible\n"
        "def action(): raise KeyboardInterrupt\n"
        "interruptible(action, 'Interrupted.')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr.strip()) == (130, "Interrupted.")


def test_invisible_tokens() -> None:
    assert [show.visible(text) for text in (" a", "\n", "\t", "")] == ["␣a", "⏎", "⇥", "∅"]
