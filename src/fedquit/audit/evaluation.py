# SPDX-License-Identifier: Apache-2.0
"""What a request is judged on, and what the judgement is: accuracies, membership attacks, and what shows at all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedquit.audit.attacks import ATTACKS
from fedquit.audit.attacks.roc import FPRS, TprAt, roc
from fedquit.audit.metrics import Metric
from fedquit.audit.metrics.backdoor import Trigger
from fedquit.audit.metrics.holdout import holdout_null
from fedquit.audit.metrics.leakage import leakage
from fedquit.audit.scores import Scores, in_batches, js_divergence, score_examples
from fedquit.core import Model, Params, Request, Task
from fedquit.data.federated import NOTHING, FederatedData
from fedquit.engine import Address, Examples, run_client

Set = Literal["test", "retain", "forget", "holdout"]
SETS: tuple[Set, ...] = ("test", "retain", "forget", "holdout")
BINS = 40  # of the entropy densities
POINTS = np.logspace(-4, 0, 81)  # false-positive rates at which a ROC is kept


def accuracy(model: Model, params: Params, x: Tensor, y: Tensor, batch_size: int = 0) -> float:
    """In percent; for sequences, every position counts as one prediction."""
    with torch.no_grad():
        parts = zip(in_batches(x, batch_size), in_batches(y, batch_size), strict=True)
        hits = sum(int((model(params, xs).argmax(-1) == ys).sum()) for xs, ys in parts)
    return 100 * hits / y.numel()


@dataclass(frozen=True)
class Evaluation:
    """The sets of a request: the retain data of all, the leaving clients' forget and holdout data, and the test set."""

    model: Model
    data: FederatedData
    request: Request
    attacks: Sequence[str] = ()
    seed: int = 0
    trigger: Trigger | None = None  # the backdoor that the leaving clients planted, if they did

    def examples(self, name: Set) -> tuple[Tensor, Tensor]:
        """One of the sets."""
        if name == "test":
            return self.data.dataset.test_x, self.data.dataset.test_y
        if name == "retain":
            at = self.data.pooled("retain")
        elif name == "forget":
            at = self.data.pooled("forget", self.request.clients)
        else:
            at = torch.cat([NOTHING, *(self.data.holdout.get(c, NOTHING) for c in self.request.clients)])
        return self.data.x[at], self.data.y[at]

    def accuracy(self, name: Set, params: Params) -> float | None:
        """In percent, or None where the set is empty."""
        x, y = self.examples(name)
        return accuracy(self.model, params, x, y) if len(y) else None

    def price_of_forgetting(self, before: Params, after: Params) -> float | None:
        """The rise of the mean loss on everything that is not forgotten."""
        x, y = self.examples("retain")
        if not len(y):
            return None
        losses = [score_examples(self.model, params, x, y).loss.mean() for params in (before, after)]
        return float(losses[1] - losses[0])

    def against(self, before: Params, after: Params, gold: Params | None) -> dict[str, Any]:
        """What needs a second model: what both snapshots give away together, and the distance to Retrain."""
        null: Set = "holdout" if len(self.examples("holdout")[1]) else "test"
        (x, y), (null_x, null_y) = self.examples("forget"), self.examples(null)
        if not len(y):
            return {}
        forgotten, outsiders = (
            (score_examples(self.model, before, a, b), score_examples(self.model, after, a, b))
            for a, b in ((x, y), (null_x, null_y))
        )
        leak = leakage(forgotten, outsiders)
        measures: dict[str, Any] = {
            "leakage_against": null,
            "leakage_auc": leak.auc.value,
            "leakage_auc_low": leak.auc.low,
            "leakage_auc_high": leak.auc.high,
            **_found("leakage_tpr", leak.tpr),
        }
        return measures | (self.distance(after, gold) if gold is not None else {})

    def distance(self, one: Params, other: Params) -> dict[str, Any]:
        """How far two models lie apart on the forget data."""
        x, y = self.examples("forget")
        return {"forget_js": float(js_divergence(self.model, one, other, x).mean())} if len(y) else {}

    def true_logits(self, params: Params) -> dict[str, Any]:
        """The density of the true class's logit on the forget data: what the teacher's v is measured against."""
        x, y = self.examples("forget")
        with torch.no_grad():
            logits = torch.cat([self.model(params, xs) for xs in in_batches(x)])
        found = logits.gather(-1, y.unsqueeze(-1)).double().flatten().cpu().numpy()
        heights, edges = np.histogram(found, BINS, density=True)
        return {
            "true_logits": {
                "edges": [round(float(e), 5) for e in edges],
                "density": [round(float(h), 5) for h in heights],
            }
        }

    def relearned(self, params: Params, task: Task, epochs: int) -> list[float]:
        """The forget accuracy before and after each epoch of training on the forget data again, in percent."""
        x, y = self.examples("forget")
        curve = [accuracy(self.model, params, x, y)]
        for epoch in range(epochs):
            seed = Address(self.seed, "relearn", epoch).seed_for("server")
            mine = Examples.unmarked(x, y, self.data.dataset.look)
            params = run_client(self.model, task, mine, {"start": params}, seed).params
            curve.append(accuracy(self.model, params, x, y))
        return curve

    def judge(self, params: Params) -> dict[str, Any]:
        """Every measure of one model that needs no other model."""
        found = {name: self._scores(name, params) for name in SETS}
        measures: dict[str, Any] = {}
        for name, seen in found.items():
            measures[f"{name}_acc"] = 100 * float(seen.correct.mean()) if seen else None
        for name, seen in found.items():
            measures[f"{name}_loss"] = float(seen.loss.mean()) if seen else None
        test, retain, forget, holdout = (found[name] for name in SETS)
        if test and retain and forget:
            attacks = {f"mia_{name}": ATTACKS[name](retain, test, forget, seed=self.seed) for name in self.attacks}
            measures |= attacks | _exposure(forget, holdout or test, "holdout" if holdout else "test")
            measures["entropy"] = _densities({"forget": forget, "test": test})
        if forget and holdout:
            measures |= _against_holdout(forget, holdout)
        if self.trigger:
            measures["backdoor_asr"] = self.trigger.success(self.model, params, *self.examples("test"))
        return measures

    def _scores(self, name: Set, params: Params) -> Scores | None:
        x, y = self.examples(name)
        return score_examples(self.model, params, x, y) if len(y) else None


