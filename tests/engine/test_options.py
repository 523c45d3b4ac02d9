# SPDX-License-Identifier: Apache-2.0
"""Options of the engine that take or give more than tokens: as without speculation.

Prompt embeddings; the tokens among which each one was sampled; the experts of each token; traces,
which vLLM refuses by request with speculation.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import Pair
from tests.engine.harness import PROMPTS, ddtree, greedy, keep_async, open_engine
from tests.engine.models import qwen3_moe

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput

SEEDED: dict[str, Any] = {"temperature": 0.9, "seed": 3}
BLOCKS: dict[str, Any] = {"block_size": 32}
ROUNDS: dict[str, Any] = {"per_request_spec_decode_metrics": "detailed"}


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def accepted(outputs: list[RequestOutput]) -> list[list[int]]:
    metrics = [output.outputs[0].spec_decode_metrics for output in outputs]
    return [list(m.per_step_accepted) for m in metrics if m is not None]


def test_prompt_embeddings(nano_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside requests with tokens, in chunks; the drafter works as with tokens."""
    rows = load_file(nano_pair.target / "model.safetensors")["model.embed_tokens.weight"].float()
    generator = torch.Generator().manual_seed(0)
    keys = {**BLOCKS, "enable_prompt_embeds": True, "max_num_batched_tokens": 96}

    def serve(llm: LLM) -> list[RequestOutput]:
        tokenizer = llm.get_tokenizer()
        ids = [tokenizer(PROMPTS[i])["input_ids"] for i in (5, 3)]
        embeds = [rows[torch.tensor(row)] for row in ids]
        generator.manual_seed(0)
        noise = torch.randn(embeds[1].shape, generator=generator) * rows.std()
        prompts: list[Any] = [
            {"prompt_embeds": embeds[0]},
            {"prompt_token_ids": ids[0]},
            {"prompt_embeds": embeds[1] + 0.3 * noise},
        ]
        params = [greedy(20), greedy(20), greedy(18, **SEEDED)]
        return llm.generate(prompts, params, use_tqdm=False)

    with open_engine(nano_pair.target, None, **keys) as llm:
        expected = serve(llm)
    keep_async(monkeypatch)
    keys["enable_trace_replay"] = True
    with open_engine(nano_pair.target, ddtree(nano_pair, 9), **{**keys, **ROUNDS}) as llm:
        with pytest.raises(ValueError, match="trace_decode_token_ids is not supported with spec"):
            llm.generate(PROMPTS[0], greedy(4, trace_decode_token_ids=[5, 6]), use_tqdm=False)
        outputs = serve(llm)
    assert tokens(outputs) == tokens(expected)
    rounds = accepted(outputs)
    assert rounds[0] == rounds[1] and sum(rounds[0]) > 0


@pytest.mark.parametrize("chunk", [None, 32], ids=["whole", "in chunks"])
def test_sampling_masks(
    nano_pair: Pair, monkeypatch: pytest.MonkeyPatch, chunk: int | None
) -> None:
    """The tokens that top_k and top_p left at every place, of paths that skip rows too."""
    keys = {**BLOCKS, "return_sampling_mask": True, "logprobs_mode": "processed_logprobs"}
    params = [
        greedy(20, temperature=0.6, seed=1, top_k=5),
        greedy(18, temperature=0.8, seed=2, top_k=40, top_p=0.9, logprobs=2),
        greedy(16, temperature=0.6, seed=3, top_k=1),
        greedy(14, temperature=0.7, seed=4, top_k=8, presence_penalty=0.5),
    ]
    prompts = [PROMPTS[i] for i in (5, 3, 0, 2)]

    def serve(llm: LLM) -> tuple[list[list[int]], list[list[list[int]]], list[Any]]:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        masks = [output.outputs[0].sampling_mask for output in outputs]
        supports = [[list(map(int, ids)) for ids in m.token_ids] for m in masks if m is not None]
        logprobs = [[*step] for step in outputs[1].outputs[0].logprobs or ()]
        accepts.extend(accepted(outputs))
        return tokens(outputs), supports, logprobs

    accepts: list[list[int]] = []
    with open_engine(nano_pair.target, None, **keys) as llm:
        expected = serve(llm)
    assert all(
        token in support
        for ids, supports in zip(*expected[:2], strict=True)
        for token, support in zip(ids, supports, strict=True)
    )
    if chunk is not None:
        monkeypatch.setattr("vllm_ddtree.sampler.sampler.get_max_chunk_logits", lambda vocab: chunk)
    with open_engine(nano_pair.target, ddtree(nano_pair, 15), **{**keys, **ROUNDS}) as llm:
        assert serve(llm) == expected
    assert sum(map(sum, accepts)) > 0


def test_routed_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The experts of every token, those of an accepted path among them; twice, for cached ones."""
    pair = qwen3_moe(tmp_path)
    keys = {
        **BLOCKS,
        "enable_return_routed_experts": True,
        "enable_prefix_caching": True,
        "skip_tokenizer_init": True,
    }
    lengths = (5, 40, 70)
    prompts: list[Any] = [
        {"prompt_token_ids": [2 + (i * 7 + j * 3) % 20 for j in range(n)]}
        for i, n in enumerate(lengths)
    ]
    params = [greedy(30, detokenize=False, **more) for more in ({}, SEEDED, SEEDED)]

    def serve(llm: LLM) -> tuple[list[list[list[int]]], list[np.ndarray]]:
        runs = [llm.generate(prompts, params, use_tqdm=False) for _ in range(2)]
        accepts.extend(rounds for outputs in runs for rounds in accepted(outputs))
        experts = [o.outputs[0].routed_experts for outputs in runs for o in outputs]
        return [tokens(outputs) for outputs in runs], [e for e in experts if e is not None]

    accepts: list[list[int]] = []
    with open_engine(pair.target, None, **keys) as llm:
        expected = serve(llm)
    keep_async(monkeypatch)
    with open_engine(pair.target, ddtree(pair, 15), **{**keys, **ROUNDS}) as llm:
        got = serve(llm)
    assert got[0] == expected[0]
    assert [e.shape for e in got[1]] == [e.shape for e in expected[1]]
    assert len(got[1]) == 2 * len(lengths)
    for ours, theirs in zip(got[1], expected[1], strict=True):
        assert np.array_equal(ours, theirs)
    assert sum(map(sum, accepts)) > 0
