# SPDX-License-Identifier: Apache-2.0
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase


class CPUInterpDriver(DriverBase):
    @staticmethod
    def is_active():
        # vLLM excludes "cpu" from its count of active drivers and adds it back
        # itself on CPU builds; Triton needs it active for TRITON_DEFAULT_BACKEND.
        return True

    def __init__(self):
        super().__init__()

    def map_python_to_cpp_type(self, ty):
        raise RuntimeError("no code generation")

    def get_current_target(self):
        return GPUTarget("cpu", "generic", 1)

    def get_active_torch_device(self):
        import torch

        return torch.device("cpu")

    def get_current_device(self):
        return 0

    def set_current_device(self, device):
        pass

    def get_current_stream(self, device):
        return 0

    def get_benchmarker(self):
        def bench(fn, *, quantiles=None, **kwargs):
            fn()
            return [0.0] * len(quantiles or [0.5])

        return bench
