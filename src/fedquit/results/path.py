# SPDX-License-Identifier: Apache-2.0
"""Recovery as a path: the accuracies after every round from the request on, and what is read from them.

A path is a list of points, as the field `path` of a row holds it. A point has `round` (counted from the request on,
rounds of unlearning included), `phase` (`original`, `unlearning`, `recovery` or `followed`; `training` in Retrain's),
the accuracies in percent and the `bytes` so far. A single round wobbles; a mean over several rounds, and Natural after
as many rounds, say more.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from fedquit.results.schema import ON_PATH, number

Point = Mapping[str, Any]

LAST = 10  # rounds at the end of a path, or of a training, that are averaged
WINDOW = 5  # rounds in each window after the recovery's stop
AFTER = (5, 10, 20)  # the last round of each window, counted from the stop
FOLLOWED = "followed"  # the phase after the recovery's stop
TRAINED = ("recovery", "training")  # phases in which the retained clients train


def path_points(stored: object) -> list[Point]:
    """The usable points of a stored path: objects that name their round."""
    points = stored if isinstance(stored, list | tuple) else []
    return [point for point in points if isinstance(point, Mapping) and number(point.get("round")) is not None]


def at_round(path: Sequence[Point], rounds: float) -> Point | None:
    """The point after so many rounds from the request on, or None where the path has none."""
    return next((point for point in path if number(point.get("round")) == rounds), None)


def natural_fields(path: Sequence[Point], rounds: float | None, method: Sequence[Point] = ()) -> dict[str, float]:
    """Natural's accuracies after as many rounds from the request on as a method took, under the names of a row.

    Args:
        path: Natural's.
        rounds: The method's, those of unlearning included; None where they are not known.
        method: The method's path: Natural is averaged over the rounds whose mean the method's `…_last` is.

    Returns:
        `natural_test_acc` and so on in percent, `natural_auc`, and `natural_test_acc_last` and so on; empty where
        Natural's path is shorter.
    """
    return _beside(path, rounds, method, "natural_")


def longer_fields(path: Sequence[Point], rounds: float | None, method: Sequence[Point] = ()) -> dict[str, float]:
    """Retrain's accuracies after as many rounds in all as the method has, under the names of a row.

    Original and Retrain trained equally long; a method adds its own rounds to Original's. Here Retrain has gone on for
    as many.

    Args:
        path: Of Retrain from its end on, `round` counting from there.
        rounds: The method's from the request on, those of unlearning included; None where they are not known.
        method: The method's path, whose last rounds are averaged.

    Returns:
        `retrain_longer_test_acc` and so on as for `natural_fields`.
    """
    return _beside(path, rounds, method, "retrain_longer_")


def _beside(path: Sequence[Point], rounds: float | None, method: Sequence[Point], prefix: str) -> dict[str, float]:
    """Another path at a method's rounds, and its means over the rounds of the method's own means."""
    point = None if rounds is None else at_round(path, rounds)
    if point is None:
        return {}
    known = {f"{prefix}{key}": number(point.get(key)) for key in (*ON_PATH, "auc")}
    fields = {key: value for key, value in known.items() if value is not None}
    window = [at_round(path, float(other["round"])) for other in _last(method, LAST)]
    return fields | _means([other for other in window if other], "last", prefix) if all(window) else fields


def mean_path(paths: Sequence[Sequence[Point]]) -> list[dict[str, Any]]:
    """The mean of several recoveries of one request, round by round; the phases are those of the first.

    Args:
        paths: One for each recovery. Where they differ in length, the rounds that all have are averaged.
    """
    averaged = []
    for at in zip(*paths, strict=False):
        point: dict[str, Any] = {"round": at[0]["round"], "phase": at[0].get("phase")}
        for key in at[0]:
            values = [value for other in at if (value := number(other.get(key))) is not None]
            if key not in point and len(values) == len(at):
                point[key] = statistics.fmean(values)
        averaged.append(point)
    return averaged


def last_rounds(path: Sequence[Point], rounds: int = LAST) -> dict[str, float]:
    """The mean of each accuracy over the last rounds of the recovery, or of a training, under the names of a row.

    The rounds that follow the recovery's stop have no part: no row counts their cost, and they have windows of their
    own (`durability`).

    Args:
        path: Of a method, or of a training.
        rounds: How many, at most.

    Returns:
        `forget_acc_last` and so on, in percent, and `last_rounds`, the number of rounds averaged: fewer than asked
        where the recovery is shorter, and that of the stop alone where no recovery followed the unlearning.
    """
    window = _last(path, rounds)
    return {**_means(window, "last"), "last_rounds": len(window)} if window else {}


def durability(path: Sequence[Point]) -> dict[str, float]:
    """The mean of each accuracy over five-round windows after the recovery's stop, under the names of a row.

    Args:
        path: With the points of phase `followed`.

    Returns:
        `forget_acc_after_5` (rounds 1 to 5 after the stop), `…_after_10` (6 to 10), `…_after_20` (16 to 20), as far as
        the path reaches.
    """
    followed = [point for point in path if point.get("phase") == FOLLOWED]
    fields: dict[str, float] = {}
    for end in AFTER:
        if len(followed) >= end:
            fields |= _means(followed[end - WINDOW : end], f"after_{end}")
    return fields


def last_window(path: Sequence[Point], key: str) -> float | None:
    """The mean of a measure over the last five rounds of a training: what a window after a stop is compared with.

    Args:
        path: Of Retrain.
        key: Of `schema.ON_PATH`.

    Returns:
        None where the path has fewer rounds.
    """
    window = path[-WINDOW:]
    values = [value for point in window if (value := number(point.get(key))) is not None]
    return statistics.fmean(values) if len(values) == WINDOW else None


def _last(path: Sequence[Point], rounds: int) -> list[Point]:
    """The last points up to the stop at which the retained clients had trained; else the point of the stop."""
    stopped = [point for point in path if point.get("phase") != FOLLOWED]
    trained = [point for point in stopped if point.get("phase") in TRAINED]
    return trained[-rounds:] or stopped[-1:]


def _means(points: Sequence[Point], suffix: str, prefix: str = "") -> dict[str, float]:
    """The mean of each accuracy that all of some points have, under its name with a prefix and a suffix."""
    means: dict[str, float] = {}
    for key in ON_PATH:
        values = [value for point in points if (value := number(point.get(key))) is not None]
        if points and len(values) == len(points):
            means[f"{prefix}{key}_{suffix}"] = statistics.fmean(values)
    return means
