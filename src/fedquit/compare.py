# SPDX-License-Identifier: Apache-2.0
"""The comparison that papers print: every method, for several leaving clients and seeds, against Retrain.

All chosen methods watch the one training of a seed; Original and Retrain are trained once and shared. A method that
fails, for one client or for all, is a row that says why; the others go on.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fedquit.core import ClientId
from fedquit.errors import FedquitError, InputError, StoreError
from fedquit.methods import METHODS
from fedquit.metrics.gaps import avg_gap, inside_floor, paired
from fedquit.metrics.tug_of_war import tug_of_war
from fedquit.names import lookup
from fedquit.recipe import Recipe
from fedquit.references import Evidence, gathered
from fedquit.rows import Row
from fedquit.runner import retrain_again, run
from fedquit.store import write_json
from fedquit.training import Attached, Reporter, require_disk
from fedquit.world import open_world

METRICS = ("test_acc", "retain_acc", "forget_acc", "mia_song_svc", "mia_yeom")
AVERAGED = {"retain": "retain_acc", "forget": "forget_acc", "song": "mia_song_svc", "yeom": "mia_yeom"}


Floor = Mapping[tuple[ClientId, int], Row]  # Retrain with another seed, for each target and seed


class Overview(Reporter, Protocol):
    """Somebody who wants to know how far the whole comparison is, and each run."""

    def runs(self, done: int, total: int, title: str) -> None:
        """So many runs are over, and this one begins."""


@dataclass(frozen=True)
class Outcome:
    """One method for one leaving client and seed: its rows, or why there are none."""

    method: str
    target: ClientId
    seed: int
    folder: Path
    rows: tuple[Row, ...] = ()
    failure: str = ""
    evidence: Evidence | None = None  # of many models

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
    gaps: dict[str, float] = dataclasses.field(default_factory=dict)  # mean absolute difference
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
    tug_of_war: float | None = None
    references: dict[str, float] = dataclasses.field(default_factory=dict)  # means of what needs many models
    inside_floor: tuple[str, ...] = ()  # gaps no larger than what another seed does to Retrain
    against_first: dict[str, float | bool] | None = (
        None  # its forget gap less that of the first method, over the targets
    )


def chosen_methods(text: str) -> list[str]:
    """From "all" or "fedquit,pga"; all are those of the table but Retrain, which is always the yardstick."""
    if text == "all":
        return [name for name in METHODS if name != "retrain"]
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if ":" not in name:
            lookup(METHODS, name, "method")
    return list(dict.fromkeys(names))


def parse_targets(text: str) -> list[ClientId]:
    """From "0,1,2"."""
    try:
        return list(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError as error:
        raise InputError(f"--targets {text!r} is not a list of clients: write, for example, 0,1,2.") from error


def compare(
    recipe: Recipe,
    methods: Sequence[str],
    targets: Sequence[ClientId],
    seeds: int,
    out: Path,
    *,
    overview: Overview,
    cache: Path | None = None,
    references: int = 0,
) -> tuple[list[Line], list[Outcome]]:
    """Run everything, or go on with it, and write `comparison.json`.

    With `references`, each erasure is repeated with so many other seeds, for what needs many models.
    """
    if seeds < 1:
        raise InputError(f"--seeds is {seeds}: it must be at least 1.")
    if not recipe.retrain:
        raise InputError("a comparison is one with Retrain: set retrain = true in the recipe.")
    cache = cache or out / "cache"
    variants = {name: _variant(recipe, name) for name in methods}
    attached, refused = _attachable(variants, cache)
    jobs = [(s, t, name) for s in range(recipe.seed, recipe.seed + seeds) for t in targets for name in methods]
    pairs = list(dict.fromkeys((s, t) for s, t, _ in jobs))
    total, outcomes, floor = len(jobs) + len(pairs), [], {}
    for number, (seed, target, name) in enumerate(jobs):
        overview.runs(number, total, f"{name}, client {target}, seed {seed}")
        tried = _for(variants[name], seed, target)
        folder = out / f"seed-{seed}" / f"client-{target}" / name.replace(":", ".")
        outcome = _tried(tried, Outcome(name, target, seed, folder), cache, overview, attached, refused)
        if references and not outcome.failure:
            found = gathered(tried, references, folder, cache, reporter=overview, attached=attached)
            outcome = dataclasses.replace(outcome, evidence=found)
        outcomes.append(outcome)
    for number, (seed, target) in enumerate(pairs, start=len(jobs)):
        overview.runs(number, total, f"noise floor, client {target}, seed {seed}")
        floor[target, seed] = retrain_again(_for(recipe, seed, target), cache, reporter=overview)
    overview.runs(total, total, "done")
    lines = list(summarised(outcomes, methods, floor))
    write_json(out / "comparison.json", to_dict(recipe, lines, outcomes))
    return lines, outcomes


def _for(recipe: Recipe, seed: int, target: ClientId) -> Recipe:
    event = dataclasses.replace(recipe.request[0], clients=(target,))
    return dataclasses.replace(recipe, seed=seed, request=(event,))


def _variant(recipe: Recipe, name: str) -> Recipe:
    """The recipe with another method; its own keeps the settings that the recipe gives it."""
    return recipe if name == recipe.method_name else dataclasses.replace(recipe, method={"name": name})


def _attachable(variants: dict[str, Recipe], cache: Path) -> tuple[Attached, dict[str, str]]:
    """The methods that can watch the training, and why the others cannot."""
    attached, refused = {}, {}
    world = open_world(next(iter(variants.values())))
    for name, variant in variants.items():
        method = variant.build_method()
        try:
            require_disk(world, cache, {name: method})
        except StoreError as error:
            refused[name] = str(error)
        else:
            attached[name] = method
    return attached, refused


def _tried(
    recipe: Recipe, outcome: Outcome, cache: Path, overview: Overview, attached: Attached, refused: dict[str, str]
) -> Outcome:
    if outcome.method in refused:
        return dataclasses.replace(outcome, failure=refused[outcome.method])
    try:
        results = run(recipe, outcome.folder, cache=cache, reporter=overview, attached=attached)
    except FedquitError as error:
        return dataclasses.replace(outcome, failure=str(error))
    except Exception as error:
        return dataclasses.replace(outcome, failure=f"{type(error).__name__}: {error}")
    return dataclasses.replace(outcome, rows=tuple(results["rows"]))


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
        yield Line("retrain again", "floor", len(noise), (), _means([a for a, _ in noise]), *_spread(between))
    first: dict[tuple[ClientId, int], float] | None = None
    for name in methods:
        mine = [o for o in done if o.method == name]
        failures = tuple(sorted({o.failure for o in outcomes if o.method == name and o.failure}))
        if not mine:
            yield Line(name, "recovered", failures=failures)
            continue
        forget = {(o.target, o.seed): _gap(o.at("recovered"), o.at("retrained"), "forget_acc") for o in mine}
        known = {at: g for at, g in forget.items() if g is not None}
        first = first if first is not None else known
        yield _line(name, mine, failures, {m: _mean(g) for m, g in between.items()}, _paired(known, first))


def _line(
    name: str,
    mine: Sequence[Outcome],
    failures: tuple[str, ...],
    floor: dict[str, float],
    against_first: dict[str, float | bool] | None,
) -> Line:
    gold = [o.at("retrained") for o in mine]
    unlearned, recovered = [o.at("unlearned") for o in mine], [o.at("recovered") for o in mine]
    gaps, deviations = _spread(_gaps(list(zip(recovered, gold, strict=True))))
    whole = _costs(gold)
    spent = {c: _costs(unlearned)[c] + _costs(recovered)[c] for c in whole}
    tug = {m: gaps.get(f"{m}_acc") for m in ("forget", "retain", "test")}
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
        avg_gap=avg_gap(**{k: gaps[m] for k, m in AVERAGED.items()}) if gaps.keys() >= set(AVERAGED.values()) else None,
        tug_of_war=tug_of_war(**{m: g for m, g in tug.items() if g is not None}) if None not in tug.values() else None,
        references=_references([o.evidence for o in mine if o.evidence]),
        inside_floor=tuple(m for m, g in gaps.items() if m in floor and inside_floor(g, floor[m])),
        against_first=against_first,
    )


def _gap(row: Row, gold: Row, metric: str) -> float | None:
    a, b = row.get(metric), gold.get(metric)
    return None if a is None or b is None else abs(a - b)


def _gaps(rows: Sequence[tuple[Row, Row]]) -> dict[str, list[float]]:
    """For each metric, the absolute difference to Retrain in each run that has both."""
    found = {m: [g for a, b in rows if (g := _gap(a, b, m)) is not None] for m in METRICS}
    return {m: gaps for m, gaps in found.items() if gaps}


def _spread(gaps: dict[str, list[float]]) -> tuple[dict[str, float], dict[str, float]]:
    deviations = {m: statistics.stdev(g) if len(g) > 1 else 0.0 for m, g in gaps.items()}
    return {m: _mean(g) for m, g in gaps.items()}, deviations


def _paired(
    mine: dict[tuple[ClientId, int], float], first: dict[tuple[ClientId, int], float]
) -> dict[str, float | bool] | None:
    """The difference to the first method over the targets that both have, with Student's 95 % interval."""
    both = sorted(mine.keys() & first.keys())
    if len(both) < 2 or mine is first:
        return None
    found = paired([mine[at] for at in both], [first[at] for at in both])
    return {"mean": found.mean, "low": found.t.low, "high": found.t.high, "different": found.different}


