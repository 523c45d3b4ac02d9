# SPDX-License-Identifier: Apache-2.0
"""The DDTree proposer: vLLM's DFlash drafter, its log-probs grown into a tree.

`DDTreeSpeculator` is vLLM's `DFlashSpeculator` (v1/worker/gpu/spec_decode/dflash/speculator.py)
with three token counts instead of one:

- the draft forward has `block_size` query tokens a request, whatever the budget;
- the verify step has budget + 1 rows a request;
- the positions of a draft that are evaluated, and with them the drafter's new context rows, are as
  many as the tree can be deep (`reach.py`).

A round's last two stages are here. `propose` hands the accepted path to the drafter as its new
context; `_generate_draft`, which is captured in a CUDA graph, drafts and builds the trees.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.logger import init_logger
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator

from vllm_ddtree.budget.tiers import TIERS
from vllm_ddtree.graphs.draft import ContextGraphManager, DraftGraphManager
from vllm_ddtree.proposer.context import gather_states
from vllm_ddtree.proposer.head import Head, make_head
from vllm_ddtree.proposer.reach import (
    Reach,
    context_alone,
    draft_reaches,
    fitting,
    make_narrow,
    make_reaches,
)
from vllm_ddtree.round import runtime
from vllm_ddtree.tree.build import build_trees

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu.input_batch import InputBatch

logger = init_logger("vllm.ddtree")

LONGEST_EVERY = 16
"""With `"budget": "auto"`, one draft in so many is of the longest reach, whatever the budget. So is
the first one after plain decoding. Only the trees of such drafts have all the nodes by which larger
budgets are estimated (round/meter.py).
"""


def _draft_view(vllm_config: VllmConfig) -> VllmConfig:
    """The configuration as the draft forward sees it: all tokens of the drafter's block."""
    view = copy.copy(vllm_config)
    view.speculative_config = copy.copy(vllm_config.speculative_config)
    view.speculative_config.num_speculative_tokens = view.speculative_config.draft_positions
    # The draft forward is the same for every budget.
    view.speculative_config.num_speculative_tokens_per_batch_size = None
    return view


