# SPDX-License-Identifier: Apache-2.0
"""One budget for a batch: the most promising nodes of all requests, however many each one gets.

A tree of fewer nodes is a prefix of the larger one. So requests share a number of nodes by taking
prefixes of different lengths. `reference.py` is the mathematics; the kernels beside it follow it
bit by bit. All of it is integers, so every rank shares alike.
"""
