# SPDX-License-Identifier: Apache-2.0
"""The draft tree: its oracle, its buffers and the kernel that grows it."""

from vllm_ddtree.round.trees import TreeBuffers, words
from vllm_ddtree.tree.build import build_trees
from vllm_ddtree.tree.reference import Tree, accepted_path, build_tree

__all__ = ["Tree", "TreeBuffers", "accepted_path", "build_tree", "build_trees", "words"]
