# SPDX-License-Identifier: Apache-2.0
"""What a run leaves behind: a row for each phase, and the curve of each recovery."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedquit.audit.evaluation import Evaluation
from fedquit.core import Request, State
from fedquit.core.params import fingerprint
from fedquit.running.recipe import Recipe
from fedquit.running.session import Progress
from fedquit.running.store import Memories
from fedquit.utils.files import read_json, write_json

Row = dict[str, Any]
Point = dict[str, float]


@dataclass(frozen=True)
class RowMaker:
    """Turns where a phase stands into a row of the results."""

    who: Evaluation
    recipe: Recipe
    number: int
    request: Request | None

    def __call__(self, method: str, phase: str, progress: Progress, rounds: int | None = None) -> Row:
        """A row; `rounds` are those of the phase unless given."""
        params, who = progress.state.params, self.who
        return {
            "method": method,
            "phase": phase,
            "request": self.number,
            "clients": list(who.request.clients),
            "samples": bool(self.request and self.request.samples),
            "seed": self.recipe.seed,
            "rounds": progress.state.round if rounds is None else rounds,
            "seconds": round(progress.seconds, 3),
            **who.judge(params),
            **asdict(progress.costs),
            "fingerprint": fingerprint(params),
        }


def mean_row(rows: list[Row]) -> Row:
    """The first row, with the measures averaged over all (one, or the paper's three recoveries)."""
    kinds = ("auc", "mia_", "leakage", "tpr_at_", "entropy_ks", "forget_js", "backdoor_")
    told = ("_enough", "_against")  # of the outsiders, who are the same for all
    measures = [k for k in rows[0] if k.endswith(("_acc", "_loss")) or (k.startswith(kinds) and not k.endswith(told))]
    means = {k: sum(r[k] for r in rows) / len(rows) for k in measures if rows[0][k] is not None}
    return rows[0] | means | {"runs": len(rows)}


def mean_curve(curves: list[list[Point]]) -> list[Point]:
    """Point by point."""
    return [{k: sum(p[k] for p in points) / len(points) for k in points[0]} for points in zip(*curves, strict=True)]


class Recovery:
    """One recovery, step by step, with its accuracies so far."""

    def __init__(self, rounds: Iterator[Progress], who: Evaluation, curve: Path, kept: Memories) -> None:
        self._rounds, self._who, self._path, self.kept = rounds, who, curve, kept
        self.curve: list[Point] = read_json(curve) if curve.exists() else []
        self._take(next(rounds))

    @property
    def state(self) -> State:
        """Where it stands."""
        return self.progress.state

    def _take(self, progress: Progress) -> None:
        self.progress = progress
        self.test_accuracy = self._who.accuracy("test", self.state.params) or 0.0
        point: Point = {"round": self.state.round, "test_acc": self.test_accuracy, "bytes": progress.costs.bytes}
        forget = self._who.accuracy("forget", self.state.params)
        if forget is not None:
            point["forget_acc"] = forget
        self.curve = [*(p for p in self.curve if p["round"] < self.state.round), point]
        write_json(self._path, self.curve)

    def step(self) -> None:
        """One more round."""
        self._take(next(self._rounds))
