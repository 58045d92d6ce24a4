# SPDX-License-Identifier: Apache-2.0
"""One method over all its requests: the line that every table prints."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from fedquit.inference.durable import DurableVerdict
from fedquit.inference.gaps import ClientGap, GapVerdict
from fedquit.inference.leaving import LeavingVerdict
from fedquit.results import quantities
from fedquit.results.averages import mean
from fedquit.results.path import AFTER, LAST
from fedquit.results.quantities import PairedDifference
from fedquit.results.references import mean_evidence
from fedquit.results.requests import RequestRows
from fedquit.results.schema import COMPARED, DISTANCE, ON_PATH, number, numbers_in
from fedquit.results.verdicts import read_clients, read_durable, read_leaving, read_verdicts
from fedquit.results.words import holdout_verdict

if TYPE_CHECKING:
    from fedquit.results.comparison import Comparison
    from fedquit.results.folders import RunResults

_ASIDE = (  # settings in which runs of one method may differ
    *("title", "seed", "retrain_seed", "request", "engine", "method.name"),
    # they add to what is known of a recovery, and do not change it
    *("recover.follow", "recover.control", "recover.retrain_longer"),
)


@dataclass(frozen=True)
class MethodSummary:
    """Means over targets and seeds, and gaps to the Retrain of the same target and seed.

    The fields are those of a line of `table` in `comparison.json`; they are never renamed. What was not measured is
    missing in the mappings and None elsewhere.

    Attributes:
        method: The name of the line.
        phase: `recovered` for a method; `original`, `retrained`, or `floor` for Retrain with another seed.
        runs: The requests that came through.
        failures: The reasons of those that did not, each once.
        means: The measures themselves, in percent.
        gaps: Mean absolute gaps to Retrain, in points; `forget_js` is a distance by itself, in nats.
        deviations: Standard deviations of the absolute gaps, with more than one request.
        unlearned: The measures before recovery.
        recovery_rounds: Mean over the requests.
        bytes: Both directions, of unlearning and recovery.
        client_epochs: Of the clients alone.
        flops: Of clients and server.
        bytes_saved: Retrain's cost divided by the method's; None where it costs nothing, or nobody counted.
        epochs_saved: The same in epochs of clients and server.
        flops_saved: The same in FLOPs of clients and server.
        avg_gap: The paper's average of four gaps, in points.
        tug_of_war: The mean over the requests.
        tug_of_war_mia: With Yeom's attack in place of the forget accuracy.
        references: What needs many models: means, and on forget, retain and test data the test's verdict.
        budgets: By share of Retrain's bytes: how many runs it pays for, what they spent, their means and gaps.
        against_first: Its gaps less those of the first method, target by target.
        epochs: Of clients and server.
        spread: The Retrain-vs-Retrain spread of each measure, and of `avg_gap`, over the same requests.
        tug_of_war_spread: Of two Retrains.
        tug_of_war_mia_spread: Of two Retrains.
        bytes_percent: Of Retrain's.
        computing_percent: In FLOPs, or in epochs where nobody counted FLOPs.
        rounds_from_request: Mean rounds of unlearning and recovery together.
        on_path: Test, retain, forget and hold-out accuracy at the recovery's stop, in percent.
        on_path_gaps: Their mean absolute gaps to Retrain, in points.
        natural: Natural's measures after as many rounds from the request on, by `test_acc` and so on, in percent.
        natural_gaps: Natural's mean absolute gaps to Retrain at these rounds, in points.
        last: The same accuracies as means over the last rounds of the path, ten at most.
        last_rounds: How many rounds these are means over: the fewest of all requests.
        last_gaps: Their mean absolute gaps to the means over Retrain's last rounds, in points.
        natural_last: Natural's accuracies as means over the same rounds as `last`.
        natural_last_gaps: Their mean absolute gaps to the means over Retrain's last rounds, in points.
        retrain_longer: Retrain's accuracies after as many rounds in all as the method has, where it went on.
        retrain_longer_last: The same as means over the same rounds as `last`.
        after: By "5", "10" and "20": the accuracies over five rounds that end so many rounds after the stop.
        price_of_forgetting: The mean rise of the retained clients' loss through unlearning, in nats.
        sample_memory: Mean over the requests, in points; see `quantities.sample_memory`.
        distribution_knowledge: Mean over the requests, in points.
        holdout_verdicts: How many requests have each verdict against the hold-out, after recovery.
        seconds: Of unlearning and recovery; not stored in `comparison.json`.
        verdicts: By measure, and for `avg_gap`: whether the gap to Retrain is a difference; a comparison sets them.
        leaving: By measure: whether the method differs from Natural at equal rounds; a comparison sets them.
        durable: Whether forget and hold-out accuracy stay at Retrain's after the stop; a comparison sets it.
        clients: By target, as "client 3": its gap in forget accuracy against its own Retrains; a comparison sets them.
        extra: Fields that this version does not know.
    """

    method: str
    phase: str
    runs: int = 0
    failures: tuple[str, ...] = ()
    means: Mapping[str, float] = field(default_factory=dict)
    gaps: Mapping[str, float] = field(default_factory=dict)
    deviations: Mapping[str, float] = field(default_factory=dict)
    unlearned: Mapping[str, float] = field(default_factory=dict)
    recovery_rounds: float | None = None
    bytes: float | None = None
    client_epochs: float | None = None
    flops: float | None = None
    bytes_saved: float | None = None
    epochs_saved: float | None = None
    flops_saved: float | None = None
    avg_gap: float | None = None
    tug_of_war: float | None = None
    tug_of_war_mia: float | None = None
    references: Mapping[str, Any] = field(default_factory=dict)
    budgets: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    against_first: Mapping[str, PairedDifference] = field(default_factory=dict)
    epochs: float | None = None
    spread: Mapping[str, float] = field(default_factory=dict)
    tug_of_war_spread: float | None = None
    tug_of_war_mia_spread: float | None = None
    bytes_percent: float | None = None
    computing_percent: float | None = None
    price_of_forgetting: float | None = None
    sample_memory: float | None = None
    distribution_knowledge: float | None = None
    holdout_verdicts: Mapping[str, float] = field(default_factory=dict)
    rounds_from_request: float | None = None
    on_path: Mapping[str, float] = field(default_factory=dict)
    on_path_gaps: Mapping[str, float] = field(default_factory=dict)
    natural: Mapping[str, float] = field(default_factory=dict)
    natural_gaps: Mapping[str, float] = field(default_factory=dict)
    last: Mapping[str, float] = field(default_factory=dict)
    last_rounds: float | None = None
    last_gaps: Mapping[str, float] = field(default_factory=dict)
    natural_last: Mapping[str, float] = field(default_factory=dict)
    natural_last_gaps: Mapping[str, float] = field(default_factory=dict)
    retrain_longer: Mapping[str, float] = field(default_factory=dict)
    retrain_longer_last: Mapping[str, float] = field(default_factory=dict)
    after: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    seconds: float | None = None
    verdicts: Mapping[str, GapVerdict] = field(default_factory=dict)
    leaving: Mapping[str, LeavingVerdict] = field(default_factory=dict)
    durable: DurableVerdict | None = None
    clients: Mapping[str, ClientGap] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """For JSON, without the seconds: the same comparison gives the same table, however long it took."""
        fields = dataclasses.asdict(self)
        extra = fields.pop("extra")
        del fields["seconds"]
        return {**extra, **fields}

    @staticmethod
    def read(stored: Mapping[str, Any]) -> MethodSummary:
        """From JSON: what is missing or damaged counts as not measured, and unknown fields are kept in `extra`."""
        known: dict[str, Any] = {}
        for spec in dataclasses.fields(MethodSummary):
            if spec.name in stored and spec.name in _READERS:
                known[spec.name] = _READERS[spec.name](stored[spec.name])
            elif spec.name in stored and spec.name not in ("method", "phase", "extra"):
                known[spec.name] = number(stored[spec.name])
        names = {spec.name for spec in dataclasses.fields(MethodSummary)}
        extra = {key: value for key, value in stored.items() if key not in names}
        return MethodSummary(str(stored.get("method")), str(stored.get("phase", "recovered")), extra=extra, **known)


def _strings(stored: object) -> tuple[str, ...]:
    return tuple(item for item in stored if isinstance(item, str)) if isinstance(stored, list) else ()


def _pairs(stored: object) -> dict[str, PairedDifference]:
    items = stored.items() if isinstance(stored, dict) else ()
    return {str(key): pair for key, value in items if (pair := PairedDifference.read(value))}


_READERS: Mapping[str, Any] = {
    "runs": lambda stored: int(number(stored) or 0),
    "failures": _strings,
    "against_first": _pairs,
    "references": partial(numbers_in, words=True),
    "verdicts": read_verdicts,
    "leaving": read_leaving,
    "durable": read_durable,
    "clients": read_clients,
    **dict.fromkeys(("means", "gaps", "deviations", "unlearned", "spread", "budgets"), numbers_in),
    "holdout_verdicts": numbers_in,
    **dict.fromkeys(("on_path", "on_path_gaps", "natural", "natural_gaps"), numbers_in),
    **dict.fromkeys(("last", "last_gaps", "natural_last", "natural_last_gaps", "after"), numbers_in),
    **dict.fromkeys(("retrain_longer", "retrain_longer_last"), numbers_in),
}


def summarise(
    method: str,
    requests: Sequence[RequestRows],
    *,
    failures: Sequence[str] = (),
    evidence: Sequence[Mapping[str, Any]] = (),
    first: Sequence[RequestRows] | None = None,
) -> MethodSummary:
    """The line of one method.

    Args:
        method: Its name.
        requests: All that it served under the same settings.
        failures: Why others did not come through.
        evidence: For each run with reference models, what they say.
        first: The requests of the method that it is compared with, target by target.

    Returns:
        Every derived quantity, in the units of `MethodSummary`.
    """
    if not requests:
        return MethodSummary(method, "recovered", failures=tuple(failures))
    sizes, deviations = mean_gaps(requests, "recovered")
    average = quantities.average_gap(sizes)
    return MethodSummary(
        method=method,
        phase="recovered",
        runs=len(requests),
        failures=tuple(failures),
        means=mean_levels(requests, "recovered"),
        gaps=sizes,
        deviations=deviations,
        unlearned=mean_levels(requests, "unlearned"),
        recovery_rounds=mean(request.get("recovered", "rounds") for request in requests),
        bytes=quantities.mean_cost(requests, "bytes"),
        client_epochs=quantities.mean_cost(requests, "client_epochs"),
        epochs=quantities.mean_cost(requests, "epochs"),
        flops=quantities.mean_cost(requests, "flops"),
        bytes_saved=quantities.times_cheaper(requests, "bytes"),
        epochs_saved=quantities.times_cheaper(requests, "epochs"),
        flops_saved=quantities.times_cheaper(requests, "flops"),
        bytes_percent=quantities.cost_share(requests, "bytes"),
        computing_percent=quantities.computing_share(requests),
        seconds=quantities.mean_cost(requests, "seconds"),
        price_of_forgetting=mean(request.get("unlearned", "price_of_forgetting") for request in requests),
        sample_memory=mean(quantities.sample_memory(request, "recovered") for request in requests),
        distribution_knowledge=mean(quantities.distribution_knowledge(request, "recovered") for request in requests),
        holdout_verdicts=count_verdicts(requests, "recovered"),
        rounds_from_request=mean(request.rounds_from_request for request in requests),
        on_path=path_levels(requests),
        on_path_gaps=path_gaps(requests),
        natural=natural_levels(requests),
        natural_gaps=natural_gaps(requests),
        last=path_levels(requests, "_last"),
        last_rounds=min((request.get("recovered", "last_rounds") or 0.0 for request in requests), default=None),
        last_gaps=path_gaps(requests, "_last"),
        natural_last=natural_levels(requests, "_last"),
        natural_last_gaps=natural_gaps(requests, "_last"),
        retrain_longer=longer_levels(requests),
        retrain_longer_last=longer_levels(requests, "_last"),
        after={str(end): levels for end in AFTER if (levels := path_levels(requests, f"_after_{end}"))},
        avg_gap=average,
        tug_of_war=quantities.tug_of_war(requests),
        tug_of_war_mia=quantities.tug_of_war(requests, "mia_yeom"),
        tug_of_war_spread=quantities.spread_tug_of_war(requests),
        tug_of_war_mia_spread=quantities.spread_tug_of_war(requests, "mia_yeom"),
        spread=mean_spreads(requests),
        budgets=budget_summaries(requests),
        references=mean_evidence(evidence),
        against_first=differences(requests, first) if first else {},
    )


def summarise_phase(method: str, phase: str, requests: Sequence[RequestRows]) -> MethodSummary:
    """The line of Original, or of Retrain: its means, costs, and gaps to Retrain where it is not Retrain itself.

    Args:
        method: The name of the line.
        phase: `original` or `retrained`.
        requests: Each once, whichever methods served it.
    """
    sizes, deviations = mean_gaps(requests, phase) if phase != "retrained" else ({}, {})
    return MethodSummary(
        method=method,
        phase=phase,
        runs=len(requests),
        means=mean_levels(requests, phase),
        gaps=sizes,
        deviations=deviations,
        avg_gap=quantities.average_gap(sizes),
        sample_memory=mean(quantities.sample_memory(request, phase) for request in requests),
        distribution_knowledge=mean(quantities.distribution_knowledge(request, phase) for request in requests),
        holdout_verdicts=count_verdicts(requests, phase),
        bytes=quantities.mean_cost(requests, "bytes", phase),
        client_epochs=quantities.mean_cost(requests, "client_epochs", phase),
        epochs=quantities.mean_cost(requests, "epochs", phase),
        flops=quantities.mean_cost(requests, "flops", phase),
        seconds=quantities.mean_cost(requests, "seconds", phase),
    )


def count_verdicts(requests: Sequence[RequestRows], phase: str) -> dict[str, float]:
    """How many requests have each verdict against the hold-out, in the short words of every view.

    Args:
        requests: Of one method.
        phase: Whose verdicts.
    """
    counts: dict[str, float] = {}
    for request in requests:
        verdict = holdout_verdict(request.row(phase))
        if verdict:
            counts[verdict] = counts.get(verdict, 0) + 1
    return counts


def mean_levels(requests: Sequence[RequestRows], phase: str) -> dict[str, float]:
    """The mean of each compared measure over the requests that have it, in percent.

    Args:
        requests: Of one method.
        phase: Whose measures.
    """
    means = {key: mean(request.get(phase, key) for request in requests) for key in COMPARED}
    return {key: level for key, level in means.items() if level is not None}


def path_levels(requests: Sequence[RequestRows], suffix: str = "") -> dict[str, float]:
    """The mean of each accuracy of a path over the requests that have it, in percent.

    Args:
        requests: Of one method.
        suffix: "" at the recovery's stop, `_last` over the last rounds, `_after_5` and so on after the stop.
    """
    return _known({key: mean(request.get("recovered", key + suffix) for request in requests) for key in ON_PATH})


def path_gaps(requests: Sequence[RequestRows], suffix: str = "") -> dict[str, float]:
    """The mean absolute gap to Retrain in each accuracy of a path, in points.

    Args:
        requests: Of one method.
        suffix: "" at the recovery's stop and at Retrain's end, `_last` over the last rounds of both.
    """
    measured = {key: quantities.absolute_gap(requests, key + suffix) for key in ON_PATH}
    return {key: gap.mean for key, gap in measured.items() if gap is not None}


def natural_levels(requests: Sequence[RequestRows], suffix: str = "") -> dict[str, float]:
    """Natural's mean accuracies at the rounds of the method, over the requests that have a control.

    Args:
        requests: Of one method.
        suffix: As for `path_gaps`.
    """
    names = {key: f"natural_{key}{suffix}" for key in ON_PATH}
    return _known({key: mean(request.natural.get(name) for request in requests) for key, name in names.items()})


def longer_levels(requests: Sequence[RequestRows], suffix: str = "") -> dict[str, float]:
    """The mean accuracies of Retrain after as many rounds in all, over the requests whose Retrain went on.

    Args:
        requests: Of one method.
        suffix: As for `path_gaps`.
    """
    names = {key: f"retrain_longer_{key}{suffix}" for key in ON_PATH}
    return _known({key: mean(request.retrain_longer.get(name) for request in requests) for key, name in names.items()})


def natural_gaps(requests: Sequence[RequestRows], suffix: str = "") -> dict[str, float]:
    """Natural's mean absolute gap to Retrain at the rounds of the method, in points.

    Args:
        requests: Of one method.
        suffix: As for `path_gaps`.
    """
    sizes = {key: mean(quantities.natural_distance(r, key + suffix) for r in requests) for key in ON_PATH}
    return _known(sizes)


def natural_averaged(lines: Sequence[MethodSummary]) -> bool:
    """Whether method and Natural are to be compared by means over the last rounds: all have them over ten."""
    return all(line.natural_last_gaps and line.last_rounds == LAST for line in lines)


def _known(numbers: Mapping[str, float | None]) -> dict[str, float]:
    return {key: value for key, value in numbers.items() if value is not None}


def mean_gaps(requests: Sequence[RequestRows], phase: str) -> tuple[dict[str, float], dict[str, float]]:
    """The mean absolute gap in each measure, and its standard deviation where there are several requests.

    Args:
        requests: Of one method.
        phase: Whose measures.

    Returns:
        Means and deviations by measure, in points.
    """
    measured = {key: quantities.absolute_gap(requests, key, phase) for key in (*COMPARED, DISTANCE)}
    known = {key: gap for key, gap in measured.items() if gap is not None}
    sizes = {key: gap.mean for key, gap in known.items()}
    deviations = {key: deviation for key, gap in known.items() if (deviation := gap.std) is not None}
    return sizes, deviations


def mean_spreads(requests: Sequence[RequestRows]) -> dict[str, float]:
    """The Retrain-vs-Retrain spread in each measure and in the average gap."""
    spreads = {key: quantities.spread(requests, key) for key in (*COMPARED, DISTANCE, "avg_gap")}
    return {key: size for key, size in spreads.items() if size is not None}


def budget_summaries(requests: Sequence[RequestRows]) -> dict[str, dict[str, float]]:
    """By share of Retrain's bytes: means and gaps over the runs that it pays for, and what was spent."""
    return {f"{share:g}": _at_budget(ended) for share, ended in quantities.at_budgets(requests).items()}


