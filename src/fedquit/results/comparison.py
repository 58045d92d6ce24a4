# SPDX-License-Identifier: Apache-2.0
"""Several methods over the same targets and seeds: the table of a comparison, as `comparison.json` stores it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedquit.inference.gaps import Margin
from fedquit.results import quantities
from fedquit.results.averages import mean
from fedquit.results.frames import frame_of_table
from fedquit.results.path import Point, path_points
from fedquit.results.references import judged_together
from fedquit.results.requests import RequestRows, Spreads, distinct, spread_sizes
from fedquit.results.schema import AGAIN, COMPARED, DISTANCE, SCHEMA, Row
from fedquit.results.summary import MethodSummary, mean_gaps, mean_levels, summarise, summarise_phase
from fedquit.results.verdicts import (
    RETRAIN_SEED,
    against_natural,
    durable,
    judged,
    judged_pairs,
    retrain_table,
    single_clients,
)
from fedquit.utils.names import each_named

if TYPE_CHECKING:
    from fedquit.results.frames import DataFrame

Target = int | tuple[int, ...]  # the clients that leave in a run: one, or several together
Place = tuple[Target, int]  # a target and a seed
Key = tuple[str, Target, int]  # a method, a target and a seed
Controls = Mapping[Place, Sequence[Point]]  # Natural's path
RetrainAgain = Mapping[Place, Row]  # the row of Retrain with another seed
Retrains = Mapping[Target, Sequence[Row]]  # the rows of all Retrains with other seeds, each with its `retrain_seed`


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
        margin: Of the equivalence: points as "2", standard deviations of Retrain as "2s"; "" where none was fixed.
        retrains: Of each Retrain that the verdicts rest on, its clients, its seed and its measures.
        controls: Natural's path for each target and seed, by "seed-0/client-2".
        longer: Retrain's path from its end on, by the same names; empty without `recover.retrain_longer`.
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
    margin: str = ""
    retrains: Sequence[Mapping[str, Any]] = ()
    controls: Mapping[str, Sequence[Point]] = field(default_factory=dict)
    longer: Mapping[str, Sequence[Point]] = field(default_factory=dict)
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
            "margin": self.margin or None,
            "retrains": list(self.retrains),
        }
        if self.controls:
            fields["controls"] = self.controls
        if self.longer:
            fields["retrain_longer"] = self.longer
        return fields if self.runs is None else {**fields, "runs": list(self.runs)}

    def to_pandas(self) -> DataFrame:
        """The table: a line for Original, Retrain and each method (needs pandas)."""
        return frame_of_table(self.table)

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
        fields = {"schema", "recipe", "code", "table", "first", "failed", "runs", "floors"}
        fields |= {"margin", "retrains", "controls", "retrain_longer"}
        return Comparison(
            folder=folder,
            table=[MethodSummary.read(line) for line in _objects(stored.get("table"))],
            first=str(stored.get("first") or ""),
            failed=_objects(stored.get("failed")),
            runs=[run for run in runs if isinstance(run, str)] if isinstance(runs, list) else None,
            spreads={key: spread_sizes(sizes) for key, sizes in spreads.items()} if isinstance(spreads, dict) else {},
            margin=str(stored.get("margin") or ""),
            retrains=_objects(stored.get("retrains")),
            controls=_paths(stored.get("controls")),
            longer=_paths(stored.get("retrain_longer")),
            recipe=recipe if isinstance(recipe, dict) else {},
            code=code if isinstance(code, dict) else {},
            extra={key: value for key, value in stored.items() if key not in fields},
        )

    @property
    def methods(self) -> dict[str, MethodSummary]:
        """The lines of the methods, by name."""
        return {line.method: line for line in self.table if line.phase == "recovered"}

    @property
    def targets(self) -> int:
        """How many clients, or groups of clients, left; 0 where older comparisons do not name their runs."""
        return len({run.split("/")[-2] for run in self.runs or () if run.count("/") >= 2})

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


def _paths(stored: object) -> dict[str, list[Point]]:
    return {str(key): path_points(path) for key, path in stored.items()} if isinstance(stored, dict) else {}


def _objects(stored: object) -> list[Mapping[str, Any]]:
    return [item for item in stored if isinstance(item, dict)] if isinstance(stored, list) else []


def _failure(stored: Mapping[str, Any]) -> Failure:
    target = stored.get("target", [])
    clients = each_named("client", target if isinstance(target, list | tuple) else [target])
    words = {"target": clients, "seed": f"seed {stored.get('seed')}"}
    where = ", ".join(text for key, text in words.items() if key in stored)
    return Failure(str(stored.get("method")), where, str(stored.get("why")))


def compare_outcomes(
    outcomes: Sequence[Outcome],
    methods: Sequence[str],
    retrain_again: RetrainAgain,
    retrains: Retrains | None = None,
    margin: Margin | None = None,
    controls: Controls | None = None,
    longer: Controls | None = None,
) -> list[MethodSummary]:
    """The lines of the table: Original, Retrain, Retrain with another seed, and each method.

    Args:
        outcomes: Of all runs.
        methods: In the order of the table; the others are paired with the first one that came through.
        retrain_again: By target and seed, the row of Retrain with another seed.
        retrains: By target, the rows of all Retrains with other seeds; else those of `retrain_again`.
        margin: Of the equivalence with Retrain; None where none was fixed.
        controls: By target and seed, Natural's path.
        longer: By target and seed, Retrain's path from its end on.
    """
    by_seed = retrains_by_seed(retrain_again, retrains)
    by_method = requests_of(outcomes, retrain_again, retrains, controls, longer)
    recovered = _recovered_rows(outcomes)
    verdicts = judged(recovered, by_seed, margin)
    lasting = durable(recovered, by_seed, margin)
    leaving = against_natural(by_method, margin)
    shared = distinct(request for requests in by_method.values() for request in requests)
    table = []
    if shared:
        table += [
            summarise_phase("original", "original", shared),
            summarise_phase("retrain", "retrained", shared),
        ]
    twice = [request for request in shared if request.row(AGAIN)]
    if twice:
        table.append(_line_of_retrain_again(twice, retrains))
    first = next((by_method[method] for method in methods if by_method.get(method)), None)
    for method in methods:
        mine = [outcome for outcome in outcomes if outcome.method == method]
        requests = by_method.get(method, [])
        line = summarise(
            method,
            requests,
            failures=sorted({outcome.failure for outcome in mine if outcome.failure}),
            evidence=[outcome.evidence for outcome in mine if outcome.evidence and not outcome.failure],
            first=None if requests is first else first,
        )
        runs = recovered.get(method, {})
        table.append(
            replace(
                line,
                verdicts=verdicts.get(method, {}),
                leaving=leaving.get(method, {}),
                durable=lasting.get(method),
                clients=single_clients(runs, by_seed, {target: named(target) for target in runs}),
            )
        )
    together = judged_together([line.references for line in table])
    table = [replace(line, references=references) for line, references in zip(table, together, strict=True)]
    pairs = judged_pairs({line.method: line.against_first for line in table if line.phase == "recovered"})
    return [replace(line, against_first=pairs.get(line.method, line.against_first)) for line in table]


def retrains_by_seed(retrain_again: RetrainAgain, retrains: Retrains | None) -> dict[Target, dict[int, Row]]:
    """By target and by the seed of the Retrain, the row of each Retrain with a seed of its own.

    Args:
        retrain_again: By target and seed of the run; older rows do not name the Retrain's own seed, and keep the run's.
        retrains: By target; in place of `retrain_again` where there are several for a run.
    """
    by_seed: dict[Target, dict[int, Row]] = {}
    if retrains is not None:
        for target, rows in retrains.items():
            by_seed[target] = {int(row.get(RETRAIN_SEED, i)): row for i, row in enumerate(rows)}
        return by_seed
    for (target, seed), row in retrain_again.items():
        by_seed.setdefault(target, {})[int(row.get(RETRAIN_SEED, seed))] = row
    return by_seed


def _recovered_rows(outcomes: Sequence[Outcome]) -> dict[str, dict[Target, dict[int, Row]]]:
    """By method, target and seed, the row after recovery of each run that came through."""
    rows: dict[str, dict[Target, dict[int, Row]]] = {}
    for outcome in outcomes:
        recovered = next((row for row in outcome.rows if row["phase"] == "recovered"), None)
        if recovered is not None and not outcome.failure:
            rows.setdefault(outcome.method, {}).setdefault(outcome.target, {})[outcome.seed] = recovered
    return rows


def requests_of(
    outcomes: Sequence[Outcome],
    retrain_again: RetrainAgain,
    retrains: Retrains | None = None,
    controls: Controls | None = None,
    longer: Controls | None = None,
) -> dict[str, list[RequestRows]]:
    """The requests of each method that came through, with the spread between the Retrains of each.

    Args:
        outcomes: Of all runs.
        retrain_again: By target and seed, the row of Retrain with another seed.
        retrains: By target, the rows of all Retrains with other seeds.
        controls: By target and seed, Natural's path.
        longer: By target and seed, Retrain's path from its end on.
    """
    done = [outcome for outcome in outcomes if not outcome.failure]
    own = {outcome.place: sizes for outcome, sizes in _spreads_of(done, retrain_again, retrains)}
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
        control = (controls or {}).get(outcome.place, ())
        beyond = (longer or {}).get(outcome.place, ())
        by_method.setdefault(outcome.method, []).append(RequestRows(0, rows, spreads, control=control, longer=beyond))
    return by_method


def _spreads_of(
    done: Iterable[Outcome], retrain_again: RetrainAgain, retrains: Retrains | None
) -> Iterator[tuple[Outcome, Mapping[str, float]]]:
    """For each outcome that has Retrains with other seeds, how far its Retrain lies from them on average."""
    for outcome in done:
        first = [retrain_again[outcome.place]] if outcome.place in retrain_again else []
        others = first if retrains is None else retrains.get(outcome.target, ())
        others = other_retrains(others, outcome.at("retrained"))
        each = [quantities.spread_between(row, outcome.at("retrained")) for row in others]
        if each:
            means = {key: mean(sizes.get(key) for sizes in each) for key in (*COMPARED, DISTANCE)}
            yield outcome, {key: size for key, size in means.items() if size is not None}


def other_retrains(rows: Iterable[Row], retrained: Row) -> list[Row]:
    """The Retrains that are not the run's own, which a bundle or a study may have among the others.

    Args:
        rows: Of Retrains with other seeds than the run's.
        retrained: Of the run's Retrain; one that has a seed of its own names it.
    """
    own = retrained.get(RETRAIN_SEED)
    others = [row for row in rows if own is None or row.get(RETRAIN_SEED) != own]
    weights = retrained.get("fingerprint")
    return [row for row in others if weights is None or row.get("fingerprint") != weights]


def _line_of_retrain_again(requests: Sequence[RequestRows], retrains: Retrains | None) -> MethodSummary:
    """Retrain with other seeds: its gaps to Retrain are the Retrain-vs-Retrain spread."""
    if retrains is not None:
        requests = [again for request in requests for again in _with_each_retrain(request, retrains)]
    sizes, deviations = mean_gaps(requests, AGAIN)
    line = MethodSummary("retrain again", "floor", runs=len(requests))
    return replace(
        line,
        means=mean_levels(requests, AGAIN),
        gaps=sizes,
        deviations=deviations,
        avg_gap=quantities.average_gap(sizes),
    )


def _with_each_retrain(request: RequestRows, retrains: Retrains) -> Iterator[RequestRows]:
    """The same request beside each Retrain of its target, in place of the first one alone."""
    own = [row for row in request.rows if row["phase"] != AGAIN]
    clients = request.clients
    target = clients[0] if len(clients) == 1 else clients
    for row in other_retrains(retrains.get(target, ()), request.row("retrained")):
        yield replace(request, rows=[*own, {**request.row(AGAIN), **row, "phase": AGAIN}])


def build_comparison(
    recipe: Mapping[str, Any],
    code: Mapping[str, Any],
    methods: Sequence[str],
    outcomes: Sequence[Outcome],
    retrain_again: RetrainAgain,
    out: Path,
    *,
    retrains: Retrains | None = None,
    margin: Margin | None = None,
    controls: Controls | None = None,
    longer: Controls | None = None,
) -> Comparison:
    """The comparison over all outcomes.

    Args:
        recipe: Of all runs, as JSON.
        code: The version of the code, from `utils.version.code_version`.
        methods: In the order of the table.
        outcomes: Of all runs, those that failed as well.
        retrain_again: By target and seed, the row of Retrain with another seed.
        out: The folder of the comparison, above those of the runs.
        retrains: By target, the rows of all Retrains with other seeds; else those of `retrain_again`.
        margin: Of the equivalence with Retrain; None where none was fixed.
        controls: By target and seed, Natural's path.
        longer: By target and seed, Retrain's path from its end on.
    """
    table = compare_outcomes(outcomes, methods, retrain_again, retrains, margin, controls, longer)
    by_seed = retrains_by_seed(retrain_again, retrains)
    done = [outcome for outcome in outcomes if not outcome.failure]
    spreads = {
        outcome.folder.parent.relative_to(out).as_posix(): sizes
        for outcome, sizes in _spreads_of(done, retrain_again, retrains)
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
        margin=str(margin or ""),
        retrains=retrain_table(by_seed, {target: members(target) for target in by_seed}),
        controls={places[place]: list(path) for place, path in (controls or {}).items() if place in places},
        longer={places[place]: list(path) for place, path in (longer or {}).items() if place in places and path},
        recipe=recipe,
        code=code,
    )
