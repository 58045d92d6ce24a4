# SPDX-License-Identifier: Apache-2.0
"""The rows of one request, by phase, with the Retrain-vs-Retrain spread that belongs to it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from fedquit.results.path import Point, longer_fields, natural_fields, path_points
from fedquit.results.schema import NATURAL, PHASES, Row, number
from fedquit.utils.names import each_named

MANY_CLIENTS = 5  # more than so many are counted, not named


@dataclass(frozen=True)
class Spreads:
    """How far two Retrains with different seeds lie apart, measure by measure, as far as a comparison measured it.

    Attributes:
        own: Between two Retrains of this very request.
        by_method: Means over the requests of a method, which older comparisons stored.
        overall: The mean over all requests of the comparison.
    """

    own: Mapping[str, float] = field(default_factory=dict)
    by_method: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    overall: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RequestRows:
    """The rows of one request to forget, or of clients that joined.

    Attributes:
        number: Of the request in its recipe, from 0.
        rows: In the order of the phases.
        spreads: What the comparison around it says about two Retrains.
        over: How many requests were averaged into these rows.
        control: Natural's path for the same target and seed, where a comparison ran it.
        longer: Retrain's path from its end on, where a comparison let it go on.
    """

    number: int
    rows: Sequence[Row]
    spreads: Spreads = field(default_factory=Spreads)
    over: int = 1
    control: Sequence[Point] = ()
    longer: Sequence[Point] = ()

    @cached_property
    def _by_phase(self) -> dict[str, Row]:
        return {row["phase"]: row for row in reversed(self.rows)}

    @property
    def forgets(self) -> bool:
        """Whether this is a request to forget."""
        return any(phase in self._by_phase for phase in PHASES)

    def row(self, phase: str) -> Row:
        """The row of a phase, or an empty one."""
        return self._by_phase.get(phase, {})

    def get(self, phase: str, key: str) -> float | None:
        """A number of a phase, or None where it was not measured.

        Args:
            phase: One of `PHASES`, `joined`, or `retrained again`.
            key: A field of the row.
        """
        return number(self.row(phase).get(key))

    @cached_property
    def budgets(self) -> dict[float, RequestRows]:
        """By share of Retrain's bytes: the same request, as if its recovery had ended at that budget."""
        before = [self._by_phase[phase] for phase in PHASES if phase in self._by_phase and phase != "recovered"]
        ended: dict[float, RequestRows] = {}
        for row in self.rows:
            budget = number(row.get("budget"))
            if row["phase"] == "budget" and budget is not None:
                ended[budget] = replace(
                    self,
                    rows=[*before, {**row, "phase": "recovered"}],
                    control=self.natural_path,
                    longer=self.longer_path,
                )
        return ended

    @property
    def method(self) -> str:
        """The unlearning method."""
        phases = ("unlearned", "recovered")
        return next((str(row["method"]) for row in self.rows if row["phase"] in phases), "the method")

    @property
    def clients(self) -> tuple[Any, ...]:
        """The clients that leave, or that joined."""
        return tuple(self.rows[0]["clients"])

    @property
    def seed(self) -> object:
        """The seed of the run."""
        return self.rows[0].get("seed")

    @property
    def samples(self) -> bool:
        """Whether only some samples of the clients are forgotten."""
        return bool(self.rows[0].get("samples"))

    @cached_property
    def spread(self) -> Mapping[str, float]:
        """The Retrain-vs-Retrain spread by measure: of this request if measured, else of its method, else of all."""
        stored: dict[str, float] = {}
        for row in self.rows:
            stored |= spread_sizes(row.get("floor"))
        return stored or self.spreads.own or self.spreads.by_method.get(self.method) or self.spreads.overall

    @property
    def target(self) -> str:
        """The clients by name, however many they are: two targets of as many clients stay two."""
        return self._of(each_named("client", self.clients))

    @property
    def target_in_short(self) -> str:
        """The clients by name, or how many they are."""
        several = len(self.clients) > MANY_CLIENTS
        return self._of(f"{len(self.clients)} clients") if several else self.target

    def _of(self, clients: str) -> str:
        return f"chosen samples of {clients}" if self.samples else clients

    @property
    def title(self) -> str:
        """A heading."""
        target = self.target_in_short
        return f"Forget {target}" if self.forgets else f"{target[:1].upper()}{target[1:]} joined"

    @property
    def path(self) -> list[Point]:
        """The accuracies after every round from the request on."""
        return path_points(self.row("recovered").get("path"))

    @property
    def natural_path(self) -> list[Point]:
        """Natural's path for the same request, from this run or from the comparison around it."""
        return path_points(self.row(NATURAL).get("path")) or path_points(self.control)

    @property
    def rounds_from_request(self) -> float | None:
        """Rounds of unlearning and recovery together: what Natural is compared at."""
        unlearning = self.get("unlearned", "rounds")
        recovery = self.get("recovered", "rounds")
        return None if unlearning is None or recovery is None else unlearning + recovery

    @cached_property
    def natural(self) -> Mapping[str, float]:
        """Natural's `natural_test_acc` and so on after as many rounds; empty where Natural did not run."""
        from_path = natural_fields(self.natural_path, self.rounds_from_request, self.path)
        row = self.row("recovered")
        stored = {key: value for key in row if key.startswith("natural_") and (value := number(row[key])) is not None}
        return from_path or stored

    @property
    def longer_path(self) -> list[Point]:
        """Retrain's path from its end on, from this run or from the comparison around it."""
        return path_points(self.row("recovered").get("retrain_longer_path")) or path_points(self.longer)

    @cached_property
    def retrain_longer(self) -> Mapping[str, float]:
        """Retrain's `retrain_longer_test_acc` and so on after as many rounds in all; empty where it did not go on."""
        return longer_fields(self.longer_path, self.rounds_from_request, self.path)

    @property
    def curve(self) -> list[Mapping[str, Any]]:
        """The points of the recovery, one for each round."""
        return curve_points(self.row("recovered").get("curve"))


def curve_points(curve: object) -> list[Mapping[str, Any]]:
    """The usable points of a stored curve: objects that name their round."""
    points = curve if isinstance(curve, list) else []
    return [point for point in points if isinstance(point, dict) and number(point.get("round")) is not None]


def spread_sizes(stored: object) -> dict[str, float]:
    """A stored spread, measure by measure: a number, or an object that has one under `value` or `mean`."""
    sizes: dict[str, float] = {}
    for key, value in stored.items() if isinstance(stored, dict) else ():
        inner = value.get("value", value.get("mean")) if isinstance(value, dict) else value
        size = number(inner)
        if size is not None:
            sizes[str(key)] = abs(size)
    return sizes


def distinct(requests: Iterable[RequestRows]) -> list[RequestRows]:
    """Each request once: Original and Retrain are the same rows for every method that served it."""
    first: dict[str, RequestRows] = {}
    for request in requests:
        retrained = request.row("retrained")
        key = [request.number, request.clients, request.samples, request.seed]
        key += [retrained.get("seed"), retrained.get("forget_acc")]
        first.setdefault(json.dumps(key), request)
    return list(first.values())