def _at_budget(ended: Sequence[RequestRows]) -> dict[str, float]:
    within = [request for request in ended if quantities.affordable(request)]
    counts: dict[str, float] = {"runs": len(within), "requests": len(ended)}
    spent = quantities.budget_spent(ended)
    summary = summarise("", within)
    optional = {"spent": spent, "rounds": summary.recovery_rounds, "avg_gap": summary.avg_gap}
    known = {key: value for key, value in optional.items() if value is not None}
    gaps = {f"{key}_gap": size for key, size in summary.gaps.items()}
    return counts | known | dict(summary.means) | gaps


def differences(requests: Sequence[RequestRows], first: Sequence[RequestRows]) -> dict[str, PairedDifference]:
    """The gaps of a method less those of the first method, for each measure and for their average.

    Args:
        requests: Of the method.
        first: Of the method that it is compared with.
    """
    pairs = {key: quantities.paired_difference(requests, first, key) for key in (*COMPARED, DISTANCE, "avg_gap")}
    return {key: pair for key, pair in pairs.items() if pair is not None}


@dataclass(frozen=True)
class MethodGroup:
    """All requests that one method served under the same settings, and what their comparison says of them."""

    label: str
    requests: Sequence[RequestRows]
    verdicts: Mapping[str, GapVerdict] = field(default_factory=dict)
    leaving: Mapping[str, LeavingVerdict] = field(default_factory=dict)
    durable: DurableVerdict | None = None
    clients: Mapping[str, ClientGap] = field(default_factory=dict)

    @cached_property
    def summary(self) -> MethodSummary:
        """The line of this method."""
        line = summarise(self.label, self.requests)
        return dataclasses.replace(
            line, verdicts=self.verdicts, leaving=self.leaving, durable=self.durable, clients=self.clients
        )


