# SPDX-License-Identifier: Apache-2.0
"""An estimate with its confidence interval."""

from __future__ import annotations

from fedquit.inference.intervals import Interval

__all__ = ["Interval"]
