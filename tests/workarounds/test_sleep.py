# SPDX-License-Identifier: Apache-2.0
"""After a level-2 sleep a drafter has its weights again, with a worker that only forgets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_ddtree.patches import worker


class DDTreeConfig:
    """Known by its name."""


class Draft(torch.nn.Module):
    """A drafter with weights of its own, made of them, and the target's head."""

    def __init__(self, target: torch.nn.Module) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 4)
        self.register_buffer("table", torch.arange(5.0), persistent=False)
        self.lm_head = target.lm_head
        self.fused = torch.cat([self.layer.weight.data, self.layer.weight.data])
        self.parts = [torch.full((2,), 7.0)]
        self.view = self.fused[2:]
        self.kv_cache = torch.zeros(6)


def make_worker(config: Any) -> Any:
    target = torch.nn.Module()
    target.lm_head = torch.nn.Linear(4, 5)
    draft = Draft(target)
    runner = SimpleNamespace(get_model=lambda: target, get_draft_model=lambda: draft)
    vllm_config = SimpleNamespace(speculative_config=config)
    return SimpleNamespace(model_runner=runner, vllm_config=vllm_config, draft=draft)


def own(draft: Any) -> list[torch.Tensor]:
    return [draft.layer.weight, draft.layer.bias, draft.table, draft.fused, draft.parts[0]]


@pytest.fixture
def worker_class() -> Any:
    """A worker with a sleep that forgets all that is on the GPU, as ours replace it."""

    def forget(self: Any, level: int = 1) -> None:
        draft = self.draft
        for tensor in (*own(draft), *draft.lm_head.parameters(), draft.kv_cache):
            tensor.data.fill_(float("nan"))

    return SimpleNamespace(
        sleep=worker.sleep(forget), wake_up=worker.wake_up(lambda self, tags=None: None)
    )


@pytest.mark.parametrize("tags", [None, ["weights"]])
def test_the_drafter_wakes_with_its_weights(worker_class: Any, tags: list[str] | None) -> None:
    worker = make_worker(DDTreeConfig())
    before = [tensor.detach().clone() for tensor in own(worker.draft)]
    addresses = [tensor.data_ptr() for tensor in own(worker.draft)]
    for _ in range(2):
        worker_class.sleep(worker, 2)
        worker_class.wake_up(worker, ["kv_cache"])
        assert all(tensor.isnan().any() for tensor in own(worker.draft)), "no memory there yet"
        worker_class.wake_up(worker, tags)
        for now, then in zip(own(worker.draft), before, strict=True):
            assert torch.equal(now, then)
    # In place: captured graphs read there. What the target has is vLLM's to reload.
    assert [tensor.data_ptr() for tensor in own(worker.draft)] == addresses
    assert worker.draft.view.data_ptr() == worker.draft.fused[2:].data_ptr()
    assert worker.draft.lm_head.weight.isnan().all() and worker.draft.kv_cache.isnan().all()


@pytest.mark.parametrize(("config", "level"), [(None, 2), (DDTreeConfig(), 1)])
def test_other_sleeps_are_vllms(worker_class: Any, config: Any, level: int) -> None:
    worker = make_worker(config)
    worker_class.sleep(worker, level)
    worker_class.wake_up(worker)
    assert all(tensor.isnan().all() for tensor in own(worker.draft))
