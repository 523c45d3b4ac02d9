# SPDX-License-Identifier: Apache-2.0
"""The layers of a target that can verify trees get the tree-aware implementation; the others are
refused."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.attention.attention import Attention
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl
from vllm.v1.attention.backends.mla.triton_mla import TritonMLABackend, TritonMLAImpl
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend, TritonAttentionImpl

from vllm_ddtree.attention.backends.triton_attn import TreeTritonAttentionImpl
from vllm_ddtree.attention.install import install_tree_attention
from vllm_ddtree.attention.layer import Variant
from vllm_ddtree.config.loaded_target import check_layer

from . import flashinfer_fakes, latent_fakes


class OtherLatentAttention(MLAAttention):
    """Stands for vLLM's subclasses."""


class ChunkedLocalAttention(Attention):
    """Stands for vLLM's subclasses."""


def make_layer(kind: Any = Attention, impl: dict[str, Any] | None = None, **given: Any) -> Any:
    """An attention layer as vLLM leaves it, without a configuration to make it from."""
    layer: Any = kind.__new__(kind)
    torch.nn.Module.__init__(layer)
    layer.impl = TritonAttentionImpl.__new__(TritonAttentionImpl)
    attributes = {"alibi_slopes": None, "sinks": None, "logits_soft_cap": 0, "chunk_lookback": -1}
    vars(layer.impl).update({**attributes, **(impl or {})})
    for name, value in {
        "attn_backend": TritonAttentionBackend,
        "attn_type": AttentionType.DECODER,
        "sliding_window": None,
        "head_size": 64,
        "head_size_v": 64,
        "dtype": torch.bfloat16,
        "kv_cache_torch_dtype": torch.bfloat16,
        "kv_cache_dtype": "auto",
        "kv_sharing_target_layer_name": None,
        **given,
    }.items():
        setattr(layer, name, value)
    return layer


