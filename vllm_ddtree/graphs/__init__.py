# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs: which batches have one, and in which form."""