def _costs(rows: Sequence[Row]) -> dict[str, float]:
    epochs, flops = _mean(r["client_epochs"] for r in rows), _mean(r.get("client_flops", 0) for r in rows)
    return {"bytes": _mean(map(_bytes, rows)), "client_epochs": epochs, "flops": flops}


def _references(found: Sequence[Evidence]) -> dict[str, float]:
    if not found:
        return {}
    each = [dataclasses.asdict(e) for e in found]
    return {k: _mean(e[k] for e in each) for k in each[0] if all(e[k] is not None for e in each)}


def _bytes(row: Row) -> float:
    return float(row["down_bytes"] + row["up_bytes"])


def _mean(values: Iterator[float] | Sequence[float] | Any) -> float:  # noqa: ANN401 - any iterable of numbers
    return float(statistics.fmean(values))


def _means(rows: Sequence[Row]) -> dict[str, float]:
    return {m: _mean(r[m] for r in rows) for m in METRICS if all(r.get(m) is not None for r in rows)}


def _saved(whole: float, part: float) -> float | None:
    return whole / part if part else None


def to_dict(recipe: Recipe, lines: Sequence[Line], outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """For JSON."""
    failed = [{"method": o.method, "target": o.target, "seed": o.seed, "why": o.failure} for o in outcomes if o.failure]
    table = [dataclasses.asdict(line) for line in lines]
    return {"schema": 1, "recipe": recipe.to_dict(), "table": table, "failed": failed}