@pytest.mark.parametrize(
    ("layer", "what"),
    [
        ({"kind": ChunkedLocalAttention}, "ChunkedLocalAttention"),
        ({"attn_type": AttentionType.ENCODER_ONLY}, "attention type"),
        ({"impl": {"alibi_slopes": torch.ones(2)}}, "ALiBi"),
        ({"impl": {"chunk_lookback": 1}}, "chunked attention"),
        ({"head_size_v": 32}, "value heads"),
        (
            {"kv_cache_torch_dtype": torch.uint8, "kv_cache_dtype": "fp8_e5m2"},
            "KV cache dtype fp8_e5m2",
        ),
        ({"kv_sharing_target_layer_name": "layers.0"}, "shared with another layer"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refused_by_name(layer: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError) as caught:
        check_layer("layers.7.attn", make_layer(**layer))
    message = str(caught.value)
    assert "target layer layers.7.attn" in message and what in message and "\n" not in message
    assert "use method dflash" in message or "set --" in message


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "fp8_e4m3"])
def test_fp8_caches_are_taken(kv_cache_dtype: str) -> None:
    given: dict[str, Any] = {"kv_cache_torch_dtype": torch.uint8, "kv_cache_dtype": kv_cache_dtype}
    check_layer("layers.7.attn", make_layer(**given))
    check_layer("layers.7.attn", make_latent_layer(**given))


def test_windows_soft_caps_and_sinks_reach_the_layers() -> None:
    layers = {
        "plain": make_layer(),
        "window": make_layer(sliding_window=128),
        "short": make_layer(sliding_window=7, impl={"sinks": torch.zeros(2)}),
        "capped": make_layer(impl={"logits_soft_cap": 30}),
    }
    for layer in layers.values():
        layer.is_draft_layer = False
    layers["draft"] = make_layer(sliding_window=5)
    layers["draft"].is_draft_layer = True
    context = SimpleNamespace(static_forward_context=layers)
    runtime: Any = SimpleNamespace(max_depth=15)
    form = install_tree_attention(SimpleNamespace(compilation_config=context), runtime)
    assert form == "Triton prefix + Triton tail"
    impls = {name: layer.impl for name, layer in layers.items()}
    assert type(impls.pop("draft")) is TritonAttentionImpl
    assert all(type(impl) is TreeTritonAttentionImpl for impl in impls.values())
    assert {name: impl.tree_variant for name, impl in impls.items()} == {
        "plain": Variant(),
        "window": Variant(window=128),
        "short": Variant(window=7, tail_window=7),
        "capped": Variant(soft_cap=30.0),
    }


@pytest.mark.parametrize(
    ("window", "form"), [(None, "FlashInfer prefix + Triton tail"), (128, "Triton prefix")]
)
def test_flashinfers_layers_become_tree_aware(
    window: int | None, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flashinfer_fakes.install(monkeypatch)
    kind: Any = AttentionBackendEnum.FLASHINFER.get_class()
    impl_class = kind.get_impl_cls()
    layer = make_layer(attn_backend=kind, sliding_window=window)
    sinks, layer.impl = layer.impl.sinks, impl_class.__new__(impl_class)
    layer.impl.sinks, layer.is_draft_layer = sinks, False
    context = SimpleNamespace(static_forward_context={"target": layer})
    runtime: Any = SimpleNamespace(max_depth=15)
    found = install_tree_attention(SimpleNamespace(compilation_config=context), runtime)
    assert found.startswith(form)
    assert type(layer.impl).__name__ == "TreeFlashInferImpl"
    builder = layer.attn_backend.get_builder_cls()
    assert builder.__name__ == "TreeFlashInferMetadataBuilder"
    assert builder.__bases__[-1] is kind.get_builder_cls()
    layer.impl = impl_class.__new__(impl_class)
    layer.attn_backend, layer.kv_cache_dtype, layer.kv_cache_torch_dtype = kind, "fp8", torch.uint8
    with pytest.raises(ValueError, match=r"dtype fp8; set --kv-cache-dtype to auto$"):
        check_layer("layers.7.attn", layer)


def make_latent_layer(kind: Any = MLAAttention, impl: Any = TritonMLAImpl, **given: Any) -> Any:
    """A layer of multi-head latent attention, as `make_layer`."""
    layer: Any = kind.__new__(kind)
    torch.nn.Module.__init__(layer)
    layer.impl = impl.__new__(impl)
    for name, value in {
        "attn_backend": TritonMLABackend,
        "sliding_window": None,
        "use_sparse": False,
        "kv_cache_dtype": "auto",
        **given,
    }.items():
        setattr(layer, name, value)
    return layer


@pytest.mark.parametrize(
    ("layer", "parts"),
    [
        ({"kind": OtherLatentAttention}, ["OtherLatentAttention", "use method dflash"]),
        (
            {"impl": CPUMLAImpl, "attn_backend": CPUMLABackend},
            [
                "attention backend CPU_MLA",
                "set --attention-backend to FLASH_ATTN_MLA, FLASHMLA or TRITON_MLA",
            ],
        ),
        (
            {"kv_cache_dtype": "fp8_ds_mla"},
            ["KV cache dtype fp8_ds_mla", "set --kv-cache-dtype to auto or fp8"],
        ),
        ({"use_sparse": True}, ["sparse", "use method dflash"]),
        ({"sliding_window": 64}, ["sliding window", "use method dflash"]),
    ],
    ids=lambda value: "" if isinstance(value, list) else str(next(iter(value))),
)
def test_latent_layers_refused_by_name(layer: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        check_layer("layers.7.attn", make_latent_layer(**layer))
    message = str(caught.value)
    assert "\n" not in message
    for part in ("target layer layers.7.attn", *parts):
        assert part in message


@pytest.mark.parametrize(
    ("backend", "form"),
    [
        ("FLASH_ATTN_MLA", "FlashAttention latent prefix + Triton latent tail"),
        ("FLASHMLA", "FlashMLA latent prefix + Triton latent tail"),
        ("TRITON_MLA", "Triton latent prefix + Triton latent tail"),
    ],
)
def test_latent_layers_become_tree_aware(
    backend: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    latent_fakes.install(monkeypatch)
    kind: Any = AttentionBackendEnum[backend].get_class()
    layer, draft = make_latent_layer(impl=kind.get_impl_cls(), attn_backend=kind), make_layer()
    layer.is_draft_layer, draft.is_draft_layer = False, True
    context = SimpleNamespace(static_forward_context={"target": layer, "draft": draft})
    runtime: Any = SimpleNamespace(max_depth=15)
    assert install_tree_attention(SimpleNamespace(compilation_config=context), runtime) == form
    impl, builder = kind.get_impl_cls().__name__, kind.get_builder_cls().__name__
    assert type(layer.impl).__name__ == f"Tree{impl}" and layer.impl.tree_runtime is runtime
    assert layer.attn_backend.get_name() == backend
    assert layer.attn_backend.get_builder_cls().__name__ == f"Tree{builder}"
    assert type(draft.impl) is TritonAttentionImpl
