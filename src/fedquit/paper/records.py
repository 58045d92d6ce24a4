# SPDX-License-Identifier: Apache-2.0
"""Records of runs as numbers beside the paper's: one loader for every kind of record.

| record | what it gives |
|---|---|
| `results.json` of a run, under any name, alone or below a comparison or a study | all phases of its requests |
| a reference (`kind = "reference"`) | the last round of Original or Retrain, for each target |
| `kind = "unlearned accuracy"` | test and forget accuracy after unlearning and after recovery, and the rounds |
| `comparison.json` | a table of methods for the pages on what lasts and what it costs |

Where several records have the same number, one with more of the paper's five measures comes before one with fewer, then
one that names the commit of its code, then the one whose name is later. A gap is always to the Retrain of the same
record, whose test accuracy ended the recovery.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from fedquit.errors import StoreError
from fedquit.paper.numbers import Key
from fedquit.paper.settings import method_of, request_of, setting_of
from fedquit.results import quantities
from fedquit.results.comparison import Comparison
from fedquit.results.folders import (
    COMPARISON,
    RESULTS,
    RunResults,
    comparison_above,
    open_folders,
    read_record,
    read_run,
)
from fedquit.results.requests import RequestRows
from fedquit.results.schema import AVERAGED, Row, number

FIVE = ("test_acc", "retain_acc", "forget_acc", "mia_song_svc", "mia_yeom")
_OWN = {"original": "original", "retrained": "retrain"}  # phases that belong to no method
_COSTS = {"bytes": "bytes", "flops": "flops", "storage": "server_storage_bytes"}
PARTS = ("value", "gap", "times", "drop")
Target = tuple[int, ...]
Place = tuple[Target, int]  # a target and a seed


@dataclass(frozen=True)
class Source:
    """Where a number comes from: the file, the code that made it, and the machine."""

    file: str
    code: str = ""
    device: str = ""


@dataclass(frozen=True)
class Measured:
    """A number of one record.

    Attributes:
        key: What it is of.
        target: The clients that leave.
        seed: Of the run.
        value: As it was measured.
        gap: Its absolute gap to the Retrain of the same record, where there is one.
        times: Of a cost: Retrain's over this one.
        drop: Original's value in the same record less this one.
        complete: How many of the paper's five measures the record has for this model.
        source: The record.
    """

    key: Key
    target: Target
    seed: int
    value: float
    source: Source
    gap: float | None = None
    times: float | None = None
    drop: float | None = None
    complete: int = 0


@dataclass(frozen=True)
class Series:
    """A quantity over targets: for each the mean over seeds."""

    by_target: Mapping[Target, float]
    seeds: int

    @property
    def mean(self) -> float:
        """The mean of the targets' values."""
        return fmean(self.by_target.values())

    @property
    def deviation(self) -> float | None:
        """Over the targets; None for one."""
        return stdev(self.by_target.values()) if len(self.by_target) > 1 else None

    @property
    def targets(self) -> int:
        """The number of targets."""
        return len(self.by_target)


@dataclass(frozen=True)
class Records:
    """All that the records of a folder say.

    Attributes:
        measured: The numbers of the paper's settings, those of several records as well.
        runs: By setting, the runs of the paper's federations, those with a hold-out as well.
        comparisons: By file, the tables of comparisons whose runs are not at hand.
        others: By title, the runs of comparisons of other federations.
        left_out: By file, why a record is beside no number of the paper.
    """

    measured: Sequence[Measured] = ()
    runs: Mapping[str, Sequence[RunResults]] = field(default_factory=dict)
    comparisons: Mapping[str, Comparison] = field(default_factory=dict)
    others: Mapping[str, Sequence[RunResults]] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def by_key(self) -> dict[Key, dict[Place, list[Measured]]]:
        """The numbers of each key by target and seed, the preferred record first."""
        cells: dict[Key, dict[Place, list[Measured]]] = {}
        for one in sorted(self.measured, key=_preference, reverse=True):
            cells.setdefault(one.key, {}).setdefault((one.target, one.seed), []).append(one)
        return cells

    def picked(self, key: Key, part: str = "value") -> dict[Place, Measured]:
        """For each target and seed the preferred record that has a quantity.

        Args:
            key: What it is of.
            part: `value`, `gap`, `times` or `drop`.
        """
        known: dict[Place, Measured] = {}
        for place, candidates in self.by_key.get(key, {}).items():
            first = next((one for one in candidates if getattr(one, part) is not None), None)
            if first:
                known[place] = first
        return known

    def series(self, key: Key, part: str = "value") -> Series | None:
        """A quantity over the targets that have it.

        Args:
            key: What it is of.
            part: `value`, `gap`, `times` or `drop`.

        Returns:
            None where no record has it.
        """
        picked = self.picked(key, part)
        values: dict[Target, list[float]] = {}
        for (target, _), one in picked.items():
            values.setdefault(target, []).append(float(getattr(one, part)))
        means = {target: fmean(values[target]) for target in sorted(values)}
        return Series(means, len({seed for _, seed in picked})) if means else None

    @cached_property
    def sources(self) -> list[Source]:
        """Of the numbers that are shown, each once, by file."""
        used = {one.source for key in self.by_key for part in PARTS for one in self.picked(key, part).values()}
        return sorted(used, key=lambda source: (source.file, source.code))


