# SPDX-License-Identifier: Apache-2.0
"""What each round was: its tree, the accepted path, the tokens; one line of JSON a round.

`write`: an engine writes its rounds to the file that `VLLM_DDTREE_ROUNDS` names.
`read`: the rounds of such a file, by request, for those who show or count them. It needs no vLLM.

A traced engine waits for the device in every step: this is for looking at rounds, not for serving.
"""
