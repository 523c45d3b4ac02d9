# SPDX-License-Identifier: Apache-2.0
"""The commit stage: the accepted path's keys and values move to where the next round reads them."""
