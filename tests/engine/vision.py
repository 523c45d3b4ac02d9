# SPDX-License-Identifier: Apache-2.0
"""Small random targets with a vision tower and positions of several axes, and prompts for them.

vLLM's own Qwen3-VL, Qwen2.5-VL and Qwen3.5, with a tower of two layers, and a DFlash drafter of
random weights as in `models`. Images are random pixels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.conftest import Pair
from tests.engine import models

WORDS = 24
START, END, IMAGE, VIDEO = range(WORDS, WORDS + 4)
MARKERS = {
    "<|vision_start|>": START,
    "<|vision_end|>": END,
    "<|image_pad|>": IMAGE,
    "<|video_pad|>": VIDEO,
}
PATCH, MERGE = 4, 2
"""Pixels of a patch's side, patches of a token's side: a token is 8 x 8 pixels."""
SECTIONS = [6, 5, 5]
"""Rotary frequencies of each axis (time, height, width)."""

TEXT: dict[str, Any] = {
    "vocab_size": WORDS + 4,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
IDS = {
    "vision_start_token_id": START,
    "vision_end_token_id": END,
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "tie_word_embeddings": False,
}


def qwen3_vl(folder: Path) -> Pair:
    """Qwen3-VL: frequencies of the axes interleaved; the tower also feeds the first layers."""
    from transformers import Qwen3VLConfig

    rope = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": SECTIONS,
        "mrope_interleaved": True,
    }
    tower = {
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        "out_hidden_size": 64,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
        "initializer_range": 0.3,
    }
    text = {**TEXT, "rope_parameters": rope}
    return _pair(folder, Qwen3VLConfig(text_config=text, vision_config=tower, **IDS))


def qwen2_5_vl(folder: Path) -> Pair:
    """Qwen2.5-VL: frequencies of the axes side by side; windows in the tower."""
    from transformers import Qwen2_5_VLConfig

    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": SECTIONS}
    tower = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        "window_size": 16,
        "fullatt_block_indexes": [1],
        "out_hidden_size": 64,
        "initializer_range": 0.3,
    }
    text = {**TEXT, "rope_parameters": rope}
    text.pop("head_dim")
    text |= {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    return _pair(folder, Qwen2_5_VLConfig(text_config=text, vision_config=tower, **IDS))


def qwen3_5(folder: Path) -> Pair:
    """Qwen3.5: gated-delta-net layers beside attention; frequencies of the axes interleaved."""
    from transformers import Qwen3_5Config

    rope = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 1.0,
        "mrope_section": SECTIONS,
        "mrope_interleaved": True,
    }
    tower = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        "out_hidden_size": 64,
        "num_position_embeddings": 64,
        "initializer_range": 0.3,
    }
    text = {**TEXT, **models.HYBRID, "rope_parameters": rope}
    return _pair(folder, Qwen3_5Config(text_config=text, vision_config=tower, **IDS))


def _pair(folder: Path, config: Any) -> Pair:
    """A target of this configuration, with a tokenizer, and a drafter that fits it."""
    from tokenizers import Tokenizer
    from tokenizers import models as token_models
    from transformers import AutoModelForImageTextToText, PreTrainedTokenizerFast

    torch.manual_seed(0)
    target, drafter = folder / "target", folder / "drafter"
    AutoModelForImageTextToText.from_config(config, dtype=torch.float32).save_pretrained(target)
    words = {chr(ord("a") + i): i for i in range(WORDS)} | MARKERS
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(token_models.WordLevel(words, unk_token="a")),
        additional_special_tokens=list(MARKERS),
        eos_token="a",
        unk_token="a",
    )
    tokenizer.save_pretrained(target)
    models.random_drafter(drafter, config.text_config)
    return Pair(folder.name, target, drafter, models.BLOCK_SIZE)


def _processor(base: Any, tokenizer: Any) -> Any:
    """Transformers' processor, with a processor of images that needs no torchvision."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    class Processor(base):
        def check_argument_for_proper_class(self, *_: Any) -> None:
            """Looks for classes where torchvision is."""

    sizes = {"patch_size": PATCH, "merge_size": MERGE, "temporal_patch_size": 2}
    token = (PATCH * MERGE) ** 2
    limits = {"shortest_edge": token, "longest_edge": 64 * token}
    images = Qwen2VLImageProcessorPil(size=limits, **sizes)
    return Processor(images, tokenizer, Qwen3VLVideoProcessor(size=limits, **sizes))


