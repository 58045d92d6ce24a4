# SPDX-License-Identifier: Apache-2.0
"""Tug-of-War; the formulas are those of `fedquit.results.tug_of_war`."""

from fedquit.results.tug_of_war import tug_of_war, tug_of_war_mia

__all__ = ["tug_of_war", "tug_of_war_mia"]
