# SPDX-License-Identifier: Apache-2.0
"""Prefix + tail, as the implementations of the backends run them.

`plain` and `latent` put the two passes together, `triton_prefix` is the prefix pass by our own
kernels, for both.
"""
