# SPDX-License-Identifier: Apache-2.0
"""The model state: tree rows before the target's forward, the commit after sampling.

A mix-in over whatever `ModelState` (v1/worker/gpu/model_states/) the target resolves to.
"""

from typing import Any

import numpy as np
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.logger import init_logger
from vllm.v1.worker.gpu.buffer_utils import UvaBackedTensor
from vllm.v1.worker.gpu.model_states.default import DefaultModelState

from vllm_ddtree import invariants
from vllm_ddtree.attention.install import draft_layers, install_tree_attention, target_layers
from vllm_ddtree.commit.kv import KVCompactor, make_compactors, with_heads
from vllm_ddtree.config.loaded_target import check_loaded_target
from vllm_ddtree.invariants.free_slots import FreeSlots
from vllm_ddtree.invariants.step import check_step
from vllm_ddtree.invariants.stop import Broken, of_all_ranks
from vllm_ddtree.round import runtime
from vllm_ddtree.round.kinds import RoundKind, step_kinds
from vllm_ddtree.round.rows import prepare_rows
from vllm_ddtree.round.runtime import Step
from vllm_ddtree.sampler.chain_requests import has_custom_processors, needs_chain
from vllm_ddtree.sampler.sampler import TreeRejectionSampler
from vllm_ddtree.sampler.walk import path_logit_rows
from vllm_ddtree.tree.chain import as_chains

logger = init_logger("vllm.ddtree")

MIXED_TREE_TOKENS = 1024
"""Tokens from which a step with prefills verifies trees, at a hidden size of 4096 on one GPU. The
host launches such a step's attention layer by layer. In a small one the GPU waits for that, and
chains, which need no launch beyond vLLM's own, are the faster kind; in a large one the launches
hide behind the prefill."""


def make_model_state(vllm_config: Any, model: Any, encoder_cache: Any, device: Any) -> Any:
    """DDTree's model state for a loaded target.

    Raises:
        ValueError: the target needs a model state, or an attention, that trees do not support.

    """
    check_loaded_target(vllm_config, model)
    return DDTreeModelState(vllm_config, model, encoder_cache, device)


