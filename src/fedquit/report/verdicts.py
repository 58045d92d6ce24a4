# SPDX-License-Identifier: Apache-2.0
"""What the results conclude, for the page: verdicts are read from the results and never worked out here.

Results of older versions lack some of them; then the page says that no test was made.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedquit.results.comparison import Comparison
from fedquit.results.requests import RequestRows
from fedquit.results.schema import number
from fedquit.results.summary import MethodGroup, MethodSummary

DIFFERENT, EQUIVALENT, UNKNOWN = "≠", "≈", "?"
MARKS = {"differs": DIFFERENT, "equivalent": EQUIVALENT, "cannot tell": UNKNOWN}
HEADLINES = ("avg_gap", "forget_acc")  # the verdict on the first of these that is there speaks for a method


@dataclass(frozen=True)
class Judged:
    """The verdict on one gap to Retrain.

    Attributes:
        word: `differs`, `equivalent` or `cannot tell`.
        gap: In points.
        low: The lower end of its interval.
        high: The upper end.
        margin: Up to which a gap counts as equivalent, in points.
        p: The p-value, adjusted for all that was tested.
        targets: Over how many.
        runs: Of the method.
        retrains: Seeds of Retrain for each target.
        reason: In words, such as why nothing can be told.
    """

    word: str
    gap: float | None = None
    low: float | None = None
    high: float | None = None
    margin: float | None = None
    p: float | None = None
    targets: float | None = None
    runs: float | None = None
    retrains: float | None = None
    reason: str = ""


Verdicts = Mapping[str, Judged]  # by measure

_NUMBERS = ("gap", "low", "high", "margin", "p", "targets", "runs", "retrains")


def verdicts_of(line: MethodSummary) -> dict[str, Judged]:
    """The verdicts of a line, by measure; empty for results that hold none."""
    stored = getattr(line, "verdicts", None) or line.extra.get("verdicts")
    known: dict[str, Judged] = {}
    for key, verdict in stored.items() if isinstance(stored, Mapping) else ():
        judged = _judged(verdict)
        if judged is not None:
            known[str(key)] = judged
    return known


def _judged(stored: object) -> Judged | None:
    """A verdict from the results model or from its JSON; None for anything else."""
    fields: Mapping[str, Any] = stored if isinstance(stored, Mapping) else {}
    if dataclasses.is_dataclass(stored) and not isinstance(stored, type):
        fields = dataclasses.asdict(stored)
    word = fields.get("word")
    if word not in MARKS:
        return None
    reason = fields.get("reason")
    numbers = {name: number(fields.get(name)) for name in _NUMBERS}
    said = reason.removeprefix(f"{word}: ") if isinstance(reason, str) else ""
    return Judged(str(word), reason=said, **numbers)


def verdicts_by_method(groups: Sequence[MethodGroup], comparisons: Sequence[Comparison]) -> dict[str, Verdicts]:
    """The verdicts of every method: those of the comparison, which are adjusted for all methods, else its own.

    Args:
        groups: The methods of the page.
        comparisons: That the runs come from; with several, none of them speaks for a method.
    """
    lines = comparisons[0].methods if len(comparisons) == 1 else {}
    found: dict[str, Verdicts] = {}
    for group in groups:
        compared = verdicts_of(lines[group.label]) if group.label in lines else {}
        found[group.label] = compared or verdicts_of(group.summary)
    return found


def headline(verdicts: Verdicts) -> Judged | None:
    """The verdict that speaks for a method, or None where no test was made."""
    return next((verdicts[key] for key in HEADLINES if key in verdicts), None)


def mark_of(key: str, verdicts: Verdicts) -> str:
    """The sign beside a gap, or "" where no test was made.

    Args:
        key: The measure.
        verdicts: Of the method.
    """
    return MARKS[verdicts[key].word] if key in verdicts else ""


# The trace against the client's own hold-out

TRACES = {
    "remembered": "still told from data of the same clients that never trained",
    "forgotten within the margin": "treated like data of the same clients that never trained, within the margin",
    "over-unlearned": "treated worse than data of the same clients that never trained, which gives it away, too",
    "cannot tell": "the hold-out cannot tell",
    "no trace": "no trace against data of the same clients that never trained",
}


def traces(requests: Sequence[RequestRows], phase: str = "recovered") -> Counter[str]:
    """How many requests have each verdict of the hold-out.

    Args:
        requests: Of one method.
        phase: Whose model.
    """
    stored = [request.row(phase).get("holdout_verdict") for request in requests]
    return Counter(word for word in stored if word in TRACES)


def trace_words(requests: Sequence[RequestRows]) -> str:
    """The verdicts of the hold-outs, short: the word alone where all agree; "" where there is none."""
    found = traces(requests)
    if len(found) == 1:
        return next(iter(found))
    return ", ".join(f"{count} {word}" for word, count in found.most_common())


def trace_reasons(requests: Sequence[RequestRows]) -> list[str]:
    """Why the hold-outs cannot tell, each reason once."""
    rows = [request.row("recovered") for request in requests]
    reasons = [row.get("holdout_reason") for row in rows if row.get("holdout_verdict") == "cannot tell"]
    return list(dict.fromkeys(reason for reason in reasons if isinstance(reason, str) and reason))
