# SPDX-License-Identifier: Apache-2.0
"""Many runs: choose an unlearning rate, compare methods, compare procedures over many models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedquit.utils.exports import lazy_exports

if TYPE_CHECKING:
    from fedquit.studies.sweep import Candidate as Candidate
    from fedquit.studies.sweep import Sweep as Sweep
    from fedquit.studies.sweep import sweep_rates as sweep_rates

__all__ = ["Candidate", "Sweep", "sweep_rates"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(__name__, {"fedquit.studies.sweep": ["Candidate", "Sweep", "sweep_rates"]})
