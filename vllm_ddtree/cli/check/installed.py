# SPDX-License-Identifier: Apache-2.0
"""Whether the installed plugin is active, and why not."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import entry_points
from importlib.metadata import version as installed_version

from vllm_ddtree.cli.check.findings import Finding, State

GROUP, NAME = "vllm.general_plugins", "ddtree"


def installed() -> Iterator[Finding]:
    """The plugin, vLLM, the model runner, the device: what every pair needs."""
    yield Finding("plugin", State.GOOD, f"vllm-ddtree {installed_version('vllm-ddtree')}")
    try:
        import vllm
    except ImportError as error:
        fix = "install vLLM in this environment, or run this command where vLLM is"
        yield Finding("vLLM", State.REFUSED, f"cannot be imported: {error}", fix)
        return
    yield _supported(vllm.__version__)
    yield _found()
    yield from _runner()
    yield _device()


def _supported(version: str) -> Finding:
    from vllm_ddtree.integration import SeamError, require

    try:
        require()
    except (SeamError, ValueError) as error:
        return Finding("vLLM", State.REFUSED, str(error))
    return Finding("vLLM", State.GOOD, f"{version}; all that is used of it is there")


def _found() -> Finding:
    """Whether vLLM loads the plugin."""
    from vllm import envs

    if not any(point.name == NAME for point in entry_points(group=GROUP)):
        fix = "install vllm-ddtree with pip in the environment that holds vLLM"
        return Finding("entry point", State.REFUSED, f"{GROUP} has no {NAME} here", fix)
    allowed = envs.VLLM_PLUGINS
    if allowed is not None and NAME not in allowed:
        listed = ",".join(allowed)
        return Finding(
            "entry point",
            State.REFUSED,
            f"VLLM_PLUGINS={listed} leaves {NAME} out",
            f"unset it, or set VLLM_PLUGINS={','.join([*allowed, NAME]).strip(',')}",
        )
    return Finding("entry point", State.GOOD, f"vLLM loads {NAME} in every process")


def _runner() -> Iterator[Finding]:
    from vllm import envs

    if envs.VLLM_USE_V2_MODEL_RUNNER is False:
        text = "VLLM_USE_V2_MODEL_RUNNER=0 asks for the V1 model runner"
        yield Finding("model runner", State.REFUSED, text, "unset it")
        return
    from vllm.triton_utils import HAS_TRITON

    if not HAS_TRITON:
        text = "Triton finds no GPU, so vLLM would take the V1 model runner here"
        yield Finding("model runner", State.NOTE, text, "serve where a GPU is")
    else:
        yield Finding("model runner", State.GOOD, "Model Runner V2, unless an option forbids it")


def _device() -> Finding:
    from vllm.platforms import current_platform

    if not current_platform.device_type:
        text = "vLLM finds no device here: backends, graphs and memory are not looked at"
        return Finding("device", State.NOTE, text)
    if current_platform.is_cuda():
        major, minor = current_platform.get_device_capability() or (0, 0)
        name = f"{current_platform.get_device_name()}, compute capability {major}.{minor}"
        if major == 9:
            return Finding("device", State.GOOD, name)
        text = f"{name}; the project's own tests ran on Hopper (9.0) only"
        return Finding("device", State.WARNING, text, "run tests/gpu of the source distribution")
    if current_platform.is_cpu():
        text = "no GPU here: what depends on one is said as of a GPU, or left open"
        return Finding("device", State.NOTE, text)
    fix = "use an NVIDIA GPU"
    return Finding("device", State.WARNING, f"{current_platform.device_type}: never tried", fix)
