# SPDX-License-Identifier: Apache-2.0
"""Evaluation of a request: accuracies, membership attacks, leakage and distances, from one pass per model and set."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedquit.audit.attacks import ATTACKS
from fedquit.audit.attacks.roc import FPRS, TprAt, auc, roc
from fedquit.audit.canaries import Canaries, fields_of
from fedquit.audit.client_models import ClientModels, owners_of
from fedquit.audit.metrics import Metric
from fedquit.audit.metrics.backdoor import Trigger
from fedquit.audit.metrics.holdout import Samples, holdout_null
from fedquit.audit.metrics.leakage import leakage
from fedquit.audit.passes import Pass, Passes, js_between, make_pass
from fedquit.audit.scores import SEQUENCE, Floats, Scores, in_batches, score_examples
from fedquit.core import ClientId, Model, Params, Request, Task
from fedquit.core.local_layers import local_names
from fedquit.core.params import fingerprint
from fedquit.data.federated import NOTHING, FederatedData
from fedquit.engine import Address, Examples, run_client
from fedquit.inference.exposed import exposed_samples
from fedquit.inference.trace import MARGIN, Trace
from fedquit.results.schema import RETAIN_PART

Set = Literal["test", "retain", "forget", "holdout", "retain_part"]
SETS: tuple[Set, ...] = ("test", "retain", "forget", "holdout")
BINS = 40  # of the entropy densities
POINTS = np.logspace(-4, 0, 81)  # false-positive rates at which a ROC is kept


def accuracy(model: Model, params: Params, x: Tensor, y: Tensor, batch_size: int = 0) -> float:
    """The share of right predictions, in percent; for sequences, every position counts as one prediction.

    Args:
        model: the network.
        params: its parameters.
        x: the examples, (N, …).
        y: their labels, (N,), or (N, T) for sequences.
        batch_size: examples in a batch; 0 for the device's own.
    """
    with torch.no_grad():
        batches = zip(in_batches(x, batch_size), in_batches(y, batch_size), strict=True)
        hits = sum(int((model(params, xs).argmax(-1) == ys).sum()) for xs, ys in batches)
    return 100 * hits / y.numel()


@dataclass(frozen=True)
class Evaluation:
    """The sets of a request: the retain data of all, the leaving clients' forget and holdout data, and the test set.

    Every model reads every set once: the measures below share the passes.

    Args:
        model: the network as it is evaluated.
        data: the federation's data, with the examples of the request marked.
        request: who leaves.
        attacks: names of `ATTACKS`.
        seed: of what the attacks draw.
        trigger: the backdoor that the leaving clients planted, if they did.
        passes: what was computed so far; several requests of one federation can share it.
        margin: how far from one half the AUC against the hold-out may lie and still count as forgotten.
        canaries: of the clients that leave, if they have any.
        network: the network itself, where clients have BatchNorm of their own (`core.local_layers`); then every example
            is read by its client's model, and those of the test set by the models of the clients that stay, in turn.
    """

    model: Model
    data: FederatedData
    request: Request
    attacks: Sequence[str] = ()
    seed: int = 0
    trigger: Trigger | None = None
    passes: Passes = field(default_factory=Passes, repr=False, compare=False)
    margin: float = MARGIN
    canaries: Canaries | None = None
    network: Model | None = None

    def examples(self, name: Set) -> tuple[Tensor, Tensor]:
        """The examples (N, …) and the labels (N,) or (N, T) of one of the sets."""
        if name == "test":
            return self.data.dataset.test_x, self.data.dataset.test_y
        at = self._positions[name]
        return self.data.x[at], self.data.y[at]

    def forget_samples(self) -> list[tuple[int, int]]:
        """For each example of the forget data its client and its number among the client's training examples."""
        samples: list[tuple[int, int]] = []
        for client in self.request.clients:
            numbers = {position: number for number, position in enumerate(self.data.train[client].tolist())}
            marked = self.data.view(client, "forget").tolist()
            samples += [(client, numbers[position]) for position in marked]
        return samples

    def exposed_by_client(self, params: Params) -> dict[int, list[dict[str, Any]]]:
        """For each client its forgotten samples, the most exposed first: for this client alone.

        Args:
            params: the model that gives them away.

        Returns:
            For JSON; `sample` is the number of a sample among the training examples of its client. Empty where there
            is no hold-out.
        """
        forget = self._scores("forget", params)
        holdout = self._scores("holdout", params)
        if forget is None or holdout is None:
            return {}
        exposed = exposed_samples(forget.phi, holdout.phi)
        owners = self.forget_samples()
        by_client: dict[int, list[dict[str, Any]]] = {client: [] for client in self.request.clients}
        for i in np.lexsort((-forget.phi, exposed.p)):
            client, sample = owners[i]
            word = "remembered" if exposed.named[i] else ""
            score = {"sample": sample, "phi": float(forget.phi[i]), "p": float(exposed.p[i]), "exposed": word}
            by_client[client].append(score)
        return by_client

    @cached_property
    def _positions(self) -> dict[Set, Tensor]:
        """Where the examples of each set but the test set lie in the data."""
        held_out = [self.data.holdout.get(client, NOTHING) for client in self.request.clients]
        retain = self.data.pooled("retain")
        return {
            "retain": retain,
            "retain_part": _part(retain, RETAIN_PART),
            "forget": self.data.pooled("forget", self.request.clients),
            "holdout": torch.cat([NOTHING, *held_out]),
        }

    @cached_property
    def _keys(self) -> dict[Set, str]:
        """By which `passes` knows a set: the same positions of the same data are the same set for every request."""
        keys: dict[Set, str] = {name: fingerprint({"at": at}) for name, at in self._positions.items()}
        keys["test"] = "test"
        return keys

    def _size(self, name: Set) -> int:
        return len(self.data.dataset.test_y) if name == "test" else len(self._positions[name])

    def _pass(self, name: Set, params: Params) -> Pass:
        """What a model said about a set: the one place where a model reads a set's examples."""

        def make() -> Pass:
            if self._is_personal:
                models = self._client_models(params)
                return models.read(*self.examples(name), self._owners(name), keep_logits=name == "forget")
            return make_pass(self.model, params, *self.examples(name), keep_logits=name == "forget")

        return self.passes.get(params, self._key(name), make)

    @property
    def _is_personal(self) -> bool:
        """Whether clients have layers of their own, and so each a model of its own."""
        return self.network is not None and bool(local_names(self.network))

    def _key(self, name: Set) -> Hashable:
        """By which `passes` knows what a model says about a set; whose models read the test set is part of it."""
        return (self._keys[name], self._stay) if self._is_personal else self._keys[name]

    @cached_property
    def _stay(self) -> tuple[ClientId, ...]:
        return tuple(self.request.stay(self.data.clients))

    def _client_models(self, params: Params) -> ClientModels:
        assert self.network is not None
        return ClientModels.of(self.model, self.network, params, self.data, self._stay)

    def _owners(self, name: Set) -> npt.NDArray[np.int64]:
        """Whose model reads each example of a set, (N,): its client's, and of the test set those who stay in turn."""
        if name == "test":
            return np.resize(np.array(self._stay, dtype=np.int64), len(self.data.dataset.test_y))
        return owners_of(self.data, self._positions[name])

    def _scores(self, name: Set, params: Params) -> Scores | None:
        return self._pass(name, params).scores if self._size(name) else None

    def scores(self, params: Params) -> dict[Set, Scores | None]:
        """The per-example scores of a model on every set; None for a set that is empty."""
        return {name: self._scores(name, params) for name in (*SETS, "retain_part")}

    def scores_within(self, everything: Scores, test: Scores) -> dict[Set, Scores | None]:
        """The same from the scores of a model on all examples, which serve the requests of all clients.

        Args:
            everything: on all training examples of the data set, in its order.
            test: on the test set.
        """
        taken: dict[Set, Scores | None] = {"test": test}
        for name, at in self._positions.items():
            taken[name] = everything.take(at.cpu().numpy()) if len(at) else None
        return taken

    @property
    def positions(self) -> int:
        """Predictions for each example: 1, or the length of a sequence."""
        return self.data.y[:1].numel()

    def accuracy(self, name: Set, params: Params) -> float | None:
        """The share of right predictions on a set, in percent, or None where the set is empty."""
        return _accuracy(self._scores(name, params), self.positions)

    def point(self, params: Params) -> dict[str, float]:
        """The measures of a model that are taken after every round, where their sets are not empty.

        Returns:
            `test_acc`, `retain_acc` (over at most `RETAIN_PART` examples, always the same), `forget_acc` and
            `holdout_acc` in percent, and the `auc` of phi between forget and hold-out data.
        """
        sets: tuple[Set, ...] = ("test", "retain_part", "forget", "holdout")
        return point_of({name: self._scores(name, params) for name in sets}, self.positions)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the sets: two evaluations with the same one measure the same."""
        keys = "".join(f"{name}:{key};" for name, key in sorted(self._keys.items()))
        return fingerprint({"keys": torch.tensor(list(keys.encode()), dtype=torch.uint8)})

    def price_of_forgetting(self, before: Params, after: Params) -> float | None:
        """The rise of the mean loss on everything that is not forgotten, in nats; None where nothing is left."""
        old = self._scores("retain", before)
        new = self._scores("retain", after)
        if old is None or new is None:
            return None
        return float(new.loss.mean() - old.loss.mean())

    def against(self, before: Params, after: Params, gold: Params | None) -> dict[str, Any]:
        """What needs a second model: what both snapshots give away together, and the distance to Retrain.

        Args:
            before: the model that the request found.
            after: the model to judge.
            gold: Retrain's model, where there is one.
        """
        if not self._size("forget"):
            return {}
        audited = self.one_run_audit(after, before)
        null = self._outsiders
        measures = self._leakage(before, self._pass("forget", after).scores, self._pass(null, after).scores)
        return measures | audited | (self.distance(after, gold) if gold is not None else {})

    @property
    def _outsiders(self) -> Set:
        """The set that never trained: the hold-out, or the test set where there is none."""
        return "holdout" if self._size("holdout") else "test"

    def _leakage(self, before: Params, forget: Scores, outsiders: Scores) -> dict[str, Any]:
        """What two snapshots give away together.

        Args:
            before: the model that the request found.
            forget: the scores of the model after it on the forget data.
            outsiders: its scores on the data that never trained.
        """
        null = self._outsiders
        forgotten = self._pass("forget", before).scores, forget
        leak = leakage(forgotten, (self._pass(null, before).scores, outsiders))
        return {
            "leakage_against": null,
            "leakage_auc": leak.auc.value,
            "leakage_auc_low": leak.auc.low,
            "leakage_auc_high": leak.auc.high,
            **_rates("leakage_tpr", leak.tpr),
        }

    def of_stored(self, stored: Mapping[Set, Scores], before: Params) -> dict[str, Any]:
        """What stored scores of Retrain give together with the model that the request found.

        Args:
            stored: on forget data, and on test or hold-out data, in the order of this evaluation's sets.
            before: the model that the request found.

        Returns:
            The exposure, and the fields that need both: two-snapshot leakage, and the verdict against the hold-out.
        """
        forget, null = stored["forget"], self._outsiders
        measures = _exposure(forget, stored[null], null) | self._leakage(before, forget, stored[null])
        if self._size("holdout"):
            measures |= self._against_holdout(forget, stored["holdout"], before)
        return measures

    def measures(self, by_set: Mapping[Set, Scores | None], attacks: Sequence[str]) -> dict[str, Any]:
        """Every measure of one model that its scores give by themselves, without Original's part in the verdict.

        Args:
            by_set: the scores on each of `SETS`; None for a set that is empty.
            attacks: names of `ATTACKS`.
        """
        forget, holdout = by_set["forget"], by_set["holdout"]
        null = self._against_holdout(forget, holdout, None) if forget and holdout else {}
        return measures_of(by_set, attacks, self.seed) | null

    def labels(self, name: Set) -> npt.NDArray[np.int64]:
        """The labels of a set, (N,), as `Scores` has them."""
        labels = self.examples(name)[1]
        if labels.dim() > 1:
            return np.full(len(labels), SEQUENCE, dtype=np.int64)
        return labels.cpu().numpy()

    def one_run_audit(self, params: Params, before: Params | None = None) -> dict[str, Any]:
        """The one-run audit of a model by the canaries of the clients that leave; nothing where they have none.

        Args:
            params: the model to judge.
            before: the model that the request found, which must be caught; None where that is the model to judge.
        """
        if self.canaries is None:
            return {}
        original = None if before is None else self._canary_scores(self.canaries, before)
        return fields_of(self.canaries.audit(self._canary_scores(self.canaries, params), original))

    def _canary_scores(self, canaries: Canaries, params: Params) -> dict[str, Floats]:
        """The score phi of each canary, by kind."""
        scores = {}
        for kind, canary_set in canaries.sets.items():
            at = canary_set.at
            make = partial(make_pass, self.model, params, self.data.x[at], self.data.y[at])
            scores[kind] = self.passes.get(params, ("canaries", fingerprint({"at": at})), make).scores.phi
        return scores

    def distance(self, one: Params, other: Params) -> dict[str, Any]:
        """How far two models lie apart on the forget data: the mean Jensen-Shannon divergence, in nats."""
        if not self._size("forget"):
            return {}
        x, _ = self.examples("forget")
        passes = [(params, self._pass("forget", params)) for params in (one, other)]
        return {"forget_js": float(js_between(self.model, passes[0], passes[1], x).mean())}

    def true_logits(self, params: Params) -> dict[str, Any]:
        """The density of the true class's logit on the forget data: what the teacher's v is measured against."""
        heights, edges = np.histogram(self._pass("forget", params).true_logits, BINS, density=True)
        return {
            "true_logits": {
                "edges": [round(float(e), 5) for e in edges],
                "density": [round(float(h), 5) for h in heights],
            }
        }

    def relearned(self, params: Params, task: Task, epochs: int) -> list[float]:
        """The forget accuracy before and after each epoch of training on the forget data again, in percent.

        Args:
            params: the model to begin with.
            task: how it trains; one call is one epoch.
            epochs: how many.
        """
        x, y = self.examples("forget")
        curve = [self.accuracy("forget", params) or 0.0]
        for epoch in range(epochs):
            seed = Address(self.seed, "relearn", epoch).seed_for("server")
            mine = Examples.unmarked(x, y, self.data.dataset.look)
            params = run_client(self.model, task, mine, {"start": params}, seed).params
            curve.append(accuracy(self.model, params, x, y))  # a model that nothing else looks at
        return curve

    def judge(self, params: Params, original: Params | None = None) -> dict[str, Any]:
        """Every measure of one model that needs no second model, but for Original's part in the verdict.

        Args:
            params: the model to judge.
            original: the model that the request found; the hold-out test must catch it to call anything forgotten.
        """
        by_set = {name: self._scores(name, params) for name in SETS}
        measures = measures_of(by_set, self.attacks, self.seed)
        forget, holdout = by_set["forget"], by_set["holdout"]
        if forget and holdout:
            measures |= self._against_holdout(forget, holdout, original)
        if self.trigger:
            measures["backdoor_asr"] = self._backdoor(self.trigger, params)
            measures["backdoor_images"] = int((self.examples("test")[1] != self.trigger.target).sum())
        return measures

    def _against_holdout(self, forget: Scores, holdout: Scores, original: Params | None) -> dict[str, Any]:
        """The hold-out null: forget data against data of the same clients that never trained."""
        before: Samples | None = None
        if original is not None:
            before = self._pass("forget", original).scores, self._pass("holdout", original).scores
        null = holdout_null(forget, holdout, before, self.margin)
        measures: dict[str, Any] = {"auc": null.auc.value, "auc_low": null.auc.low, "auc_high": null.auc.high}
        if null.change:
            ends = {"": null.change.value, "_low": null.change.low, "_high": null.change.high}
            measures |= {f"auc_change{end}": value for end, value in ends.items()}
        judged = null.trace
        return measures | {
            "auc_p": judged.area.p_above,
            "tail_p": judged.tail,
            "entropy_ks": null.entropy_ks,
            "entropy_ks_p": null.entropy_p,
            "holdout_verdict": judged.verdict,
            "holdout_reason": judged.reason,
            "holdout_margin": judged.margin,
            "holdout_needed": judged.needed,
            "original_auc_low": judged.original_low,
            "forget_size": judged.area.members,
            "holdout_size": judged.area.outsiders,
            "exposed_at_least": null.exposed.at_least,
            "exposed_named": int(null.exposed.named.sum()),
            "holdout_halves": [_half(half) for half in null.halves],
        }

    def _backdoor(self, trigger: Trigger, params: Params) -> float | None:
        """How often the trigger works on the stamped test images, in percent."""
        make = partial(trigger.success, self.model, params, *self.examples("test"))
        return self.passes.number(params, trigger, make)


def _part(at: Tensor, most: int) -> Tensor:
    """At most so many of some positions: all of them, or a random choice that is always the same."""
    if len(at) <= most:
        return at
    generator = torch.Generator().manual_seed(Address(0, "path", 0).seed_for("server"))
    chosen = torch.randperm(len(at), generator=generator)[:most].sort().values
    return at[chosen.to(at.device)]


def _accuracy(scores: Scores | None, positions: int) -> float | None:
    """The share of right predictions, in percent, from whole hits; None without scores."""
    if scores is None:
        return None
    hits = round(float(scores.correct.sum()) * positions)
    return 100 * hits / (len(scores) * positions)


def point_of(by_set: Mapping[Set, Scores | None], positions: int) -> dict[str, float]:
    """The measures of a model that are taken after every round, from its scores; see `Evaluation.point`.

    Args:
        by_set: the scores on `test`, `retain_part`, `forget` and `holdout`; None for a set that is empty.
        positions: predictions for each example.
    """
    sets: dict[str, Set] = {"test": "test", "retain": "retain_part", "forget": "forget", "holdout": "holdout"}
    accuracies = {f"{name}_acc": _accuracy(by_set[one], positions) for name, one in sets.items()}
    measures = {key: value for key, value in accuracies.items() if value is not None}
    forget, holdout = by_set["forget"], by_set["holdout"]
    if forget and holdout:
        measures["auc"] = auc(forget.phi, holdout.phi).value
    return measures


def measures_of(by_set: Mapping[Set, Scores | None], attacks: Sequence[str], seed: int) -> dict[str, Any]:
    """Every measure of one model that its per-example scores give.

    Args:
        by_set: the scores on each of `SETS`; None for a set that is empty.
        attacks: names from `ATTACKS`.
        seed: of what attacks draw.

    Returns:
        The measures by their keys in a row of `results.json`.
    """
    measures: dict[str, Any] = {}
    for name in SETS:
        scores = by_set[name]
        measures[f"{name}_acc"] = 100 * float(scores.correct.mean()) if scores else None
    measures |= {f"{name}_size": len(scores) for name in SETS if (scores := by_set[name])}
    for name in SETS:
        scores = by_set[name]
        measures[f"{name}_loss"] = float(scores.loss.mean()) if scores else None
    test, retain, forget, holdout = (by_set[name] for name in SETS)
    if test and retain and forget:
        measures |= {f"mia_{name}": ATTACKS[name](retain, test, forget, seed=seed) for name in attacks}
        measures |= _exposure(forget, holdout or test, "holdout" if holdout else "test")
        measures["entropy"] = _densities({"forget": forget, "test": test})
    return measures


def _half(judged: Trace) -> dict[str, Any]:
    """The verdict against one half of the hold-out."""
    ends = judged.area.interval()
    return {
        "verdict": judged.verdict,
        "reason": judged.reason,
        "auc": ends.value,
        "auc_low": ends.low,
        "auc_high": ends.high,
        "holdout_size": judged.area.outsiders,
    }


def _exposure(forget: Scores, null: Scores, against: str) -> dict[str, Any]:
    """How well phi tells the forget data from data that never trained, and how well at a low FPR."""
    curve = roc(forget.phi, null.phi)
    measures = {"exposed_against": against} | _rates("tpr", map(curve.tpr_at, FPRS))
    tpr = [float(curve.tpr[int(np.searchsorted(curve.fpr, f, side="right")) - 1]) for f in POINTS]
    return measures | {"roc": {"fpr": [round(float(f), 6) for f in POINTS], "tpr": [round(t, 5) for t in tpr]}}


def _rates(name: str, rates: Iterable[TprAt]) -> dict[str, Any]:
    """The TPR at each FPR, its bounds, whether the outsiders suffice for it, and how large the true FPR may be."""
    measures: dict[str, Any] = {}
    for at in rates:
        key = f"{name}_at_{at.asked:g}"
        measures |= {key: at.tpr.value, f"{key}_low": at.tpr.low, f"{key}_high": at.tpr.high}
        measures |= {f"{key}_enough": at.enough, f"{key}_fpr_high": at.fpr.high}
    return measures


def _densities(sets: dict[str, Scores]) -> dict[str, Any]:
    """Histograms of the predictive entropy, as densities over the same bins."""
    top = max(float(scores.entropy.max()) for scores in sets.values()) or 1.0
    edges = np.linspace(0, top, BINS + 1)
    densities: dict[str, Any] = {"edges": [round(float(e), 5) for e in edges]}
    for name, scores in sets.items():
        heights, _ = np.histogram(scores.entropy, edges, density=True)
        densities[name] = [round(float(h), 5) for h in heights]
    return densities


MEASURES: dict[str, Metric] = {  # what takes a model and the sets themselves; the rest is in `fedquit.audit.metrics`
    "accuracy": Metric("right predictions on test, retain, forget and hold-out data, in percent", accuracy),
    "loss": Metric("mean cross-entropy on the same data, in nats", score_examples),
    "price_of_forgetting": Metric(
        "rise of the retained clients' mean loss through unlearning", Evaluation.price_of_forgetting
    ),
    "entropy": Metric("densities of the predictive entropy on forget and test data", _densities),
    "true_logits": Metric("density of Original's true-class logits on the forget data", Evaluation.true_logits),
}
