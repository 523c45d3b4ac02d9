# SPDX-License-Identifier: Apache-2.0
"""Helpers of the tests and the demo. The plugin itself imports nothing from here."""
