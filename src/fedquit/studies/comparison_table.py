# SPDX-License-Identifier: Apache-2.0
"""What a comparison found: a line for each method, with means over clients and seeds, and gaps to Retrain."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedquit.audit.attacks import ATTACKS
from fedquit.audit.metrics.gaps import Gap, avg_gap, gap, inside_floor, paired
from fedquit.audit.metrics.tug_of_war import tug_of_war
from fedquit.core import ClientId
from fedquit.running.recipe import Recipe
from fedquit.running.rows import Row
from fedquit.studies.many_models import Evidence, is_farther
from fedquit.utils.names import each_named

METRICS = ("test_acc", "retain_acc", "forget_acc", *(f"mia_{name}" for name in ATTACKS), "backdoor_asr")
DISTANCE = "forget_js"  # to Retrain, from both models' predictions
AVERAGED = {"retain": "retain_acc", "forget": "forget_acc", "song": "mia_song_svc", "yeom": "mia_yeom"}

Target = ClientId | tuple[ClientId, ...]  # who leaves in a run: one client, or several together
At = tuple[Target, int]  # a target and a seed
Key = tuple[str, Target, int]  # a method, a target and a seed
Floor = Mapping[At, Row]  # Retrain with another seed


def members(target: Target) -> tuple[ClientId, ...]:
    """The clients of a target."""
    return target if isinstance(target, tuple) else (target,)


def named(target: Target) -> str:
    """As in "client 0", or "clients 0 and 1"."""
    return each_named("client", members(target))


@dataclass(frozen=True)
class Outcome:
    """One method for one target and seed: its rows, or why there are none."""

    method: str
    target: Target
    seed: int
    folder: Path
    rows: tuple[Row, ...] = ()
    failure: str = ""
    evidence: Evidence | None = None  # of many models

    @property
    def key(self) -> Key:
        """Which it is."""
        return self.method, self.target, self.seed

    def at(self, phase: str) -> Row:
        """The row of a phase."""
        return next(row for row in self.rows if row["phase"] == phase)


@dataclass(frozen=True)
class Line:
    """A line of the table: means over targets and seeds, and gaps to the Retrain of the same target and seed."""

    method: str
    phase: str
    runs: int = 0
    failures: tuple[str, ...] = ()
    means: dict[str, float] = dataclasses.field(default_factory=dict)
    # mean absolute difference; `forget_js` is a distance by itself
    gaps: dict[str, float] = dataclasses.field(default_factory=dict)
    deviations: dict[str, float] = dataclasses.field(default_factory=dict)  # of the absolute differences
    unlearned: dict[str, float] = dataclasses.field(default_factory=dict)  # means before recovery
    recovery_rounds: float | None = None
    bytes: float | None = None
    client_epochs: float | None = None
    flops: float | None = None
    bytes_saved: float | None = None  # Retrain's cost divided by the method's; None where it costs nothing
    epochs_saved: float | None = None
    flops_saved: float | None = None
    avg_gap: float | None = None
    tug_of_war: float | None = None  # the mean over runs
    tug_of_war_mia: float | None = None  # with Yeom's attack in place of the forget accuracy
    references: dict[str, Any] = dataclasses.field(default_factory=dict)  # means of what needs many models
    inside_floor: tuple[str, ...] = ()  # gaps no larger than what another seed does to Retrain
    # what each share of Retrain's bytes pays for: means, gaps and the share that was spent, over the runs it pays for
    budgets: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    # its gaps less those of the first method, target by target, for each measure and for their average
    against_first: dict[str, dict[str, float | bool]] = dataclasses.field(default_factory=dict)


def summarised(outcomes: Sequence[Outcome], methods: Sequence[str], floor: Floor) -> Iterator[Line]:
    """The lines of the table: Original, Retrain, Retrain with another seed, and each method."""
    done = [o for o in outcomes if not o.failure]
    pairs = list({(o.target, o.seed): o for o in done}.values())  # Original and Retrain are the same for all methods
    for name, phase in (("original", "original"), ("retrain", "retrained")):
        rows = [o.at(phase) for o in pairs]
        if rows:
            spent = _costs(rows)
            costs = (spent["bytes"], spent["client_epochs"], spent["flops"])
            yield Line(name, phase, len(rows), (), _means(rows), {}, {}, {}, None, *costs)
    noise = [(floor[o.target, o.seed], o.at("retrained")) for o in pairs if (o.target, o.seed) in floor]
    between = _gaps(noise)
    if noise:
        gaps, deviations = _spread(between)
        means = _means([a for a, _ in noise])
        yield Line("retrain again", "floor", len(noise), (), means, gaps, deviations, avg_gap=_average(gaps))
    first: dict[str, dict[At, float]] | None = None
    for name in methods:
        mine = [o for o in done if o.method == name]
        failures = tuple(sorted({o.failure for o in outcomes if o.method == name and o.failure}))
        if not mine:
            yield Line(name, "recovered", failures=failures)
            continue
        each = _each(mine)
        paired_with = {m: _paired(g, first[m]) for m, g in each.items() if m in first} if first else {}
        first = first or each
        against = {m: found for m, found in paired_with.items() if found}
        yield _line(name, mine, failures, {m: found.mean for m, found in between.items()}, against)


def _line(
    name: str,
    mine: Sequence[Outcome],
    failures: tuple[str, ...],
    floor: dict[str, float],
    against_first: dict[str, dict[str, float | bool]],
) -> Line:
    gold = [o.at("retrained") for o in mine]
    unlearned, recovered = [o.at("unlearned") for o in mine], [o.at("recovered") for o in mine]
    gaps, deviations = _spread(_gaps(list(zip(recovered, gold, strict=True))))
    whole = _costs(gold)
    spent = {c: _costs(unlearned)[c] + _costs(recovered)[c] for c in whole}
    each = _each(mine)
    average = _average(gaps)
    judged = {**gaps, "avg_gap": average} if average is not None else gaps
    noise = {**floor, "avg_gap": both} if (both := _average(floor)) is not None else floor
    return Line(
        name,
        "recovered",
        len(mine),
        failures,
        _means(recovered),
        gaps,
        deviations,
        _means(unlearned),
        _mean(r["rounds"] for r in recovered),
        spent["bytes"],
        spent["client_epochs"],
        spent["flops"],
        bytes_saved=_saved(whole["bytes"], spent["bytes"]),
        epochs_saved=_saved(whole["client_epochs"], spent["client_epochs"]),
        flops_saved=_saved(whole["flops"], spent["flops"]),
        avg_gap=average,
        tug_of_war=_tug(each, "forget_acc"),
        tug_of_war_mia=_tug(each, "mia_yeom"),
        references=_references([o.evidence for o in mine if o.evidence]),
        inside_floor=tuple(m for m, g in judged.items() if m in noise and inside_floor(g, noise[m])),
        budgets=_budgets(mine),
        against_first=against_first,
    )


def _budgets(mine: Sequence[Outcome]) -> dict[str, dict[str, float]]:
    """By the share of Retrain's bytes; a run whose unlearning alone costs more is not in the means."""
    bought: dict[float, list[tuple[Row, Row]]] = {}
    for o in mine:
        for row in (row for row in o.rows if row["phase"] == "budget"):
            paid = [(row, o.at("retrained"))] if row["budget_spent"] <= row["budget"] + 1e-9 else []
            bought.setdefault(row["budget"], []).extend(paid)
    return {f"{share:g}": _within(rows) for share, rows in sorted(bought.items())}