@contextmanager
def processors() -> Iterator[None]:
    """Within, vLLM processes images with Transformers' processors, without torchvision."""
    import ddtree_testbed

    ddtree_testbed.prepare()
    from transformers import Qwen2_5_VLProcessor, Qwen3VLProcessor
    from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VLProcessingInfo
    from vllm.model_executor.models.qwen3_vl import Qwen3VLProcessingInfo

    with pytest.MonkeyPatch.context() as patch:
        for info, base in (
            (Qwen3VLProcessingInfo, Qwen3VLProcessor),
            (Qwen2_5_VLProcessingInfo, Qwen2_5_VLProcessor),
        ):
            make = functools.cache(functools.partial(_processor, base))
            patch.setattr(
                info, "get_hf_processor", lambda self, make=make, **_: make(self.get_tokenizer())
            )
        yield


def image(seed: int, height: int, width: int) -> Any:
    """Random pixels; sides in tokens."""
    from PIL import Image

    side = PATCH * MERGE
    rng = np.random.default_rng(seed)
    return Image.fromarray(rng.integers(0, 256, (height * side, width * side, 3), dtype=np.uint8))


def text(length: int, seed: int = 0) -> list[int]:
    """Token ids of words."""
    return np.random.default_rng(seed).integers(1, WORDS, length).tolist()


@dataclass(frozen=True)
class Prompt:
    """Words and images, in their order."""

    parts: tuple[Any, ...]
    """Lists of token ids, and images."""
    ends_in_image: bool = False
    """Whether the marker behind the last image is left out."""

    @property
    def request(self) -> dict[str, Any]:
        """As a user gives it to vLLM: one placeholder for each image."""
        images = [part for part in self.parts if not isinstance(part, list)]
        tokens = self._tokens(lambda _: 1)
        return {"prompt_token_ids": tokens} | (
            {"multi_modal_data": {"image": images}} if images else {}
        )

    @property
    def token_ids(self) -> list[int]:
        """As the target sees it: one token for each place of an image."""
        return self._tokens(lambda sides: sides[0] * sides[1])

    def _tokens(self, places: Callable[[tuple[int, int]], int]) -> list[int]:
        tokens: list[int] = []
        for part in self.parts:
            if isinstance(part, list):
                tokens += part
            else:
                tokens += [START, *[IMAGE] * places(_sides(part)), END]
        return tokens[:-1] if self.ends_in_image else tokens

    def positions(self, length: int) -> list[tuple[int, int, int]]:
        """Time, height and width of the first `length` tokens: of the prompt and what follows it.

        Words count on alike on all axes. An image stands at one time; its rows and columns count
        from there. What follows it counts on from the largest position before (M-RoPE, arXiv
        2409.12191).
        """
        found: list[tuple[int, int, int]] = []
        for part in self.parts:
            if isinstance(part, list):
                found += _words(found, len(part))
                continue
            found += _words(found, 1)
            start, (height, width) = _next(found), _sides(part)
            found += [(start, start + i, start + j) for i in range(height) for j in range(width)]
            found += _words(found, 1)
        if self.ends_in_image:
            found.pop()
        return found[:length] + _words(found, length - len(found))


def _sides(image: Any) -> tuple[int, int]:
    """Rows and columns of an image, in tokens."""
    width, height = image.size
    return height // (PATCH * MERGE), width // (PATCH * MERGE)


def _next(before: list[tuple[int, int, int]]) -> int:
    return max(map(max, before), default=-1) + 1


def _words(before: list[tuple[int, int, int]], length: int) -> list[tuple[int, int, int]]:
    start = _next(before)
    return [(i, i, i) for i in range(start, start + length)]