class DDTreeSpeculator(DFlashSpeculator):
    """Drafts a block and grows the best tree of `budget` nodes from its log-probs.

    By itself it is for plain DFlash drafters. For the others it stands before vLLM's speculator of
    their family in the order of bases, so that `super()` means that one (`conditional`).

    vLLM's parts take a draft's graphs from `query_cudagraph_manager`. That is the manager of the
    longest reach, except while a shorter draft is made.

    Args:
        vllm_config: the engine's.
        device: of the worker.
        rt: the engine's trees, rows and paths.

    """

    _speculator_name = "DDTree"
    query_cudagraph_manager: DraftGraphManager

    def __init__(
        self,
        vllm_config: VllmConfig,
        device: torch.device,
        rt: runtime.Runtime,
        check_loaded: Callable[[VllmConfig, torch.nn.Module], None],
    ) -> None:
        self.runtime = rt
        self._check_loaded = check_loaded
        spec = vllm_config.speculative_config
        self._schedule = spec.num_speculative_tokens_per_batch_size
        budgets = [nodes for _, _, nodes in self._schedule or [(1, 1, rt.budget)]]
        budgets = list(TIERS) if spec.auto_budget else budgets
        positions = self._positions(budgets)
        max_num_reqs = vllm_config.scheduler_config.max_num_seqs
        # Set first: DFlashSpeculator sizes its staging by `_num_graph_context_tokens`.
        self.reaches = make_reaches(positions, max_num_reqs, rt.top_k, device)
        """The reaches that a draft may have, the longest first."""
        self.narrow = self._make_narrow(spec.block_size) if spec.auto_budget else None
        """The reach of few masks; None where there is none."""
        self.context_alone = context_alone(max_num_reqs, device) if 0 in budgets else None
        """The reach of steps that draft nothing; None if there are none."""
        self.reach = self.reaches[0]
        """The reach of the draft in progress."""
        super().__init__(_draft_view(vllm_config), device)
        self.tree_tokens = torch.zeros(
            self.max_num_reqs, rt.budget, dtype=torch.int64, device=device
        )
        """int64 [max_num_reqs, budget], the trees' tokens in row order, by place in the batch."""
        self.tree_indices = torch.full((self.max_num_reqs,), -1, dtype=torch.int64, device=device)
        """int64 [max_num_reqs], index of each request of the batch; -1 for padding and dummies."""
        self._drafts = 0
        for reach in self._with_graphs():
            setattr(self, reach.manager, None)
        self.head: Head | None = None
        """Made by the first (profiling) run: not while weights load, or it would sleep with them.
        """

    def _positions(self, budgets: Iterable[int]) -> list[int]:
        """Positions of the drafts that the engine may make, the longest first.

        Args:
            budgets: nodes that it may draft.

        """
        return draft_reaches(self.runtime.max_depth, budgets)

    def _make_narrow(self, block_size: int) -> Reach | None:
        """The reach of few masks; None where there is none."""
        return make_narrow(self.reaches, block_size)

    def _with_graphs(self) -> list[Reach]:
        """All reaches, the longest first."""
        return [*self.reaches, *filter(None, (self.narrow, self.context_alone))]

    def load_draft_model(self, target_model: Any, target_attn_layer_names: set[str]) -> Any:
        """vLLM's drafter, checked."""
        model = super().load_draft_model(target_model, target_attn_layer_names)
        self._check_loaded(self.vllm_config, model)
        return model

    def _num_graph_context_tokens(self, num_reqs: int) -> int:
        """Context rows in a draft's graph: those of a path, whatever the budget."""
        return min(num_reqs * self.reach.context.rows, self.max_num_tokens)

    @contextmanager
    def _drafting(self, reach: Reach) -> Iterator[None]:
        """Within, what vLLM drafts has this reach."""
        self._set_reach(reach)
        try:
            yield
        finally:
            self._set_reach(self.reaches[0])

    def _set_reach(self, reach: Reach) -> None:
        """Make vLLM's parts draft with this reach, and its graphs."""
        self.reach = reach
        self.query_cudagraph_manager = getattr(self, reach.manager)
        masks = self._masks(reach)
        self.num_query_per_req = 1 + masks
        self.num_speculative_steps = 1 + masks if self.sample_from_anchor else masks

    def _masks(self, reach: Reach) -> int:
        """Masked queries of each block."""
        return self.speculative_config.block_size - 1 if reach.masks is None else reach.masks

    def _choose_reach(self, num_nodes: int | None, dummy_run: bool) -> Reach:
        """The shortest reach for what the step has verified and for `num_nodes` to draft.

        All ranks choose the same: it follows from the scheduler's steps.

        Args:
            num_nodes: nodes that the scheduler will verify; None: the most there can be.
            dummy_run: whether nothing is drafted for a request.

        """
        rt = self.runtime
        if num_nodes is None:
            return self.reaches[0]
        if num_nodes > 0 and not dummy_run and self.speculative_config.auto_budget:
            self._drafts += 1
            if self._drafts % LONGEST_EVERY == 1 or rt.step.max_verify_len == 0:
                return self.reaches[0]
        needed = min(rt.max_depth, max(num_nodes, rt.step.max_verify_len - 1))
        reach = fitting(self.reaches, needed)
        if rt.narrow_asked and num_nodes > 0 and self.narrow:
            return self.narrow if reach.positions <= self.narrow.positions else reach
        return reach

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        """Graph managers of each reach, in the mode that DFlash chooses; then the start-up line."""
        super().init_cudagraph_manager(cudagraph_mode)
        chosen = self.query_cudagraph_manager.cudagraph_mode
        for reach in self._with_graphs():
            kind = DraftGraphManager if reach.positions else ContextGraphManager
            manager = kind(
                self.vllm_config, self.device, chosen, decode_query_len=1 + self._masks(reach)
            )
            setattr(self, reach.manager, manager)
        self._set_reach(self.reaches[0])
        self._log_start(cudagraph_mode, chosen)

    def _log_start(self, verify_mode: CUDAGraphMode, draft_mode: CUDAGraphMode) -> None:
        """The start-up line."""
        rt, spec = self.runtime, self.speculative_config
        logger.info_once(
            "method=ddtree family=%s budget=%s depth=%d top_k=%d block_size=%d drafter=%s "
            "attention=%s %sgraphs=%s (verify %d tokens a request, draft %d, "
            "%s positions of it, draft graphs %s)",
            self._family_in_words(),
            self._budget_in_words(),
            spec.depth_limit,
            rt.top_k,
            spec.block_size,
            self.draft_model_config.model,
            rt.attention_words,
            rt.state_words and f"states={rt.state_words} ",
            verify_mode.name,
            rt.num_rows,
            spec.block_size,
            "/".join(str(reach.positions) for reach in self.reaches),
            draft_mode.name,
        )

    def capture(self) -> None:
        """Capture the graphs of each reach, the longest first: the others fit in its memory."""
        for reach in self._with_graphs():
            with self._drafting(reach):
                super().capture()

    def _family_in_words(self) -> str:
        """The drafter's family in the start-up line."""
        return self.speculative_config.family

    def _budget_in_words(self) -> str:
        """The budget of the start-up line: a number, a schedule, or auto."""
        spec = self.speculative_config
        if spec.auto_budget:
            return f"auto (up to {spec.budget})"
        return str(self._schedule or spec.budget)

    def _generate_draft(
        self,
        num_reqs: int,
        num_tokens_padded: int,
        attn_metadata: dict[str, Any] | None,
        slot_mappings: dict[str, torch.Tensor] | None,
        num_tokens_across_dp: torch.Tensor | None,
        cudagraph_runtime_mode: CUDAGraphMode = CUDAGraphMode.NONE,
    ) -> None:
        """Draft forward, candidates of each position, trees: the draft's FULL graph.

        The signature is vLLM's (`DFlashSpeculator._generate_draft`).
        """
        if self.reach.positions == 0:
            return  # the graph has the drafter's context, and that is all
        hidden_states = self._run_model(
            num_tokens_padded,
            attn_metadata,
            slot_mappings,
            num_tokens_across_dp,
            cudagraph_runtime_mode,
        )
        self._grow(num_reqs, hidden_states)

    def _grow(self, num_reqs: int, hidden_states: torch.Tensor) -> None:
        """Candidates of each position, and trees.

        Args:
            num_reqs: requests, padding included.
            hidden_states: [draft tokens, hidden size], of the draft forward.

        """
        log_probs, token_ids = self._draft_candidates(num_reqs, hidden_states)
        self.build_plain(num_reqs, log_probs, token_ids)

    def _draft_candidates(
        self, num_reqs: int, hidden_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The best tokens of the positions that the draft's reach evaluates.

        Args:
            num_reqs: requests, padding included.
            hidden_states: [draft tokens, hidden size], of the draft forward.

        Returns:
            float32 and int64 [num_reqs, positions, top_k], log-probs and token ids.

        """
        rt, reach, steps = self.runtime, self.reach, self.num_speculative_steps
        if self.head is None:
            max_rows = self.max_num_reqs * rt.max_depth
            self.head = make_head(self.model, max_rows, rt.top_k, self.device)
        # The first masked queries of each block.
        rows = self.sample_indices[: num_reqs * steps].view(num_reqs, steps)[:, : reach.positions]
        log_probs, token_ids = reach.log_probs[:num_reqs], reach.token_ids[:num_reqs]
        self.head.top_k(
            hidden_states[rows.reshape(-1)], log_probs.flatten(0, 1), token_ids.flatten(0, 1)
        )
        return log_probs, token_ids

    def build_plain(self, num_reqs: int, log_probs: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Grow the trees of the batch's requests.

        Args:
            num_reqs: requests, padding included.
            log_probs: float32 [num_reqs, positions, top_k].
            token_ids: int64 [num_reqs, positions, top_k].

        """
        rt, reach = self.runtime, self.reach
        build_trees(
            log_probs,
            token_ids,
            self.batch_indices(num_reqs),
            rt.trees,
            self.tree_tokens[:num_reqs],
            reach.positions,
            # Of shorter drafts the probabilities of larger trees are not known.
            rt.meter.built if reach is self.reaches[0] else None,
        )

    def batch_indices(self, num_reqs: int) -> torch.Tensor:
        """Index of each request of the batch; a padded or dummy request's rows are inert: -1."""
        steps, indices = self.num_speculative_steps, self.tree_indices[:num_reqs]
        indices.copy_(self.sample_idx_mapping[: num_reqs * steps].view(num_reqs, steps)[:, 0])
        return indices

    def _build_uniform_attn_metadata(self, *args: Any, **kwargs: Any) -> dict[str, Any] | None:
        """Of the draft's attention; none where the context alone is written."""
        if self.reach.positions == 0:
            return {}
        return super()._build_uniform_attn_metadata(*args, **kwargs)

    def _store_hidden_states(
        self,
        num_tokens: int,
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        num_graph_tokens: int = 0,
    ) -> None:
        """As vLLM 0.33 does it, unless the rows are in the staging buffer already."""
        staging = getattr(self, "_aux_staging", None)
        if (
            num_graph_tokens >= num_tokens
            and aux_hidden_states
            and staging is not None
            and aux_hidden_states[0].data_ptr() == staging.data_ptr()
        ):
            return
        super()._store_hidden_states(
            num_tokens, last_hidden_states, aux_hidden_states, num_graph_tokens
        )

    @torch.inference_mode()
    def propose(
        self,
        input_batch: InputBatch,
        attn_metadata: dict[str, Any],
        slot_mappings: dict[str, torch.Tensor],
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Draft trees for the batch.

        The arguments are vLLM's (`DFlashSpeculator.propose`).

        Returns:
            int64 [num_reqs, budget], the trees' tokens in row order.

        """
        step = self.runtime.step
        num_nodes = kwargs.get("num_speculative_tokens")
        if kwargs.get("skip_attn_for_dummy_run"):
            # The profiling run: with all of them, nothing is left to compile while serving.
            reaches = self.reaches
        elif num_nodes == 0 and self.context_alone and self._context_has_graph(input_batch):
            reaches = [self.context_alone]
            kwargs["num_speculative_tokens"] = None  # at 0 vLLM launches kernel by kernel
        else:
            reaches = [self._choose_reach(num_nodes, kwargs.get("dummy_run", False))]
            self.runtime.narrow_drafted = reaches[0] is self.narrow
        if aux_hidden_states and step.verified and not step.as_chains:
            input_batch, aux_hidden_states, num_rejected = self._path_to_front(
                reaches[0], input_batch, aux_hidden_states, num_rejected
            )
        for reach in reaches:
            with self._drafting(reach):
                super().propose(
                    input_batch,
                    attn_metadata,
                    slot_mappings,
                    last_hidden_states,
                    aux_hidden_states,
                    num_sampled,
                    num_rejected,
                    *args,
                    **kwargs,
                )
        step.verified = False
        self.runtime.meter.publish()
        return self.tree_tokens[: input_batch.num_reqs]

    def _context_has_graph(self, batch: InputBatch) -> bool:
        """Whether the context that a step adds, one row a request, has a graph."""
        if batch.num_tokens != batch.num_reqs or self.dp_size > 1 or self.context_alone is None:
            return False
        if getattr(self, "_aux_staging", None) is None:
            return False
        manager = getattr(self, self.context_alone.manager)
        return isinstance(manager, ContextGraphManager) and manager.holds(batch.num_reqs)

    def _path_to_front(
        self,
        reach: Reach,
        batch: InputBatch,
        aux_hidden_states: list[torch.Tensor],
        num_rejected: torch.Tensor,
    ) -> tuple[InputBatch, list[torch.Tensor], torch.Tensor]:
        """The step's rows with each accepted path at the front of its request's rows.

        vLLM takes the drafter's new context from there: it drops the last `num_rejected` rows of
        each request.

        Args:
            reach: of the draft that follows.
            batch: of the verify step.
            aux_hidden_states: the target's, each [num_tokens, hidden size].
            num_rejected: int32 [num_reqs], rows of each request that are not on its path.

        """
        paths = self.runtime.paths
        if self.runtime.step.has_plain_rows:
            sources = paths.gather_index[: batch.num_tokens]
            columns = sum(states.shape[1] for states in aux_hidden_states)
            gathered = aux_hidden_states[0].new_empty(sources.shape[0], columns)
            gather_states(aux_hidden_states, sources, gathered)
            return batch, [gathered], num_rejected
        # Where the draft's graph reads them (vLLM 0.33; without graphs, a new tensor).
        staging = getattr(self, "_aux_staging", None)
        return reach.context.gather(paths, batch, aux_hidden_states, num_rejected, staging)
