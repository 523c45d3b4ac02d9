# SPDX-License-Identifier: Apache-2.0
"""Which recurrent layers are taken, and that vLLM sizes their states without drafts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.v1.kv_cache_interface import MambaSpec

from vllm_ddtree.config.loaded_target import check_recurrent_layer
from vllm_ddtree.patches import states
from vllm_ddtree.recurrent.rows import RecurrentRows, prepare_recurrent_rows


def layer(
    conv: torch.dtype = torch.bfloat16,
    dim: int = 128,
    kind: Any = None,
    replay: bool = False,
    stochastic: bool = False,
) -> Any:
    kind = kind or QwenGatedDeltaNetAttention
    made = object.__new__(kind)
    torch.nn.Module.__init__(made)
    made.model_config = SimpleNamespace(dtype=torch.bfloat16)
    made.use_replayssm = replay
    made.mamba_config = SimpleNamespace(enable_stochastic_rounding=stochastic)
    object.__setattr__(made, "get_state_dtype", lambda: (conv, torch.float32))
    object.__setattr__(made, "get_state_shape", lambda: ((3, 4), (2, dim, dim)))
    return made


def test_layers_that_are_taken() -> None:
    check_recurrent_layer("layers.0", layer())
    check_recurrent_layer("layers.0", layer(dim=256))
    check_recurrent_layer("layers.0", layer(kind=MambaMixer2))


class Other(QwenGatedDeltaNetAttention):
    """Computes something else behind the same name."""


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"kind": Other}, "layers.0: Other is no gated delta net"),
        ({"conv": torch.float32}, "--mamba-cache-dtype=float32: leave it out"),
        ({"dim": 512}, "heads of 512 and 512"),
        ({"kind": MambaMixer2, "dim": 512}, "heads of 512 and 512"),
        ({"kind": MambaMixer2, "replay": True}, "--use-replayssm=True: leave it out"),
        ({"kind": MambaMixer2, "stochastic": True}, "-cache-stochastic-rounding=True: leave"),
    ],
)
def test_layers_that_are_refused(given: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        check_recurrent_layer("layers.0", layer(**given))


def config(ddtree: bool) -> Any:
    spec = SimpleNamespace(num_speculative_tokens=63)
    if ddtree:
        spec.depth_limit = 15
    return SimpleNamespace(speculative_config=spec)


@pytest.mark.parametrize("ddtree", [True, False])
def test_a_request_has_one_block(ddtree: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "is_ddtree", lambda spec: hasattr(spec, "depth_limit"))
    own = MambaSpec(
        shapes=((3, 4),), dtypes=(torch.float32,), block_size=16, num_speculative_blocks=63
    )
    got = states.get_kv_cache_spec(lambda self, vllm_config: own)("layer", config(ddtree))
    assert got.num_speculative_blocks == (0 if ddtree else 63)
    assert got.shapes == own.shapes and got.block_size == 16
    seen: list[Any] = []

    def align(cls: Any, vllm_config: Any, backend: Any) -> None:
        seen.append(vllm_config.speculative_config)
        vllm_config.cache = backend

    given = config(ddtree)
    spec = given.speculative_config
    states.align_hybrid_block_size(align)("platform", given, "backend")
    assert seen == [None if ddtree else spec] and given.speculative_config is spec


def test_trees_that_do_not_fit() -> None:
    """vLLM's warm-up has steps with more tree rows than the scheduler gives: the last ones go."""
    trees: Any = SimpleNamespace(
        parents=torch.full((3, 8), -1, dtype=torch.int32),
        masks=torch.ones(3, 8, 1, dtype=torch.int32),
    )
    rows = RecurrentRows(12, 5, 4, trees.parents.device)
    rows.lens.fill_(9)
    lens = torch.tensor([8, 4, 3], dtype=torch.int32)
    arguments = (trees, rows, torch.arange(3), lens, 3, 15, 4)
    with pytest.raises(ValueError, match="exceed the 12"):
        prepare_recurrent_rows(*arguments)
    prepare_recurrent_rows(*arguments, cut=True)
    assert rows.lens.tolist() == [8, 4, 0, 0, 9]
