# SPDX-License-Identifier: Apache-2.0
"""Log lines with a time: plain text or one JSON object a line, in which nobody from outside can forge another line."""

from __future__ import annotations

import json
import time
import unicodedata
from typing import Literal

Format = Literal["text", "json"]
CONTROL = frozenset(
    ("Cc", "Cf", "Cs", "Zl", "Zp")
)  # controls, formats such as bidirectional overrides, line separators
MAX_LINE = 2_000  # characters


def printable(text: str) -> str:
    """A text on one line: control characters become visible escapes, and a very long text is cut.

    Names and reasons come from other machines. A line feed in one of them would begin a line of its own in the log, and
    an escape sequence would be carried out by the operator's terminal.
    """
    cut = text if len(text) <= MAX_LINE else f"{text[:MAX_LINE]} [{len(text) - MAX_LINE} more characters]"
    return "".join(_escaped(c) if unicodedata.category(c) in CONTROL else c for c in cut)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode() if character.isascii() else f"\\u{ord(character):04x}"


def timestamp(now: float) -> str:
    """Unix time as ISO 8601, in UTC, to the second."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now))


def log_line(text: str, source: str, style: Format, now: float | None = None) -> str:
    """One line of a log.

    Args:
        text: what happened.
        source: who says so: `fedquit`, or `app` for a line of the server app's own log.
        style: `text` or `json`.
        now: Unix time, if not the present.
    """
    when = timestamp(time.time() if now is None else now)
    if style == "json":
        return json.dumps({"time": when, "source": source, "text": printable(text)})
    indent = "" if source == "fedquit" else "  "
    return f"{when} {indent}{printable(text)}"
