# SPDX-License-Identifier: Apache-2.0
"""DDTree, tree speculative decoding, as a vLLM plugin (`"method": "ddtree"`).

- `plugin`, `patches`, `integration`, `config`: how it gets into vLLM, and what it refuses.
- `runtime`: what one engine's parts share.
- `proposer`: the drafter's log-probs; `tree`: trees of them; `attention`: their verification;
  `sampler`: the target's choices and the walk; `commit`: the accepted path's keys and values.
- `model_state`: where a round's parts meet; `graphs`: CUDA graph sizes and forms; `budget`: nodes
  by load; `metrics`: what rounds did; `sleep`: the drafter's weights meanwhile; `invariants`: what
  must hold after a round, checked on request.
- `demo`, `testing`: on the CPU, for people and tests.
"""