def load_records(folder: Path, *, smoke: bool = False) -> Records:
    """Every record below a folder.

    Args:
        folder: Of records and studies, at any depth.
        smoke: Whether to take records of recipes at their smallest size in place of the paper's.

    Raises:
        StoreError: The folder is missing, or a record is damaged.
    """
    if not folder.is_dir():
        raise StoreError(f"{folder} is no folder of records: name one that holds results.json files at any depth.")
    found = _Found([], {}, {}, {}, {})
    for path in sorted(folder.rglob("*.json")):
        stored = _object(path)
        if not isinstance(stored.get("recipe"), Mapping) or not {"rows", "table", "kind"} & stored.keys():
            continue  # a part of a run, or a file of somebody else
        name = path.relative_to(folder).as_posix()
        setting, fault = setting_of(stored["recipe"], smoke=smoke)
        if isinstance(stored.get("table"), list):
            found.add_comparison(path, name, stored, known=not fault)
        elif fault:
            found.leave_out(path, name, fault)
        else:
            found.add_record(path, name, stored, setting)
    return Records(found.measured, found.runs, found.comparisons, found.others, found.left_out)


@dataclass(frozen=True)
class _Found:
    """What was read so far; the fields are those of `Records`."""

    measured: list[Measured]
    runs: dict[str, list[RunResults]]
    comparisons: dict[str, Comparison]
    others: dict[str, Sequence[RunResults]]
    left_out: dict[str, str]

    def add_comparison(self, path: Path, name: str, stored: Mapping[str, Any], *, known: bool) -> None:
        """The runs of a comparison in a setting of the paper are read by themselves; others are kept together."""
        comparison = Comparison.read(path.stem, stored)
        if path.name != COMPARISON or not comparison.runs or not (path.parent / comparison.runs[0]).exists():
            self.comparisons[name] = comparison
        elif not known:
            self.others[str(comparison.recipe.get("title") or name)] = open_folders([path.parent]).runs

    def leave_out(self, path: Path, name: str, why: str) -> None:
        """Note a record that is beside no number of the paper, unless its comparison shows it."""
        if not _inside_a_comparison(path):
            self.left_out[name] = why

    def add_record(self, path: Path, name: str, stored: Mapping[str, Any], setting: str) -> None:
        """The numbers of a record in a setting of the paper."""
        source = _source(stored, name)
        is_run = isinstance(stored.get("rows"), list)
        run = _run(path) if is_run else None
        if run and any(row["phase"] not in _OWN for request in run.requests for row in request.rows):
            self.runs.setdefault(setting, []).append(run)  # Original and Retrain alone are in the runs of the methods
        apart = _set_apart(stored["recipe"])
        if apart:
            self.left_out[name] = apart
        elif run:
            self.measured.extend(_of_run(run, setting, source))
        elif stored.get("kind") == "reference":
            self.measured.extend(_of_reference(stored, setting, source))
        elif stored.get("kind") == "unlearned accuracy":
            self.measured.extend(_of_unlearned(stored, setting, name))
        else:
            self.left_out[name] = "it is a record of an unknown kind"


def _object(path: Path) -> Mapping[str, Any]:
    try:
        stored = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise StoreError(f"{path} cannot be read ({error}): restore it, or move it out of the folder.") from error
    return stored if isinstance(stored, dict) else {}


def _run(path: Path) -> RunResults:
    """A run; below a comparison, with the control that ran beside it."""
    return read_run(path.parent) if _inside_a_comparison(path) else read_record(path)


def _inside_a_comparison(path: Path) -> bool:
    top = comparison_above(path.parent.resolve()) if path.name == RESULTS else None
    return top is not None and (top / COMPARISON).exists()


def _set_apart(recipe: Mapping[str, Any]) -> str:
    """Why a run in a setting of the paper is beside none of its numbers, or ""."""
    data = recipe.get("data", {})
    if number(data.get("holdout")):
        return f"its clients hold out {100 * data['holdout']:g} % of their data, which the paper's do not"
    evaluate = recipe.get("evaluate")
    if isinstance(evaluate, Mapping) and number(evaluate.get("backdoor")):
        return "its leaving clients poison their data"
    audit = recipe.get("audit")
    if isinstance(audit, Mapping) and number(audit.get("canaries")):
        return "its clients plant canaries"
    return ""


def _source(stored: Mapping[str, Any], file: str, code: Mapping[str, Any] | None = None) -> Source:
    code = stored.get("code", {}) if code is None else code
    commit = code.get("commit") if isinstance(code, Mapping) else None
    versions = stored.get("versions")
    version = code.get("version") or (versions.get("fedquit") if isinstance(versions, Mapping) else None)
    named = f"fedquit {version}" if version else ""
    named += f" at {commit[:7]}" if isinstance(commit, str) else ""
    named += " with uncommitted changes" if isinstance(code, Mapping) and code.get("dirty") is True else ""
    computed = stored.get("computed", {})
    device = ", ".join(str(computed[key]) for key in ("device", "precision") if key in computed)
    return Source(file, named, device)


