# SPDX-License-Identifier: Apache-2.0
"""What the demo and the command draw in a terminal: texts by round, trees, the table of rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from vllm_ddtree.trace.read import Request, Round

COLORS = ("bold cyan", "bold yellow", "bold green", "bold magenta", "bold blue", "bold red")
"""Of rounds, one after another."""


@dataclass
class Writing:
    """A text that is being written."""

    prompt: str
    pieces: list[str] = field(default_factory=list)
    """What each round added."""
    counts: list[int] = field(default_factory=list)
    """Tokens that each round added."""

    def take(self, text: str, num_tokens: int) -> None:
        """The text as it is now, and its tokens."""
        added = num_tokens - sum(self.counts)
        if added:
            self.pieces.append(text[sum(map(len, self.pieces)) :])
            self.counts.append(added)

    @property
    def num_rounds(self) -> int:
        """Rounds after the prompt's own pass, which gives the first token."""
        return max(0, len(self.counts) - 1)

    @property
    def num_tokens(self) -> int:
        """Tokens that these rounds gave."""
        return sum(self.counts[1:])


def colored(writing: Writing, number: int, plain: bool) -> Text:
    """A text, a colour for each round; without colours, a bar between rounds."""
    text = Text()
    text.append(f"--- text {number}\n", style="dim")
    text.append(writing.prompt, style="dim")
    for index, piece in enumerate(writing.pieces):
        if plain:
            text.append("|" + piece)
        else:
            text.append(piece, style=COLORS[index % len(COLORS)])
    text.append("\n")
    return text


def texts(writings: Sequence[Writing], plain: bool) -> RenderableType:
    """All texts, as far as they are written."""
    return Group(*(colored(each, number, plain) for number, each in enumerate(writings, 1)))


def visible(text: str) -> str:
    """A token as it is drawn: spaces and line breaks are made visible."""
    return text.replace(" ", "␣").replace("\n", "⏎").replace("\t", "⇥") or "∅"


def label(word: str, rank: int, probability: float, accepted: bool, on_chain: bool) -> Text:
    """A node: its token, its rank, the drafter's probability of the path to it."""
    text = Text()
    text.append("✓ " if accepted else "  ", style="bold green")
    text.append(word, style="bold green" if accepted else "default")
    text.append(f"  rank {rank}, p {probability:.2f}", style="dim")
    if on_chain:
        text.append("  chain", style="blue")
    return text


def draw_tree(this: Round, word: Callable[[int], str], taken_by_chain: int) -> RenderableType:
    """A round's tree with the accepted path lit."""
    ranks, accepted, chain = this.ranks(), set(this.path), set(this.chain_rows())
    drawn = Tree(Text(f"{word(this.tokens[0])}  (root)", style="bold green"), guide_style="dim")
    branches = {0: drawn}
    for row in range(1, len(this.tokens)):
        if this.parents[row] < 0:
            continue
        node = label(
            word(this.tokens[row]),
            ranks[row],
            this.probabilities[row],
            row in accepted,
            row in chain,
        )
        branches[row] = branches[this.parents[row]].add(node)
    nodes, tokens = len(this.path) - 1, len(this.emitted)
    end = Text("The target accepts ")
    end.append(f"{nodes} of {this.num_nodes} nodes", style="bold green")
    end.append(f" and adds {word(this.emitted[-1])}: {tokens} tokens in one pass.\n")
    end.append(f"The chain would have given {taken_by_chain + 1}", style="blue")
    if this.chain:
        end.append(f" (it is {' '.join(word(token) for token in this.chain)})")
    return Group(drawn, end, Text())


def telling_rounds(requests: Sequence[Request], count: int) -> list[tuple[Request, int]]:
    """The rounds in which the tree took most beyond what the chain would have taken.

    A request's last round is left out: the target's text ends there, and with it what is known of
    the chain.
    """
    found = []
    for request in requests:
        for number, each in enumerate(request.rounds[:-1]):
            if each.form == "tree":
                gain = len(each.path) - 1 - request.chain_taken(number)
                found.append((gain, len(each.path), request, number))
    found.sort(key=lambda entry: (-entry[0], -entry[1]))
    return [(request, number) for _, _, request, number in found[:count]]


def table(rows: Sequence[tuple[str, Sequence[Writing]]]) -> Table:
    """Rounds and tokens a round, by way of decoding."""
    drawn = Table(box=None, pad_edge=False)
    drawn.add_column("")
    for head in ("rounds", "tokens a round", "rounds of one text"):
        drawn.add_column(head, justify="right")
    for name, writings in rows:
        rounds = sum(each.num_rounds for each in writings)
        tokens = sum(each.num_tokens for each in writings)
        drawn.add_row(
            name,
            str(rounds),
            f"{tokens / rounds:.2f}" if rounds else "-",
            f"{rounds / len(writings):.1f}",
        )
    return drawn


def make_console(no_color: bool) -> Console:
    """For the terminal; in a pipe there are no colours, whatever is asked for."""
    return Console(no_color=no_color or None, highlight=False, soft_wrap=True)


def is_plain(console: Console) -> bool:
    """Whether colours would not be seen."""
    return console.no_color or not console.is_terminal
