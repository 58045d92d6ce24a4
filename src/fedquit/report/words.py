# SPDX-License-Identifier: Apache-2.0
"""How numbers read, and the two sentences: what was forgotten, and at what cost and how sure."""

from __future__ import annotations

from collections.abc import Iterable

from fedquit.report.reading import Part

DASH, NBSP = "–", "\u00a0"


def fixed(value: float | None, digits: int = 1) -> str:
    """With a true minus, or a dash."""
    return DASH if value is None else f"{value:.{digits}f}".replace("-", "−")


def signed(value: float | None, digits: int = 1) -> str:
    """With its sign, unless it is zero."""
    if value is None:
        return DASH
    return f"{value:+.{digits}f}".replace("-", "−") if round(value, digits) else f"{0:.{digits}f}"


def percent(value: float | None) -> str:
    """In words, for sentences."""
    return f"{fixed(value)}{NBSP}%" if value is not None else "not measured"


def share(value: float | None) -> str:
    """A percentage with about two digits, for a table."""
    if value is None:
        return DASH
    return f"{value:.{0 if value >= 100 else 1 if value >= 1 or not value else 2}f}{NBSP}%"


def scaled(value: float | None, unit: str) -> str:
    """Bytes or FLOPs with a prefix."""
    if value is None:
        return DASH
    size, prefixes = value, ["", "k", "M", "G", "T", "P", "E", "Z"]
    while abs(size) >= 999.5 and len(prefixes) > 1:
        size, prefixes = size / 1000, prefixes[1:]
    digits = 0 if prefixes[0] == "" or size >= 100 else 1
    return f"{size:.{digits}f}{NBSP}{prefixes[0]}{unit}"


def count(value: float | None, noun: str) -> str:
    """With the noun."""
    if value is None:
        return f"an unknown number of {noun}s"
    return f"{value:g} {noun}" if value == 1 else f"{value:g} {noun}s"


def seconds(*values: float | None) -> str:
    """Together."""
    known = [v for v in values if v is not None]
    total = sum(known)
    if not known:
        return "an unknown time"
    return (
        f"{total:.1f}{NBSP}s"
        if total < 120
        else f"{total / 60:.0f}{NBSP}min"
        if total < 7200
        else f"{total / 3600:.1f}{NBSP}h"
    )


def ranged(values: Iterable[float | None], digits: int = 1, unit: str = "") -> str:
    """From the least to the largest."""
    known = [v for v in values if v is not None]
    if not known:
        return "not measured"
    low, high = (f"{edge(known):.{digits}f}" for edge in (min, max))
    return f"{low if low == high else f'{low}–{high}'}{unit}"


def sentences(part: Part) -> str:
    """What was forgotten and how close to Retrain; at what cost, and how sure."""
    before, after, now = (part.get(p, "forget_acc") for p in ("original", "unlearned", "recovered"))
    gap, there = part.gap("recovered"), percent(part.get("retrained", "forget_acc"))
    if gap is None or round(gap, 1) == 0:
        close = f"and Retrain, which never saw that data, has {there}"
    else:
        close = f"{abs(gap):.1f} points {'above' if gap > 0 else 'below'} Retrain, which never saw that data ({there})"
    rounds = part.get("recovered", "rounds")
    spent = seconds(part.get("unlearned", "seconds"), part.get("recovered", "seconds"))
    sent, worked = part.share("bytes"), part.work
    shares = [f"{share(v)} of its {what}" for v, what in ((sent, "communication"), (worked, "computing")) if v]
    took = f"that took {spent} where Retrain took {seconds(part.get('retrained', 'seconds'))}"
    return (
        f"Asked to forget {part.who}, {part.method} took the accuracy on the data to forget from {percent(before)} "
        f"to {percent(after)}; after {count(rounds, 'round')} of recovery it is {percent(now)}, {close}. "
        f"{_price(part)}, test accuracy ended at {percent(part.get('recovered', 'test_acc'))} against Retrain’s "
        f"{percent(part.get('retrained', 'test_acc'))}, and {took}{', with ' if shares else ''}{' and '.join(shares)}; "
        f"{how_sure(part)}."
    )


def _price(part: Part) -> str:
    price = part.get("unlearned", "price_of_forgetting")
    if price is None:
        return "The price of forgetting was not measured"
    if round(price, 3) == 0:
        return "The price of forgetting was nil: the retained clients’ loss did not change"
    return f"The price of forgetting: the retained clients’ loss {'rose' if price > 0 else 'fell'} by {abs(price):.3f}"


VERDICTS = {
    "no trace": "no trace of it shows against data of the same clients that never trained",
    "remembered": "it is still told from data of the same clients that never trained",
    "over-unlearned": "it is treated worse than data of the same clients that never trained, which gives it away, too",
}


def how_sure(part: Part) -> str:
    """From the hold-out and the noise floor, or that neither is there."""
    told = []
    verdict = VERDICTS.get(str(part.row("recovered").get("holdout_verdict")))
    auc, low, high = (part.get("recovered", k) for k in ("auc", "auc_low", "auc_high"))
    if verdict and auc is not None:
        interval = f", 95{NBSP}% interval {low:.3f} to {high:.3f}" if low is not None and high is not None else ""
        told.append(f"{verdict} (AUC {auc:.3f}{interval})")
    gap, floor = part.gap("recovered"), part.doubt("forget_acc")
    if gap is not None and floor is not None:
        inside = "is not a difference" if abs(gap) <= floor else "is more than chance explains"
        told.append(f"two Retrains differ by {floor:.1f} points, so that the gap {inside}")
    if told:
        return f"how sure: {', and '.join(told)}"
    return "how sure is open, without a hold-out or a second Retrain to compare with"
