# SPDX-License-Identifier: Apache-2.0
"""vLLM's statistics of speculation."""

from typing import Any


def new_spec_decoding_stats(num_spec_tokens: int) -> Any:
    """vLLM's SpecDecodingStats of a step without any draft."""
    from vllm.v1.spec_decode.metrics import SpecDecodingStats

    return SpecDecodingStats.new(num_spec_tokens)
