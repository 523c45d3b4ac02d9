# SPDX-License-Identifier: Apache-2.0
"""The verify stage's choices and the walk, and the requests that verify their chain alone."""
