# SPDX-License-Identifier: Apache-2.0
"""`vllm-ddtree check`: does a pair fit, from its configurations alone; is the plugin active."""
