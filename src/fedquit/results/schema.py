# SPDX-License-Identifier: Apache-2.0
"""The schema of `results.json`: which fields a row has, which of them are measures, and how a measure is averaged.

A field is never renamed, and a new one does not raise the number of the schema. Every field but those of `REQUIRED` is
optional: older results lack some, and what this version does not know is kept as it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

SCHEMA = 1

Row = Mapping[str, Any]  # one phase of one request, as `results.json` has it

REQUIRED: Mapping[str, type] = {"method": str, "phase": str, "request": int, "clients": list}
ACCURACIES = ("test_acc", "retain_acc", "forget_acc")  # a row without any of these fields measures nothing

PHASES = {
    "original": "Original",
    "retrained": "Retrained",
    "unlearned": "Unlearned",
    "recovered": "Recovered",
}
NATURAL = "natural"  # the phase of the control: Natural for as many rounds as the method took
AGAIN = "retrained again"  # the phase of Retrain with another seed, in comparisons only


@dataclass(frozen=True)
class Measure:
    """A number of a row: what it is called, its unit, and over what it may be averaged.

    Attributes:
        key: The field of the row.
        label: The heading of a column.
        unit: `%`, `share` (0 to 1), `nats`, `B`, `FLOP`, `s`, or what is counted.
        over_recoveries: Whether several recoveries of one request are averaged; if not, the first one's number stands.
        over_requests: Whether several requests are averaged; the ends of intervals are not.
        compared: Whether its gap to Retrain is part of a comparison.
    """

    key: str
    label: str
    unit: str
    over_recoveries: bool = True
    over_requests: bool = True
    compared: bool = False


def _rate(key: str, label: str) -> tuple[Measure, ...]:
    """A share with the ends of its interval, which are means over recoveries but not over requests."""
    ends = {"low": "lower end", "high": "upper end"}
    limits = (Measure(f"{key}_{end}", f"{label}, {words}", "share", over_requests=False) for end, words in ends.items())
    return (Measure(key, label, "share"), *limits)


def _tpr(key: str, label: str) -> tuple[Measure, ...]:
    """A TPR at an FPR with its bounds, and how large the true FPR of the threshold may be."""
    return (
        *_rate(key, label),
        Measure(f"{key}_fpr_high", f"{label}, upper end of the FPR", "share", over_requests=False),
    )


def _verdict(key: str, label: str, unit: str) -> Measure:
    """A part of a verdict, which is that of the first recovery and is not averaged."""
    return Measure(key, label, unit, over_recoveries=False, over_requests=False)


def _cost(key: str, label: str, unit: str) -> Measure:
    """Costs and counts of several recoveries are those of the first."""
    return Measure(key, label, unit, over_recoveries=False)


def _canaries(kind: str) -> Iterator[Measure]:
    """The one-run audit by canaries of one kind: of the first recovery, and of no mean over requests."""
    names = {
        "canaries": ("canaries", "canaries"),
        "guesses": ("guesses", "guesses"),
        "correct": ("correct guesses", "guesses"),
        "epsilon_low": ("epsilon, lower bound", "nats"),
        "gain_high": ("gain of the attack, upper bound", "nats"),
        "p": ("p-value", "share"),
        "delta": ("delta", "share"),
        "confidence": ("confidence", "share"),
    }
    for name, (label, unit) in names.items():
        title = f"{kind.capitalize()} canaries: {label}"
        yield Measure(f"canary_{kind}_{name}", title, unit, over_recoveries=False, over_requests=False)


CANARY_KINDS = ("natural", "mislabelled")
RETAIN_PART = 10_000  # retain examples at most, drawn once, on which a model is evaluated after every round
ON_PATH = {"test_acc": "Test", "retain_acc": "Retain", "forget_acc": "Forget", "holdout_acc": "Hold-out"}


def _on_path() -> tuple[Measure, ...]:
    """What is read from the accuracies round by round: Natural at equal rounds, means over windows of rounds."""
    natural = [Measure(f"natural_{key}", f"Natural: {label}", "%") for key, label in ON_PATH.items()]
    last = [Measure(f"{key}_last", f"{label}, last rounds", "%") for key, label in ON_PATH.items()]
    natural += [Measure(f"natural_{key}_last", f"Natural: {label}, last rounds", "%") for key, label in ON_PATH.items()]
    after = [
        Measure(f"{key}_after_{end}", f"{label}, {end} rounds after the stop", "%")
        for key, label in ON_PATH.items()
        for end in (5, 10, 20)
    ]
    auc = Measure("natural_auc", "Natural: AUC against hold-out", "share")
    longer = [Measure(f"retrain_longer_{key}", f"Retrain, longer: {label}", "%") for key, label in ON_PATH.items()]
    longer += [Measure(f"{one.key}_last", f"{one.label}, last rounds", "%") for one in longer]
    longer.append(Measure("retrain_longer_auc", "Retrain, longer: AUC against hold-out", "share"))
    return (*natural, auc, *longer, *last, _cost("last_rounds", "Rounds averaged", "rounds"), *after)


_TABLE = (
    Measure("test_acc", "Test", "%", compared=True),
    Measure("retain_acc", "Retain", "%", compared=True),
    Measure("forget_acc", "Forget", "%", compared=True),
    Measure("holdout_acc", "Hold-out", "%"),
    Measure("test_loss", "Test loss", "nats"),
    Measure("retain_loss", "Retain loss", "nats"),
    Measure("forget_loss", "Forget loss", "nats"),
    Measure("holdout_loss", "Hold-out loss", "nats"),
    Measure("mia_song_svc", "MIA Song", "%", compared=True),
    Measure("mia_yeom", "MIA Yeom", "%", compared=True),
    Measure("mia_song_correctness", "Correctness", "%", compared=True),
    Measure("mia_song_confidence", "Confidence", "%", compared=True),
    Measure("mia_song_entropy", "Entropy", "%", compared=True),
    Measure("mia_song_modified_entropy", "Modified entropy", "%", compared=True),
    Measure("backdoor_asr", "Backdoor", "%", compared=True),
    *_tpr("tpr_at_0.05", "TPR at 5 % FPR"),
    *_tpr("tpr_at_0.01", "TPR at 1 % FPR"),
    *_tpr("tpr_at_0.001", "TPR at 0.1 % FPR"),
    *_rate("auc", "AUC against hold-out"),
    *_rate("auc_change", "AUC against hold-out, less Original's"),
    _verdict("auc_p", "p-value of an AUC above one half", "share"),
    _verdict("tail_p", "p-value of the highest scores", "share"),
    _verdict("original_auc_low", "AUC of Original, lower bound", "share"),
    _verdict("holdout_margin", "Margin of the AUC", "share"),
    _verdict("holdout_needed", "Hold-out samples needed", "samples"),
    Measure("test_size", "Test samples", "samples", over_recoveries=False),
    Measure("retain_size", "Retained samples", "samples", over_recoveries=False),
    Measure("forget_size", "Forgotten samples", "samples", over_recoveries=False),
    Measure("holdout_size", "Hold-out samples", "samples", over_recoveries=False),
    Measure("backdoor_images", "Stamped test images", "samples", over_recoveries=False),
    _verdict("exposed_at_least", "Forgotten samples exposed, at least", "samples"),
    _verdict("exposed_named", "Forgotten samples named", "samples"),
    Measure("entropy_ks", "KS distance of the entropies", "share"),
    Measure("entropy_ks_p", "p-value of the KS distance", "share"),
    *_rate("leakage_auc", "Two snapshots, AUC"),
    *_tpr("leakage_tpr_at_0.05", "Two snapshots, TPR at 5 % FPR"),
    *_tpr("leakage_tpr_at_0.01", "Two snapshots, TPR at 1 % FPR"),
    *_tpr("leakage_tpr_at_0.001", "Two snapshots, TPR at 0.1 % FPR"),
    *(measure for kind in CANARY_KINDS for measure in _canaries(kind)),
    Measure("forget_js", "JS divergence", "nats"),
    *_on_path(),
    Measure("price_of_forgetting", "Price of forgetting", "nats", over_recoveries=False),
    Measure("relearn_ratio", "Relearning", "× Retrain", over_recoveries=False),
    _cost("rounds", "Rounds", "rounds"),
    _cost("seconds", "Time", "s"),
    _cost("down_bytes", "Downloads", "B"),
    _cost("up_bytes", "Uploads", "B"),
    _cost("participations", "Participations", "replies"),
    _cost("client_epochs", "Client epochs", "epochs"),
    _cost("server_epochs", "Server epochs", "epochs"),
    _cost("server_storage_bytes", "Server storage", "B"),
    _cost("client_storage_bytes", "Client storage", "B"),
    _cost("client_flops", "Client FLOPs", "FLOP"),
    _cost("server_flops", "Server FLOPs", "FLOP"),
    _cost("budget", "Budget", "share"),
    _cost("budget_spent", "Spent", "share"),
)
MEASURES: Mapping[str, Measure] = {measure.key: measure for measure in _TABLE}
TPRS = tuple(key.removesuffix("_fpr_high") for key in MEASURES if key.endswith("_fpr_high"))
COMPARED = tuple(measure.key for measure in _TABLE if measure.compared)
DISTANCE = "forget_js"  # a distance to Retrain by itself, from both models' predictions
AVERAGED = {"retain": "retain_acc", "forget": "forget_acc", "song": "mia_song_svc", "yeom": "mia_yeom"}  # in Avg. gap


def labels(*keys: str) -> dict[str, str]:
    """The headings of some measures, by key and in this order."""
    return {key: MEASURES[key].label for key in keys}


GAPS = labels(*AVERAGED.values())
THRESHOLDS = labels("mia_song_correctness", "mia_song_confidence", "mia_song_entropy", "mia_song_modified_entropy")


@dataclass(frozen=True)
class CostKind:
    """A cost of a phase: the fields that add up to it, and how the phases of a request add up."""

    label: str
    unit: str
    fields: tuple[str, ...]
    largest: bool = False  # storage: the larger phase counts, not the sum


COSTS: Mapping[str, CostKind] = {
    "bytes": CostKind("Communication", "B", ("down_bytes", "up_bytes")),
    "flops": CostKind("Computing", "FLOP", ("client_flops", "server_flops")),
    "epochs": CostKind("Epochs", "epochs", ("client_epochs", "server_epochs")),
    "client_epochs": CostKind("Client epochs", "epochs", ("client_epochs",)),
    "server_storage_bytes": CostKind("Server storage", "B", ("server_storage_bytes",), largest=True),
    "client_storage_bytes": CostKind("Client storage", "B", ("client_storage_bytes",), largest=True),
    "seconds": CostKind("Time", "s", ("seconds",)),
}


WORDS = (  # fields of a row that hold a word or a sentence, where they are
    *("holdout_verdict", "holdout_reason", "exposed_against", "leakage_against"),
    *(f"canary_{kind}_{name}" for kind in CANARY_KINDS for name in ("verdict", "sentence")),
)


def number(value: object) -> float | None:
    """A finite number, or None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer beyond what a float can hold
        return None


