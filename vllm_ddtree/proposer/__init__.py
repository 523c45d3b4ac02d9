# SPDX-License-Identifier: Apache-2.0
"""The draft stage: the drafter's context, its forward, and the candidates of each position."""
