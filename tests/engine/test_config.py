# SPDX-License-Identifier: Apache-2.0
"""What `method: ddtree` takes and refuses: before weights, in one line of key, value and fix."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import ddtree_testbed
from tests.conftest import NANO

TARGET, DRAFTER = NANO.target, NANO.drafter


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    ddtree_testbed.prepare()
    from vllm_ddtree import plugin

    plugin.register()


def build(spec: dict[str, Any] | None = None, model: str | Path = TARGET, **more: Any) -> Any:
    """The VllmConfig of an engine with this speculative_config, over the small defaults here."""
    from vllm.engine.arg_utils import EngineArgs

    given = {"method": "ddtree", "model": str(DRAFTER), **(spec or {})}
    keys = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 8, **more}
    args = EngineArgs(model=str(model), speculative_config=given, **keys)
    return args.create_engine_config()


def refusal(make: Callable[[], Any]) -> str:
    """The one line with which it is refused: a plain ValueError, not a validator's report."""
    with pytest.raises(ValueError) as caught:
        make()
    assert type(caught.value) is ValueError
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_defaults() -> None:
    spec = build().speculative_config
    assert spec.auto_budget
    assert (spec.budget, spec.top_k, spec.depth_limit, spec.block_size) == (63, 16, 7, 8)
    # Toward vLLM: a DFlash draft of as many tokens as there are nodes.
    assert spec.method == "dflash" and spec.num_speculative_tokens == 63
    assert repr(spec) == (
        f"SpeculativeConfig(method='ddtree', model={str(DRAFTER)!r}, budget=auto, depth=7, "
        "top_k=16, block_size=8)"
    )
    assert "budget=31, depth" in repr(build({"budget": 31}).speculative_config)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"budget": 1}, (1, 1, 7)),
        ({"budget": 255, "top_k": 64}, (255, 64, 7)),
        ({"budget": 5}, (5, 5, 7)),  # a node of rank 5 has five better siblings
        ({"budget": 40, "top_k": 3, "num_speculative_tokens": 2}, (40, 3, 2)),
        ({"num-speculative-tokens": 4, "top-k": 9}, (63, 9, 4)),
        ({"budget": None, "top_k": None, "num_speculative_tokens": None}, (63, 16, 7)),
    ],
    ids=str,
)
def test_values(keys: dict[str, Any], expected: tuple[int, int, int]) -> None:
    spec = build(keys, max_num_batched_tokens=4096).speculative_config
    assert (spec.budget, spec.top_k, spec.depth_limit) == expected


@pytest.mark.parametrize("budget", [1, 5, 7, 8, 31])
def test_lookahead_covers_tree_and_draft_block(budget: int) -> None:
    config = build({"budget": budget})
    assert config.num_lookahead_tokens == max(budget + 1, 8)
    assert config.speculative_config.max_depth == min(budget, 7)


def test_dflash_keys_keep_their_meaning() -> None:
    spec = build(
        {
            "draft_tensor_parallel_size": 1,
            "attention_backend": "CPU_ATTN",
            "max_model_len": 128,
            "enforce_eager": True,
            "draft_sample_method": "greedy",
            "rejection_sample_method": "standard",
            "parallel_drafting": True,
        }
    ).speculative_config
    assert spec.draft_tensor_parallel_size == 1
    assert spec.draft_model_config.max_model_len == 128
    assert spec.enforce_eager is True
    assert "CPU_ATTN" in str(spec.attention_backend)


