# SPDX-License-Identifier: Apache-2.0
"""The top candidates and their log-probs are those of a sort and a float64 log-sum-exp."""

from typing import Any

import pytest
import torch

from vllm_ddtree.proposer.candidates import (
    CHUNK_GROUPS,
    GROUP,
    Candidates,
    top_k_log_probs,
    top_k_log_probs_reference,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INF = float("inf")
CHUNK = GROUP * CHUNK_GROUPS


def run(logits, k, scratch=None):
    num_rows, vocab = logits.shape
    scratch = scratch or Candidates(num_rows, vocab, k, DEVICE)
    log_probs = torch.full((num_rows, k), 7.0, device=DEVICE)
    ids = torch.full((num_rows, k), -9, device=DEVICE)
    top_k_log_probs(logits, log_probs, ids, scratch)
    return log_probs, ids


def check(logits, log_probs, ids):
    """Ids exactly; log-probs to float32 rounding of the exact value."""
    k = ids.shape[1]
    wanted, wanted_ids = top_k_log_probs_reference(logits, k)
    assert torch.equal(ids, wanted_ids)
    exact = torch.where(logits.isnan(), -INF, logits.double())
    total = exact.logsumexp(-1, keepdim=True)
    exact = exact.gather(1, ids) - total.where(total > -INF, 0.0)
    for values in (log_probs, wanted):
        torch.testing.assert_close(values.double(), exact, rtol=1e-6, atol=4e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "num_rows,vocab,k",
    [
        (3, 1, 1),
        (2, 7, 7),
        (3, GROUP, 5),
        (2, GROUP + 1, 16),
        (2, CHUNK, 4),
        (2, CHUNK + 1, 4),
        (1, 151_936, 16),
        (70, 600, 3),
    ],
)
def test_shapes(num_rows, vocab, k, dtype):
    generator = torch.Generator().manual_seed(vocab + k)
    logits = (torch.randn(num_rows, vocab, generator=generator) * 4).to(dtype).to(DEVICE)
    check(logits, *run(logits, k))


def test_ties_go_to_the_smaller_id():
    generator = torch.Generator().manual_seed(0)
    few = torch.randint(0, 3, (4, 3000), generator=generator).float()
    few[1] = 1.25  # one value only
    few[2] = 0.0
    few[2, [0, 2999, 1500, GROUP - 1, GROUP]] = 5.0  # in five places of four groups
    few[3, ::2] = -0.0  # a tie with 0.0
    few[3, 1::2] = 0.0
    log_probs, ids = run(few.to(DEVICE), 64)
    check(few.to(DEVICE), log_probs, ids)
    assert ids[1].tolist() == list(range(64)) == ids[3].tolist()
    assert ids[2, :5].tolist() == [0, GROUP - 1, GROUP, 1500, 2999]


def test_all_candidates_in_one_group_or_in_many():
    logits = torch.zeros(2, 20 * GROUP)
    logits[0, 5 * GROUP : 6 * GROUP] = torch.linspace(9, 3, GROUP)
    logits[1, :: GROUP // 2] = torch.linspace(3, 9, 40)
    logits = logits.to(DEVICE)
    check(logits, *run(logits, 64))


@pytest.mark.parametrize("gone", [-INF, float("nan")])
def test_missing_logits(gone):
    """As a draft vocabulary smaller than the target's leaves them; down to no logit at all."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(5, 2 * CHUNK + 5, generator=generator)
    logits[0, 3:CHUNK] = gone
    logits[1, :] = gone
    logits[2, :] = gone
    logits[2, [4, CHUNK + 3, 2 * CHUNK + 4]] = torch.tensor([-1.0, -2.0, 3.0])
    logits[3, :CHUNK] = gone  # a whole chunk, with the rest far below zero
    logits[3, CHUNK:] -= 500
    logits[4, ::2] = gone
    logits = logits.to(DEVICE)
    log_probs, ids = run(logits, 8)
    check(logits, log_probs, ids)
    assert (log_probs[1] == -INF).all() and (log_probs[2, 3:] == -INF).all()
    assert not log_probs.isnan().any()


def test_large_logits_do_not_overflow():
    logits = torch.tensor([[3e38, 2.9e38, -3e38], [-3e38, -3e38, -3e38], [200.0, 100.0, 199.0]])
    logits = logits.to(DEVICE)
    log_probs, ids = run(logits, 3)
    assert ids.tolist() == [[0, 1, 2], [0, 1, 2], [0, 2, 1]]
    assert log_probs[0, 0].item() == 0.0
    check(logits[2:], log_probs[2:], ids[2:])


def test_views():
    """Rows of a wider buffer in, rows of wider buffers out."""
    generator = torch.Generator().manual_seed(2)
    wide = torch.randn(6, 1000, generator=generator).to(DEVICE)
    logits = wide[::2, 100:800]
    log_probs = torch.full((3, 10), 7.0, device=DEVICE)
    ids = torch.full((6, 8), -9, device=DEVICE)
    top_k_log_probs(logits, log_probs[:, 2:7], ids[1::2, 1:6], Candidates(3, 700, 5, DEVICE))
    check(logits, log_probs[:, 2:7], ids[1::2, 1:6])
    assert (log_probs[:, [0, 1, 7, 8, 9]] == 7).all()
    assert (ids[::2] == -9).all() and (ids[:, [0, 6, 7]] == -9).all()


def test_a_row_does_not_depend_on_the_others():
    """Same bits alone, in a batch, in reused scratch, and with one or many rows a program."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(5, CHUNK + 300, generator=generator).to(DEVICE)
    scratch = Candidates(9, CHUNK + 300, 6, DEVICE)
    log_probs, ids = run(logits, 6, scratch)
    for rows_per_program in (1, 4):
        scratch.rows_per_program = rows_per_program
        for first, last in ((2, 5), (0, 1)):
            part, part_ids = run(logits[first:last], 6, scratch)
            assert torch.equal(part, log_probs[first:last])
            assert torch.equal(part_ids, ids[first:last])


def test_offsets_beyond_32_bits():
    """Row 2 of tensors with 2**30 elements a row starts at element 2**31.

    Only the pages of the rows themselves are ever touched, so this costs address space alone.
    """
    generator = torch.Generator().manual_seed(5)
    near = (torch.randn(3, 600, generator=generator) * 4).half().to(DEVICE)
    far = far_rows(3, 600, torch.float16)
    far.copy_(near)
    log_probs, ids = far_rows(3, 7, torch.float32), far_rows(3, 7, torch.int64)
    top_k_log_probs(far, log_probs, ids, Candidates(3, 600, 7, DEVICE))
    check(near, log_probs, ids)


def far_rows(num_rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    stride = 2**30
    storage = torch.empty((num_rows - 1) * stride + columns, dtype=dtype, device=DEVICE)
    return storage.as_strided((num_rows, columns), (stride, 1))


def test_no_rows():
    log_probs, _ = run(torch.zeros(0, 10, device=DEVICE), 2, Candidates(1, 10, 2, DEVICE))
    assert log_probs.shape == (0, 2)


@pytest.mark.parametrize(
    "argument,change",
    [
        ("logits", lambda t: t.double()),
        ("logits", lambda t: t[:, :9]),
        ("logits", lambda t: t.new_zeros(3, 10)),
        ("logits", lambda t: t.new_zeros(10, 2).T),
        ("out_log_probs", lambda t: t.half()),
        ("out_log_probs", lambda t: t[:, :1]),
        ("out_log_probs", lambda t: t.new_zeros(4, 2).T),
        ("out_ids", lambda t: t.int()),
        ("out_ids", lambda t: t[:1]),
    ],
)
def test_arguments_that_do_not_fit(argument, change):
    arguments: dict[str, Any] = {
        "logits": torch.zeros(2, 10, device=DEVICE),
        "out_log_probs": torch.zeros(2, 4, device=DEVICE),
        "out_ids": torch.zeros(2, 4, dtype=torch.int64, device=DEVICE),
        "scratch": Candidates(2, 10, 4, DEVICE),
    }
    top_k_log_probs(**arguments)
    arguments[argument] = change(arguments[argument])
    with pytest.raises(ValueError, match=argument):
        top_k_log_probs(**arguments)


@pytest.mark.parametrize("max_rows,vocab,k", [(0, 10, 2), (1, 10, 0), (1, 10, 11)])
def test_sizes_that_do_not_fit(max_rows, vocab, k):
    with pytest.raises(ValueError, match=r"max_rows|top_k"):
        Candidates(max_rows, vocab, k, DEVICE)