def _within(rows: Sequence[tuple[Row, Row]]) -> dict[str, float]:
    if not rows:
        return {"runs": 0}
    gaps, _ = _spread(_gaps(rows))
    found = {"runs": len(rows), "spent": _mean(row["budget_spent"] for row, _ in rows), **_means([a for a, _ in rows])}
    average = _average(gaps)
    return found | {f"{m}_gap": g for m, g in gaps.items()} | ({"avg_gap": average} if average is not None else {})


def _average(gaps: Mapping[str, float]) -> float | None:
    """The paper's, where all four measures are known."""
    return avg_gap(**{k: gaps[m] for k, m in AVERAGED.items()}) if gaps.keys() >= set(AVERAGED.values()) else None


def _gap(row: Row, gold: Row, metric: str) -> float | None:
    a, b = row.get(metric), gold.get(metric)
    return None if a is None or b is None else abs(a - b)


def _gaps(rows: Sequence[tuple[Row, Row]]) -> dict[str, Gap]:
    """For each metric, the gaps to Retrain in the runs that have both."""
    known = {m: [(a[m], b[m]) for a, b in rows if _gap(a, b, m) is not None] for m in METRICS}
    found = {m: gap([a for a, _ in pairs], [b for _, b in pairs]) for m, pairs in known.items() if pairs}
    apart = [a[DISTANCE] for a, _ in rows if a.get(DISTANCE) is not None]
    return found | ({DISTANCE: gap(apart, [0.0] * len(apart))} if apart else {})


def _spread(gaps: Mapping[str, Gap]) -> tuple[dict[str, float], dict[str, float]]:
    """Means, and standard deviations where there is more than one run."""
    deviations = {m: g.std for m, g in gaps.items()}
    return {m: g.mean for m, g in gaps.items()}, {m: d for m, d in deviations.items() if d is not None}


