# SPDX-License-Identifier: Apache-2.0
"""What the soak asks an engine's worker: its memory, on the GPU and on the host."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

MIB = 1 << 20


class SoakWorker:
    """vLLM's `worker_extension_cls`; its methods are called over `collective_rpc`."""

    device: Any

    def soak_memory(self) -> dict[str, float]:
        """MiB: live tensors, what PyTorch keeps, what the GPU has in use, and the process's RSS."""
        import torch

        pages = int(Path("/proc/self/statm").read_text().split()[1])
        memory = {"host": pages * os.sysconf("SC_PAGE_SIZE") / MIB}
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            free, total = torch.cuda.mem_get_info(self.device)
            memory["allocated"] = torch.cuda.memory_allocated(self.device) / MIB
            memory["reserved"] = torch.cuda.memory_reserved(self.device) / MIB
            memory["in_use"] = (total - free) / MIB
        return memory