def _against_holdout(forget: Scores, holdout: Scores) -> dict[str, Any]:
    """The hold-out null: forget data against data of the same clients that never trained."""
    null = holdout_null(forget, holdout)
    apart = {"auc": null.auc.value, "auc_low": null.auc.low, "auc_high": null.auc.high}
    return apart | {"entropy_ks": null.entropy_ks, "entropy_ks_p": null.entropy_p, "holdout_verdict": null.verdict}


def _exposure(forget: Scores, null: Scores, against: str) -> dict[str, Any]:
    """How well phi tells the forget data from data that never trained, where it counts: at few false alarms."""
    curve = roc(forget.phi, null.phi)
    measures = {"exposed_against": against} | _found("tpr", map(curve.tpr_at, FPRS))
    tpr = [float(curve.tpr[int(np.searchsorted(curve.fpr, f, side="right")) - 1]) for f in POINTS]
    return measures | {"roc": {"fpr": [round(float(f), 6) for f in POINTS], "tpr": [round(t, 5) for t in tpr]}}


def _found(name: str, rates: Iterable[TprAt]) -> dict[str, Any]:
    """Who is found at each rate of false alarms, with the interval, and whether the outsiders suffice for that rate."""
    measures: dict[str, Any] = {}
    for at in rates:
        key = f"{name}_at_{at.asked:g}"
        measures |= {key: at.tpr.value, f"{key}_low": at.tpr.low, f"{key}_high": at.tpr.high}
        measures[f"{key}_enough"] = at.enough
    return measures


def _densities(sets: dict[str, Scores]) -> dict[str, Any]:
    """Histograms of the predictive entropy, as densities over the same bins."""
    top = max(float(seen.entropy.max()) for seen in sets.values()) or 1.0
    edges = np.linspace(0, top, BINS + 1)
    found = {name: np.histogram(seen.entropy, edges, density=True)[0] for name, seen in sets.items()}
    return {"edges": [round(float(e), 5) for e in edges]} | {
        n: [round(float(d), 5) for d in h] for n, h in found.items()
    }


MEASURES: dict[str, Metric] = {  # what takes a model and the sets themselves; the rest is in `fedquit.audit.metrics`
    "accuracy": Metric("right predictions on test, retain, forget and hold-out data, in percent", accuracy),
    "loss": Metric("mean cross-entropy on the same data, in nats", score_examples),
    "price_of_forgetting": Metric(
        "rise of the retained clients' mean loss through unlearning", Evaluation.price_of_forgetting
    ),
    "entropy": Metric("densities of the predictive entropy on forget and test data", _densities),
    "true_logits": Metric("density of Original's true-class logits on the forget data", Evaluation.true_logits),
}