@pytest.mark.parametrize(
    ("keys", "parts"),
    [
        ({"budget": 0}, ["budget=0", "1 to 255"]),
        ({"budget": 256}, ["budget=256", "1 to 255"]),
        ({"budget": -3}, ["budget=-3", "1 to 255"]),
        ({"budget": "31"}, ["budget='31'", "whole number"]),
        ({"budget": 7.5}, ["budget=7.5", "whole number"]),
        ({"budget": True}, ["budget=True", "whole number"]),
        ({"budget": [7]}, ["budget=[7]", "whole number"]),
        ({"top_k": 0}, ["top_k=0", "1 to 64"]),
        ({"top_k": 65}, ["top_k=65", "1 to 64"]),
        ({"top_k": "a"}, ["top_k='a'", "whole number"]),
        ({"num_speculative_tokens": 0}, ["num_speculative_tokens=0", "from 1 to 7"]),
        ({"num_speculative_tokens": 8}, ["num_speculative_tokens=8", "from 1 to 7", "budget"]),
        ({"num_speculative_tokens": 99}, ["num_speculative_tokens=99", "from 1 to 7"]),
        ({"num_speculative_tokens": "3"}, ["num_speculative_tokens='3'", "whole number"]),
        ({"budgets": 7}, ["budgets=7", "no such key", "'budget'"]),
        ({"topk": 7}, ["topk=7", "no such key", "'top_k'"]),
        ({"zebra": 1}, ["zebra=1", "no such key", "budget", "top_k"]),
        ({"prompt_lookup_max": 4}, ["prompt_lookup_max=4", "no such key"]),
        ({"tensor_parallel_size": 1}, ["tensor_parallel_size=1", "draft_tensor_parallel_size"]),
        (
            {"draft_sample_method": "probabilistic"},
            ["draft_sample_method='probabilistic'", "'greedy'"],
        ),
        (
            {"rejection_sample_method": "block"},
            ["rejection_sample_method='block'", "'standard'"],
        ),
        ({"parallel_drafting": False}, ["parallel_drafting=False", "True"]),
        ({"disable_padded_drafter_batch": True}, ["disable_padded_drafter_batch=True", "False"]),
        ({"use_local_argmax_reduction": True}, ["use_local_argmax_reduction=True", "False"]),
        ({"enable_adaptive_verification": True}, ["enable_adaptive_verification=True", "False"]),
        (
            {"num_speculative_tokens_per_batch_size": [[1, 4, 7]]},
            ["num_speculative_tokens_per_batch_size", "budget_per_batch_size"],
        ),
        *(
            ({"budget_per_batch_size": value}, ["budget_per_batch_size", part, "give ranges"])
            for value, part in [
                ([[1, 4, 7], [5, 8, "7"]], "[5, 8, '7'] is not three whole numbers"),
                ([[1, 4]], "[1, 4] is not three whole numbers"),
                ([1, 4, 7], "1 is not three whole numbers"),
                ([[2, 4, 7]], "[2, 4, 7] begins at 2, not at 1"),
                ([[1, 4, 7], [4, 8, 3]], "[4, 8, 3] begins before the range before it ends"),
                ([[1, 4, 7], [8, 5, 3]], "[8, 5, 3] ends before it begins"),
                ([[1, 4, 256]], "[1, 4, 256] has a budget that is not from 0 to 255"),
            ]
        ),
        ({"model": None}, ["model=None", "drafter"]),
        ({"model": ""}, ["model=''", "drafter"]),
        ({"model": 7}, ["model=7", "drafter"]),
        ({"model": "/no/such/drafter"}, ["model='/no/such/drafter'", "DFlash drafter"]),
        ({"quantization": 7}, ["quantization=7"]),
        ({"max_model_len": "long"}, ["max_model_len='long'"]),
        ({"attention_backend": 3}, ["attention_backend=3", "FLASH_ATTN"]),
        ({"attention_backend": "NOPE"}, ["attention_backend='NOPE'", "FLASH_ATTN"]),
        ({"draft_load_config": {"nope": 1}}, ["draft_load_config={'nope': 1}", "leave that out"]),
        ({"model": str(TARGET)}, [f"model={str(TARGET)!r}", "DFlash drafter", "no draft model"]),
    ],
    ids=lambda v: str(v).replace(str(TARGET), "TARGET") if isinstance(v, dict) else "",
)
def test_wrong_keys(keys: dict[str, Any], parts: list[str]) -> None:
    message = refusal(lambda: build(keys))
    for part in ("ddtree", *parts):
        assert part in message


def test_a_key_of_another_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_ddtree.config import speculative as config

    monkeypatch.setattr(config, "DFLASH_KEYS", (*config.DFLASH_KEYS, "key_of_tomorrow"))
    message = refusal(lambda: build({"key_of_tomorrow": 1}))
    assert "key_of_tomorrow=1" in message and "leave it out" in message
    assert "key_of_tomorrow" not in refusal(lambda: build({"zebra": 1}))


