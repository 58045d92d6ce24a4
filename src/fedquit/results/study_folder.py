# SPDX-License-Identifier: Apache-2.0
"""The folder of a study: its plan, the record of each finished unit, what failed, and the time that is left.

    study.json                                       the plan, as the last `fedquit study run` expanded it
    units/SETTING/original/seed-0/results.json       Original, with a row for each target
    units/SETTING/retrain/client-2/seed-7/…          Retrain
    units/SETTING/seed-0/client-2/METHOD/…           a method's run; `failed.json` in place of results says why
    units/SETTING/seed-0/client-2/control/…          Natural's path beside the methods
    units/SETTING/comparison.json                    the table over the units of a setting that are done

The folder of a setting is that of a comparison, so that everything that reads comparisons reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from fedquit.errors import StoreError
from fedquit.inference.gaps import Margin
from fedquit.results.comparison import Comparison, Outcome, Place, Target, build_comparison
from fedquit.results.folders import RESULTS, STUDY, load_results
from fedquit.results.path import Point
from fedquit.results.schema import SCHEMA, Row, number
from fedquit.utils.files import read_json, write_json
from fedquit.utils.version import code_version

UNITS = "units"
FAILED = "failed.json"
KINDS = ("original", "retrain", "method", "control")


@dataclass(frozen=True)
class PlannedUnit:
    """A unit of a study, as far as reading its records needs it.

    Attributes:
        name: Its folder below `units`.
        kind: One of `KINDS`.
        setting: The setting that it belongs to.
        seed: Of Original, of the run, or of Retrain itself.
        target: The clients that leave; empty for Original.
        method: The method with its options, as tables name it; empty for the other kinds.
        recipe_hash: Of the recipe that it carries out.
        after: The units that it waits for.
        retrains: Of a method's run, the Retrains of other seeds that its verdict rests on, its reference among them.
    """

    name: str
    kind: str
    setting: str
    seed: int
    target: tuple[int, ...] = ()
    method: str = ""
    recipe_hash: str = ""
    after: tuple[str, ...] = ()
    retrains: tuple[str, ...] = ()

    @property
    def place(self) -> Place:
        """The target and the seed."""
        return as_target(self.target), self.seed

    @property
    def alike(self) -> tuple[str, str, str]:
        """What units have in common that should take as long."""
        return self.kind, self.setting, self.method


def as_target(clients: Sequence[int]) -> Target:
    """The target of these clients."""
    return clients[0] if len(clients) == 1 else tuple(clients)


@dataclass(frozen=True)
class StudyFolder:
    """A study's plan and the folder in which its records lie.

    Attributes:
        folder: Of the study.
        title: Of tables.
        units: In the order in which they are run.
        recipes: Of each setting, in plain values.
        margin: Of the equivalence with Retrain: "2" points, "2s" deviations of Retrain; "" where none was fixed.
    """

    folder: Path
    title: str = ""
    units: tuple[PlannedUnit, ...] = ()
    recipes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    margin: str = ""

    @staticmethod
    def read(folder: Path) -> StudyFolder:
        """The study in a folder.

        Raises:
            StoreError: there is none, or it cannot be read.
        """
        path = folder / STUDY
        if not path.exists():
            raise StoreError(f"no {STUDY} in {folder}: run `fedquit study run STUDY.toml --out {folder}` first.")
        stored = read_json(path)
        try:
            units = [PlannedUnit(**{**unit, **_tuples(unit)}) for unit in stored["units"]]
            return StudyFolder(folder, stored["title"], tuple(units), stored["recipes"], stored["margin"])
        except (KeyError, TypeError) as error:
            raise StoreError(
                f"{path} is not what `fedquit study run` wrote: run the study into {folder} again; its units are kept."
            ) from error

    def write(self) -> None:
        """Write the plan; records that lie in the folder stay as they are."""
        units = [asdict(unit) for unit in self.units]
        plan = {"schema": SCHEMA, "title": self.title, "margin": self.margin, "recipes": self.recipes, "units": units}
        write_json(self.folder / STUDY, plan)

    def place_of(self, unit: PlannedUnit) -> Path:
        """The folder of a unit's record."""
        return self.folder / UNITS / unit.name

    def record(self, unit: PlannedUnit) -> dict[str, Any] | None:
        """The record of a unit, or None where it is not finished.

        Raises:
            StoreError: it is damaged, or of another recipe.
        """
        place = self.place_of(unit)
        if not (place / RESULTS).exists():
            return None
        stored = load_results(place)
        if stored.get("recipe_hash") != unit.recipe_hash:
            raise StoreError(
                f"{place} holds the results of another recipe than the study has under this name: "
                "give the block another name, or choose another --out."
            )
        return stored

    def write_record(self, unit: PlannedUnit, results: Mapping[str, Any], seconds: float) -> None:
        """Keep the results of a finished unit.

        Args:
            unit: Which.
            results: What `results.json` holds, of the results model.
            seconds: That it took, with evaluation.
        """
        about = {
            "unit": unit.name,
            "kind": unit.kind,
            "setting": unit.setting,
            "method": unit.method,
            "target": list(unit.target),
            "seed": unit.seed,
            "seconds": round(seconds, 3),
        }
        write_json(self.place_of(unit) / RESULTS, {**results, "schema": SCHEMA, "study": about})
        (self.place_of(unit) / FAILED).unlink(missing_ok=True)

    def failure(self, unit: PlannedUnit) -> str:
        """Why a unit failed; "" where it did not, or has not run."""
        path = self.place_of(unit) / FAILED
        return str(read_json(path).get("why", "unknown")) if path.exists() else ""

    def write_failure(self, unit: PlannedUnit, why: str, seconds: float) -> None:
        """Keep the reason why a unit failed.

        Args:
            unit: Which.
            why: A sentence.
            seconds: That it took.
        """
        content = {"schema": SCHEMA, "unit": unit.name, "why": why, "seconds": round(seconds, 3)}
        write_json(self.place_of(unit) / FAILED, {**content, "code": code_version()})

    def forget_failures(self) -> None:
        """Let failed units be run again."""
        for unit in self.units:
            (self.place_of(unit) / FAILED).unlink(missing_ok=True)

    def comparison(self, setting: str) -> Comparison | None:
        """The table over the finished units of a setting; None where no method is finished or failed."""
        methods = [unit for unit in self.units if unit.kind == "method" and unit.setting == setting]
        top = self.folder / UNITS / setting
        outcomes = []
        again: dict[Place, Row] = {}
        retrains: dict[Target, dict[str, Row]] = {}
        for unit in methods:
            record, failure = self.record(unit), self.failure(unit)
            if record is None and not failure:
                continue
            rows = tuple(record["rows"]) if record else ()
            outcomes.append(Outcome(unit.method, *unit.place, self.place_of(unit), rows, "" if rows else failure))
            others = self._rows_of(unit.retrains)
            retrains.setdefault(unit.place[0], {}).update(others)
            if len(others) > 1:  # the first is the run's own reference
                again[unit.place] = list(others.values())[1]
        if not outcomes:
            return None
        others_of = {target: list(rows.values()) for target, rows in retrains.items() if rows}
        return build_comparison(
            self.recipes[setting],
            code_version(),
            list(dict.fromkeys(unit.method for unit in methods)),
            outcomes,
            again,
            top,
            retrains=others_of or None,
            margin=Margin.parse(self.margin) if self.margin else None,
            controls=self._controls(setting),
        )

    def _rows_of(self, names: Sequence[str]) -> dict[str, Row]:
        """By name, the row of each of these Retrains that is finished."""
        by_name = {unit.name: unit for unit in self.units if unit.name in names}
        rows: dict[str, Row] = {}
        for name in names:
            record = self.record(by_name[name])
            if record:
                rows[name] = record["rows"][0]
        return rows

    def _controls(self, setting: str) -> dict[Place, Sequence[Point]]:
        paths: dict[Place, Sequence[Point]] = {}
        for unit in self.units:
            record = self.record(unit) if unit.kind == "control" and unit.setting == setting else None
            if record:
                paths[unit.place] = record["rows"][0]["path"]
        return paths