# Runs


def _of_run(run: RunResults, setting: str, source: Source) -> Iterator[Measured]:
    for request in run.requests:
        what = request_of(run.recipe, len(request.clients))
        method = method_of(run.method_options, setting)
        for phase, own in {**_OWN, "unlearned": method, "recovered": method}.items():
            yield from _of_phase(request, Key(setting, what, own, phase, ""), phase, source)
        for share, ended in request.budgets.items():
            if quantities.affordable(ended):
                yield from _of_phase(ended, Key(setting, what, method, f"budget-{share:g}", ""), "recovered", source)
        for measure, kind in _COSTS.items():
            spent = quantities.total_cost(request, kind)
            whole = quantities.cost(request, "retrained", kind)
            if spent is not None:
                key = Key(setting, what, method, "total", measure)
                yield _measured(key, request, spent, source, times=whole / spent if whole and spent else None)


def _of_phase(request: RequestRows, key: Key, phase: str, source: Source) -> Iterator[Measured]:
    """The accuracies, attacks, rounds and costs of one phase."""
    row = request.row(phase)
    complete = sum(number(row.get(measure)) is not None for measure in FIVE)
    gaps: dict[str, float | None] = {}
    for measure in FIVE:
        value = request.get(phase, measure)
        gap = None if phase == "retrained" else quantities.request_distance(request, phase, measure)
        gaps[measure] = gap
        if value is not None:
            before = request.get("original", measure)
            drop = None if before is None or phase == "original" else before - value
            own = key._replace(measure=measure)
            yield _measured(own, request, value, source, gap=gap, drop=drop, complete=complete)
    average = quantities.average_gap({measure: gaps[measure] for measure in AVERAGED.values()})
    extra = {"avg_gap": average, "rounds": request.get(phase, "rounds"), "forget_entropy": _mean_entropy(row)}
    extra |= {measure: quantities.cost(request, phase, kind) for measure, kind in _COSTS.items()}
    retrain_entropy = _mean_entropy(request.row("retrained"))
    for measure, value in extra.items():
        if value is not None:
            far = abs(value - retrain_entropy) if measure == "forget_entropy" and retrain_entropy is not None else None
            times = 1.0 if phase == "retrained" and measure in _COSTS else None
            own = key._replace(measure=measure)
            yield _measured(own, request, value, source, gap=far, times=times, complete=complete)


def _mean_entropy(row: Row) -> float | None:
    """The mean predictive entropy on the forget data, in nats, from the stored density."""
    stored = row.get("entropy")
    if not isinstance(stored, Mapping):
        return None
    edges, density = stored.get("edges", ()), stored.get("forget", ())
    if len(edges) != len(density) + 1:
        return None
    bins = zip(edges, edges[1:], density, strict=False)
    return float(sum((high - low) * (high + low) / 2 * mass for low, high, mass in bins))


def _measured(key: Key, request: RequestRows, value: float, source: Source, **more: Any) -> Measured:  # noqa: ANN401 - fields of Measured
    seed = request.seed if isinstance(request.seed, int) else 0
    return Measured(key, request.clients, seed, value, source, **more)


# References and unlearned accuracy


def _of_reference(stored: Mapping[str, Any], setting: str, source: Source) -> Iterator[Measured]:
    """The model of the last round, for each target."""
    for rows in stored["rows"].values():
        row = rows[-1]
        request = RequestRows(0, [row])
        key = Key(setting, request_of(stored["recipe"], len(request.clients)), row["method"], row["phase"], "")
        yield from _of_phase(request, key, row["phase"], source)


def _of_unlearned(stored: Mapping[str, Any], setting: str, file: str) -> Iterator[Measured]:
    known: set[tuple[Target, str]] = set()
    for run in stored["runs"]:
        source = _source(stored, file, run.get("code", {}))
        method = method_of(run["method"], setting)
        target = (int(run["target"]),)
        references = stored["references"][str(run["target"])]
        rows: list[dict[str, Any]] = [
            {**references[phase], "method": own, "phase": phase} for phase, own in _OWN.items() if phase in references
        ]
        rows += [{**run["unlearned"], "method": method, "phase": "unlearned", "rounds": len(run["unlearning"])}]
        if run.get("reached") and run["recovery"]:
            last = run["recovery"][-1]
            rows += [{**last, "method": method, "phase": "recovered", "rounds": last["round"]}]
        shared = {"request": 0, "clients": list(target), "seed": int(stored["recipe"].get("seed", 0))}
        request = RequestRows(0, [{**row, **shared} for row in rows])
        for row in rows:
            own = Key(setting, "client", row["method"], row["phase"], "")
            if row["phase"] in _OWN and (target, row["phase"]) in known:
                continue
            known.add((target, row["phase"]))
            yield from _of_phase(request, own, row["phase"], source)


def _preference(one: Measured) -> tuple[int, bool, str]:
    """The order of records of the same number; the largest is preferred."""
    return one.complete, " at " in one.source.code, one.source.file
