# SPDX-License-Identifier: Apache-2.0
"""Gaps to Retrain and paired comparisons; the formulas are those of `fedquit.results.gaps`."""

from fedquit.results.gaps import Gap, Paired, avg_gap, gap, paired, within_spread

inside_floor = within_spread

__all__ = ["Gap", "Paired", "avg_gap", "gap", "inside_floor", "paired"]
