# SPDX-License-Identifier: Apache-2.0
"""Reference bundles: what is kept of Original and Retrain, so that nobody need train a Retrain again.

A bundle is a folder. For each model it has one JSON file (the rows of the last ten rounds, what was trained on which
data, code and hardware) and one safetensors file (per-example scores of the final model in half precision). It has no
weights and no data. A model is found by the hashes of its data, partition and training, its target and its seed, never
by the name of its file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from fedquit.errors import InputError, StoreError
from fedquit.results.folders import ResultSet, RunResults
from fedquit.results.path import LAST, last_rounds
from fedquit.results.schema import Row, fault_of_row, number
from fedquit.results.words import signed
from fedquit.utils.files import write_atomic
from fedquit.utils.names import each_named

SCHEMA = 1
KIND = "reference"
BUNDLE = "bundle"  # the field `source` of a row that was taken from a bundle
SOURCE = "source"
LEFT_EMPTY = "left_empty"  # the field of such a row that names what a bundle cannot give, and why
RETRAIN_FROM = "retrain_from"  # the field of results that says from which bundle Retrain came
KEY = "reference_key"  # the field of results that a report finds a Retrain by
SCORES = ("phi", "entropy", "modified_entropy")  # in half precision
CORRECT = "correct"
SETS = ("test", "forget", "holdout", "train")  # `train`: of Original, in the order of the data set
LARGEST = float(np.finfo(np.float16).max)
ROUNDING = 2.0**-11  # the relative error of half precision, half a unit in the last place
NO_WEIGHTS = {
    "forget_js": "it needs the probabilities of all classes",
    "relearn_ratio": "it needs Retrain's weights",
    "retain_acc_last": "the retain accuracy of the last rounds was recorded over other retain data",
}

Role = Literal["original", "retrained"]
Halves = npt.NDArray[np.float16]
Arrays = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class SettingKey:
    """What a reference was trained on, but for its target and its seed: three hashes.

    Attributes:
        data: Of all examples and labels, those of the test set included, and of their preprocessing.
        partition: Of the positions of each client's training and hold-out examples, and of the public ones.
        training: Of the network without its first parameters, of the training's settings and of the precision.
    """

    data: str
    partition: str
    training: str

    def differences(self, other: SettingKey) -> list[str]:
        """The names of the hashes in which two settings differ."""
        return [part for part, value in asdict(self).items() if value != getattr(other, part)]

    @staticmethod
    def read(stored: object) -> SettingKey | None:
        """From JSON; None where one of the three is missing."""
        named = stored if isinstance(stored, dict) else {}
        parts = [named.get(part) for part in ("data", "partition", "training")]
        known = [part for part in parts if isinstance(part, str) and part]
        return SettingKey(*known) if len(known) == len(parts) else None


@dataclass(frozen=True, eq=False)
class Reference:
    """One model of a bundle.

    Attributes:
        file: Its JSON file; the scores lie beside it.
        role: Whether it is Original or a Retrain.
        clients: That Retrain was trained without, in rising order; empty for Original.
        samples: A hash of the forgotten samples, where only some of the clients' are; "" for whole clients.
        seed: Of the training.
        key: Of the setting; None in a record that was made before there were keys.
        rows: For each target, by the names of its clients as in "0+1", its rows of the last rounds.
        paths: The same as the points of a path, with the retain accuracy on the data that a run's paths have.
        sizes: The number of examples of each set with scores.
        stored: All that the file holds.
    """

    file: Path
    role: Role
    clients: tuple[int, ...]
    samples: str
    seed: int
    key: SettingKey | None
    rows: Mapping[str, Sequence[Row]]
    paths: Mapping[str, Sequence[Mapping[str, Any]]]
    sizes: Mapping[str, int]
    stored: Mapping[str, Any] = field(repr=False)

    @property
    def scores_file(self) -> Path:
        """The file of the per-example scores."""
        return self.file.with_suffix(".safetensors")

    @cached_property
    def scores(self) -> dict[str, Arrays]:
        """For each set its arrays by name, in half precision; `correct` as counted.

        Raises:
            StoreError: The file is damaged, or does not belong to the rows.
        """
        scores: dict[str, dict[str, npt.NDArray[Any]]] = {}
        with _opened(self.scores_file) as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                kind, _, key = name.partition(".")
                scores.setdefault(kind, {})[key] = _read(file, name, self.scores_file)
        for kind, arrays in scores.items():
            self._check_scores(kind, arrays)
        return dict(scores)

    def _check_scores(self, kind: str, arrays: Arrays) -> None:
        for key in SCORES:
            if not np.isfinite(arrays[key]).all():
                raise _damaged(self.scores_file, f"{kind}.{key} has numbers that are not finite")
        rows = self.rows.get(target_name(self.clients), ())
        stored = number(rows[-1].get(f"{kind}_acc")) if rows else None
        positions = self.positions
        share = 100 * float(arrays[CORRECT].astype(np.float64).mean()) / positions
        if stored is not None and abs(share - stored) > 1e-6:
            raise _damaged(self.scores_file, f"its {kind} accuracy is {share:.4f} %, and its rows say {stored:.4f} %")

    @property
    def positions(self) -> int:
        """Predictions for each example: 1, or the length of a sequence."""
        return int(number(self.stored.get("positions")) or 1)

    @property
    def final_rounds(self) -> int:
        """The rounds of the training."""
        return int(next(iter(self.rows.values()))[-1]["rounds"])

    def row(self, clients: Sequence[int]) -> dict[str, Any]:
        """The row of the final model for a target, with the means over its last rounds.

        Args:
            clients: Of the target; those of Retrain itself, or of any target of Original.
        """
        rows = self.rows[target_name(clients)]
        path = self.path(clients)
        return {**rows[-1], "retrain_seed": self.seed, SOURCE: BUNDLE, "path": path, **last_rounds(path)}

    def path(self, clients: Sequence[int]) -> list[dict[str, Any]]:
        """The accuracies after each of the last rounds, as Retrain's path has them.

        A record without paths of its own has them without the retain accuracy, which its rows have over all retain
        data and a run's paths over a part of it.
        """
        name = target_name(clients)
        if name in self.paths:
            return [dict(point) for point in self.paths[name]]
        points = []
        for row in self.rows[name]:
            accuracies = {key: row.get(key) for key in ("test_acc", "forget_acc", "holdout_acc")}
            known = {key: value for key, value in accuracies.items() if number(value) is not None}
            sent = float(row.get("down_bytes", 0)) + float(row.get("up_bytes", 0))
            points.append({"round": row["rounds"], "phase": "training", **known, "bytes": sent})
        return points

    @property
    def made_by(self) -> str:
        """Its seed, hardware, precision and code, as a clause."""
        computed = self.stored.get("computed")
        machine = computed if isinstance(computed, dict) else {}
        return made_by(self.seed, machine, self.stored.get("code"))


def made_by(seed: int, computed: Mapping[str, Any], code: object) -> str:
    """How a reference was made, as a clause.

    Args:
        seed: Of its training.
        computed: `device` and `precision`.
        code: `version` and `commit`.
    """
    words = [f"seed {seed}"]
    if computed.get("device"):
        words.append(f"{computed['device']} in {computed.get('precision', 'unknown precision')}")
    if isinstance(code, dict) and code.get("version"):
        commit = code.get("commit")
        words.append(f"fedquit {code['version']}" + (f" at {commit[:12]}" if isinstance(commit, str) else ""))
    return ", ".join(words)


def target_name(clients: Sequence[int]) -> str:
    """The name of a target in a record: "0", or "0+1" for clients that leave together."""
    return "+".join(str(client) for client in sorted(clients))


# Reading


@dataclass(frozen=True, eq=False)
class Bundle:
    """All references below a folder."""

    folder: Path
    references: Sequence[Reference]

    def retrains(self, key: SettingKey, clients: Sequence[int], samples: str = "") -> list[Reference]:
        """The Retrains of a target, by rising seed.

        Args:
            key: Of the setting.
            clients: That leave.
            samples: The hash of the forgotten samples, where not all are forgotten.

        Raises:
            InputError: There is none; the sentence says what differs and what to do.
        """
        own = self.fitting(key, clients, samples)
        if not own:
            raise InputError(self._why_not(key, clients, samples))
        return own

    def fitting(self, key: SettingKey, clients: Sequence[int], samples: str = "") -> list[Reference]:
        """The Retrains of a target, by rising seed; empty where there is none.

        Args:
            key: Of the setting.
            clients: That leave.
            samples: The hash of the forgotten samples, where not all are forgotten.
        """
        own = [ref for ref in self._of(key, "retrained") if target_name(ref.clients) == target_name(clients)]
        return sorted((ref for ref in own if ref.samples == samples), key=lambda ref: ref.seed)

    def original(self, key: SettingKey, seed: int) -> Reference | None:
        """Original of that seed, or None."""
        return next((ref for ref in self._of(key, "original") if ref.seed == seed), None)

    def _of(self, key: SettingKey, role: Role) -> list[Reference]:
        return [ref for ref in self.references if ref.role == role and ref.key == key]

    def _why_not(self, key: SettingKey, clients: Sequence[int], samples: str) -> str:
        """Why no Retrain fits, and what to do, in a sentence."""
        instead = "leave --retrain-from out, and Retrain is trained"
        asked = each_named("client", tuple(clients))
        of_setting = self._of(key, "retrained")
        if of_setting:
            whole = samples or any(ref.samples for ref in of_setting)
            known = ", ".join(dict.fromkeys(target_name(ref.clients) for ref in of_setting))
            what = f"the forgotten samples of {asked}" if whole else asked
            only = f"only without {known}: choose among these, or {instead}"
            return f"{self.folder} has no Retrain without {what}, {only}."
        keyed = [ref for ref in self.references if ref.key is not None and ref.role == "retrained"]
        if not keyed:
            return f"no Retrain in {self.folder} names its data, partition and training by hashes: {instead}."
        nearest = min(keyed, key=lambda ref: len(_differing(ref, key)))
        differing = _differing(nearest, key)
        same = [part for part in asdict(key) if part not in differing]
        agree = f" ({' and '.join(same)} {'agrees' if len(same) == 1 else 'agree'})" if same else ""
        verb = "differs" if len(differing) == 1 else "differ"
        advice = {
            "data": "the same data set and options",
            "partition": "the same partition (file, clients, alpha, hold-out, data.seed)",
            "training": "the same [model], [train] and engine.precision",
        }
        needed = ", ".join(advice[part] for part in differing)
        return (
            f"the Retrains in {self.folder} are of another setting: {' and '.join(differing)} {verb}{agree}; give the "
            f"recipe {needed} as {nearest.file.name} has, or {instead}."
        )


def _differing(ref: Reference, key: SettingKey) -> list[str]:
    return [] if ref.key is None else ref.key.differences(key)


def read_bundle(folder: Path) -> Bundle:
    """The references in a folder and below it; each is checked, and the scores are read when they are asked for.

    Args:
        folder: Of one bundle or of several.

    Raises:
        StoreError: There are none, or one of them is damaged, of another schema, or there twice.
    """
    return BundleReader(folder).read()


_Stamp = tuple[tuple[int, int, int] | None, ...]


class BundleReader:
    """Reads the references in a folder and below it each time anew, but a file that has not changed only once.

    Args:
        folder: Of one bundle or of several; it may be empty, or not there yet.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._known: dict[Path, tuple[_Stamp, Reference | None]] = {}

    @property
    def empty(self) -> bool:
        """Whether there is nothing to read yet."""
        return not any(self.folder.rglob("*.json"))

    def read(self) -> Bundle:
        """All references that are there now.

        Raises:
            StoreError: There are none, or one of them is damaged, of another schema, or there twice.
        """
        references = [ref for path in sorted(self.folder.rglob("*.json")) if (ref := self._reference(path))]
        if not references:
            raise StoreError(
                f"no reference bundle in {self.folder}: make one with `fedquit references make`, or name another "
                "folder."
            )
        seen: dict[tuple[Any, ...], Path] = {}
        for ref in references:
            place = (ref.key, ref.role, ref.clients, ref.samples, ref.seed)
            if ref.key is not None and place in seen:
                raise StoreError(
                    f"{seen[place]} and {ref.file} are records of the same training: move one of them away."
                )
            seen[place] = ref.file
        return Bundle(self.folder, references)

    def _reference(self, path: Path) -> Reference | None:
        """The reference in a file; None for another kind of file."""
        stamp = tuple(_stamp(each) for each in (path, path.with_suffix(".safetensors")))
        if path not in self._known or self._known[path][0] != stamp:
            stored = _json(path)
            reference = None
            if isinstance(stored, dict) and stored.get("kind") == KIND:
                reference = _reference(path, stored)
            self._known[path] = (stamp, reference)
        return self._known[path][1]


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """What changes with a file: its time, size and number; None where it is not there."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _json(path: Path) -> object:
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise StoreError(f"cannot read {path} ({error.strerror}): make it readable and try again.") from error
    except (ValueError, RecursionError) as error:
        raise _damaged(path, str(error)) from error


def _damaged(path: Path, why: str) -> StoreError:
    return StoreError(f"{path} is damaged ({why}): restore it from where the bundle came from.")


def _reference(path: Path, stored: Mapping[str, Any]) -> Reference:
    """A record that was checked, with the shapes of its scores."""
    if stored.get("schema") != SCHEMA or isinstance(stored.get("schema"), bool):
        raise StoreError(
            f"{path} has schema {stored.get('schema')!r} and this version of fedquit reads references of schema "
            f"{SCHEMA} only: use the version that wrote it."
        )
    fault = next(_faults(stored), "")
    if fault:
        raise _damaged(path, fault)
    paths = stored.get("paths")
    reference = Reference(
        file=path,
        role=stored["role"],
        clients=tuple(stored["target"]),
        samples=str(stored.get("samples") or ""),
        seed=stored["seed"],
        key=SettingKey.read(stored.get("key")),
        rows=stored["rows"],
        paths=paths if isinstance(paths, dict) else {},
        sizes=stored["scores"],
        stored=stored,
    )
    _check_shapes(reference)
    return reference


def _faults(stored: Mapping[str, Any]) -> Iterator[str]:
    """What keeps a record from being used, in words."""
    if stored.get("role") not in ("original", "retrained"):
        yield "it has no usable role"
        return
    target = stored.get("target")
    if not isinstance(target, list) or not all(_whole(client) for client in target):
        yield "it has no usable target"
        return
    if bool(target) != (stored["role"] == "retrained") or target != sorted(set(target)):
        yield f"its target {target} does not fit its role {stored['role']}"
    if not _whole(stored.get("seed")):
        yield "it has no usable seed"
    sizes = stored.get("scores")
    if not isinstance(sizes, dict) or not sizes.keys() <= {*SETS} or "test" not in sizes:
        yield "it has no usable sizes of its scores"
        return
    if not all(_whole(size) and size > 0 for size in sizes.values()):
        yield "the sizes of its scores are not positive numbers"
    rows = stored.get("rows")
    if not isinstance(rows, dict) or not rows:
        yield "it has no usable rows"
        return
    if target and set(rows) != {target_name(target)}:
        yield f"its rows are of {', '.join(rows)} and its target is {target_name(target)}"
    for name, each in rows.items():
        yield from _faults_of_rows(name, each)
    paths = stored.get("paths", {})
    for name, points in paths.items() if isinstance(paths, dict) else ():
        rounds = [point.get("round") for point in points if isinstance(point, dict)] if isinstance(points, list) else []
        if name not in rows or rounds != [row["rounds"] for row in rows[name]]:
            yield f"its path of target {name} is not of the rounds of its rows"


def _faults_of_rows(name: str, rows: object) -> Iterator[str]:
    if not isinstance(rows, list) or not 1 <= len(rows) <= LAST:
        yield f"target {name} has no rows, or more than {LAST}"
        return
    for row in rows:
        fault = fault_of_row(row)
        if fault:
            yield f"a row of target {name} {fault}"
            return
    rounds = [row.get("rounds") for row in rows]
    if not all(_whole(each) for each in rounds) or rounds != list(range(rounds[0], rounds[0] + len(rounds))):
        yield f"the rows of target {name} are not of consecutive rounds"
    if number(rows[-1].get("test_acc")) is None:
        yield f"the last row of target {name} has no test accuracy"


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_shapes(reference: Reference) -> None:
    """Refuse a file of scores that has anything but the arrays that the record names."""
    path = reference.scores_file
    wanted: dict[str, tuple[list[int], tuple[str, ...]]] = {}
    for kind, size in reference.sizes.items():
        wanted |= {f"{kind}.{key}": ([size], ("F16",)) for key in SCORES}
        wanted[f"{kind}.{CORRECT}"] = ([size], ("U8", "U16"))
    with _opened(path) as file:
        names = set(file.keys())
        if names != set(wanted):
            other = ", ".join(sorted(names ^ set(wanted))[:3])
            raise _damaged(path, f"it does not hold exactly the scores that {reference.file.name} names: {other}")
        for name, (shape, types) in wanted.items():
            part = file.get_slice(name)
            if part.get_shape() != shape or part.get_dtype() not in types:
                actual = f"{part.get_dtype()} of shape {part.get_shape()}"
                raise _damaged(path, f"{name} is {actual} and should be {types[0]} of shape {shape}")


def _opened(path: Path) -> Any:  # noqa: ANN401 - safetensors has no type for it
    try:
        return safe_open(path, "np")
    except FileNotFoundError as error:
        raise StoreError(f"{path} is missing: restore it from where the bundle came from.") from error
    except (SafetensorError, OSError) as error:
        raise _damaged(path, str(error)) from error


def _read(file: Any, name: str, path: Path) -> npt.NDArray[Any]:  # noqa: ANN401 - safetensors has no type for it
    try:
        return np.asarray(file.get_tensor(name))
    except (SafetensorError, OSError) as error:
        raise _damaged(path, str(error)) from error


# Writing


def halved(values: npt.NDArray[np.float64]) -> Halves:
    """Numbers in half precision; beyond its range, the largest number that it has."""
    return np.clip(values, -LARGEST, LARGEST).astype(np.float16)


def counted(correct: npt.NDArray[np.float64], positions: int) -> npt.NDArray[Any]:
    """How many predictions of each example are right.

    Args:
        correct: The share of right predictions of each example.
        positions: Predictions for each example.
    """
    kind = np.uint8 if positions < 256 else np.uint16
    return np.rint(correct * positions).astype(kind)


def write_reference(file: Path, record: Mapping[str, Any], arrays: Arrays) -> Reference:
    """Write a reference, the scores first: where there is a JSON file, it is complete.

    Args:
        file: The JSON file; the scores go beside it.
        record: As `read_bundle` wants it.
        arrays: The scores, by names such as `test.phi`.

    Returns:
        What was written, read again and checked.
    """
    write_atomic(file.with_suffix(".safetensors"), save(dict(arrays)))
    write_record(file, record)
    reference = _reference(file, record)
    _ = reference.scores
    return reference


def write_record(file: Path, record: Mapping[str, Any]) -> None:
    """Write the JSON file of a reference on one line, which is a third of the size of indented lines.

    Args:
        file: Where to.
        record: All that it holds.
    """
    write_atomic(file, (json.dumps(record, separators=(",", ":"), allow_nan=False) + "\n").encode())


# What a run says of its bundle


def retrain_from(
    reference: Reference, left_empty: Mapping[str, str], half: Sequence[str], original: Mapping[str, Any]
) -> dict[str, Any]:
    """The field `retrain_from` of results: which Retrain it was, and what it cannot give.

    Args:
        reference: Retrain.
        left_empty: The fields of rows that are empty, with the reason for each.
        half: The fields that were computed from scores in half precision.
        original: How the run's Original compares with the bundle's; empty where there is none to compare with.
    """
    return {
        "bundle": reference.file.parent.name,
        "clients": list(reference.clients),
        "seed": reference.seed,
        "computed": reference.stored.get("computed"),
        "code": reference.stored.get("code"),
        LEFT_EMPTY: dict(left_empty),
        "half_precision": list(half),
        "original": dict(original),
    }


def said_of_empty(left_empty: Mapping[str, str]) -> str:
    """What is left empty and why, as a clause: the same reason is given once."""
    by_reason: dict[str, list[str]] = {}
    for key, why in left_empty.items():
        by_reason.setdefault(why, []).append(key)
    return "; ".join(f"{', '.join(keys)} ({why})" for why, keys in by_reason.items())


def bundle_notes(stored: Iterable[object]) -> list[str]:
    """What the fields `retrain_from` of several runs say, in sentences.

    Args:
        stored: The fields; anything but an object is left out.
    """
    known = [each for each in stored if isinstance(each, dict)]
    if not known:
        return []
    notes = []
    by_maker: dict[str, list[str]] = {}
    for each in known:
        computed = each.get("computed")
        machine = computed if isinstance(computed, dict) else {}
        seed = int(number(each.get("seed")) or 0)
        maker = f"the bundle {each.get('bundle')} ({made_by(seed, machine, each.get('code'))})"
        clients = each.get("clients")
        by_maker.setdefault(maker, []).append(target_name(clients) if isinstance(clients, list) else "")
    for maker, targets in by_maker.items():
        clients = ", ".join(dict.fromkeys(targets))
        notes.append(f"Retrain without {clients} is from {maker}; it was not trained here.")
    empty: dict[str, str] = {}
    half: dict[str, None] = {}
    for each in known:
        stored_empty = each.get(LEFT_EMPTY)
        empty |= {str(k): str(v) for k, v in stored_empty.items()} if isinstance(stored_empty, dict) else {}
        half |= dict.fromkeys(str(key) for key in each.get("half_precision") or ())
    if empty:
        notes.append(f"Left empty, as a bundle has no weights: {said_of_empty(empty)}.")
    if half:
        notes.append(f"Retrain's {', '.join(half)} come from scores in half precision.")
    originals = [each.get("original") for each in known]
    notes += dict.fromkeys(_said_of_original(each) for each in originals if isinstance(each, dict) and each)
    return notes


def _said_of_original(compared: Mapping[str, Any]) -> str:
    seed = compared.get("seed")
    if compared.get("same") is True:
        return f"Original with seed {seed} is the bundle's, parameter for parameter."
    gaps = [("test", number(compared.get("test_acc"))), ("forget", number(compared.get("forget_acc")))]
    far = " and ".join(f"{name} accuracy {signed(gap, 2)} points" for name, gap in gaps if gap is not None)
    return f"Original with seed {seed} is not the bundle's (other hardware or another version): {far} from it."


# The report


def with_retrains(results: ResultSet, bundle: Bundle) -> ResultSet:
    """Results whose runs without a Retrain have that of a bundle, where one fits.

    Args:
        results: Of runs that name their `reference_key`; those that have a Retrain, or name none, stay as they are.
        bundle: With the Retrains.

    Raises:
        InputError: A run lacks a Retrain, and none of the bundle fits it.
    """
    return replace(results, runs=[_with_retrain(run, bundle) for run in results.runs])


def _with_retrain(run: RunResults, bundle: Bundle) -> RunResults:
    requests = run.requests
    stored = run.extra.get(KEY)
    key = SettingKey.read(stored)
    if len(requests) != 1 or requests[0].row("retrained"):
        return run
    if key is None or not isinstance(stored, dict):
        raise InputError(
            f"{run.folder} was run by a version that did not record the hashes of its data, partition and training: "
            "run it again, with --retrain-from, or leave --retrain-from out of the report."
        )
    request = requests[0]
    own = bundle.retrains(key, request.clients, str(stored.get("samples") or ""))
    reference = next((ref for ref in own if ref.seed == request.seed), own[0])
    of_two_models = "it needs the models of the run"
    names = ("leakage_auc", "auc_change", "holdout_verdict")
    left_empty = {"forget_js": NO_WEIGHTS["forget_js"], **dict.fromkeys(names, of_two_models)}
    row = reference.row(request.clients) | {"request": request.number, "seed": request.seed}
    row |= {LEFT_EMPTY: said_of_empty(left_empty), "holdout_verdict": None, "holdout_reason": None}
    at = next((i for i, each in enumerate(run.rows) if each["phase"] != "original"), len(run.rows))
    original = compared_original(bundle.original(key, int(number(request.seed) or 0)), request.row("original"))
    extra = {**run.extra, RETRAIN_FROM: retrain_from(reference, left_empty, (), original)}
    return replace(run, rows=[*run.rows[:at], row, *run.rows[at:]], extra=extra)


def compared_original(reference: Reference | None, row: Row) -> dict[str, Any]:
    """How a run's Original compares with a bundle's of the same seed: the same parameters, or how far in accuracy.

    Args:
        reference: The bundle's Original; None where it has none.
        row: Of the run's Original.

    Returns:
        `seed` and `same`, and where they differ `test_acc` and `forget_acc`, the run's less the bundle's in points.
        Empty where there is nothing to compare with.
    """
    if reference is None or target_name(row.get("clients", ())) not in reference.rows:
        return {}
    theirs = reference.row(row["clients"])
    compared: dict[str, Any] = {"seed": reference.seed, "same": theirs.get("fingerprint") == row.get("fingerprint")}
    if compared["same"]:
        return compared
    for key in ("test_acc", "forget_acc"):
        ours, other = number(row.get(key)), number(theirs.get(key))
        if ours is not None and other is not None:
            compared[key] = ours - other
    return compared
