# SPDX-License-Identifier: Apache-2.0
"""Metrics of tree speculation beside vLLM's own: counted exactly, once for every round.

Some facts of a round only the worker knows; they travel with the step's sampled tokens
(round/emitted.py). The scheduler counts them where vLLM counts a draft (`scheduler`), and sends the
counts (`rounds`) along with vLLM's `SpecDecodingStats`. The front-end takes those apart, for
Prometheus and the log (`frontend`).
"""
