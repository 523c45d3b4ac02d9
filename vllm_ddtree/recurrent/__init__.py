# SPDX-License-Identifier: Apache-2.0
"""Trees on recurrent layers, with their short convolution: gated delta net, Mamba2, and Kimi delta
attention, which is not in the engine yet."""
