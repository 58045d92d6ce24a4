# SPDX-License-Identifier: Apache-2.0
"""How a number is printed, the same in every view."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fedquit.inference.trace import CANNOT_TELL

DASH = "–"
NBSP = "\u00a0"
FREE = "free"
NOT_JUDGED = "not judged"  # of a result whose verdict was made by an earlier rule
JUDGE_ANEW = "an earlier version made this result, by a rule of unknown error rate; run it again into a new folder"


def fixed(value: float | None, digits: int = 1) -> str:
    """With a true minus, or a dash where nothing was measured."""
    return DASH if value is None else f"{value:.{digits}f}".replace("-", "−")


def signed(value: float | None, digits: int = 1) -> str:
    """With its sign, unless it is zero."""
    if value is None:
        return DASH
    return f"{value:+.{digits}f}".replace("-", "−") if round(value, digits) else f"{0:.{digits}f}"


def percent(value: float | None) -> str:
    """A percentage for a sentence."""
    return f"{fixed(value)}{NBSP}%" if value is not None else "not measured"


def share(value: float | None) -> str:
    """A percentage with about two digits, for a table."""
    if value is None:
        return DASH
    if value >= 100:
        return f"{value:.0f}{NBSP}%"
    return f"{value:.{1 if value >= 1 or not value else 2}f}{NBSP}%"


def times(cheaper: float | None, spent: float | None) -> str:
    """How many times cheaper than Retrain; below one with two digits, so that a dear method does not print as 0.0×.

    Args:
        cheaper: Retrain's cost over the method's.
        spent: The method's cost, which tells "free" from "not counted" where there is no ratio.
    """
    if cheaper is not None:
        return f"{cheaper:.1f}×" if cheaper >= 0.95 else f"{cheaper:.2g}×"
    return FREE if spent == 0 else ""


def scaled(value: float | None, unit: str) -> str:
    """Bytes or FLOPs with a prefix."""
    if value is None:
        return DASH
    size = value
    prefixes = ["", "k", "M", "G", "T", "P", "E", "Z"]
    while abs(size) >= 999.5 and len(prefixes) > 1:
        size /= 1000
        prefixes = prefixes[1:]
    digits = 0 if prefixes[0] == "" or size >= 100 else 1
    return f"{size:.{digits}f}{NBSP}{prefixes[0]}{unit}"


def holdout_verdict(row: Mapping[str, Any], *, in_full: bool = False) -> str:
    """The verdict against the hold-out as a row stores it, or "" where there is none.

    Args:
        row: Of the results; that of an older version has no reason, and is not judged.
        in_full: With the whole reason. In short, only a verdict that is open has the first words of its reason.
    """
    verdict = row.get("holdout_verdict")
    reason = row.get("holdout_reason")
    if not isinstance(verdict, str):
        return ""
    if not isinstance(reason, str):
        return f"{NOT_JUDGED}: {JUDGE_ANEW}" if in_full else NOT_JUDGED
    if in_full:
        return f"{verdict}: {reason}"
    return f"{verdict}: {reason.partition(':')[0]}" if verdict == CANNOT_TELL else verdict


def exposed(row: Mapping[str, Any]) -> str:
    """How many forgotten samples a model still gives away, as a sentence without names; "" where it is not known.

    Args:
        row: Of the results, with a hold-out.
    """
    least = row.get("exposed_at_least")
    named = row.get("exposed_named")
    size = row.get("forget_size")
    if not all(isinstance(number, int) for number in (least, named, size)):
        return ""
    if not least and not named:
        return f"That any of the {size} forgotten samples is still exposed cannot be told from this model."
    return (
        f"At least {least} of the {size} forgotten samples are still exposed (95 % confidence); {named} can be named, "
        "of which at most 5 % wrongly on average."
    )


def count(value: float | None, noun: str) -> str:
    """A number with its noun, as in "1 round" and "2.5 rounds"."""
    if value is None:
        return f"an unknown number of {noun}s"
    return f"{value:g} {noun}" if value == 1 else f"{value:g} {noun}s"


def duration(values: Iterable[float | None]) -> str:
    """The sum of some times in seconds, in the unit that suits it."""
    known = [value for value in values if value is not None]
    total = sum(known)
    if not known:
        return "an unknown time"
    if total < 120:
        return f"{total:.1f}{NBSP}s"
    return f"{total / 60:.0f}{NBSP}min" if total < 7200 else f"{total / 3600:.1f}{NBSP}h"
