# SPDX-License-Identifier: Apache-2.0
"""What the paper states in words: whether it holds in its own tables, and in our records.

A claim of `claims.toml` is a list of comparisons. Our records decide it by `inference.findings`: it holds where enough
comparisons are true at a level of 5 %, and does not hold where too many are true the other way round at the same level;
else it cannot be told. What has no record counts against both words.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from fedquit.inference.findings import LEVEL, at_least_p, least_targets, less_p
from fedquit.paper.numbers import Key, Paper
from fedquit.paper.records import PARTS, Records, Target

HOLDS = "holds"
FAILS = "does not hold"
OPEN = "cannot be told"
WORDS = (HOLDS, FAILS, OPEN)


@dataclass(frozen=True)
class Quantity:
    """One side of a comparison: a factor and a number of a table, or the factor alone."""

    factor: float
    key: Key | None = None
    part: str = "value"

    @staticmethod
    def read(text: str, setting: str, request: str) -> Quantity:
        """From `0.5 original original forget_acc gap`, or from a number.

        Args:
            text: The side.
            setting: Of the claim.
            request: Of the claim.
        """
        words = text.split()
        factor = float(words.pop(0)) if words[0][0].isdigit() else 1.0
        if not words:
            return Quantity(factor)
        part = words.pop() if words[-1] in PARTS else "value"
        *method, phase, measure = words
        return Quantity(factor, Key(setting, request, " ".join(method), phase, measure), part)

    def in_paper(self, paper: Paper) -> float | None:
        """The paper's number, or None where it prints none."""
        if self.key is None:
            return self.factor
        number = _printed(paper, self.key, self.part)
        return None if number is None else self.factor * number

    def in_records(self, records: Records) -> dict[Target, float] | None:
        """By target our number; None for a constant."""
        if self.key is None:
            return None
        series = records.series(self.key, self.part)
        return {target: self.factor * value for target, value in series.by_target.items()} if series else {}


def _printed(paper: Paper, key: Key, part: str) -> float | None:
    cell = paper.by_key.get(key)
    if cell is None:
        return None
    if part == "drop":
        before = paper.by_key.get(key._replace(method="original", phase="original"))
        return before.printed.value - cell.printed.value if before else None
    number: float | None = getattr(cell.printed, part)
    if part == "gap" and number is None:
        retrain = paper.by_key.get(key._replace(method="retrain", phase="retrained"))
        return abs(cell.printed.value - retrain.printed.value) if retrain else None
    return abs(number) if part == "gap" and number is not None else number


@dataclass(frozen=True)
class Comparison:
    """One quantity is less than another."""

    less: Quantity
    more: Quantity

    def in_paper(self, paper: Paper) -> bool | None:
        """Whether the paper's own numbers say so; None where it does not print both."""
        less, more = self.less.in_paper(paper), self.more.in_paper(paper)
        return None if less is None or more is None else less < more

    def in_records(self, records: Records) -> tuple[list[float], list[float]]:
        """The two sides over the targets that have both."""
        less, more = self.less.in_records(records), self.more.in_records(records)
        targets = [target for target in (less if less is not None else more or {}) if more is None or target in more]
        left = [less[target] if less is not None else self.less.factor for target in targets]
        right = [more[target] if more is not None else self.more.factor for target in targets]
        return left, right


@dataclass(frozen=True)
class Claim:
    """A finding that the paper states, in one setting."""

    id: str
    section: str
    says: str
    how: str
    setting: str
    request: str
    needed: int
    comparisons: Sequence[Comparison]
    counted: bool = False

    def in_paper(self, paper: Paper) -> bool | None:
        """Whether the paper's own tables bear it out; None where they do not print enough."""
        known = [said for one in self.comparisons if (said := one.in_paper(paper)) is not None]
        if sum(known) >= self.needed:
            return True
        return False if len(known) - sum(known) > len(self.comparisons) - self.needed else None


@dataclass(frozen=True)
class Finding:
    """What our records say of a claim.

    Attributes:
        claim: The claim.
        word: `holds`, `does not hold` or `cannot be told`.
        reason: Why, in a sentence.
        targets: The fewest and the most of the comparisons that have any.
        measured: Comparisons that have a record.
        true: Of them, those whose means lie as the claim says.
        p: Of "it does not hold".
        refuted_p: Of "it holds".
        printed: Whether the paper's own tables bear the claim out.
    """

    claim: Claim
    word: str
    reason: str
    targets: tuple[int, int]
    measured: int
    true: int
    p: float
    refuted_p: float
    printed: bool | None


def load_claims() -> list[Claim]:
    """The claims that come with the package, each in each of its settings."""
    stored = tomllib.loads(files("fedquit.paper").joinpath("claims.toml").read_text(encoding="utf-8"))
    return [claim for one in stored["claim"] for claim in _claims(one)]


def _claims(stored: dict[str, Any]) -> Iterator[Claim]:
    request = stored.get("request", "client")
    for setting in stored["settings"]:
        sides = [text.split(" < ") for text in stored["comparisons"]]
        comparisons = [
            Comparison(Quantity.read(less, setting, request), Quantity.read(more, setting, request))
            for less, more in sides
        ]
        yield Claim(
            id=stored["id"],
            section=stored["section"],
            says=stored["says"],
            how=stored["how"],
            setting=setting,
            request=request,
            needed=stored.get("at_least", len(comparisons)),
            comparisons=comparisons,
            counted=stored.get("counted", False),
        )


def judge(claim: Claim, paper: Paper, records: Records) -> Finding:
    """Decide a claim.

    Args:
        claim: In one setting.
        paper: Its own numbers.
        records: Ours.
    """
    sides = [one.in_records(records) for one in claim.comparisons]
    known = [(less, more) for less, more in sides if less]
    total = len(claim.comparisons)
    chance = _certain_p if claim.counted else less_p
    p = at_least_p([chance(less, more) for less, more in sides], claim.needed)
    refuted_p = at_least_p([chance(more, less) for less, more in sides], total - claim.needed + 1)
    word = HOLDS if p <= LEVEL else FAILS if refuted_p <= LEVEL else OPEN
    true = sum(sum(less) < sum(more) for less, more in known)
    counts = [len(less) for less, _ in known]
    targets = (min(counts), max(counts)) if counts else (0, 0)
    reason = _reason(claim, word, targets, measured=len(known), true=true)
    return Finding(claim, word, reason, targets, len(known), true, p, refuted_p, claim.in_paper(paper))


def _certain_p(less: Sequence[float], more: Sequence[float]) -> float:
    """Of numbers that are counted: 0 where it is so for every target, else 1."""
    return 0.0 if less and all(one < other for one, other in zip(less, more, strict=True)) else 1.0


def _reason(claim: Claim, word: str, targets: tuple[int, int], *, measured: int, true: int) -> str:
    total = len(claim.comparisons)
    if not measured:
        return "Not run yet."
    over = f"{targets[0]}" if targets[0] == targets[1] else f"{targets[0]} to {targets[1]}"
    noun = "target" if over == "1" else "targets"
    seen = (
        f"{true} of {measured} comparisons are as stated" if total > 1 else ("As stated" if true else "Not as stated")
    )
    sentence = f"{seen}, over {over} {noun}."
    if word != OPEN:
        return sentence
    if measured < total:
        missing = total - measured
        sentence += f" {missing} more {'is' if missing == 1 else 'are'} not run yet."
    least = 1 if claim.counted else least_targets(total, claim.needed)
    return sentence + (f" At least {least} targets are needed." if targets[0] < least else "")
