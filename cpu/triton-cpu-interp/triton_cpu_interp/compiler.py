# SPDX-License-Identifier: Apache-2.0
from triton.backends.compiler import BaseBackend


class CPUInterpBackend(BaseBackend):
    """Never compiles: kernels must run through Triton's interpreter."""

    binary_ext = "none"

    @staticmethod
    def supports_target(target):
        return target.backend == "cpu"

    def hash(self):
        return "cpu-interp"

    def parse_options(self, options):
        return options

    def add_stages(self, stages, options, language):
        raise RuntimeError("triton-cpu-interp has no compiler: set TRITON_INTERPRET=1")

    def load_dialects(self, context):
        pass

    def get_module_map(self):
        return {}
