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
from fedquit.running.recipe import Recipe
from fedquit.running.session import Progress
from fedquit.running.store import Memories
from fedquit.utils.files import read_json_rows, write_json

Row = dict[str, Any]
Point = dict[str, float]


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
        params = progress.state.params
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


class Recovery:
    """One recovery, round by round, with the accuracies so far on disk.

    Attributes:
        memories: What server and clients remember during this recovery.
        curve: A point for each round: `round`, `test_acc`, `forget_acc` (in percent) and the `bytes` so far.
        progress: Model and costs after the last round.
        test_accuracy: Of that model, in percent.
    """

    def __init__(self, rounds: Iterator[Progress], evaluation: Evaluation, curve: Path, memories: Memories) -> None:
        self._rounds = rounds
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
        self.test_accuracy = self._evaluation.accuracy("test", self.state.params) or 0.0
        point: Point = {"round": self.state.round, "test_acc": self.test_accuracy, "bytes": progress.costs.bytes}
        forget = self._evaluation.accuracy("forget", self.state.params)
        if forget is not None:
            point["forget_acc"] = forget
        before = [earlier for earlier in self.curve if earlier["round"] < self.state.round]
        self.curve = [*before, point]
        write_json(self._path, self.curve)

    def step(self) -> None:
        """Run one more round."""
        self._record(next(self._rounds))
