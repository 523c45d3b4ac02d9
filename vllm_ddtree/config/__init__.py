# SPDX-License-Identifier: Apache-2.0
"""What the user asks for: the keys of `method: ddtree`, and what they and the engine must be.

`speculative.make_config` reads the keys (`keys`) and checks the drafter (`drafter`);
`engine.finish_engine_config` checks the engine (`engine`, `target`, `token_budget`) and changes the
settings that DDTree chooses (`attention`, `graphs`, `token_budget`). `errors` says every refusal:
one line with what was given and what to do.
"""
