# SPDX-License-Identifier: Apache-2.0
"""Steps of trees alone share their nodes; in all others each tree is cut to the mean."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_ddtree.budget.share import Sharing
from vllm_ddtree.round.marks import cut_to, note_cut, shared_nodes

MEAN = 3
PLAIN: dict[str, Any] = {"structured_outputs": None, "logprobs": None, "logprob_token_ids": None}


def request(nodes: int, **params: Any) -> Any:
    sampling = SimpleNamespace(**{**PLAIN, **params})
    return SimpleNamespace(request_id="", spec_token_ids=[-1] * nodes, sampling_params=sampling)


def step(
    requests: list[Any],
    waiting: int = 0,
    trimmed: dict[int, int] | None = None,
    late: tuple[int, int] | None = None,
    most_rows: int = 1000,
    cut: int | None = None,
) -> tuple[list[int], int | None, int | None]:
    """Nodes of each request in a step, nodes that they share, and what they were cut to.

    Args:
        requests: running.
        waiting: requests.
        trimmed: nodes that vLLM's scheduler leaves, by request.
        late: rows and nodes of a request that joins the step unseen.
        most_rows: rows that are sampled in one piece.
        cut: nodes to which trees were cut before, so that they fit.

    """
    scheduler = SimpleNamespace(running=requests, waiting=[None] * waiting, max_num_running_reqs=8)
    for i, each in enumerate(requests):
        each.request_id = str(i)
    sharing = Sharing(scheduler, MEAN, most_rows)
    sharing.scheduling()
    lengths, drafts = {}, {}
    for i, each in enumerate(requests):
        nodes = (trimmed or {}).get(i, len(each.spec_token_ids))
        lengths[str(i)] = 1 + nodes
        if nodes:
            drafts[str(i)] = [-1] * nodes
    if late:
        lengths["late"], nodes = late
        drafts |= {"late": [-1] * nodes} if nodes else {}
    output: Any = SimpleNamespace(num_scheduled_tokens=lengths, scheduled_spec_decode_tokens=drafts)
    note_cut(output, cut)
    sharing.scheduled(output)
    return [n - 1 for n in lengths.values()], shared_nodes(output), cut_to(output)


def test_trees_alone_share() -> None:
    assert step([request(15) for _ in range(4)]) == ([15] * 4, 4 * MEAN, None)


def test_with_less_room_than_others() -> None:
    requests = [request(15) for _ in range(3)]
    assert step(requests, trimmed={1: 2}) == ([15, 2, 15], 3 * MEAN, None)


@pytest.mark.parametrize(
    ("requests", "waiting"),
    [
        ([request(15)], 0),
        ([request(15), request(15)], 1),
        ([request(15), request(0)], 0),
        ([request(15), request(15, logprobs=0)], 0),
        ([request(15), request(15, logprob_token_ids=[4])], 0),
        ([request(15), request(15, structured_outputs="a grammar")], 0),
    ],
    ids=["alone", "waiting", "no draft", "logprobs", "logprobs of ids", "grammar"],
)
def test_where_the_host_must_know(requests: list[Any], waiting: int) -> None:
    nodes, shared, cut = step(requests, waiting)
    assert max(nodes) == MEAN and shared is None and cut == MEAN


def test_a_queue_behind_a_full_batch_does_not_matter() -> None:
    assert step([request(15) for _ in range(8)], waiting=3)[1] == 8 * MEAN


@pytest.mark.parametrize("late", [(40, 0), (6, 5)], ids=["prefill", "prompt of one token"])
def test_a_request_that_joins_late(late: tuple[int, int]) -> None:
    """The trees stay as they are, which the host knows."""
    assert step([request(5), request(5)], late=late) == ([5, 5, late[0] - 1], None, None)


def test_a_draft_that_vllm_drops() -> None:
    assert step([request(15), request(15), request(15)], trimmed={2: 0})[1] is None


def test_trees_that_are_no_larger_than_the_mean() -> None:
    assert step([request(MEAN), request(MEAN)]) == ([MEAN] * 2, None, None)


@pytest.mark.parametrize(("most_rows", "shared"), [(12, 8), (5, 1), (4, 0), (3, None)])
def test_rows_that_are_sampled_in_one_piece(most_rows: int, shared: int | None) -> None:
    assert step([request(15) for _ in range(4)], most_rows=most_rows)[1] == shared


@pytest.mark.parametrize(("before", "after"), [(2, 2), (7, MEAN)])
def test_a_cut_is_the_smallest(before: int, after: int) -> None:
    assert step([request(before)], cut=before)[2] == after
