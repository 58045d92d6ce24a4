# SPDX-License-Identifier: Apache-2.0
"""Several methods over the same targets and seeds: the table of a comparison, as `comparison.json` stores it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedquit.results import quantities
from fedquit.results.averages import mean
from fedquit.results.path import Point, path_points
from fedquit.results.requests import RequestRows, Spreads, distinct, spread_sizes
from fedquit.results.schema import AGAIN, COMPARED, DISTANCE, SCHEMA, Row
from fedquit.results.summary import MethodSummary, mean_gaps, mean_levels, summarise, summarise_phase
from fedquit.utils.names import each_named

Target = int | tuple[int, ...]  # the clients that leave in a run: one, or several together
Place = tuple[Target, int]  # a target and a seed
Key = tuple[str, Target, int]  # a method, a target and a seed
Controls = Mapping[Place, Sequence[Point]]  # Natural's path
RetrainAgain = Mapping[Place, Row]  # the rows of Retrain with another seed


def members(target: Target) -> tuple[int, ...]:
    """The clients of a target."""
    return target if isinstance(target, tuple) else (target,)


def named(target: Target) -> str:
    """As in "client 0", or "clients 0 and 1"."""
    return each_named("client", members(target))


@dataclass(frozen=True)
class Outcome:
    """One method for one target and seed: its rows, or why there are none.

    Attributes:
        method: Its name.
        target: The clients that leave.
        seed: Of the run.
        folder: Of the run.
        rows: As `results.json` has them.
        failure: Why the run did not come through; "" if it did.
        evidence: What its reference models say, as a JSON object.
    """

    method: str
    target: Target
    seed: int
    folder: Path
    rows: tuple[dict[str, Any], ...] = ()
    failure: str = ""
    evidence: Mapping[str, Any] | None = None

    @property
    def key(self) -> Key:
        """The method, target and seed of this run."""
        return self.method, self.target, self.seed

    @property
    def place(self) -> Place:
        """The target and seed, which all methods share."""
        return self.target, self.seed

    def at(self, phase: str) -> dict[str, Any]:
        """The row of a phase."""
        return next(row for row in self.rows if row["phase"] == phase)


@dataclass(frozen=True)
class Failure:
    """A method that did not come through, for which target and seed, and why."""

    method: str
    where: str
    why: str


@dataclass(frozen=True)
class Comparison:
    """What `comparison.json` holds.

    Attributes:
        folder: The name of its folder.
        table: One line for Original, Retrain, Retrain with another seed, and each method.
        first: The method that the others are paired with; "" where none came through.
        failed: For each run that did not come through, `method`, `target`, `seed` and `why`.
        runs: The folders of its runs below its own; None in older comparisons, which did not name them.
        spreads: The Retrain-vs-Retrain spread of each target and seed, by "seed-0/client-2".
        controls: Natural's path for each target and seed, by "seed-0/client-2".
        recipe: Of all runs, but for method, request and seed.
        code: The version of the code that made it.
        extra: Fields that this version does not know.
    """

    folder: str
    table: Sequence[MethodSummary] = ()
    first: str = ""
    failed: Sequence[Mapping[str, Any]] = ()
    runs: Sequence[str] | None = None
    spreads: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    controls: Mapping[str, Sequence[Point]] = field(default_factory=dict)
    recipe: Mapping[str, Any] = field(default_factory=dict)
    code: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        fields = {
            **self.extra,
            "schema": SCHEMA,
            "recipe": self.recipe,
            "code": self.code,
            "table": [line.to_dict() for line in self.table],
            "first": self.first or None,
            "failed": list(self.failed),
            "floors": self.spreads,
        }
        if self.controls:
            fields["controls"] = self.controls
        return fields if self.runs is None else {**fields, "runs": list(self.runs)}

    @staticmethod
    def read(folder: str, stored: Mapping[str, Any]) -> Comparison:
        """From JSON of schema 1; entries that are no objects are left out.

        Args:
            folder: The name to give it.
            stored: The object in `comparison.json`.
        """
        runs = stored.get("runs")
        spreads = stored.get("floors")
        recipe = stored.get("recipe")
        code = stored.get("code")
        fields = ("schema", "recipe", "code", "table", "first", "failed", "runs", "floors", "controls")
        controls = stored.get("controls")
        return Comparison(
            folder=folder,
            table=[MethodSummary.read(line) for line in _objects(stored.get("table"))],
            first=str(stored.get("first") or ""),
            failed=_objects(stored.get("failed")),
            runs=[run for run in runs if isinstance(run, str)] if isinstance(runs, list) else None,
            spreads={key: spread_sizes(sizes) for key, sizes in spreads.items()} if isinstance(spreads, dict) else {},
            controls={key: path_points(p) for key, p in controls.items()} if isinstance(controls, dict) else {},
            recipe=recipe if isinstance(recipe, dict) else {},
            code=code if isinstance(code, dict) else {},
            extra={key: value for key, value in stored.items() if key not in fields},
        )

    @property
    def methods(self) -> dict[str, MethodSummary]:
        """The lines of the methods, by name."""
        return {line.method: line for line in self.table if line.phase == "recovered"}

    @property
    def failures(self) -> list[Failure]:
        """The runs that did not come through, with target and seed in words."""
        return [_failure(stored) for stored in self.failed]

    def spreads_of(self, place: str) -> Spreads:
        """The Retrain-vs-Retrain spreads for the runs in one of its folders.

        Args:
            place: As "seed-0/client-2".
        """
        again = next((line for line in self.table if line.phase == "floor"), None)
        overall = spread_sizes(dict(again.gaps)) if again else spread_sizes(self.extra.get("floor"))
        by_method = {line.method: spread_sizes(line.extra.get("floor")) for line in self.table}
        return Spreads(own=self.spreads.get(place, {}), by_method=by_method, overall=overall)


def _objects(stored: object) -> list[Mapping[str, Any]]:
    return [item for item in stored if isinstance(item, dict)] if isinstance(stored, list) else []


def _failure(stored: Mapping[str, Any]) -> Failure:
    target = stored.get("target", [])
    clients = each_named("client", target if isinstance(target, list | tuple) else [target])
    words = {"target": clients, "seed": f"seed {stored.get('seed')}"}
    where = ", ".join(text for key, text in words.items() if key in stored)
    return Failure(str(stored.get("method")), where, str(stored.get("why")))


def compare_outcomes(
    outcomes: Sequence[Outcome], methods: Sequence[str], retrain_again: RetrainAgain, controls: Controls | None = None
) -> list[MethodSummary]:
    """The lines of the table: Original, Retrain, Retrain with another seed, and each method.

    Args:
        outcomes: Of all runs.
        methods: In the order of the table; the others are paired with the first one that came through.
        retrain_again: By target and seed, the row of Retrain with another seed.
        controls: By target and seed, Natural's path.
    """
    by_method = requests_of(outcomes, retrain_again, controls)
    shared = distinct(request for requests in by_method.values() for request in requests)
    table = []
    if shared:
        table += [
            summarise_phase("original", "original", shared),
            summarise_phase("retrain", "retrained", shared),
        ]
    twice = [request for request in shared if request.row(AGAIN)]
    if twice:
        table.append(_line_of_retrain_again(twice))
    first = next((by_method[method] for method in methods if by_method.get(method)), None)
    for method in methods:
        mine = [outcome for outcome in outcomes if outcome.method == method]
        requests = by_method.get(method, [])
        table.append(
            summarise(
                method,
                requests,
                failures=sorted({outcome.failure for outcome in mine if outcome.failure}),
                evidence=[outcome.evidence for outcome in mine if outcome.evidence and not outcome.failure],
                first=None if requests is first else first,
            )
        )
    return table


def requests_of(
    outcomes: Sequence[Outcome], retrain_again: RetrainAgain, controls: Controls | None = None
) -> dict[str, list[RequestRows]]:
    """The requests of each method that came through, with the spread between both Retrains of each.

    Args:
        outcomes: Of all runs.
        retrain_again: By target and seed, the row of Retrain with another seed.
        controls: By target and seed, Natural's path.
    """
    done = [outcome for outcome in outcomes if not outcome.failure]
    own = {outcome.place: sizes for outcome, sizes in _spreads_of(done, retrain_again)}
    keys = (*COMPARED, DISTANCE)
    means = {key: mean(sizes.get(key) for sizes in own.values()) for key in keys}
    overall = {key: size for key, size in means.items() if size is not None}
    by_method: dict[str, list[RequestRows]] = {}
    for outcome in done:
        fields = {"method": outcome.method, "request": 0, "clients": members(outcome.target), "seed": outcome.seed}
        rows = [{**fields, **row} for row in outcome.rows]
        if outcome.place in retrain_again:
            rows.append({**fields, **retrain_again[outcome.place], "phase": AGAIN})
        spreads = Spreads(own=own.get(outcome.place, {}), overall=overall)
        by_method.setdefault(outcome.method, []).append(
            RequestRows(0, rows, spreads, control=(controls or {}).get(outcome.place, ()))
        )
    return by_method


def _spreads_of(done: Iterable[Outcome], retrain_again: RetrainAgain) -> Iterator[tuple[Outcome, Mapping[str, float]]]:
    """For each outcome that has both Retrains, how far they lie apart."""
    for outcome in done:
        if outcome.place in retrain_again:
            yield outcome, quantities.spread_between(retrain_again[outcome.place], outcome.at("retrained"))


def _line_of_retrain_again(requests: Sequence[RequestRows]) -> MethodSummary:
    """Retrain with another seed: its gaps to Retrain are the Retrain-vs-Retrain spread."""
    sizes, deviations = mean_gaps(requests, AGAIN)
    line = MethodSummary("retrain again", "floor", runs=len(requests))
    return replace(
        line,
        means=mean_levels(requests, AGAIN),
        gaps=sizes,
        deviations=deviations,
        avg_gap=quantities.average_gap(sizes),
    )


def build_comparison(
    recipe: Mapping[str, Any],
    code: Mapping[str, Any],
    methods: Sequence[str],
    outcomes: Sequence[Outcome],
    retrain_again: RetrainAgain,
    out: Path,
    controls: Controls | None = None,
) -> Comparison:
    """The comparison over all outcomes.

    Args:
        recipe: Of all runs, as JSON.
        code: The version of the code, from `utils.version.code_version`.
        methods: In the order of the table.
        outcomes: Of all runs, those that failed as well.
        retrain_again: By target and seed, the row of Retrain with another seed.
        out: The folder of the comparison, above those of the runs.
        controls: By target and seed, Natural's path.
    """
    table = compare_outcomes(outcomes, methods, retrain_again, controls)
    done = [outcome for outcome in outcomes if not outcome.failure]
    spreads = {
        outcome.folder.parent.relative_to(out).as_posix(): sizes for outcome, sizes in _spreads_of(done, retrain_again)
    }
    places = {outcome.place: outcome.folder.parent.relative_to(out).as_posix() for outcome in outcomes}
    failed = [outcome for outcome in outcomes if outcome.failure]
    return Comparison(
        folder=out.resolve().name,
        table=table,
        first=next((line.method for line in table if line.phase == "recovered" and line.runs), ""),
        failed=[{"method": o.method, "target": o.target, "seed": o.seed, "why": o.failure} for o in failed],
        runs=[outcome.folder.relative_to(out).as_posix() for outcome in done],
        spreads=spreads,
        controls={places[place]: list(path) for place, path in (controls or {}).items() if place in places},
        recipe=recipe,
        code=code,
    )
