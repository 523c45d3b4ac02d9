# SPDX-License-Identifier: Apache-2.0
"""Attention of the target's layers to a batch with trees.

A layer's attention runs in two passes: all tree rows of a request see the keys before their tree
(the prefix), which needs no mask; then each row sees its ancestors (the tail), and the two parts
are merged.

- `registry`: the backends of vLLM on which this works, and their tree-aware implementations.
- `install`: gives a loaded target's layers their tree-aware form.
- `backends/`: one file a backend of vLLM.
- `forward/`: the two passes put together, for plain and for latent attention.
- `metadata/`: what a step's batch tells the layers.
- `layer`: what the passes read off a layer.
- `kernels/`: our kernels and the functions that launch them.

Each imports only what stands below it, and `registry` imports nothing of these.
"""