class DDTreeStateMixin:
    """Tree hooks over a `ModelState`."""

    def __init__(self, vllm_config: Any, model: Any, encoder_cache: Any, device: Any) -> None:
        super().__init__(vllm_config, model, encoder_cache, device)  # type: ignore[call-arg]
        self.runtime = runtime.take(vllm_config)
        self.runtime.attention_form = install_tree_attention(vllm_config, self.runtime)
        self._kv_cache_groups: list[tuple[int, list[str]]] = []
        self._draft_names: frozenset[str] = frozenset()
        # Made when first needed: vLLM also allocates a small cache to profile graphs, and drops it.
        self._compactors: list[tuple[int, KVCompactor]] | None = None
        # Requests that verify a chain inside the tree's rows, by slot.
        self._chain = UvaBackedTensor(vllm_config.scheduler_config.max_num_seqs, torch.int32)
        self._chain_stale = False
        self._all_chain = False
        # A layer's work grows with tokens times the square of the hidden size.
        size = vllm_config.model_config.get_hidden_size() / 4096
        shards = vllm_config.parallel_config.tensor_parallel_size
        self._mixed_tree_tokens = MIXED_TREE_TOKENS * shards / size**2
        self._check = invariants.enabled()
        self._free_slots: FreeSlots | None = None
        self._broken: Broken = {}
        # Latent attention verifies chains by the same kernels as trees.
        self.chains_allowed = not vllm_config.model_config.use_mla
        if not self.chains_allowed:
            self._mixed_tree_tokens = 0

    def add_request(self, req_index: int, new_req_data: Any) -> None:
        """Note whether the request's sampling reads preceding rows as its own tokens."""
        super().add_request(req_index, new_req_data)  # type: ignore[misc]
        chain = self._all_chain or needs_chain(new_req_data.sampling_params)
        if self._chain.np[req_index] != chain:
            self._chain.np[req_index] = chain
            self._chain_stale = True

    def apply_staged_writes(self) -> None:
        """Bring staged request state to the device."""
        super().apply_staged_writes()  # type: ignore[misc]
        if self._chain_stale:
            self.runtime.trees.chain.copy_(self._chain.copy_to_uva())
            self._chain_stale = False

    def initialize_kv_cache(self, kv_cache_config: Any, block_tables: Any) -> None:
        """Note which of the target's layers each KV group holds."""
        super().initialize_kv_cache(kv_cache_config, block_tables)  # type: ignore[misc]
        self._kv_cache_groups = [
            (gid, list(group.layer_names))
            for gid, group in enumerate(kv_cache_config.kv_cache_groups)
        ]
        self._draft_names = draft_layers(self.vllm_config)  # type: ignore[attr-defined]
        self._compactors = None
        self._compile()

    def _compile(self) -> None:
        """Compile what vLLM's own warm-up does not come by, on an empty request."""
        rt, device = self.runtime, self.device  # type: ignore[attr-defined]
        none = torch.full((1,), -1, dtype=torch.int64, device=device)
        zeros = torch.zeros(2, dtype=torch.int32, device=device)
        as_chains(rt.trees, none, zeros, zeros, zeros, rt.max_depth, 1)
        path_logit_rows(rt.path_rows[:1], rt.path_lens[:1], zeros, none)

    def compactors(self) -> list[tuple[int, KVCompactor]]:
        """(KV group, compactor of the target's caches in it)."""
        if self._compactors is None:
            layers = target_layers(self.vllm_config)  # type: ignore[attr-defined]
            self._compactors = []
            for gid, names in self._kv_cache_groups:
                caches = [with_heads(layers[name].kv_cache) for name in names if name in layers]
                self._compactors += [(gid, compactor) for compactor in make_compactors(caches)]
        return self._compactors

    def prepare_attn(
        self,
        input_batch: Any,
        cudagraph_mode: CUDAGraphMode,
        block_tables: tuple[torch.Tensor, ...],
        slot_mappings: torch.Tensor,
        attn_groups: Any,
        kv_cache_config: Any,
        for_capture: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Fill the step's tree rows, then build vLLM's attention metadata (with the tree in it)."""
        rt, batch = self.runtime, input_batch
        num_logits = np.diff(batch.cu_num_logits_np)
        cu_num_logits = batch.cu_num_logits
        lens = batch.num_scheduled_tokens
        if for_capture and 1 < lens.min() == lens.max() <= rt.num_rows:
            # A FULL graph of the verify step: every request is a tree, of budget + 1 rows or fewer.
            cu_num_logits = batch.query_start_loc
            num_logits = lens
        most = int(num_logits.max())
        plain = bool((num_logits != lens).any() or (num_logits == 1).any())
        mixed = plain and most > 1 and not for_capture
        narrow = mixed and batch.num_tokens < self._mixed_tree_tokens
        chains = narrow or (rt.chains_asked and not plain)
        if chains and not for_capture:
            as_chains(
                rt.trees,
                batch.idx_mapping,
                batch.query_start_loc,
                cu_num_logits,
                batch.input_ids,
                rt.max_depth,
                batch.num_reqs,
            )
        kind = RoundKind.MIXED if narrow else RoundKind.CHOSEN if chains else RoundKind.TREE
        rt.step = Step(
            # A tree of one node is a chain.
            has_trees=most > 2 and not chains,
            max_verify_len=int(lens[num_logits > 1].max(initial=0)),
            num_tree_rows=int(num_logits[num_logits > 1].sum()),
            as_chains=chains,
            has_plain_rows=plain,
            in_graph=for_capture,
            num_reqs=batch.num_reqs,
            req_ids=batch.req_ids,
            query_start_loc=batch.query_start_loc,
            slot_mappings=slot_mappings,
            kinds=None
            if for_capture
            else step_kinds(self._chain.np[batch.idx_mapping_np], self._all_chain, kind),
        )
        prepare_rows(
            rt.trees,
            rt.rows,
            batch.idx_mapping,
            batch.query_start_loc,
            cu_num_logits,
            batch.seq_lens,
            batch.positions,
            batch.num_reqs,
            batch.num_reqs_after_padding,
            batch.num_tokens_after_padding,
            int(lens.max()),
        )
        if self._check and not for_capture:
            self._free_slots = FreeSlots(rt.step, self.compactors(), block_tables, batch.seq_lens)
        # The drafter's layers run later, with metadata of their own. Where they share a group with
        # the target's (vLLM's chain) they cost nothing here.
        of_drafter = self._draft_names.issuperset
        attn_groups = [[g for g in kv if not of_drafter(g.layer_names)] for kv in attn_groups]
        return super().prepare_attn(  # type: ignore[misc]
            input_batch,
            cudagraph_mode,
            block_tables,
            slot_mappings,
            attn_groups,
            kv_cache_config,
            for_capture,
            *args,
            **kwargs,
        )

    def prepare_inputs(self, input_batch: Any, req_states: Any) -> dict[str, Any]:
        """The target's positions: committed length + depth for tree rows."""
        inputs = super().prepare_inputs(input_batch, req_states)  # type: ignore[misc]
        positions = self.runtime.rows.positions[: input_batch.num_tokens_after_padding]
        return {**inputs, "positions": positions}

    def prepare_dummy_inputs(self, num_reqs: int, num_tokens: int) -> dict[str, Any]:
        """The same persistent positions for a captured graph."""
        inputs = super().prepare_dummy_inputs(num_reqs, num_tokens)  # type: ignore[misc]
        return {**inputs, "positions": self.runtime.rows.positions[:num_tokens]}

    def custom_sampler(self, sampler: Any) -> tuple[Any, Any]:
        """vLLM's sampler, and the tree rejection sampler over it."""
        self._all_chain = has_custom_processors(sampler)
        return sampler, TreeRejectionSampler(
            sampler,
            self.vllm_config.speculative_config,  # type: ignore[attr-defined]
            self.device,  # type: ignore[attr-defined]
            self.runtime,
        )

    def postprocess_state(
        self,
        idx_mapping: torch.Tensor,
        num_sampled: torch.Tensor,
        num_computed_tokens: torch.Tensor | None = None,
    ) -> None:
        """Move the accepted path's keys and values to the slots right after the root."""
        rt, step = self.runtime, self.runtime.step
        commit = None
        if self._check and step.verified:
            assert num_computed_tokens is not None
            self._broken, commit = check_step(
                rt, self.compactors(), idx_mapping, num_sampled, num_computed_tokens
            )
        if step.verified and not step.as_chains:
            assert step.slot_mappings is not None and step.query_start_loc is not None
            for gid, compactor in self.compactors():
                compactor.compact(
                    step.slot_mappings[gid],
                    step.query_start_loc,
                    rt.rows.tail_lens,
                    rt.path_rows,
                    rt.path_lens,
                    step.num_reqs,
                )
        if commit is not None:
            self._broken |= commit.check()
        if self._free_slots is not None:
            self._broken = of_all_ranks(self._free_slots.check() | self._broken)
            self._free_slots = None
        super().postprocess_state(idx_mapping, num_sampled, num_computed_tokens)  # type: ignore[misc]

    def take_broken(self) -> Broken:
        """What the checks of the last step found (`VLLM_DDTREE_CHECK=1`)."""
        broken, self._broken = self._broken, {}
        return broken


class DDTreeModelState(DDTreeStateMixin, DefaultModelState):
    """DDTree over vLLM's default model state."""
