# SPDX-License-Identifier: Apache-2.0
"""Candidates merged from shards of the vocabulary are those of the whole of it."""

import pytest
import torch

from vllm_ddtree.proposer.candidates import (
    Candidates,
    top_k_keys,
    top_k_log_probs,
    top_k_log_probs_reference,
)
from vllm_ddtree.proposer.shards import merge_shards

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INF = float("inf")
SHARDS = (1, 2, 3, 4, 8)


def shard_keys(
    logits: torch.Tensor, num_shards: int, k: int, token_ids: torch.Tensor | None = None
) -> torch.Tensor:
    """[shards, M, k + 1]: what each of so many ranks gathers, shards padded to 16 tokens as vLLM
    pads them.
    """
    num_rows, vocab = logits.shape
    size = -(-vocab // (16 * num_shards)) * 16
    if token_ids is None:
        token_ids = torch.arange(vocab)
    keys = torch.full((num_shards, num_rows, k + 1), -9, device=DEVICE)
    for rank in range(num_shards):
        first = min(rank * size, vocab)
        last = min(first + size, vocab)
        padded = torch.full((num_rows, size), 99.0, dtype=logits.dtype, device=DEVICE)
        padded[:, : last - first] = logits[:, first:last]
        ids = token_ids[first:last].to(DEVICE, torch.int32)
        scratch = Candidates(num_rows, last - first, k, DEVICE, ids)
        top_k_keys(padded[:, : last - first], keys[rank], scratch)
    return keys


def merged(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    _, num_rows, num_keys = keys.shape
    log_probs = torch.full((num_rows, num_keys - 1), 7.0, device=DEVICE)
    ids = torch.full((num_rows, num_keys - 1), -9, device=DEVICE)
    merge_shards(keys, log_probs, ids)
    return log_probs, ids


def check(logits: torch.Tensor, k: int, num_shards: int) -> None:
    """The ids of the reference and of one rank; log-probs to a rounding of the log-sum-exp."""
    logits = logits.to(DEVICE)
    log_probs, ids = merged(shard_keys(logits, num_shards, k))
    wanted, wanted_ids = top_k_log_probs_reference(logits, k)
    assert torch.equal(ids, wanted_ids)
    torch.testing.assert_close(log_probs, wanted, rtol=1e-6, atol=4e-6)
    one, one_ids = torch.empty_like(log_probs), torch.empty_like(ids)
    top_k_log_probs(logits, one, one_ids, Candidates(len(logits), logits.shape[1], k, DEVICE))
    assert torch.equal(ids, one_ids)
    torch.testing.assert_close(log_probs, one, rtol=2e-7, atol=1e-6)
    if num_shards == 1:
        assert torch.equal(log_probs, one)


@pytest.mark.parametrize("num_shards", SHARDS)
def test_shapes(num_shards: int) -> None:
    """In the last one shards are smaller than k, and of more than three some are empty."""
    dtype = torch.bfloat16 if num_shards == 3 else torch.float32
    for num_rows, vocab, k in ((3, 1000, 16), (5, 300, 5), (2, 40, 33)):
        generator = torch.Generator().manual_seed(vocab)
        check((torch.randn(num_rows, vocab, generator=generator) * 4).to(dtype), k, num_shards)


@pytest.mark.parametrize("num_shards", SHARDS)
def test_ties_and_near_ties(num_shards: int) -> None:
    """Ties within a shard, of the ends of shards, of all tokens; one bit apart; of both zeros."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(0, 3, (6, 512), generator=generator).float()
    logits[1] = 1.25
    logits[2] = 0.0
    logits[2, torch.arange(0, 512, 64)] = 5.0  # the first of every shard
    logits[2, torch.arange(63, 512, 64)] = 5.0  # the last of every shard
    logits[3, ::2], logits[3, 1::2] = -0.0, 0.0
    near = torch.tensor(3.0).view(torch.int32) + torch.randint(0, 3, (512,), generator=generator)
    logits[4] = near.int().view(torch.float32)
    logits[5] = -logits[4]
    check(logits, 24, num_shards)
    _, ids = merged(shard_keys(logits.to(DEVICE), num_shards, 24))
    assert ids[1].tolist() == list(range(24)) == ids[3].tolist()
    assert ids[2, :4].tolist() == [0, 63, 64, 127]


@pytest.mark.parametrize("gone", [-INF, float("nan")])
@pytest.mark.parametrize("num_shards", SHARDS)
def test_missing_logits(num_shards: int, gone: float) -> None:
    """Down to shards and rows without any."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(5, 256, generator=generator)
    logits[0, 3:140] = gone
    logits[1] = gone
    logits[2] = gone
    logits[2, [4, 200]] = torch.tensor([-1.0, 3.0])
    logits[3, :128] = gone  # half of the shards, with the rest far below zero
    logits[3, 128:] -= 500
    logits[4, ::2] = gone
    check(logits, 8, num_shards)
    log_probs, _ = merged(shard_keys(logits.to(DEVICE), num_shards, 8))
    assert (log_probs[1] == -INF).all() and not log_probs.isnan().any()


def test_a_vocabulary_of_its_own() -> None:
    """The ids that a shard's tokens have in the target; ties in their order."""
    token_ids = torch.arange(90) * 3 + 7
    logits = torch.zeros(2, 90)
    logits[1] = torch.arange(90)
    _, ids = merged(shard_keys(logits.to(DEVICE), 4, 6, token_ids))
    assert ids[0].tolist() == token_ids[:6].tolist()
    assert ids[1].tolist() == token_ids[-6:].flip(0).tolist()


def test_the_largest_id() -> None:
    keys = shard_keys(torch.zeros(1, 2, device=DEVICE), 1, 2, torch.tensor([3, 2**31 - 1]))
    assert merged(keys)[1].tolist() == [[3, 2**31 - 1]]


def test_a_row_does_not_depend_on_the_others() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(70, 200, generator=generator).to(DEVICE)
    log_probs, ids = merged(shard_keys(logits, 4, 6))
    part, part_ids = merged(shard_keys(logits[66:68], 4, 6))
    assert torch.equal(part, log_probs[66:68]) and torch.equal(part_ids, ids[66:68])


def test_views_and_no_rows() -> None:
    keys = shard_keys(torch.randn(3, 64, device=DEVICE), 2, 5)
    log_probs = torch.full((3, 10), 7.0, device=DEVICE)
    ids = torch.full((6, 8), -9, device=DEVICE)
    merge_shards(keys, log_probs[:, 2:7], ids[1::2, 1:6])
    wanted, wanted_ids = merged(keys)
    assert torch.equal(log_probs[:, 2:7], wanted) and torch.equal(ids[1::2, 1:6], wanted_ids)
    assert (log_probs[:, [0, 1, 7, 8, 9]] == 7).all()
    assert (ids[::2] == -9).all() and (ids[:, [0, 6, 7]] == -9).all()
    assert merged(keys[:, :0].contiguous())[1].shape == (0, 5)


def test_arguments_that_do_not_fit() -> None:
    keys = torch.zeros(2, 3, 5, dtype=torch.int64, device=DEVICE)
    log_probs = torch.zeros(3, 4, device=DEVICE)
    ids = torch.zeros(3, 4, dtype=torch.int64, device=DEVICE)
    for wrong in (keys.int(), keys[:, ::2], keys.transpose(0, 1)):
        with pytest.raises(ValueError, match="keys"):
            merge_shards(wrong, log_probs, ids)
    with pytest.raises(ValueError, match="out_log_probs"):
        merge_shards(keys, log_probs.half(), ids)
    with pytest.raises(ValueError, match="out_ids"):
        merge_shards(keys, log_probs, ids[:, :3])
    some = torch.zeros(8, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match="token_ids"):
        Candidates(3, 9, 4, DEVICE, some)
    with pytest.raises(ValueError, match="token_ids"):
        top_k_keys(keys[0].float(), keys[0], Candidates(3, 5, 4, DEVICE))
    with pytest.raises(ValueError, match="out_keys"):
        top_k_keys(torch.zeros(3, 8, device=DEVICE), ids, Candidates(3, 8, 4, DEVICE, some))
