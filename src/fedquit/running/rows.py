# SPDX-License-Identifier: Apache-2.0
"""Rows of the results from models and their costs, and the curve of each recovery while it goes on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedquit.audit.evaluation import Evaluation
from fedquit.core import Params, Request, State
from fedquit.core.params import fingerprint
from fedquit.results.path import LAST
from fedquit.running.recipe import Recipe
from fedquit.running.session import Progress
from fedquit.running.store import Memories
from fedquit.utils.files import read_json_rows, write_json

Row = dict[str, Any]
Point = dict[str, float]
PathPoint = dict[str, Any]


@dataclass(frozen=True)
class RowMaker:
    """Makes a row of the results from a model and its costs.

    Attributes:
        evaluation: Judges the model.
        recipe: Of the run.
        number: Of the request in the recipe, from 0.
        request: To forget; None where clients joined.
        original: The model that the request found, where it is known.
    """

    evaluation: Evaluation
    recipe: Recipe
    number: int
    request: Request | None
    original: Params | None = None

    def __call__(self, method: str, phase: str, progress: Progress, rounds: int | None = None) -> Row:
        """The row of one phase.

        Args:
            method: The method, or `original`, `retrain`.
            phase: As in `results.schema.PHASES`, or `budget`, `joined`.
            progress: Model and costs at the end of the phase.
            rounds: Those of the phase, unless given.
        """
        params = progress.evaluated
        return {
            "method": method,
            "phase": phase,
            "request": self.number,
            "clients": list(self.evaluation.request.clients),
            "samples": bool(self.request and self.request.samples),
            "seed": self.recipe.seed,
            "rounds": progress.state.round if rounds is None else rounds,
            "seconds": round(progress.seconds, 3),
            **self.evaluation.judge(params, self.original),
            **asdict(progress.costs),
            "fingerprint": fingerprint(params),
        }


class PathRecorder:
    """The accuracies after every round of a phase, on disk as soon as they are measured.

    Attributes:
        points: One for each round; `round` counts from the request on.
    """

    def __init__(
        self, evaluation: Evaluation, file: Path, phase: str, *, rounds_before: int = 0, bytes_before: float = 0
    ) -> None:
        """Go on with what the file holds.

        Args:
            evaluation: Judges the models.
            file: Of the points.
            phase: `unlearning`, `recovery` or `followed`.
            rounds_before: From the request to the beginning of the phase.
            bytes_before: What those rounds sent.
        """
        self._evaluation = evaluation
        self._file = file
        self._phase = phase
        self._rounds_before = rounds_before
        self._bytes_before = bytes_before
        self.points: list[PathPoint] = read_json_rows(file, "round", "phase")

    def record(self, progress: Progress) -> None:
        """Evaluate the model after a round; before the first round there is nothing to add to the phase before."""
        if progress.state.round == 0:
            return
        rounds = self._rounds_before + progress.state.round
        point = {"round": rounds, "phase": self._phase, **self._evaluation.point(progress.evaluated)}
        point["bytes"] = self._bytes_before + progress.costs.bytes
        self.points = [*(earlier for earlier in self.points if earlier["round"] < rounds), point]
        write_json(self._file, self.points)


class LastRounds:
    """The accuracies after each of the last rounds of a training, kept beside it in the cache.

    Attributes:
        points: One for each of the last `results.path.LAST` rounds that was evaluated.
    """

    def __init__(self, evaluation: Evaluation, folder: Path, rounds: int) -> None:
        """Go on with what the folder holds.

        Args:
            evaluation: Judges the models; for other sets of examples there is another file.
            folder: Of the training.
            rounds: That the training takes.
        """
        self._evaluation = evaluation
        self._file = folder / f"rounds-{evaluation.fingerprint}.json"
        self._rounds = rounds
        self.points: list[PathPoint] = read_json_rows(self._file, "round", "phase")

    @property
    def complete(self) -> bool:
        """Whether each of the last rounds was evaluated."""
        return [point["round"] for point in self.points] == list(range(self._first, self._rounds + 1))

    @property
    def _first(self) -> int:
        return max(1, self._rounds - LAST + 1)

    def record(self, progress: Progress) -> None:
        """Evaluate the model after a round, if it is one of the last and has no point yet."""
        done = progress.state.round
        if done < self._first or any(point["round"] == done for point in self.points):
            return
        point = {"round": done, "phase": "training", **self._evaluation.point(progress.evaluated)}
        point["bytes"] = progress.costs.bytes
        self.points = sorted([*self.points, point], key=lambda one: int(one["round"]))
        write_json(self._file, self.points)


def request_point(evaluation: Evaluation, original: Progress) -> PathPoint:
    """Round 0 of a path: the model that the request found."""
    return {"round": 0, "phase": "original", **evaluation.point(original.evaluated), "bytes": 0}


class Recovery:
    """One recovery, round by round, with the accuracies so far on disk.

    Attributes:
        memories: What server and clients remember during this recovery.
        curve: A point for each round: `round`, `test_acc`, `forget_acc` (in percent) and the `bytes` so far.
        path: The accuracies after every round, from the request on.
        progress: Model and costs after the last round.
        test_accuracy: Of that model, in percent.
    """

    def __init__(
        self,
        rounds: Iterator[Progress],
        evaluation: Evaluation,
        curve: Path,
        memories: Memories,
        path: PathRecorder,
    ) -> None:
        self._rounds = rounds
        self.path = path
        self._evaluation = evaluation
        self._path = curve
        self.memories = memories
        self.curve: list[Point] = read_json_rows(curve, "round", "test_acc", "bytes")
        self._record(next(rounds))

    @property
    def state(self) -> State:
        """The state after the last round."""
        return self.progress.state

    def _record(self, progress: Progress) -> None:
        """Evaluate the model after a round, and add the point to the curve."""
        self.progress = progress
        model = progress.evaluated
        self.test_accuracy = self._evaluation.accuracy("test", model) or 0.0
        point: Point = {"round": self.state.round, "test_acc": self.test_accuracy, "bytes": progress.costs.bytes}
        forget = self._evaluation.accuracy("forget", model)
        if forget is not None:
            point["forget_acc"] = forget
        before = [earlier for earlier in self.curve if earlier["round"] < self.state.round]
        self.curve = [*before, point]
        write_json(self._path, self.curve)
        self.path.record(progress)

    def step(self) -> None:
        """Run one more round."""
        self._record(next(self._rounds))
