# SPDX-License-Identifier: Apache-2.0
"""`"budget": "auto"`: the number of nodes that pays at the present load."""
