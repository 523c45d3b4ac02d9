# SPDX-License-Identifier: Apache-2.0
"""What a step's batch tells the layers: vLLM's metadata builders, with the step's trees added.

`builders` holds what all tree-aware builders share, `plain` and `latent` the two kinds of them. All
tensors in their metadata are persistent buffers of the engine's runtime, written in place, so a
replayed CUDA graph never sees a new one.
"""
