# SPDX-License-Identifier: Apache-2.0
"""The results of runs: their schema and the quantities derived from them, without torch or matplotlib."""
