# SPDX-License-Identifier: Apache-2.0
"""Timings and sizes, measured on the machine at hand: `fedquit bench`. Tests assert what is computed, not how fast."""
