# SPDX-License-Identifier: Apache-2.0
"""What a model reveals: per-example scores, membership attacks, metrics, evaluation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedquit.utils.exports import lazy_exports

if TYPE_CHECKING:
    from fedquit.audit.attacks import ATTACKS as ATTACKS
    from fedquit.audit.attacks import REFERENCE_ATTACKS as REFERENCE_ATTACKS
    from fedquit.audit.attacks.lira import lira_offline as lira_offline
    from fedquit.audit.attacks.lira import lira_online as lira_online
    from fedquit.audit.attacks.lira import ulira as ulira
    from fedquit.audit.attacks.rmia import rmia as rmia
    from fedquit.audit.attacks.roc import auc as auc
    from fedquit.audit.attacks.roc import roc as roc
    from fedquit.audit.metrics import METRICS as METRICS
    from fedquit.audit.metrics.forgetting_quality import forgetting_quality as forgetting_quality
    from fedquit.audit.metrics.klom import klom as klom
    from fedquit.audit.scores import Scores as Scores
    from fedquit.audit.scores import score_examples as score_examples

__all__ = [
    "ATTACKS",
    "METRICS",
    "REFERENCE_ATTACKS",
    "Scores",
    "auc",
    "forgetting_quality",
    "klom",
    "lira_offline",
    "lira_online",
    "rmia",
    "roc",
    "score_examples",
    "ulira",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "fedquit.audit.attacks": ["ATTACKS", "REFERENCE_ATTACKS"],
            "fedquit.audit.attacks.lira": ["lira_offline", "lira_online", "ulira"],
            "fedquit.audit.attacks.rmia": ["rmia"],
            "fedquit.audit.attacks.roc": ["auc", "roc"],
            "fedquit.audit.metrics": ["METRICS"],
            "fedquit.audit.metrics.forgetting_quality": ["forgetting_quality"],
            "fedquit.audit.metrics.klom": ["klom"],
            "fedquit.audit.scores": ["Scores", "score_examples"],
        },
    )