def test_no_drafter_at_all() -> None:
    from vllm.engine.arg_utils import EngineArgs

    args = EngineArgs(model=str(TARGET), speculative_config={"method": "ddtree"})
    message = refusal(args.create_engine_config)
    assert "model=None" in message and "drafter" in message


def test_short_flags() -> None:
    from vllm.engine.arg_utils import EngineArgs

    def args(**more: Any) -> EngineArgs:
        return EngineArgs(model=str(TARGET), dtype="float32", max_model_len=256, **more)

    spec = (
        args(spec_method="ddtree", spec_model=str(DRAFTER), spec_tokens=3)
        .create_engine_config()
        .speculative_config
    )
    assert (spec.budget, spec.depth_limit) == (63, 3)
    mixed = args(spec_method="ddtree", spec_model=str(DRAFTER), speculative_config={"budget": 9})
    assert mixed.create_engine_config().speculative_config.budget == 9
    for flag, more in (
        ("--spec-model", {"spec_model": str(DRAFTER)}),
        ("--spec-method", {"spec_method": "ddtree"}),
        ("--spec-tokens", {"spec_tokens": 3}),
    ):
        both = {"method": "ddtree", "model": str(DRAFTER), "num_speculative_tokens": 3}
        message = refusal(args(speculative_config=both, **more).create_engine_config)
        assert flag in message and "mutually exclusive" in message


def parse(arguments: list[str]) -> Any:
    """The speculative config of a `vllm serve` command line."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    base = ["--model", str(TARGET), "--dtype", "float32", "--max-model-len", "256"]
    args = EngineArgs.from_cli_args(parser.parse_args([*base, *arguments]))
    return args.create_engine_config().speculative_config


def test_command_line_and_yaml(tmp_path: Path) -> None:
    given = {"method": "ddtree", "model": str(DRAFTER), "budget": 12, "top_k": 5}
    for flag in ("--speculative-config", "-sc"):
        spec = parse([flag, json.dumps(given)])
        assert (spec.budget, spec.top_k, spec.depth_limit) == (12, 5, 7)
    spec = parse(["--spec-method", "ddtree", "--spec-model", str(DRAFTER), "--spec-tokens", "2"])
    assert (spec.budget, spec.depth_limit) == (63, 2)
    dotted = [f"--speculative-config.{key}={value}" for key, value in given.items()]
    assert parse(dotted).budget == 12
    config = tmp_path / "serve.yaml"
    config.write_text(
        "speculative-config:\n"
        f"  method: ddtree\n  model: {DRAFTER}\n  budget: 12\n  num-speculative-tokens: 4\n"
    )
    spec = parse(["--config", str(config)])
    assert (spec.budget, spec.depth_limit) == (12, 4)


def edited(source: Path, folder: Path, **changes: Any) -> Path:
    """A copy of a checkpoint's folder, weights left out, with changes in its config.json."""
    skip = shutil.ignore_patterns("*.safetensors", "*.pt")
    shutil.copytree(source, folder, ignore=skip)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        (
            {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [0, 1, 9]}},
            ["target layer 10", "4 layers"],
        ),
        ({"dflash_config": {"mask_token_id": 1}}, ["target_layer_ids"]),
        ({"dflash_config": {"target_layer_ids": [0, 1, 2]}}, ["mask_token_id"]),
        ({"block_size": None}, ["block_size"]),
        ({"block_size": 64}, ["block_size 64", "2 to 32"]),
        ({"block_size": 1}, ["block_size 1", "2 to 32"]),
    ],
    ids=lambda v: str(v) if isinstance(v, dict) else "",
)
def test_wrong_drafters(tmp_path: Path, changes: dict[str, Any], parts: list[str]) -> None:
    drafter = edited(DRAFTER, tmp_path / "drafter", **changes)
    message = refusal(lambda: build({"model": str(drafter)}))
    for part in (f"model={str(drafter)!r}", *parts):
        assert part in message


