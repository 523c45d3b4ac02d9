# SPDX-License-Identifier: Apache-2.0
"""`VLLM_DDTREE_CHECK=1`: what must hold after every step, checked on the host.

`checks`: the checks of a step, in order.
`step`: trees, positions, paths and moved keys and values, request by request.
`free_slots`: no step writes a KV slot that is no row's.
`stop`: the requests for which something does not hold are finished with an error, the others go on.

Every check waits for the device and copies from it: this is for finding faults, not for serving.
"""

import os


def enabled() -> bool:
    """Whether the environment asks for the checks; read once, when an engine starts."""
    return os.environ.get("VLLM_DDTREE_CHECK") == "1"