def _each(mine: Sequence[Outcome]) -> dict[str, dict[At, float]]:
    """The gap of each run in each measure, and their average where a run has all four."""
    rows = {(o.target, o.seed): (o.at("recovered"), o.at("retrained")) for o in mine}
    found = {m: {at: g for at, (a, b) in rows.items() if (g := _gap(a, b, m)) is not None} for m in METRICS}
    found[DISTANCE] = {at: a[DISTANCE] for at, (a, _) in rows.items() if a.get(DISTANCE) is not None}
    whole = [at for at in rows if all(at in found[m] for m in AVERAGED.values())]
    found["avg_gap"] = {at: avg_gap(**{k: found[m][at] for k, m in AVERAGED.items()}) for at in whole}
    return {m: gaps for m, gaps in found.items() if gaps}


def _tug(each: Mapping[str, Mapping[At, float]], first: str) -> float | None:
    """Tug-of-War run by run, then the mean: a product of means would hide a run that is wholly off."""
    forget, retain, test = (each.get(m, {}) for m in (first, "retain_acc", "test_acc"))
    whole = forget.keys() & retain.keys() & test.keys()
    return _mean(tug_of_war(forget=forget[at], retain=retain[at], test=test[at]) for at in whole) if whole else None


def _paired(mine: Mapping[At, float], first: Mapping[At, float]) -> dict[str, float | bool] | None:
    """The difference to the first method over what both have, with Student's 95 % interval and a bootstrap one.

    The seeds of one target are not independent of each other: they are averaged, and the targets compared. With one
    target, its seeds are all there is to compare.
    """
    both = mine.keys() & first.keys()
    by = 0 if len({target for target, _ in both}) > 1 else 1
    units = sorted({at[by] for at in both}, key=members)
    if len(units) < 2:
        return None
    ours, theirs = ([_mean(gaps[at] for at in both if at[by] == unit) for unit in units] for gaps in (mine, first))
    found = paired(ours, theirs)
    t, drawn = found.t, found.bootstrap
    intervals = {"low": t.low, "high": t.high, "bootstrap_low": drawn.low, "bootstrap_high": drawn.high}
    return {"mean": found.mean, **intervals, "units": len(units), "different": found.different}


def _costs(rows: Sequence[Row]) -> dict[str, float]:
    epochs, flops = _mean(r["client_epochs"] for r in rows), _mean(r.get("client_flops", 0) for r in rows)
    return {"bytes": _mean(map(_bytes, rows)), "client_epochs": epochs, "flops": flops}


def _references(found: Sequence[Evidence]) -> dict[str, Any]:
    """Means over the runs; in halves, whether the method is then farther from Retrain than Retrain itself."""
    means: dict[str, Any] = _averaged([dataclasses.asdict(e) for e in found]) if found else {}
    for measure, half in means.get("halves", {}).items():
        half["different"] = is_farther(measure, half["method"], half["farthest"])
    return means


def _averaged(values: Sequence[Any]) -> Any:  # noqa: ANN401 - what JSON can say
    """The mean of numbers, and of each part of what all have; what is yes or no must be so for all."""
    if isinstance(values[0], bool):
        return all(values)
    if isinstance(values[0], dict):
        return {k: _averaged([v[k] for v in values]) for k in values[0] if all(v[k] is not None for v in values)}
    return _mean(values)


def _bytes(row: Row) -> float:
    return float(row["down_bytes"] + row["up_bytes"])


def _mean(values: Iterator[float] | Sequence[float] | Any) -> float:  # noqa: ANN401 - any iterable of numbers
    return float(statistics.fmean(values))


def _means(rows: Sequence[Row]) -> dict[str, float]:
    return {m: _mean(r[m] for r in rows) for m in METRICS if all(r.get(m) is not None for r in rows)}


def _saved(whole: float, part: float) -> float | None:
    return whole / part if part else None


def to_dict(
    recipe: Recipe, lines: Sequence[Line], outcomes: Sequence[Outcome], floor: Floor, out: Path
) -> dict[str, Any]:
    """For JSON; `runs` are the folders below `out` that the table is made of, `floors` are by target and seed."""
    failed = [{"method": o.method, "target": o.target, "seed": o.seed, "why": o.failure} for o in outcomes if o.failure]
    table = [dataclasses.asdict(line) for line in lines]
    done = [o for o in outcomes if not o.failure]
    runs = [o.folder.relative_to(out).as_posix() for o in done]
    noise = {o.folder.parent: (floor[o.target, o.seed], o.at("retrained")) for o in done if (o.target, o.seed) in floor}
    floors = {place.relative_to(out).as_posix(): _spread(_gaps([pair]))[0] for place, pair in noise.items()}
    first = next((line.method for line in lines if line.phase == "recovered" and line.runs), None)
    found = {"table": table, "first": first, "failed": failed, "runs": runs, "floors": floors}
    return {"schema": 1, "recipe": recipe.to_dict(), **found}
