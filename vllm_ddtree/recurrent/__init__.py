# SPDX-License-Identifier: Apache-2.0
"""Trees on recurrent layers: gated delta net with its short convolution."""
