# SPDX-License-Identifier: Apache-2.0
"""The folders of runs and comparisons: reading them with care, and writing them without losing what is there.

A run has `results.json`; a comparison has `comparison.json`, and its runs lie below it as `seed-0/client-2/METHOD`.
Nothing that cannot be read is overwritten: it may be hours of work, or of a later version.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from fedquit.errors import StoreError
from fedquit.results.comparison import Comparison
from fedquit.results.frames import frame_of_rows
from fedquit.results.path import Point
from fedquit.results.requests import RequestRows, Spreads
from fedquit.results.schema import SCHEMA, TPRS, Row, fault_of_results
from fedquit.results.words import JUDGE_ANEW, NOT_JUDGED
from fedquit.utils.files import write_json

if TYPE_CHECKING:
    from fedquit.results.frames import DataFrame

RESULTS = "results.json"
COMPARISON = "comparison.json"
SWEEP = "sweep.json"
OWNER_FOLDER = "owner"  # in the folder of a run; its files name samples, each for the client that owns them alone
STUDY = "study.json"  # of a study; each of its settings is the folder of a comparison
_SHARED = ("data", "model", "train")  # sections of the recipe in which all runs of a comparison agree
_FINDINGS = ("rows", "clients")  # fields that say what was found, not how
_RUNS = "seed-*/client*-*/*"  # where the runs of a comparison lie below it
_RATES = "lr-*"  # where the runs of a sweep lie below it


@dataclass(frozen=True, eq=False)
class RunResults:
    """One run: what `results.json` holds, with its rows request by request.

    Attributes:
        folder: The name to print; within a comparison, from the seed on.
        recipe: As it was carried out.
        versions: Of the packages it was computed with.
        rows: One for each phase of each request, as they are stored; `judged_rows` has them as every view shows them.
        clients: The label counts of each client, where they were stored.
        code: The version of the code that made it; empty in older results.
        spreads: What the comparison around it says about two Retrains.
        control: Natural's path, where the comparison around it ran Natural as a control.
        longer: Retrain's path from its end on, where the comparison around it let Retrain go on.
        extra: All other fields.
    """

    folder: str
    recipe: Mapping[str, Any]
    versions: Mapping[str, Any]
    rows: Sequence[Row]
    clients: object = None
    code: Mapping[str, Any] = field(default_factory=dict)
    spreads: Spreads = field(default_factory=Spreads)
    control: Sequence[Point] = ()
    longer: Sequence[Point] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)
    events: Sequence[RequestRows] = field(init=False)

    def __post_init__(self) -> None:
        by_number = groupby(self.rows, key=lambda row: int(row["request"]))
        events = [
            RequestRows(
                number,
                [_without_old_claims(row) for row in rows],
                self.spreads,
                control=self.control,
                longer=self.longer,
            )
            for number, rows in by_number
        ]
        object.__setattr__(self, "events", events)

    @property
    def requests(self) -> list[RequestRows]:
        """The requests to forget."""
        return [event for event in self.events if event.forgets]

    @property
    def judged_rows(self) -> list[Row]:
        """The rows as every view shows them: without what an earlier version claimed at an unknown error rate."""
        return [row for event in self.events for row in event.rows]

    @property
    def name(self) -> str:
        """The title of the recipe, or the folder."""
        title = self.recipe.get("title")
        return title if isinstance(title, str) and title.strip() else self.folder

    @property
    def method_options(self) -> Mapping[str, Any]:
        """The settings of the method."""
        method = self.recipe.get("method")
        return method if isinstance(method, dict) else {}

    @staticmethod
    def read(
        folder: str,
        stored: Mapping[str, Any],
        spreads: Spreads | None = None,
        control: Sequence[Point] = (),
        longer: Sequence[Point] = (),
    ) -> RunResults:
        """From the JSON of results that `load_results` accepted.

        Args:
            folder: The name to print.
            stored: The object in `results.json`.
            spreads: What the comparison around it says about two Retrains.
            control: Natural's path, from the comparison around it.
            longer: Retrain's path from its end on, from the comparison around it.
        """
        fields = ("schema", "recipe", "versions", "rows", "clients", "code")
        code = stored.get("code")
        return RunResults(
            folder=folder,
            recipe=stored["recipe"],
            versions=stored["versions"],
            rows=stored["rows"],
            clients=stored.get("clients"),
            code=code if isinstance(code, dict) else {},
            spreads=spreads or Spreads(),
            control=control,
            longer=longer,
            extra={key: value for key, value in stored.items() if key not in fields},
        )

    def to_pandas(self) -> DataFrame:
        """The rows as a table: a line for each phase of each request (needs pandas)."""
        return frame_of_rows(self.judged_rows)

    def to_dict(self) -> dict[str, Any]:
        """For JSON: what was read, with every field that this version does not know."""
        named: dict[str, Any] = {"recipe": self.recipe, "versions": self.versions, "rows": self.rows}
        optional = {"code": self.code or None, "clients": self.clients}
        known = {key: value for key, value in optional.items() if value is not None}
        return {"schema": SCHEMA, **named, **known, **self.extra}


def _without_old_claims(row: Row) -> Row:
    """A row without what an earlier version claimed by rules of unknown error rate; other rows are as they are.

    A verdict without its reason is not judged, and bounds of a TPR without that of its FPR covered it too seldom.
    """
    uncovered = {f"{key}_{end}" for key in TPRS if f"{key}_fpr_high" not in row for end in ("low", "high")}
    kept = {key: value for key, value in row.items() if key not in uncovered}
    if isinstance(row.get("holdout_verdict"), str) and not isinstance(row.get("holdout_reason"), str):
        kept |= {"holdout_verdict": NOT_JUDGED, "holdout_reason": JUDGE_ANEW}
    return kept


@dataclass(frozen=True)
class ResultSet:
    """All that a report is made of.

    Attributes:
        runs: Each with its rows; those of a comparison too.
        comparisons: What was found over several runs.
        sweeps: What `sweep.json` holds of each sweep; its runs, one for each rate, are among the others.
    """

    runs: Sequence[RunResults]
    comparisons: Sequence[Comparison] = ()
    sweeps: Sequence[Mapping[str, Any]] = ()


# Reading


def load_results(folder: Path) -> dict[str, Any]:
    """The object in the `results.json` of a run.

    Raises:
        StoreError: It is missing, damaged, or of another schema.
    """
    path = folder / RESULTS
    if not _exists(path):
        if _is_unfinished_comparison(folder):
            raise StoreError(f"{folder} holds an unfinished comparison: run the same `fedquit compare` into it again.")
        raise StoreError(f"no {RESULTS} in {folder}: run `fedquit run RECIPE --out {folder}` first")
    return _load(path)


def _load(path: Path) -> dict[str, Any]:
    advice = "restore it from a backup, or run the same recipe into another folder"
    stored = _read_object(path, advice)
    fault = fault_of_results(stored)
    if fault:
        raise _damaged(path, fault, advice)
    return stored


def read_record(path: Path) -> RunResults:
    """The results of a run that were put aside under another name than `results.json`."""
    return RunResults.read(path.stem, _load(path))


def read_run(folder: Path) -> RunResults:
    """A run, with the spreads of the comparison that it lies in, if there is one."""
    here = folder.resolve()
    top = comparison_above(here)
    if top is None:
        return RunResults.read(here.name, load_results(folder))
    comparison = read_comparison(top) if _exists(top / COMPARISON) else Comparison(top.name)
    return _run_of(comparison, top, here)


def read_comparison(folder: Path) -> Comparison:
    """The `comparison.json` of a folder, without its runs.

    Raises:
        StoreError: It is missing, damaged, or of another schema.
    """
    path = folder / COMPARISON
    advice = "restore it from a backup, or move it away and run the same comparison again, which keeps its runs"
    stored = _read_object(path, advice)
    for key, kind in (("table", list), ("runs", list), ("failed", list), ("floors", dict)):
        if key in stored and not isinstance(stored[key], kind):
            raise _damaged(path, f"it has no usable {key}", advice)
    return Comparison.read(folder.resolve().name, stored)


def open_folders(folders: Sequence[Path]) -> ResultSet:
    """The runs in some folders; the folder of a comparison stands for all its runs.

    Args:
        folders: Of runs, comparisons and studies.

    Raises:
        StoreError: One of them is empty, damaged, of another schema, or holds what does not belong together.
    """
    runs: list[RunResults] = []
    comparisons: list[Comparison] = []
    sweeps: list[Mapping[str, Any]] = []
    for folder in [place for given in folders for place in _settings_of(given)]:
        rates = _rates_of(folder)
        if rates:
            runs += [read_run(place) for place in rates]
            sweeps += [read_sweep(folder)] if _exists(folder / SWEEP) else []
            continue
        if not _exists(folder / COMPARISON):
            runs.append(read_run(folder))
            continue
        if _exists(folder / RESULTS):
            raise StoreError(
                f"{folder} holds both the {RESULTS} of a run and a {COMPARISON}: "
                "move the run into a folder of its own, then name the one that you mean."
            )
        comparison = read_comparison(folder)
        comparisons.append(comparison)
        runs += _runs_of(comparison, folder)
    return ResultSet(runs, comparisons, sweeps)


def _settings_of(folder: Path) -> list[Path]:
    """The comparisons of a study, one for each setting with results; of any other folder, itself."""
    if not _exists(folder / STUDY):
        return [folder]
    settings = sorted(path.parent for path in folder.glob(f"units/*/{COMPARISON}"))
    if not settings:
        raise StoreError(f"no method of the study in {folder} is finished: go on with `fedquit study run`.")
    return settings


def _rates_of(folder: Path) -> list[Path]:
    """The runs of a sweep, by rising rate; empty where the folder is none."""
    if _exists(folder / RESULTS) or _exists(folder / COMPARISON):
        return []
    places = [path.parent for path in folder.glob(f"{_RATES}/{RESULTS}")]
    return sorted(places, key=_rate)


def _rate(place: Path) -> tuple[float, str]:
    try:
        return float(place.name.removeprefix("lr-")), place.name
    except ValueError:
        return float("inf"), place.name


def read_sweep(folder: Path) -> Mapping[str, Any]:
    """The `sweep.json` of a folder: its `rates`, the one that was `chosen`, the one that was `tried`, and the `reason`.

    Raises:
        StoreError: It is missing, damaged, or of another schema.

    Returns:
        As it is stored; in a sweep of an earlier version, whose choice nothing confirmed, no rate is chosen.
    """
    path = folder / SWEEP
    advice = "restore it from a backup, or move it away and run the same sweep again, which keeps its runs"
    stored = _read_object(path, advice)
    if not isinstance(stored.get("rates"), list):
        raise _damaged(path, "it has no usable rates", advice)
    confirmed = any(isinstance(rate, Mapping) and "halves" in rate for rate in stored["rates"])
    return stored if confirmed else {**stored, "chosen": None, "reason": f"{NOT_JUDGED}: {JUDGE_ANEW}"}


def write_sweep(folder: Path, sweep: Mapping[str, Any]) -> None:
    """Write the `sweep.json` of a folder.

    Args:
        folder: Of the sweep; its runs lie below it.
        sweep: `rates`, `chosen`, `tried` and `reason`, as plain values.
    """
    write_json(folder / SWEEP, {"schema": SCHEMA, **sweep})


def comparison_above(run: Path) -> Path | None:
    """The folder of the comparison that a run lies in by the names of its folders, or None."""
    if len(run.parents) < 3:
        return None
    within_target = run.parent.name.startswith(("client-", "clients-"))
    within_seed = run.parents[1].name.startswith("seed-")
    return run.parents[2] if within_target and within_seed else None


def _runs_of(comparison: Comparison, folder: Path) -> list[RunResults]:
    """The runs that a comparison names, or all that lie below it where it names none."""
    if comparison.runs is None:
        places = sorted(path.parent for path in folder.glob(f"{_RUNS}/{RESULTS}"))
    else:
        places = [folder / name for name in comparison.runs]
        _refuse_missing(folder, comparison.runs)
    if not places and not comparison.failed:
        raise StoreError(f"{folder / COMPARISON} has no runs below it: run `fedquit compare` into {folder} again.")
    runs = [_run_of(comparison, folder, place) for place in places]
    for run in runs:
        _refuse_foreign(comparison, run, folder)
    return runs


def _run_of(comparison: Comparison, top: Path, place: Path) -> RunResults:
    inside = place.resolve().relative_to(top.resolve())
    where = inside.parent.as_posix()
    around = comparison.controls.get(where, ()), comparison.longer.get(where, ())
    return RunResults.read(inside.as_posix(), load_results(place), comparison.spreads_of(where), *around)


def _refuse_missing(folder: Path, names: Sequence[str]) -> None:
    for name in names:
        parts = PurePosixPath(name).parts
        if not parts or PurePosixPath(name).is_absolute() or ".." in parts:
            raise StoreError(
                f"{folder / COMPARISON} names the run {name!r}, which is not below it: name a run of its own."
            )
        if not _exists(folder / name / RESULTS):
            raise StoreError(
                f"{folder / COMPARISON} names the run {name}, and {name}/{RESULTS} is not there: "
                "restore it from a backup, or run the same comparison again, which makes what is missing."
            )


def _refuse_foreign(comparison: Comparison, run: RunResults, folder: Path) -> None:
    section = differing_section(comparison.recipe, run.recipe)
    if section:
        raise StoreError(
            f"{folder} is mixed: {run.folder} was run with another [{section}] than its {COMPARISON} says; "
            "move the run that does not belong there into a folder of its own."
        )


def differing_section(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """The section in which two recipes are not of one comparison, or "".

    Keys that only one of them has do not count: a later version added them, and their default is what the other had.

    Args:
        one: A recipe in plain values.
        other: Another.
    """
    for section in _SHARED:
        ours, theirs = one.get(section), other.get(section)
        if not (isinstance(ours, Mapping) and isinstance(theirs, Mapping)):
            continue
        if any(ours[key] != theirs[key] for key in ours.keys() & theirs.keys()):
            return section
    return ""


def _is_unfinished_comparison(folder: Path) -> bool:
    return not _exists(folder / COMPARISON) and next(folder.glob(_RUNS), None) is not None


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return True  # reading it says what is wrong


def _read_object(path: Path, advice: str) -> dict[str, Any]:
    try:
        stored = json.loads(path.read_bytes())
    except OSError as error:
        raise StoreError(f"cannot read {path} ({error.strerror}): make it readable and try again.") from error
    except (ValueError, RecursionError) as error:
        raise _damaged(path, str(error), advice) from error
    if not isinstance(stored, dict):
        raise _damaged(path, "it is not an object", advice)
    if stored.get("schema") != SCHEMA or isinstance(stored.get("schema"), bool):
        raise StoreError(
            f"{path} has schema {stored.get('schema')!r} and this version of fedquit reads schema {SCHEMA} only: "
            "use the version that wrote it, or choose another folder."
        )
    return stored


def _damaged(path: Path, why: str, advice: str) -> StoreError:
    return StoreError(f"{path} is damaged ({why}): {advice}.")


# Writing


def refuse_overwriting(folder: Path, kind: str, recipe: Mapping[str, Any] | None = None) -> None:
    """Refuse a folder whose contents the results of this work would damage; to be called before the work begins.

    Args:
        folder: Of a run or a comparison; it need not exist.
        kind: What will be written, `RESULTS` or `COMPARISON`.
        recipe: Of a comparison, in plain values.

    Raises:
        StoreError: It holds results that cannot be read, those of the other kind, or a comparison of another recipe.
    """
    if kind == RESULTS and (_exists(folder / COMPARISON) or _is_unfinished_comparison(folder)):
        raise StoreError(f"{folder} holds a comparison, and a run would mix with it: choose another folder.")
    if kind == COMPARISON and _exists(folder / RESULTS):
        raise StoreError(f"{folder} holds a run, and a comparison would mix with it: choose another folder.")
    if not _exists(folder / kind):
        return
    if kind == RESULTS:
        load_results(folder)
        return
    section = differing_section(read_comparison(folder).recipe, recipe or {})
    if section:
        raise StoreError(
            f"{folder} holds a comparison of another recipe (it differs in [{section}]): choose another folder."
        )


def write_results(folder: Path, results: Mapping[str, Any]) -> dict[str, Any]:
    """Write the `results.json` of a run, and return what it holds then.

    Results that a resumed run found already on disk are left as they are, so that they go on naming the code that made
    them.

    Args:
        folder: Of the run.
        results: All its fields.

    Raises:
        StoreError: What lies there cannot be read, so that it is not overwritten.
    """
    refuse_overwriting(folder, RESULTS)
    content = {**results, "schema": SCHEMA}
    if _exists(folder / RESULTS):
        stored = load_results(folder)
        if _findings(stored) == _findings(json.loads(json.dumps(content))):
            return stored
    write_json(folder / RESULTS, content)
    return content


def _findings(results: Mapping[str, Any]) -> dict[str, Any]:
    return {key: results.get(key) for key in _FINDINGS}


def write_comparison(folder: Path, comparison: Comparison) -> dict[str, Any]:
    """Write the `comparison.json` of a folder, and return what it holds.

    Args:
        folder: Of the comparison.
        comparison: With all its lines.

    Raises:
        StoreError: What lies there cannot be read, so that it is not overwritten.
    """
    refuse_overwriting(folder, COMPARISON, comparison.recipe)
    content = comparison.to_dict()
    write_json(folder / COMPARISON, content)
    return content
