# SPDX-License-Identifier: Apache-2.0
"""Metrics of tree speculation beside vLLM's own: counted exactly, once for every round.

What only the device and the worker know of a round travels with the step's sampled tokens
(`rounds`); the scheduler counts it where vLLM counts a draft (`scheduler`) and sends it along with
vLLM's `SpecDecodingStats`; the front-end takes it apart, for Prometheus and the log (`frontend`).
"""
