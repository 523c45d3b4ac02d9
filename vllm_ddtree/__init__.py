# SPDX-License-Identifier: Apache-2.0
"""DDTree, tree speculative decoding, as a vLLM plugin (`"method": "ddtree"`).

- `plugin`: the entry point; `patches`: one table of all that is replaced in vLLM; `integration`:
  all that is used of it; `presence`: whether a DDTree configuration exists in the process.
- `config`: the user's keys, and what is refused.
- `round`: what one round shares.
- `proposer`: the drafter's log-probs; `tree`: trees of them; `attention`: their verification;
  `sampler`: the target's choices and the walk; `commit`: the accepted path's keys and values.
- `model_state`: where a round's parts meet; `graphs`: CUDA graph sizes and forms; `budget`: nodes
  by load; `metrics`: what rounds did; `invariants`: what must hold after a round, checked on
  request; `workarounds`: for faults of vLLM.
- `demo`, `testing`: on the CPU, for people and tests.
"""
