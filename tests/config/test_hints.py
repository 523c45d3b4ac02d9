# SPDX-License-Identifier: Apache-2.0
"""Where vLLM refuses and needs a word of ours: another method where trees were meant, its advice, a
drafter without weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest

from tests.config.building import DRAFTER, TARGET, build, edited, refusal
from tests.config.checkpoints import as_speculators
from vllm_ddtree.config import hints


def args(spec: dict[str, Any] | None, **more: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    keys = {"dtype": "float32", "max_model_len": 256, **more}
    return EngineArgs(model=str(TARGET), speculative_config=spec, **keys)


@pytest.mark.parametrize(
    "method",
    ["dd-tree", "DDTree", "dd_tree", "DDTREE", "ddtre", "ddtrees", "dtree", "dd tree", "tree"],
)
def test_near_misses(method: str) -> None:
    message = refusal(lambda: build({"method": method}))
    assert f"method={method!r}" in message and "did you mean 'ddtree'?" in message


def test_a_near_miss_of_the_flag() -> None:
    made = args(None, spec_method="DDTree", spec_model=str(DRAFTER))
    assert "did you mean 'ddtree'?" in refusal(made.create_engine_config)


def test_what_is_not_near() -> None:
    from vllm.config import speculative

    methods = get_args(speculative.SpeculativeMethod)
    flat = [each for method in methods for each in (get_args(method) or [method])]
    assert "dflash" in str(flat)
    for method in (*flat, None, 7, ""):
        assert not hints.is_near(method)


@pytest.mark.parametrize(
    ("spec", "parts"),
    [
        ({"budget": 7}, ["no method is given", "budget is for trees", '"method": "ddtree"']),
        ({}, ["`num_speculative_tokens` was not provided", "no method is given", "ddtree"]),
        ({"method": "dflash", "num_speculative_tokens": 7, "top_k": 4}, ["top_k", "'dflash'"]),
        ({"method": "eagle", "speculative_token_tree": "[(0,)]"}, ["speculative_token_tree"]),
    ],
)
def test_trees_without_the_method(spec: dict[str, Any], parts: list[str]) -> None:
    message = refusal(args({"model": str(DRAFTER), **spec}).create_engine_config)
    for part in parts:
        assert part in message


def test_other_refusals_are_vllms() -> None:
    """No trees were meant."""
    for spec in ({"method": "no such"}, {"method": "dflash", "no_such": 1}):
        with pytest.raises(ValueError) as caught:
            args({"model": str(DRAFTER), **spec}).create_engine_config()
        assert type(caught.value).__name__ == "ValidationError"


def test_layer_ids_are_quoted_as_the_file_has_them(tmp_path: Path) -> None:
    """The speculators library counts from 1."""
    ids = [1, 2, 10]
    drafter = as_speculators(DRAFTER, tmp_path / "d", TARGET, aux_hidden_state_layer_ids=ids)
    message = refusal(lambda: build({"model": str(drafter)}))
    assert "aux_hidden_state_layer_ids [1, 2, 10] name layer 10" in message
    assert "4 layers end with 4" in message


def test_token_trees_of_older_releases() -> None:
    message = refusal(lambda: build({"speculative_token_tree": "[(0,)]"}))
    assert "speculative_token_tree='[(0,)]'" in message and "budget" in message


def test_vllms_advice_is_translated() -> None:
    error = ValueError("please adjust num_speculative_tokens (63)\n or sizes")
    message = str(hints.advice(error))
    assert "please adjust num_speculative_tokens (63) or sizes" in message
    assert "lower budget" in message and "\n" not in message
    assert hints.advice(ValueError("something else")) is None
    ours = ValueError("num_speculative_tokens=99 is not valid for method ddtree: give ...")
    assert hints.advice(ours) is None


def test_such_a_refusal_of_vllms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where vLLM raises it, in the midst of a whole configuration."""
    from vllm.config.vllm import VllmConfig

    def refuse(self: VllmConfig) -> None:
        raise ValueError("no room; decrease num_speculative_tokens.")

    monkeypatch.setattr(VllmConfig, "_set_max_num_scheduled_tokens", refuse)
    message = refusal(build)
    assert "decrease num_speculative_tokens" in message and "the budget here" in message


@pytest.mark.parametrize(("tokens", "said"), [(2048, True), (8192, False)])
def test_vllms_warning_is_followed_by_ours(
    monkeypatch: pytest.MonkeyPatch, tokens: int, said: bool
) -> None:
    from vllm_ddtree.config import token_budget

    lines: list[str] = []
    monkeypatch.setattr(
        token_budget.logger, "info", lambda text, *values: lines.append(text % values)
    )
    build({"budget": 9}, max_num_batched_tokens=tokens)
    assert any("is the budget here, which is 9" in line for line in lines) == said


def test_a_drafter_without_weights(tmp_path: Path) -> None:
    drafter = edited(DRAFTER, tmp_path / "drafter")
    weights = drafter / "model.safetensors"
    weights.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    message = refusal(lambda: build({"model": str(drafter)}))
    assert "git lfs pull" in message and str(weights) in message
    weights.unlink()
    message = refusal(lambda: build({"model": str(drafter)}))
    assert "has no weights" in message and "*.safetensors" in message
    # Where no weights are read, none are missed.
    build({"model": str(drafter), "draft_load_config": {"load_format": "dummy"}})
    build({"model": str(drafter)}, load_format="dummy")
