# SPDX-License-Identifier: Apache-2.0
"""What the page says of the verdicts against the hold-out; none is worked out here."""

from __future__ import annotations

from collections.abc import Sequence

from fedquit.inference.trace import CANNOT_TELL, FORGOTTEN, OVER_UNLEARNED, REMEMBERED
from fedquit.results.requests import RequestRows
from fedquit.results.summary import count_verdicts
from fedquit.results.words import NOT_JUDGED

TRACES = {
    REMEMBERED: "still told from data of the same clients that never trained",
    FORGOTTEN: "treated like data of the same clients that never trained",
    OVER_UNLEARNED: "treated worse than data of the same clients that never trained, which gives it away, too",
    CANNOT_TELL: "the hold-out cannot tell",
    NOT_JUDGED: NOT_JUDGED,
}


def trace_word(verdict: str) -> str:
    """The word of a verdict that may have the first words of its reason."""
    return verdict.partition(":")[0]


def traces(requests: Sequence[RequestRows], phase: str = "recovered") -> dict[str, int]:
    """How many requests have each verdict of the hold-out, the most frequent first.

    Args:
        requests: Of one method.
        phase: Whose model.
    """
    counts = {word: int(n) for word, n in count_verdicts(requests, phase).items() if trace_word(word) in TRACES}
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


def trace_words(requests: Sequence[RequestRows], phase: str = "recovered") -> str:
    """The verdicts of the hold-outs, short: the word alone where all agree; "" where there is none.

    Args:
        requests: Of one method.
        phase: Whose model.
    """
    found = traces(requests, phase)
    if len(found) == 1:
        return next(iter(found))
    counts: dict[str, int] = {}
    for verdict, n in found.items():
        word = trace_word(verdict).removesuffix(" within the margin")
        counts[word] = counts.get(word, 0) + n
    return ", ".join(f"{n} {word}" for word, n in counts.items())


def trace_reasons(requests: Sequence[RequestRows]) -> list[str]:
    """Why the hold-outs do not tell: of each kind of reason the first, and how many of the requests have that kind."""
    rows = [request.row("recovered") for request in requests]
    stored = [row.get("holdout_reason") for row in rows if row.get("holdout_verdict") in (CANNOT_TELL, NOT_JUDGED)]
    by_kind: dict[str, list[str]] = {}
    for reason in stored:
        if isinstance(reason, str) and reason:
            by_kind.setdefault(reason.partition(":")[0], []).append(reason)
    several = len(requests) > 1
    return [f"{same[0]} ({len(same)} of {len(requests)} requests)" if several else same[0] for same in by_kind.values()]