def group_by_method(runs: Iterable[RunResults], comparisons: Sequence[Comparison] = ()) -> list[MethodGroup]:
    """The requests of all runs by method; settings in which the runs of a method differ become part of its name.

    Args:
        runs: Of any methods.
        comparisons: Those that the runs lie in; the verdicts of a single one hold for groups with all its runs.
    """
    by_method: dict[str, list[tuple[dict[str, str], RequestRows]]] = {}
    for run in runs:
        settings = _flat(run.recipe)
        for request in run.requests:
            by_method.setdefault(request.method, []).append((settings, request))
    groups: dict[str, list[RequestRows]] = {}
    for method, requests in by_method.items():
        recipes = [settings for settings, _ in requests]
        keys = dict.fromkeys(key for settings in recipes for key in settings)
        varied = [key for key in keys if len({settings.get(key) for settings in recipes}) > 1]
        for settings, request in requests:
            own = [f"{key.split('.')[-1]}={settings.get(key, 'default')}" for key in varied]
            groups.setdefault(", ".join([method, *own]), []).append(request)
    return [_group(label, requests, comparisons) for label, requests in groups.items()]


def _group(label: str, requests: Sequence[RequestRows], comparisons: Sequence[Comparison]) -> MethodGroup:
    """With the verdicts of the comparison, where it has just these requests of the method."""
    line = comparisons[0].methods.get(label) if len(comparisons) == 1 else None
    if line is None or line.runs != len(requests):
        return MethodGroup(label, requests)
    return MethodGroup(label, requests, line.verdicts, line.leaving, line.durable, line.clients)


def _flat(recipe: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """The settings of a recipe by dotted name, without those in which runs of one method may differ."""
    settings: dict[str, str] = {}
    for key, value in recipe.items():
        name = f"{prefix}{key}"
        if name in _ASIDE:
            continue
        if isinstance(value, dict):
            settings |= _flat(value, f"{name}.")
        else:
            settings[name] = value if isinstance(value, str) else json.dumps(value)
    return settings
