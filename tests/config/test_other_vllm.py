# SPDX-License-Identifier: Apache-2.0
"""A vLLM that the plugin does not know: method ddtree is refused, other methods do not notice."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.config.building import build, refusal


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
