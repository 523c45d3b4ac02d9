# SPDX-License-Identifier: Apache-2.0
"""The draft tree: the kernel that grows it, its chain, and the reference on paper."""