def test_a_longer_block_allows_a_deeper_tree(tmp_path: Path) -> None:
    drafter = edited(DRAFTER, tmp_path / "drafter", block_size=16)
    spec = build({"model": str(drafter), "budget": 5}).speculative_config
    assert (spec.budget, spec.depth_limit, spec.block_size) == (5, 15, 16)


@pytest.mark.parametrize(
    ("more", "parts"),
    [
        ({"pipeline_parallel_size": 2}, ["--pipeline-parallel-size=2", "set it to 1"]),
        ({"data_parallel_size": 2}, ["--data-parallel-size=2", "set it to 1"]),
        ({"enable_lora": True}, ["--enable-lora", "leave it out"]),
        ({"kv_offloading_size": 1.0}, ["--kv-offloading-size=1.0", "leave it out"]),
        ({"enable_prompt_embeds": True}, ["--enable-prompt-embeds", "leave it out"]),
        (
            {"max_num_batched_tokens": 24, "max_num_seqs": 2, "enable_chunked_prefill": True},
            ["--max-num-batched-tokens=24", "budget=auto", "at least"],
        ),
        ({"kv_cache_dtype": "fp8_e5m2"}, ["--kv-cache-dtype=fp8_e5m2", "set it to fp8"]),
        (
            {"compilation_config": {"pass_config": {"fuse_attn_quant": True}}},
            ["pass_config.fuse_attn_quant=True", "leave it out"],
        ),
    ],
    ids=lambda v: str(v) if isinstance(v, dict) else "",
)
def test_wrong_engines(more: dict[str, Any], parts: list[str]) -> None:
    message = refusal(lambda: build(**more))
    for part in ("ddtree", *parts) if "max_num_seqs" not in more else parts:
        assert part in message


def test_float16_and_an_fp8_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.attention.backends import fa_utils

    half: dict[str, Any] = {"dtype": "float16", "kv_cache_dtype": "fp8"}
    build(**half)
    monkeypatch.setattr(fa_utils, "get_flash_attn_version", lambda: 3)
    message = refusal(lambda: build(**half))
    assert "--dtype=float16" in message and "use bfloat16" in message
    build({"kv_cache_dtype": "auto"}, **half)
    build(dtype="bfloat16", kv_cache_dtype="fp8")


@pytest.fixture
def fresh_environment() -> Iterator[None]:
    """vLLM reads its variables once an engine has started; here they are read again."""
    import vllm.envs as envs

    cached = getattr(envs.__getattr__, "cache_clear", None)
    if cached is not None:
        cached()
    yield
    if cached is not None:
        cached()


@pytest.mark.usefixtures("fresh_environment")
def test_the_v1_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    message = refusal(build)
    assert "V1 model runner" in message and "VLLM_USE_V2_MODEL_RUNNER=0" in message


