# SPDX-License-Identifier: Apache-2.0
"""The acceptance test of an unlearning method, whoever wrote it: `fedquit check module:Class`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedquit.utils.exports import lazy_exports

if TYPE_CHECKING:
    from fedquit.check.report import PartResult as PartResult
    from fedquit.check.report import Report as Report
    from fedquit.check.report import Violation as Violation
    from fedquit.check.suite import check_method as check_method

__all__ = ["PartResult", "Report", "Violation", "check_method"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "fedquit.check.report": ["PartResult", "Report", "Violation"],
            "fedquit.check.suite": ["check_method"],
        },
    )
