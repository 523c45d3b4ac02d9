# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters on a GPU: graphs with and without them, and texts that are the adapted target's.

The judge is plain decoding with the same adapter. It completes every prefix of a text by one token;
prompt logprobs would not do, because vLLM gives their rows no adapter's head.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.conftest import Pair
from tests.engine.adapters import make_adapter
from tests.engine.harness import PROMPTS
from tests.gpu.engines import ENGINE, GRAPHS, TIE, check_gaps, kernels_compiled, spec
from vllm_ddtree.testing.engine import Counters, open_engine

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.lora.request import LoRARequest

Text = tuple[list[int], list[int], str | None]
"""(prompt, text, adapter)."""
LORA: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 4, "max_lora_rank": 8}
TOKENS = 48
# More adapters than may be active at once.
NAMES = (None, "a", "head", "a", "b", None, "head", "b")
MODES: dict[str, tuple[int | str, dict[str, Any]]] = {
    "full": (7, GRAPHS),
    "by adapters": (7, {**GRAPHS, "specialize_active_lora": True}),
    "auto": ("auto", GRAPHS),
    "piecewise": (7, {"compilation_config": {"cudagraph_mode": "PIECEWISE"}}),
}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory, small_pair: Pair) -> dict[str, Path]:
    folder, target = tmp_path_factory.mktemp("adapters"), small_pair.target
    return {
        "a": make_adapter(folder / "a", target, 1, 0.2),
        "b": make_adapter(folder / "b", target, 2, 0.3),
        "head": make_adapter(folder / "head", target, 3, 0.25, lm_head=True),
    }


def lora(adapters: dict[str, Path], name: str | None) -> LoRARequest | None:
    from vllm.lora.request import LoRARequest

    return name and LoRARequest(name, sorted(adapters).index(name) + 1, str(adapters[name]))


def count_graphs(llm: LLM) -> Counter[int]:
    """Counts the target's FULL graphs from now on, by the active adapters that they are for."""
    runner = llm.collective_rpc(lambda worker: worker.model_runner)[0]
    counts: Counter[int] = Counter()
    manager = runner.cudagraph_manager
    run = manager.run_fullgraph

    def count(desc: Any) -> Any:
        counts[desc.num_active_loras] += 1
        return run(desc)

    manager.run_fullgraph = count
    return counts


def texts_of(llm: LLM, adapters: dict[str, Path], names: tuple[str | None, ...]) -> list[Text]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(names))]
    loras = [lora(adapters, name) for name in names]
    outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=loras)
    return [
        (list(o.prompt_token_ids or ()), list(o.outputs[0].token_ids), name)
        for o, name in zip(outputs, names, strict=True)
    ]


def gaps(llm: LLM, adapters: dict[str, Path], texts: list[Text]) -> list[float]:
    """How far each token is below plain decoding's first choice after the tokens before it."""
    from vllm import SamplingParams

    distinct = sorted({(tuple(p), tuple(t), name or "") for p, t, name in texts})
    prefixes = [(p, t, i, name or None) for p, t, name in distinct for i in range(len(t))]
    outputs = llm.generate(
        [{"prompt_token_ids": [*p, *t[:i]]} for p, t, i, _ in prefixes],
        SamplingParams(temperature=0.0, max_tokens=1, logprobs=20, ignore_eos=True),
        use_tqdm=False,
        lora_request=[lora(adapters, name) for *_, name in prefixes],
    )
    found = []
    for (_, text, i, _), output in zip(prefixes, outputs, strict=True):
        logprobs = output.outputs[0].logprobs
        assert logprobs is not None
        best = {token: choice.logprob for token, choice in logprobs[0].items()}
        # A token that is not among the 20 best is further away than any tie.
        own = best.get(text[i], float("-inf"))
        found.append(max(best.values()) - own)
    return found


def test_adapters_in_every_mode(small_pair: Pair, adapters: dict[str, Path]) -> None:
    texts: list[Text] = []
    for mode, (budget, engine) in MODES.items():
        keys = {**ENGINE, **LORA, **engine}
        with open_engine(small_pair.target, spec(small_pair, budget), **keys) as llm:
            graphs = count_graphs(llm)
            with kernels_compiled() as compiled:
                texts += texts_of(llm, adapters, NAMES)
                texts += texts_of(llm, adapters, (None, None, None))
            counters = Counters.read(llm)
        print(mode, counters.acceptance_length, dict(graphs))
        assert counters.num_accepted_tokens > 0, mode
        assert compiled == [], mode
        if mode == "piecewise":
            assert not graphs
            continue
        cases = {1, 2, 3} if mode == "by adapters" else {3}
        assert 0 in graphs and cases & set(graphs), mode
    plain = {**ENGINE, **LORA, "enforce_eager": True, "max_num_seqs": 64}
    with open_engine(small_pair.target, None, **plain) as llm:
        found = gaps(llm, adapters, texts)
    # Adapters of random weights leave the target less sure than it was trained to be.
    check_gaps(found, tie=2 * TIE, often=0.1)
