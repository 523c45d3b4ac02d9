# SPDX-License-Identifier: Apache-2.0
"""Conditional drafters in plain PyTorch, and the rounds of trees over their lattices.

DFlash2 (vLLM: `models/qwen3_dflash2.py`): the DFlash backbone with convolutions over the block, and
a selector that rates each candidate after each other.

DSpark (`models/qwen3_dspark.py`): the backbone, a Markov head whose bias depends on the token
before, and a head that tells how likely a draft is accepted.

LiLiCorr (`models/lilicorr.py`): the backbone, with or without convolutions, and attention over all
candidates of the block.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from vllm_ddtree.tree.lattice_reference import build_lattice_tree
from vllm_ddtree.tree.reference import Tree

from .dflash import Drafter
from .lattice import conditional
from .qwen3 import KeyValue, Layer, LayerShape, Target, rms_norm
from .replay import Trace, candidates


class Conv:
    """A grouped convolution over the block whose kernel depends on the row."""

    def __init__(self, weights: dict[str, Tensor], prefix: str, group: int) -> None:
        self.base = weights.pop(f"{prefix}.base_kernel")  # [2, taps, hidden]
        self.projection = weights.pop(f"{prefix}.kernel_projection.weight")
        self.group = group

    def deltas(self, x: Tensor) -> Tensor:
        """[n, 2, taps, hidden] of x [n, hidden]."""
        taps = self.base.shape[1]
        deltas = (x @ self.projection.T).view(len(x), 2, taps, -1)
        return deltas.repeat_interleave(self.group, dim=-1)

    def apply(self, x: Tensor, deltas: Tensor, side: int) -> Tensor:
        """Row i: the sum over taps t <= i of kernel[i, t] * x[i - t]."""
        out = torch.zeros_like(x)
        for i in range(len(x)):
            for tap in range(min(self.base.shape[1], i + 1)):
                out[i] += (self.base[side, tap] + deltas[i, side, tap]) * x[i - tap]
        return out


class ConvLayer(Layer):
    """A decoder layer with a convolution before and after attention and MLP."""

    def __init__(
        self, weights: dict[str, Tensor], prefix: str, shape: LayerShape, group: int
    ) -> None:
        super().__init__(weights, prefix, shape)
        self.attention_conv = Conv(weights, f"{prefix}attention_conv", group)
        self.mlp_conv = Conv(weights, f"{prefix}mlp_conv", group)

    def forward(
        self, x: Tensor, positions: Tensor, past: KeyValue | None, mask: Tensor | None
    ) -> tuple[Tensor, KeyValue]:
        """As in `Layer`; x is one block."""
        eps = self.shape.rms_norm_eps
        h = rms_norm(x, self.input_norm, eps)
        deltas = self.attention_conv.deltas(h)
        h, kv = self.attention(self.attention_conv.apply(h, deltas, 0), positions, past, mask)
        x = x + self.attention_conv.apply(h, deltas, 1)
        h = rms_norm(x, self.post_attention_norm, eps)
        deltas = self.mlp_conv.deltas(h)
        h = self.mlp(self.mlp_conv.apply(h, deltas, 0))
        return x + self.mlp_conv.apply(h, deltas, 1), kv


class Context(list[KeyValue]):
    """A drafter's context: keys and values of each layer, and what they are made of."""

    rows: Tensor
    """float32 [n, hidden]."""


class Draft(NamedTuple):
    """What a drafter gives to a lattice."""

    scores: Tensor
    """float32 [D, K, K], raw."""
    unary: Tensor
    """float32 [D, K], log-probs of the candidates by themselves."""
    ids: Tensor
    """int64 [D, K]."""
    confidence: Tensor | None = None
    """float32 [D, K]."""