def numbers(value: object) -> list[float] | None:
    """A list of finite numbers, or None for anything else."""
    if not isinstance(value, list):
        return None
    known = [finite for item in value if (finite := number(item)) is not None]
    return known if len(known) == len(value) else None


def numbers_in(value: object, *, words: bool = False) -> dict[str, Any]:
    """The numbers and truth values of a JSON object and of the objects in it; everything else is left out.

    Args:
        value: Anything; what is no object counts as an empty one.
        words: Whether strings are kept as well.
    """
    known: dict[str, Any] = {}
    for key, item in value.items() if isinstance(value, dict) else ():
        if isinstance(item, dict):
            known[str(key)] = numbers_in(item, words=words)
        elif isinstance(item, bool) or (words and isinstance(item, str)):
            known[str(key)] = item
        elif (finite := number(item)) is not None:
            known[str(key)] = finite
    return known


def fault_of_row(row: object) -> str:
    """What keeps a row from being read, in words; "" for a row that can be read."""
    if not isinstance(row, dict):
        return "is not an object"
    return next(_faults_of_row(row), "")


def _faults_of_row(row: Row) -> Iterator[str]:
    for key, kind in REQUIRED.items():
        if not isinstance(row.get(key), kind):
            yield f"has no usable {key}"
            return
    if not all(isinstance(client, int) for client in row["clients"]):
        yield "has no usable clients"
    for key in WORDS:
        if not isinstance(row.get(key), str | None):
            yield f"has no usable {key}"
    if not any(key in row for key in ACCURACIES):
        yield f"has no measure: none of {', '.join(ACCURACIES)}"
    for key in COMPARED:
        percentage = number(row.get(key))
        if percentage is not None and not -1e-9 <= percentage <= 100 + 1e-9:
            yield f"has {key} {percentage:g}, which is not a percentage"


def fault_of_results(results: Mapping[str, Any]) -> str:
    """What keeps results from being read, in words; "" for results that can be read."""
    for key, kind in (("recipe", dict), ("versions", dict), ("rows", list)):
        if not isinstance(results.get(key), kind):
            return f"it has no usable {key}"
    for index, row in enumerate(results["rows"]):
        if fault := fault_of_row(row):
            return f"row {index} {fault}"
    return ""
