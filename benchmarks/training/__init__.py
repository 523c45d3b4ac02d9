# SPDX-License-Identifier: Apache-2.0
"""Makes small trained pairs: see README.md here."""
