# SPDX-License-Identifier: Apache-2.0
"""What of vLLM is replaced: `table` lists it, the other modules are the replacements.

A wrapper takes vLLM's function and returns what stands in its place. It calls vLLM's for a
configuration that is not DDTree's, and is small: what is to be done for DDTree's lies in the rooms
below, which are imported when they are needed.
"""
