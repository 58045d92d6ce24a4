# SPDX-License-Identifier: Apache-2.0
"""Gaps to Retrain and paired comparisons; the formulas are those of `fedquit.results.gaps`."""

from fedquit.inference.gaps import judge
from fedquit.results.gaps import Gap, Paired, avg_gap, gap, paired

__all__ = ["Gap", "Paired", "avg_gap", "gap", "judge", "paired"]
