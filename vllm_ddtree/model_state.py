# SPDX-License-Identifier: Apache-2.0
"""The model state: where a round's stages meet on the worker.

vLLM's model runner calls a `ModelState` (v1/worker/gpu/model_states/interface.py) around the
target's forward. A round passes here in this order:

    add_request, apply_staged_writes   requests that verify their chain alone
    preprocess_state                   how many rows of each request are sampled, for adapters
    prepare_attn                       the step is planned, its rows are filled
    prepare_inputs                     the target verifies all rows in one forward
    custom_sampler                     the sampler samples every row and walks
    postprocess_state                  the accepted path is committed

The draft and the tree build follow in the speculator (proposer/speculator.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState

from vllm_ddtree.attention.install import draft_layers, install_tree_attention, target_layers
from vllm_ddtree.commit.target import TargetCaches
from vllm_ddtree.config.loaded_target import check_loaded_target
from vllm_ddtree.invariants.checks import Checks
from vllm_ddtree.invariants.stop import enabled_on_all_ranks
from vllm_ddtree.recurrent.install import install_recurrent
from vllm_ddtree.round import runtime
from vllm_ddtree.round.axes import place_nodes
from vllm_ddtree.round.kinds import step_kinds
from vllm_ddtree.round.layout import Layout
from vllm_ddtree.round.plan import mixed_tree_tokens, plan_shared_step, plan_step
from vllm_ddtree.round.rows import prepare_rows
from vllm_ddtree.sampler.chain_requests import ChainRequests, has_custom_processors
from vllm_ddtree.sampler.sampler import TreeRejectionSampler
from vllm_ddtree.sampler.walk import path_logit_rows
from vllm_ddtree.share.rows import SharedRows
from vllm_ddtree.tree.chain import as_chains

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.core.sched.output import NewRequestData
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.worker.gpu.block_table import BlockTables
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.mm.encoder_cache import EncoderCache
    from vllm.v1.worker.gpu.sample.sampler import Sampler
    from vllm.v1.worker.gpu.states import RequestState
    from vllm.v1.worker.utils import AttentionGroup

    from vllm_ddtree.invariants.stop import Broken
    from vllm_ddtree.round.step import Step


def make_model_state(
    vllm_config: VllmConfig,
    model: torch.nn.Module,
    encoder_cache: EncoderCache | None,
    device: torch.device,
) -> DDTreeModelState:
    """DDTree's model state for a loaded target.

    Raises:
        ValueError: the target needs a model state, or an attention, that trees do not support.

    """
    check_loaded_target(vllm_config, model)
    kind = HybridModelState if vllm_config.model_config.is_hybrid else DDTreeModelState
    return kind(vllm_config, model, encoder_cache, device)


class DDTreeModelState(DefaultModelState):
    """vLLM's default model state, with the stages of a round.

    Args:
        vllm_config: the engine's.
        model: the loaded target.
        encoder_cache: vLLM's, for targets with several modalities.
        device: of the worker.

    Raises:
        ValueError: the target's positions or attention do not support trees.

    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        model: torch.nn.Module,
        encoder_cache: EncoderCache | None,
        device: torch.device,
    ) -> None:
        super().__init__(vllm_config, model, encoder_cache, device)
        self.runtime = runtime.take(vllm_config)
        self.runtime.attention_words = install_tree_attention(vllm_config, self.runtime)
        self.chains_allowed = not vllm_config.model_config.use_mla
        """Whether steps of trees may become chains; latent attention gains nothing by it."""
        self._chain_requests = ChainRequests(vllm_config.scheduler_config.max_num_seqs)
        self._mixed_tree_tokens = mixed_tree_tokens(vllm_config)
        self._draft_names: frozenset[str] = frozenset()
        connected = vllm_config.kv_transfer_config is not None
        self._checks = Checks(others_write=connected) if enabled_on_all_ranks() else None
        self._num_logits: np.ndarray | None = None
        shared = vllm_config.speculative_config.mean_budget is not None
        self.shared_rows = SharedRows(self.runtime.trees) if shared else None
        """How requests share the nodes of a step; None: they never do."""

    def initialize_kv_cache(
        self, kv_cache_config: KVCacheConfig, block_tables: BlockTables
    ) -> None:
        """Note which of the target's layers each KV group holds."""
        super().initialize_kv_cache(kv_cache_config, block_tables)
        self._target_caches = TargetCaches(kv_cache_config, lambda: target_layers(self.vllm_config))
        self._draft_names = draft_layers(self.vllm_config)
        self._compile()

    def _compile(self) -> None:
        """Compile the kernels that vLLM's own warm-up does not come by, on an empty request."""
        rt = self.runtime
        none = torch.full((1,), -1, dtype=torch.int64, device=self.device)
        zeros = torch.zeros(2, dtype=torch.int32, device=self.device)
        as_chains(rt.trees, Layout(none, zeros, zeros), zeros, rt.max_depth)
        path_logit_rows(rt.paths.part(0, 1), zeros, none)
        if self.shared_rows:
            self.shared_rows.compile(rt.paths)

    def add_request(self, req_index: int, new_req_data: NewRequestData) -> None:
        """Note whether the request's sampling takes preceding rows for its own tokens."""
        super().add_request(req_index, new_req_data)
        self._chain_requests.add(req_index, new_req_data.sampling_params)

    def apply_staged_writes(self) -> None:
        """Bring staged request state to the device."""
        super().apply_staged_writes()
        self._chain_requests.apply(self.runtime.trees)

    def preprocess_state(self, input_batch: InputBatch, *args: Any, **kwargs: Any) -> None:
        """Note how many rows of each request are sampled; dummy steps do not come here."""
        super().preprocess_state(input_batch, *args, **kwargs)
        self._num_logits = np.diff(input_batch.cu_num_logits_np)

    def take_num_logits(self) -> np.ndarray | None:
        """Rows to sample of each request of the step that begins; None: a dummy step, or taken.

        Returns:
            int32 [num_reqs].

        """
        taken, self._num_logits = self._num_logits, None
        return taken

    def prepare_attn(
        self,
        input_batch: InputBatch,
        cudagraph_mode: CUDAGraphMode,
        block_tables: tuple[torch.Tensor, ...],
        slot_mappings: torch.Tensor,
        attn_groups: list[list[AttentionGroup]],
        kv_cache_config: KVCacheConfig,
        for_capture: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Plan the step and fill its rows, then build vLLM's attention metadata.

        The metadata have the tree in them.
        """
        self._prepare_rows(input_batch, slot_mappings, for_capture)
        if self._checks and not for_capture:
            self._checks.before_forward(
                self.runtime,
                self._target_caches.compactors,
                block_tables,
                input_batch.seq_lens,
                *self._state_blocks(),
            )
        # The drafter's layers run later, with metadata of their own. Where they share a group with
        # the target's (vLLM's chain) they cost nothing here. A KV connector that loads before the
        # forward asks for the metadata of all layers whose keys it brings.
        if self.vllm_config.kv_transfer_config is None:
            of_drafter = self._draft_names.issuperset
            attn_groups = [[g for g in kv if not of_drafter(g.layer_names)] for kv in attn_groups]
        return super().prepare_attn(
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

    def _prepare_rows(
        self, batch: InputBatch, slot_mappings: torch.Tensor, for_capture: bool
    ) -> None:
        """Plan the step; turn its trees into chains, if that is planned; fill its rows."""
        rt, num_rows = self.runtime, batch.num_scheduled_tokens
        layout, num_logits = Layout.of(batch), np.diff(batch.cu_num_logits_np)
        if for_capture and 1 < num_rows.min() == num_rows.max() <= rt.num_rows:
            # A FULL graph of the verify step: every request is a tree, of budget + 1 rows or fewer.
            layout = Layout(batch.idx_mapping, batch.query_start_loc, batch.query_start_loc)
            num_logits = num_rows
        if rt.shared:
            rt.step = plan_shared_step(num_rows, batch.num_tokens)
        else:
            rt.step = plan_step(
                num_rows,
                num_logits,
                batch.num_tokens,
                self._mixed_tree_tokens,
                rt.chains_asked,
                for_capture,
            )
        self._note_batch(rt.step, batch, slot_mappings)
        if rt.step.as_chains and not for_capture:
            as_chains(rt.trees, layout, batch.input_ids, rt.max_depth)
        self._fill_rows(batch, layout)

    def _fill_rows(self, batch: InputBatch, layout: Layout) -> None:
        """What the rows of the step need to know about their trees."""
        rt = self.runtime
        prepare_rows(
            rt.trees,
            rt.rows,
            rt.paths,
            layout,
            batch.seq_lens,
            batch.positions,
            num_reqs_padded=batch.num_reqs_after_padding,
            num_tokens_padded=batch.num_tokens_after_padding,
            max_query_len=int(batch.num_scheduled_tokens.max()),
            roots_alone=rt.step.shared,
        )

    def _note_batch(self, step: Step, batch: InputBatch, slot_mappings: torch.Tensor) -> None:
        """What the later stages of the step need of its batch."""
        step.num_reqs = batch.num_reqs
        step.req_ids = batch.req_ids
        step.query_start_loc = batch.query_start_loc
        step.slot_mappings = slot_mappings
        if not step.in_graph:
            chains = self._chain_requests
            step.kinds = step_kinds(chains.of(batch.idx_mapping_np), chains.all, step.kind)

    def prepare_inputs(self, input_batch: InputBatch, req_states: RequestState) -> dict[str, Any]:
        """The target's inputs: a tree row's position is the committed length + its depth.

        Where positions have several axes it is so on each, counted from where images leave them.
        """
        inputs, rt = super().prepare_inputs(input_batch, req_states), self.runtime
        if self.rope_state is None:
            positions = rt.rows.positions[: input_batch.num_tokens_after_padding]
            return {**inputs, "positions": positions}
        if rt.step.max_verify_len:
            place_nodes(
                rt.rows,
                Layout.of(input_batch),
                self.rope_state.prefill_delta.gpu,
                self.rope_state.positions,
                rt.num_rows,
            )
        return inputs

    def prepare_dummy_inputs(self, num_reqs: int, num_tokens: int) -> dict[str, Any]:
        """The inputs of a captured graph, with the same persistent positions."""
        inputs = super().prepare_dummy_inputs(num_reqs, num_tokens)
        if self.rope_state is not None:
            return inputs
        return {**inputs, "positions": self.runtime.rows.positions[:num_tokens]}

    def custom_sampler(self, sampler: Sampler) -> tuple[Sampler, TreeRejectionSampler]:
        """vLLM's sampler, and the tree rejection sampler over it."""
        self._chain_requests.all = has_custom_processors(sampler)
        return sampler, TreeRejectionSampler(
            sampler, self.vllm_config.speculative_config, self.device, self.runtime
        )

    def postprocess_state(
        self,
        idx_mapping: torch.Tensor,
        num_sampled: torch.Tensor,
        num_computed_tokens: torch.Tensor | None = None,
    ) -> None:
        """Commit the accepted paths."""
        if self._checks and self.runtime.step.verified:
            assert num_computed_tokens is not None
            self._checks.before_commit(
                self.runtime,
                self._target_caches.compactors,
                idx_mapping,
                num_sampled,
                num_computed_tokens,
            )
        if self.runtime.step.verified:
            self._commit()
            if self.shared_rows and not self.runtime.step.as_chains:
                rt = self.runtime
                self.shared_rows.calibration.observe(
                    rt.trees, idx_mapping, rt.rows.tail_lens, rt.paths
                )
        if self._checks:
            self._checks.after_commit()
        super().postprocess_state(idx_mapping, self._accepted(num_sampled), num_computed_tokens)

    def _state_blocks(self) -> tuple[set[int], int]:
        """Blocks in which the step works on recurrent states, and how many there are; waits for
        the device."""
        return set(), 0

    def _commit(self) -> None:
        self._target_caches.commit(self.runtime)

    def _accepted(self, num_sampled: torch.Tensor) -> torch.Tensor | int:
        """Tokens that vLLM's class is to count for each request."""
        return num_sampled

    def take_broken(self) -> Broken:
        """What the checks of the last step found (`VLLM_DDTREE_CHECK=1`)."""
        return self._checks.take_broken() if self._checks else {}


class HybridModelState(DDTreeModelState, MambaHybridModelState):
    """The same over vLLM's model state of targets with recurrent layers beside attention.

    vLLM's class copies states where prefixes are cached, and counts the tokens that its own chains
    accept. Here states are always those of the last accepted token, as after plain decoding.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        model: torch.nn.Module,
        encoder_cache: EncoderCache | None,
        device: torch.device,
    ) -> None:
        super().__init__(vllm_config, model, encoder_cache, device)
        target = install_recurrent(vllm_config, self.runtime, device)
        assert target is not None
        self.recurrent = target
        self.runtime.state_words = target.words

    def initialize_kv_cache(
        self, kv_cache_config: KVCacheConfig, block_tables: BlockTables
    ) -> None:
        """Take the states that vLLM has allocated, too."""
        super().initialize_kv_cache(kv_cache_config, block_tables)
        self.recurrent.bind(kv_cache_config, block_tables)

    def _fill_rows(self, batch: InputBatch, layout: Layout) -> None:
        super()._fill_rows(batch, layout)
        fitted = self.runtime.fitted
        self.recurrent.prepare(layout, batch.seq_lens, batch.num_reqs_after_padding, fitted)

    def _state_blocks(self) -> tuple[set[int], int]:
        blocks = self.recurrent.blocks
        return blocks.written(self.runtime.step.num_reqs), self.recurrent.num_blocks

    def _commit(self) -> None:
        super()._commit()
        self.recurrent.commit()

    def _accepted(self, num_sampled: torch.Tensor) -> int:
        return 1  # The states are behind the last accepted token, not one of several before it.
