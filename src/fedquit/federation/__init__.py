# SPDX-License-Identifier: Apache-2.0
"""Federations from Python: `run`, `compare` and `study`, from a recipe or from objects of one's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedquit.utils.exports import lazy_exports

if TYPE_CHECKING:
    from fedquit.federation.calls import compare as compare
    from fedquit.federation.calls import run as run
    from fedquit.federation.calls import study as study
    from fedquit.federation.outcomes import ComparisonResult as ComparisonResult
    from fedquit.federation.outcomes import RunResult as RunResult
    from fedquit.federation.outcomes import StudyResult as StudyResult
    from fedquit.federation.setting import Setting as Setting

__all__ = ["ComparisonResult", "RunResult", "Setting", "StudyResult", "compare", "run", "study"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "fedquit.federation.calls": ["compare", "run", "study"],
            "fedquit.federation.outcomes": ["ComparisonResult", "RunResult", "StudyResult"],
            "fedquit.federation.setting": ["Setting"],
        },
    )
