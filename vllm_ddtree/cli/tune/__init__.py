# SPDX-License-Identifier: Apache-2.0
"""`vllm-ddtree tune`: what a drafter's trees accept of the user's own texts, and settings from it.

`seen` counts the rounds of a trace, `costs` reads what rounds take, `advise` chooses budgets.
"""
