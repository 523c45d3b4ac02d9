# SPDX-License-Identifier: Apache-2.0
"""Writing the rounds of an engine to a file, on request."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.distributed import get_tensor_model_parallel_rank

from vllm_ddtree.round.kinds import LABELS, RoundKind

if TYPE_CHECKING:
    import torch
    from vllm.v1.worker.gpu.input_batch import InputBatch

    from vllm_ddtree.round.emitted import Emitted
    from vllm_ddtree.round.runtime import Runtime

VARIABLE = "VLLM_DDTREE_ROUNDS"
"""Environment variable: the file."""
WHOLE = 1 << 20
"""A path probability of 1 in `TreeBuffers.claims`."""


class RoundWriter:
    """Appends to the file: a line for the engine, then one for each round.

    Args:
        path: the file; a second engine appends to what it finds.
        speculative_config: the engine's DDTreeConfig.

    """

    def __init__(self, path: Path, speculative_config: Any) -> None:
        self._path = path
        target = speculative_config.target_model_config
        self._append(
            [
                {
                    "engine": {
                        "target": target.model,
                        "tokenizer": target.tokenizer,
                        "drafter": speculative_config.model,
                        "budget": speculative_config.budget,
                        "depth": speculative_config.depth_limit,
                        "top_k": speculative_config.top_k,
                    }
                }
            ]
        )

    def _append(self, entries: list[dict[str, Any]]) -> None:
        with self._path.open("a") as file:
            file.writelines(json.dumps(entry) + "\n" for entry in entries)

    def step(
        self,
        runtime: Runtime,
        batch: InputBatch,
        emitted: Emitted,
        num_sampled: torch.Tensor,
        prefill_lens: torch.Tensor,
    ) -> None:
        """Write the rounds of a step, after its walk and before the next trees are built.

        Args:
            runtime: the engine's.
            batch: the step's.
            emitted: by the walk.
            num_sampled: int32 [num_reqs], tokens that vLLM takes of each request; 0 for a part of a
                prompt.
            prefill_lens: int32 [max_num_reqs], by index, tokens before the first round.

        """
        kinds = runtime.step.kinds
        if kinds is None:
            return
        trees, paths = runtime.trees, runtime.paths
        counts, starts = num_sampled.tolist(), batch.cu_num_logits.tolist()
        row_tokens = batch.input_ids[batch.logits_indices].tolist()
        prefills = (batch.seq_lens[: batch.num_reqs] <= prefill_lens[batch.idx_mapping]).tolist()
        tokens, entries = emitted.tokens.tolist(), []
        for place, req_id in enumerate(batch.req_ids):
            if not counts[place]:
                continue
            index = int(batch.idx_mapping_np[place])
            own = row_tokens[starts[place] : starts[place + 1]]
            kind = kinds.asked if kinds.chain_only[place] else kinds.others
            if runtime.step.shared and len(own) == 1:
                kind = RoundKind.LEFT_OUT
            form, reason = LABELS[kind]
            entry: dict[str, Any] = {
                "request": req_id,
                "form": form if len(own) > 1 else "none",
                "reason": reason,
                "prefill": prefills[place],
                "root": own[0],
                "emitted": tokens[place][: counts[place]],
            }
            if len(own) > 1:
                claims = trees.claims[index, int(form == "chain"), : len(own)].tolist()
                depth = int(trees.claims[index, 1].count_nonzero()) - 1  # the root has one, too
                entry |= {
                    "tokens": own,
                    "parents": trees.parents[index, : len(own)].tolist(),
                    "probabilities": [claim / WHOLE for claim in claims],
                    "chain": trees.chains[index, :depth].tolist(),
                    "path": paths.rows[place, : int(paths.lens[place])].tolist(),
                }
            entries.append(entry)
        self._append(entries)


def make_writer(speculative_config: Any) -> RoundWriter | None:
    """What the environment asks for; the first rank writes."""
    name = os.environ.get(VARIABLE)
    if not name or get_tensor_model_parallel_rank() != 0:
        return None
    return RoundWriter(Path(name), speculative_config)