class ConditionalDrafter(Drafter, ABC):
    """A drafter that rates candidates given the one before."""

    top_k: int

    def context(self, states: Sequence[Tensor]) -> list[KeyValue]:
        """As in `Drafter`."""
        context = Context(super().context(states))
        context.rows = self.context_rows(states)
        return context

    @abstractmethod
    def propose(self, hidden: Tensor, anchor: int, before: Tensor) -> Draft:
        """The draft.

        Args:
            hidden: float32 [D, hidden].
            anchor: the token before the first position.
            before: float32 [hidden], the context's last row.

        """

    @torch.inference_mode()
    def lattice(
        self,
        context: Sequence[KeyValue],
        anchor: int,
        position: int,
        max_model_len: int | None,
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Conditional log-probs float32 [D, K, K] and ids [D, K] after the anchor."""
        assert isinstance(context, Context)
        hidden = self.hidden(context, anchor, position, max_model_len=max_model_len)
        draft = self.propose(hidden, anchor, context.rows[position - 1])
        log_probs = conditional(draft.scores.numpy(), draft.unary.numpy())
        if draft.confidence is not None:
            log_probs = confident(log_probs, draft.confidence.numpy())
        return log_probs.astype(np.float32), draft.ids.numpy()


def confident(log_probs: NDArray[np.float64], confidence: NDArray) -> NDArray[np.float64]:
    """The best candidate of each row gets its confidence, the others share what is left."""
    out = log_probs.copy()
    for depth, before in np.ndindex(out.shape[:2]):
        row, chance = out[depth, before], float(confidence[depth, before])
        best = int(row.argmax())
        factor = np.log((1 - chance) / (1 - np.exp(row[best])))
        row += factor
        row[best] = np.log(chance)
    return out


class DFlash2(ConditionalDrafter):
    """A DFlash2DraftModel checkpoint."""

    def __init__(
        self,
        config: Mapping[str, Any],
        weights: Mapping[str, Tensor],
        mask_embedding: Tensor | None,
        target: Target,
    ) -> None:
        """As `Drafter`."""
        dflash, weights = config["dflash_config"], dict(weights)
        self.top_k = dflash["selector_top_k"]
        self.group = dflash["conv_group_size"]
        self.scale = dflash.get("output_multiplier", 1.0)
        self.soft_cap = dflash.get("final_logit_softcapping") or None
        self.predecessors = weights.pop("candidate_selector.predecessor_codebook")
        self.successors = weights.pop("candidate_selector.successor_codebook")
        self.projection = weights.pop("candidate_selector.hidden_projection.weight")
        super().__init__(config, weights, mask_embedding, target)

    def make_layer(self, weights: dict[str, Tensor], prefix: str) -> Layer:
        return ConvLayer(weights, prefix, self.shape, self.group)

    def logits(self, hidden: Tensor) -> Tensor:
        logits = super().logits(hidden) * self.scale
        if self.soft_cap is not None:
            logits = self.soft_cap * torch.tanh(logits / self.soft_cap)
        return logits

    def propose(self, hidden: Tensor, anchor: int, before: Tensor) -> Draft:
        logits = self.logits(hidden)
        unary, ids = candidates(logits, self.top_k)
        gates = hidden @ self.projection.T
        scores = torch.empty(*ids.shape, self.top_k)
        for depth, own in enumerate(ids):
            previous = ids[depth - 1] if depth else torch.full((self.top_k,), anchor)
            rows = self.predecessors[previous] * gates[depth]
            scores[depth] = logits[depth, own] + rows @ self.successors[own].T
        return Draft(scores, unary, ids)


class DSpark(ConditionalDrafter):
    """A Qwen3DSparkModel checkpoint. The number of candidates is the user's."""

    def __init__(
        self,
        config: Mapping[str, Any],
        weights: Mapping[str, Tensor],
        mask_embedding: Tensor | None,
        target: Target,
    ) -> None:
        """As `Drafter`; a separate mask embedding is not read."""
        weights = dict(weights)
        self.top_k = 4
        self.first_row = 0 if config["sample_from_anchor"] else 1
        offsets = weights.pop("d2t", None)
        self.to_target = None if offsets is None else offsets.long()
        self.before = weights.pop("markov_head.markov_w1.weight")
        self.after = weights.pop("markov_head.markov_w2.weight")
        self.chance = weights.pop("confidence_head.proj.weight", None)
        if self.chance is not None:
            self.chance_bias = weights.pop("confidence_head.proj.bias")
            self.with_markov = config["confidence_head_with_markov"]
        ids = {key: config[key] for key in ("mask_token_id", "target_layer_ids")}
        super().__init__({**config, "dflash_config": ids}, weights, None, target)

    def propose(self, hidden: Tensor, anchor: int, before: Tensor) -> Draft:
        base = self.logits(hidden)
        base[0] += self.after @ self.before[anchor]
        unary, own = candidates(base, self.top_k)
        ids = own if self.to_target is None else own + self.to_target[own]
        scores = torch.empty(*ids.shape, self.top_k)
        chances = torch.empty(ids.shape)
        for depth in range(len(ids)):
            previous = ids[depth - 1] if depth else torch.full((self.top_k,), anchor)
            scores[depth] = base[depth, own[depth]]
            if depth:
                scores[depth] += self.before[previous] @ self.after[own[depth]].T
            if self.chance is not None:
                features = hidden[depth].expand(self.top_k, -1)
                if self.with_markov:
                    features = torch.cat([features, self.before[previous]], dim=-1)
                chances[depth] = (features @ self.chance.T + self.chance_bias)[:, 0].sigmoid()
        return Draft(scores, unary, ids, None if self.chance is None else chances)

    @torch.inference_mode()
    def chain(self, hidden: Tensor, anchor: int) -> list[int]:
        """vLLM's own draft: the best token of the whole vocabulary after each other."""
        tokens = [anchor]
        for logits in self.logits(hidden):
            own = int((logits + self.after @ self.before[tokens[-1]]).argmax())
            tokens.append(own if self.to_target is None else own + int(self.to_target[own]))
        return tokens[1:]


class LiLiCorr(ConditionalDrafter):
    """A LiLiCorrDraftModel checkpoint."""

    def __init__(
        self,
        config: Mapping[str, Any],
        weights: Mapping[str, Tensor],
        mask_embedding: Tensor | None,
        target: Target,
    ) -> None:
        """As `Drafter`."""
        self.sizes = dflash = config["dflash_config"]
        self.top_k = dflash["lilicorr_candidate_topk"]
        self.group = dflash.get("conv_group_size", 0)
        self.eps = config["rms_norm_eps"]
        self.of_target = target.embed_tokens
        prefix = "lilicorr."
        self.head = {k.removeprefix(prefix): v for k, v in weights.items() if prefix in k}
        rest = {k: v for k, v in weights.items() if prefix not in k}
        super().__init__(config, rest, mask_embedding, target)

    def make_layer(self, weights: dict[str, Tensor], prefix: str) -> Layer:
        if self.group:
            return ConvLayer(weights, prefix, self.shape, self.group)
        return super().make_layer(weights, prefix)

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.head[f"{name}.weight"].T + self.head[f"{name}.bias"]

    def mlp(self, name: str, x: Tensor) -> Tensor:
        return self.linear(f"{name}.down_proj", F.silu(self.linear(f"{name}.up_proj", x)))

    def normed(self, name: str, x: Tensor) -> Tensor:
        return rms_norm(x, self.head[f"{name}.weight"], self.eps)

    def propose(self, hidden: Tensor, anchor: int, before: Tensor) -> Draft:
        unary, ids = candidates(self.logits(hidden), self.top_k)
        num_depths, top_k = ids.shape
        ranks = torch.arange(top_k) / max(1, top_k - 1)
        features = torch.stack(
            [
                unary,
                unary.exp(),
                unary - unary[:, :1],
                ranks.expand_as(unary),
                (torch.arange(top_k) == 0).float().expand_as(unary),
            ],
            dim=-1,
        )
        norm = self.head["feature_norm.weight"], self.head["feature_norm.bias"]
        x = self.linear("token_proj", self.of_target[ids])
        x = x + self.linear("pass_hidden_proj", hidden)[:, None]
        x = x + self.mlp("feature_mlp", F.layer_norm(features, (5,), *norm))
        x = x + self.head["slot_embedding"][0, 0, :num_depths]
        x = x + self.head["rank_embedding"][0, 0]
        x = x.flatten(0, 1)
        slots = torch.arange(num_depths).repeat_interleave(top_k)
        apart = slots[:, None] - slots[None]
        bias = self.head["relative_slot_bias"][:, apart + self.block_size - 1]
        bias = bias + self.head["same_slot_bias"][:, None, None] * (apart == 0)
        for layer in range(self.sizes["lilicorr_num_layers"]):
            x = x + self.attend(
                f"layers.{layer}.attn", self.normed(f"layers.{layer}.attn_norm", x), bias
            )
            x = x + self.mlp(f"layers.{layer}.mlp", self.normed(f"layers.{layer}.mlp_norm", x))
        x = self.normed("output_norm", x)
        state = self.normed("anchor_norm", self.linear("context_proj", before))
        joined = torch.cat([x, state.expand_as(x), x * state], dim=-1)
        x = F.silu(self.linear("factor_input_proj", joined))

        def unit(v: Tensor) -> Tensor:
            length = v.norm(dim=-1, keepdim=True)
            return v / length.clamp_min(self.sizes["lilicorr_vector_eps"])

        out = unit(self.linear("out_head", x)).view(num_depths, top_k, -1)
        into = unit(self.linear("in_head", x)).view(num_depths, top_k, -1)
        start = unit(self.linear("anchor_out_head", state))
        scores = torch.empty(num_depths, top_k, top_k)
        for depth in range(num_depths):
            source = out[depth - 1] if depth else start.expand(top_k, -1)
            scores[depth] = source @ into[depth].T
        return Draft(self.sizes["lilicorr_logit_scale"] * scores, unary, ids)

    def attend(self, name: str, x: Tensor, bias: Tensor) -> Tensor:
        heads = self.sizes["lilicorr_num_heads"]
        weight, offset = self.head[f"{name}.in_proj_weight"], self.head[f"{name}.in_proj_bias"]
        q, k, v = ((x @ weight.T + offset).view(len(x), 3, heads, -1)).unbind(1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5 + bias
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
        return self.linear(f"{name}.out_proj", mixed)


class LatticeTrace(Trace):
    """A request with its known continuation, replayed with trees over lattices."""

    drafter: ConditionalDrafter

    def grow(
        self,
        position: int,
        budget: int,
        top_k: int,
        depth: int | None,
        chain: bool,
        num_masks: int,
        max_model_len: int | None,
    ) -> Tree:
        """As in `Trace`; the number of candidates is the drafter's."""
        log_probs, ids = self.drafter.lattice(
            self.context, self.tokens[position], position, self._limit(position, max_model_len)
        )
        return build_lattice_tree(log_probs, ids, budget, depth, chain)