def _tuples(unit: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    return {key: tuple(value) for key, value in unit.items() if isinstance(value, list)}


@dataclass(frozen=True)
class StudyStatus:
    """How far a study is.

    Attributes:
        title: Of the study.
        done: Names of finished units.
        missing: Names of units that are not finished, in the order in which they will be run.
        failed: By name, why a unit failed.
        blocked: By name, which failed unit it waits for; they are not among the missing.
        seconds_spent: On finished units.
        seconds_left: The estimate for the missing ones, as if one process did them all; None where none is known.
        unknown: Missing units that no finished one is like, which the estimate leaves out.
        codes: The versions of the code that made the records.
    """

    title: str
    done: tuple[str, ...]
    missing: tuple[str, ...]
    failed: Mapping[str, str]
    blocked: Mapping[str, str]
    seconds_spent: float
    seconds_left: float | None
    unknown: int
    codes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def study_status(study: StudyFolder) -> StudyStatus:
    """What of a study is done, missing, failed, and how long the rest should take."""
    seconds: dict[str, float] = {}
    codes: dict[str, None] = {}
    failed: dict[str, str] = {}
    for unit in study.units:
        record = study.record(unit)
        if record is not None:
            seconds[unit.name] = number(record.get("study", {}).get("seconds")) or 0.0
            codes[code_name(record.get("code"))] = None
        elif why := study.failure(unit):
            failed[unit.name] = why
    blocked = blocked_units(study.units, failed)
    over = seconds.keys() | failed.keys() | blocked.keys()
    missing = [unit for unit in study.units if unit.name not in over]
    left = [estimate(unit, study.units, seconds) for unit in missing]
    known = [one for one in left if one is not None]
    return StudyStatus(
        title=study.title,
        done=tuple(seconds),
        missing=tuple(unit.name for unit in missing),
        failed=failed,
        blocked=blocked,
        seconds_spent=sum(seconds.values()),
        seconds_left=sum(known) if known or not missing else None,
        unknown=len(missing) - len(known),
        codes=tuple(codes),
    )


def blocked_units(units: Sequence[PlannedUnit], failed: Mapping[str, str]) -> dict[str, str]:
    """By name, the failed unit that a unit waits for, through others too; a control waits for no method."""
    blocked: dict[str, str] = {}
    for unit in units:
        needed = [name for name in unit.after if unit.kind != "control" or "/original/" in name]
        cause = next((blocked.get(name, name) for name in needed if name in failed or name in blocked), "")
        if cause and unit.name not in failed:
            blocked[unit.name] = cause
    return blocked


def estimate(unit: PlannedUnit, units: Sequence[PlannedUnit], seconds: Mapping[str, float]) -> float | None:
    """The seconds that a unit should take: the mean of finished units that are most like it.

    Args:
        unit: That is not finished.
        units: All of the study.
        seconds: By name, what finished units took.

    Returns:
        The mean over units of the same kind, setting and method; else of the same kind and setting; else of the same
        kind; None where none of these is finished.
    """
    for length in (3, 2, 1):
        known = [seconds[u.name] for u in units if u.name in seconds and u.alike[:length] == unit.alike[:length]]
        if known:
            return fmean(known)
    return None


def code_name(code: object) -> str:
    """A version of the code in words, as "0.1.0 at c96ac97"."""
    if not isinstance(code, Mapping):
        return "an unknown version"
    commit = str(code.get("commit", ""))[:7]
    changed = ", changed" if code.get("dirty") else ""
    return str(code.get("version", "an unknown version")) + (f" at {commit}{changed}" if commit else "")
