# SPDX-License-Identifier: Apache-2.0
"""What a check found: parts that are kept, broken or skipped, and figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Status = Literal["kept", "broken", "skipped", "shown"]
PARTS = ("contract", "determinism", "resume", "engines", "flower", "requests", "costs", "behaviour")


@dataclass(frozen=True)
class Violation:
    """A contract that is broken, as one line.

    Attributes:
        part: of the check, one of `PARTS`.
        where: the phase, round, client, task and request.
        seen: what the method did.
        advice: what to do about it.
        times: how often it was seen.
    """

    part: str
    where: str
    seen: str
    advice: str
    times: int = 1

    @property
    def line(self) -> str:
        """What was seen, where, and what to do."""
        often = f" ({self.times} times)" if self.times > 1 else ""
        return f"{self.where}: {self.seen}{often}; {self.advice}."


@dataclass(frozen=True)
class PartResult:
    """One part of a check.

    Attributes:
        name: one of `PARTS`.
        status: `kept`, `broken`, `skipped`, or `shown` for figures that are not judged.
        note: what was looked at, or why the part was skipped.
        violations: what is broken.
    """

    name: str
    status: Status
    note: str
    violations: tuple[Violation, ...] = ()

    @classmethod
    def judged(cls, name: str, note: str, violations: tuple[Violation, ...]) -> PartResult:
        """A part that is kept unless there are violations.

        Args:
            name: one of `PARTS`.
            note: what was looked at.
            violations: of any part; those of this one count.
        """
        own = tuple(violation for violation in violations if violation.part == name)
        return cls(name, "broken" if own else "kept", note, own)

    @classmethod
    def skipped(cls, name: str, reason: str) -> PartResult:
        """A part that was left out.

        Args:
            name: one of `PARTS`.
            reason: why it was left out.
        """
        return cls(name, "skipped", reason)


@dataclass(frozen=True)
class RequestOutcome:
    """What became of one kind of request."""

    request: str  # such as "one client"
    outcome: Literal["served", "refused", "failed"]
    reason: str = ""  # the sentence with which it was refused, or the error


@dataclass(frozen=True)
class CostLine:
    """What one phase of one request was charged, from the meter."""

    request: str
    phase: Literal["unlearning", "recovery"]
    rounds: int
    down_bytes: int
    up_bytes: int
    participations: int
    client_epochs: float
    server_epochs: float
    client_flops: int
    server_flops: int


@dataclass(frozen=True)
class BehaviourLine:
    """Accuracies of one model on the embedded data, and what it took to get there."""

    method: str
    phase: str  # original, retrained, unlearned or recovered
    test_accuracy: float | None  # in percent
    forget_accuracy: float | None  # in percent
    rounds: int
    bytes: int


@dataclass(frozen=True)
class Report:
    """The result of a check.

    Attributes:
        method: its name, as in a recipe.
        options: its hyper-parameters.
        form: `quick` or `full`.
        parts: in the order of `PARTS`.
        requests: what became of each kind of request.
        costs: what each phase was charged.
        behaviour: accuracies beside those of FedQUIT, Natural and Retrain; none in the quick form.
        seconds: how long the check took.
    """

    method: str
    options: Mapping[str, Any]
    form: Literal["quick", "full"]
    parts: tuple[PartResult, ...]
    requests: tuple[RequestOutcome, ...] = ()
    costs: tuple[CostLine, ...] = ()
    behaviour: tuple[BehaviourLine, ...] = ()
    seconds: float = 0.0

    @property
    def violations(self) -> tuple[Violation, ...]:
        """Those of all parts."""
        return tuple(violation for part in self.parts for violation in part.violations)

    @property
    def kept(self) -> bool:
        """Whether no contract is broken."""
        return not self.violations

    def part(self, name: str) -> PartResult:
        """The part of that name."""
        return next(part for part in self.parts if part.name == name)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values, for JSON."""
        return {"kept": self.kept, **asdict(self)}


@dataclass
class Findings:
    """Violations as they are found: the same one at several places is one line."""

    _by_code: dict[tuple[str, str], Violation] = field(default_factory=dict)

    def add(self, part: str, code: str, where: str, seen: str, advice: str) -> None:
        """Note a violation.

        Args:
            part: of the check.
            code: what is the same violation at another place has the same code.
            where: it was seen.
            seen: what the method did.
            advice: what to do about it.
        """
        first = self._by_code.get((part, code))
        times = first.times + 1 if first else 1
        shown = first or Violation(part, where, seen, advice)
        self._by_code[part, code] = Violation(part, shown.where, shown.seen, shown.advice, times)

    def count(self, code: str) -> int:
        """How often violations whose code begins so were noted."""
        return sum(violation.times for (_, own), violation in self._by_code.items() if own.startswith(code))

    @property
    def all(self) -> tuple[Violation, ...]:
        """All that were noted, in the order in which they first appeared."""
        return tuple(self._by_code.values())

    def of(self, *parts: str) -> bool:
        """Whether there is any of these parts."""
        return any(violation.part in parts for violation in self.all)
