# SPDX-License-Identifier: Apache-2.0
"""How far an unlearned model is from one that never saw the data: pure functions of numbers and `Scores`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fedquit.audit.attacks import roc as strength
from fedquit.audit.metrics import (
    backdoor,
    forgetting_quality,
    gaps,
    holdout,
    klom,
    leakage,
    relearn,
    tug_of_war,
)
from fedquit.audit.scores import js_of_logits
from fedquit.inference import models, one_run


@dataclass(frozen=True)
class Metric:
    """A metric and, in one line, what it says."""

    description: str
    function: Callable[..., object]


METRICS: dict[str, Metric] = {
    "gap": Metric("absolute difference to Retrain for each target, mean and standard deviation", gaps.gap),
    "avg_gap": Metric("mean of the gaps in retain and forget accuracy, MIA Song and MIA Yeom", gaps.avg_gap),
    "gap_verdict": Metric(
        "whether gaps differ from Retrain, are equivalent within a margin, or cannot be told", gaps.judge
    ),
    "paired": Metric("two methods over the same targets, with 95 % intervals", gaps.paired),
    "tug_of_war": Metric(
        "product of the closeness to Retrain in forget, retain and test accuracy", tug_of_war.tug_of_war
    ),
    "tug_of_war_mia": Metric(
        "the same with a membership attack in place of the forget accuracy", tug_of_war.tug_of_war_mia
    ),
    "js_divergence": Metric("distance between two models' predictions, in nats from 0 to ln 2", js_of_logits),
    "roc": Metric("TPR at 1 % and 0.1 % FPR, with bounds that cover", strength.roc),
    "auc": Metric("the chance that forget data scores higher than data never seen, with its interval", strength.auc),
    "holdout_null": Metric(
        "verdict on forget data against the same client's hold-out; needs no Retrain", holdout.holdout_null
    ),
    "entropy_ks": Metric(
        "Kolmogorov and Smirnov's distance between the entropies on forget and hold-out data", holdout.holdout_null
    ),
    "one_run_audit": Metric(
        "a lower bound on epsilon from canaries of a single training; needs no Retrain", one_run.audit
    ),
    "leakage": Metric("what the models before and after the erasure give away together", leakage.leakage),
    "relearn_time": Metric("steps to learn the forgotten anew, over Retrain's", relearn.relearn_time),
    "backdoor": Metric("how often a trigger of the leaving client still works, in percent", backdoor.attack_success),
    "klom": Metric("KL divergence of phi over many unlearned and retrained models", klom.klom),
    "model_test": Metric(
        "whether many unlearned models and Retrains differ: permutation test over model labels", models.permutation_test
    ),
    "epsilon_bound": Metric("lower bound on epsilon over many models, with 95 % confidence", models.epsilon_bound),
    "sample_exposure": Metric(
        "for each sample how far many unlearned models and Retrains lie apart", models.sample_exposure
    ),
    "forgetting_quality": Metric(
        "epsilon for each example over many models (NeurIPS 2023); descriptive, no bound",
        forgetting_quality.forgetting_quality,
    ),
}