def other_target(folder: Path, **config: Any) -> Path:
    shutil.copytree(TARGET, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_sliding_window_target(tmp_path: Path) -> None:
    window = {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 0}
    target = edited(TARGET, tmp_path / "target", **window)
    config = build(model=target)
    assert config.model_config.get_sliding_window() == 64


def test_a_hybrid_target(tmp_path: Path) -> None:
    target = other_target(
        tmp_path / "target",
        architectures=["Lfm2ForCausalLM"],
        model_type="lfm2",
        vocab_size=2048,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        layer_types=["conv", "conv", "full_attention", "conv"],
        conv_L_cache=3,
    )
    message = refusal(lambda: build(model=target))
    for part in (f"target {str(target)!r}", "recurrent layers", "use method dflash"):
        assert part in message


@pytest.mark.parametrize(
    ("attribute", "value", "what"),
    [
        ("is_hybrid", True, "recurrent layers"),
        ("is_attention_free", True, "recurrent layers"),
        ("is_encoder_decoder", True, "an encoder"),
        ("uses_mrope", True, "M-RoPE"),
        ("rswa_window", 64, "sliding-window"),
        ("hf_text_config", SimpleNamespace(index_topk=64), "sparse latent attention"),
    ],
)
def test_other_targets(
    monkeypatch: pytest.MonkeyPatch, attribute: str, value: Any, what: str
) -> None:
    """Nano with the trait: reading a real one's model class takes vLLM seconds."""
    from vllm_ddtree.config.engine import check_engine_config

    config = build()
    model_type = type(config.model_config)
    monkeypatch.setattr(model_type, attribute, property(lambda _: value), raising=False)
    message = refusal(lambda: check_engine_config(None, config))
    for part in (f"target {str(TARGET)!r}", what, "use method dflash"):
        assert part in message


class Named:
    """Stands for an attention backend's class."""

    def __init__(self, name: str) -> None:
        self.name = name

    def get_name(self) -> str:
        return self.name


@pytest.mark.parametrize(
    ("asked", "platform", "chosen"),
    [
        # Hopper; with a block size of 8, say; Blackwell; older.
        (None, ["FLASH_ATTN_MLA", "FLASHMLA", "TRITON_MLA"], "FLASH_ATTN_MLA"),
        (None, ["FLASHMLA", "TRITON_MLA"], "FLASHMLA"),
        (None, ["FLASHINFER_MLA", "CUTLASS_MLA", "TRITON_MLA"], "TRITON_MLA"),
        (None, ["TRITON_MLA"], "TRITON_MLA"),
        ("TRITON_MLA", ["FLASH_ATTN_MLA", "TRITON_MLA"], "TRITON_MLA"),
        ("FLASHMLA", ["FLASH_ATTN_MLA", "FLASHMLA"], "FLASHMLA"),
        (None, ["FLASHINFER_MLA"], ["for which vLLM has FLASHINFER_MLA", "use method dflash"]),
        (None, [], ["for which vLLM has no backend", "use method dflash"]),
        ("CUTLASS_MLA", ["CUTLASS_MLA"], ["--attention-backend=CUTLASS_MLA", "leave it out"]),
        ("FLASH_ATTN", ["FLASH_ATTN_MLA"], ["--attention-backend=FLASH_ATTN ", "leave it out"]),
    ],
)
def test_the_backend_of_a_latent_target(
    monkeypatch: pytest.MonkeyPatch,
    asked: str | None,
    platform: list[str],
    chosen: str | list[str],
) -> None:
    """Nano with multi-head latent attention, on a platform with these backends, its own choice
    first.
    """
    from vllm.config import get_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.attention import selector
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from vllm_ddtree.config.engine import check_engine_config

    args, config = EngineArgs(model=str(TARGET)), build()
    attention = config.attention_config

    def get_attn_backend(head_size: int, *args: Any, use_mla: bool, num_heads: int) -> Named:
        assert use_mla and (head_size, num_heads) == (
            config.model_config.get_head_size(),
            config.model_config.get_num_attention_heads(config.parallel_config),
        )
        assert get_current_vllm_config() is config
        backend = attention.backend.name if attention.backend else [*platform, ""][0]
        if backend not in platform:
            raise ValueError("not valid")
        return Named(backend)

    monkeypatch.setattr(selector, "get_attn_backend", get_attn_backend)
    monkeypatch.setattr(type(config.model_config), "use_mla", property(lambda _: True))
    attention.backend = AttentionBackendEnum[asked] if asked else None
    if isinstance(chosen, str):
        check_engine_config(args, config)
        assert attention.backend is AttentionBackendEnum[chosen]
        return
    message = refusal(lambda: check_engine_config(args, config))
    supported = "FLASH_ATTN_MLA, FLASHMLA or TRITON_MLA"
    for part in (f"target {str(TARGET)!r}", "latent attention", supported, *chosen):
        assert part in message


@pytest.mark.parametrize(
    ("platform", "chosen"),
    [
        (["FLASH_ATTN", "FLASHINFER", "TRITON_ATTN"], None),  # Hopper: vLLM's own, by layer
        (["FLASHINFER", "FLASH_ATTN", "TRITON_ATTN"], "FLASH_ATTN"),  # Blackwell
        (["FLASHINFER", "TRITON_ATTN"], "TRITON_ATTN"),
        (["FLEX_ATTENTION"], ["FLEX_ATTENTION", "not FLASH_ATTN", "use method dflash"]),
    ],
)
def test_the_backend_of_other_targets(
    monkeypatch: pytest.MonkeyPatch, platform: list[str], chosen: str | list[str] | None
) -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.attention import selector

    from vllm_ddtree.config.engine import check_engine_config

    args, config = EngineArgs(model=str(TARGET)), build()
    attention = config.attention_config

    def get_attn_backend(*args: Any, use_mla: bool, **kwargs: Any) -> Named:
        assert not use_mla
        backend = attention.backend.name if attention.backend else platform[0]
        if backend not in platform:
            raise ValueError("not valid")
        return Named(backend)

    monkeypatch.setattr(selector, "get_attn_backend", get_attn_backend)
    assert attention.backend is None
    if isinstance(chosen, list):
        message = refusal(lambda: check_engine_config(args, config))
        assert all(part in message for part in chosen)
        return
    check_engine_config(args, config)
    assert (attention.backend.name if attention.backend else None) == chosen


@pytest.mark.parametrize(
    ("asked", "taken"),
    [("FLASH_ATTN", True), ("TRITON_ATTN", True), ("FLASHINFER", True), ("FLEX_ATTENTION", False)],
)
def test_a_backend_that_is_named(asked: str, taken: bool) -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from vllm_ddtree.config.engine import check_engine_config

    args, config = EngineArgs(model=str(TARGET)), build()
    config.attention_config.backend = AttentionBackendEnum[asked]
    if taken:
        check_engine_config(args, config)
        assert config.attention_config.backend is AttentionBackendEnum[asked]
        return
    message = refusal(lambda: check_engine_config(args, config))
    assert f"--attention-backend={asked}: use FLASH_ATTN or TRITON_ATTN" in message


def test_this_platform_has_no_backend_for_trees_in_latents(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM's own selector: the CPU's answer, whatever is asked for, is its own backend."""
    from vllm_ddtree import integration

    config = build()
    before = config.attention_config.backend
    assert integration.target_backend(config, None) == "CPU_ATTN"
    monkeypatch.setattr(type(config.model_config), "use_mla", property(lambda _: True))
    for asked in (None, "FLASH_ATTN_MLA", "TRITON_MLA"):
        assert integration.target_backend(config, asked) in ("CPU_MLA", "AMX_MLA")
    assert config.attention_config.backend is before


@pytest.fixture
def registered_anew() -> Iterator[Callable[[], None]]:
    """`register()` as in a new process, under whatever the test replaces in `integration`."""
    from vllm_ddtree import integration, plugin

    def register() -> None:
        integration.check.cache_clear()
        plugin.register()

    yield register
    integration.check.cache_clear()


def test_an_unknown_vllm(
    monkeypatch: pytest.MonkeyPatch, registered_anew: Callable[[], None]
) -> None:
    from packaging.specifiers import SpecifierSet

    from vllm_ddtree import integration
    from vllm_ddtree.integration import seams

    monkeypatch.setattr(seams, "SUPPORTED_VLLM", SpecifierSet(">=9.1,<9.2"))
    registered_anew()
    message = refusal(build)
    assert "ddtree" in message and "9.1" in message and str(integration.vllm_version()) in message
    # Other methods do not notice.
    chain = {"method": "dflash", "num_speculative_tokens": 7}
    assert type(build(chain).speculative_config).__name__ == "SpeculativeConfig"


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("vllm.v1.worker.gpu.spec_decode", "no_such_function"),
        ("vllm.no_such_module", "anything"),
        ("vllm.config.speculative", "SpeculativeConfig: no_such_member"),
    ],
)
def test_a_missing_seam(
    monkeypatch: pytest.MonkeyPatch,
    registered_anew: Callable[[], None],
    module: str,
    name: str,
) -> None:
    from vllm_ddtree.integration import seams

    monkeypatch.setattr(seams, "SEAMS", {**seams.SEAMS, module: (name,)})
    registered_anew()
    message = refusal(build)
    assert "ddtree" in message and module in message and "install" in message
    if module in ("vllm.v1.worker.gpu.spec_decode", "vllm.config.speculative"):
        assert name.replace(": ", ".") in message


def test_every_seam_is_there() -> None:
    from vllm_ddtree import integration

    integration.check.cache_clear()
    integration.check()
