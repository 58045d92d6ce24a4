# SPDX-License-Identifier: Apache-2.0
"""Reading the logs of Flower's processes: their last lines, and why a process ended."""

from __future__ import annotations

import contextlib
import re
import signal
from pathlib import Path

COLOURS = re.compile(r"\x1b\[[0-9;]*m")
PORT_TAKEN = "address already in use"
KNOWN_REASONS = {  # by what Flower writes
    "[code: 2004]": "the SuperLink refuses its key: it is not registered, or its node was killed in the last minute",
    "CERTIFICATE_VERIFY_FAILED": "the SuperLink's certificate is not from the authority that it trusts",
}
TAIL_BYTES = 20_000


def tail(log: Path, lines: int = 15) -> str:
    """The last lines of a log, without terminal colours; "(no log)" where it cannot be read."""
    content = b""
    for path in (log.with_name(f"{log.name}.1"), log):  # a new file may have been begun a moment ago
        with contextlib.suppress(OSError):
            content += path.read_bytes()[-TAIL_BYTES:]
    if not content and not log.exists():
        return "(no log)"
    text = content[-TAIL_BYTES:].decode(errors="replace")
    return "\n".join(COLOURS.sub("", text).splitlines()[-lines:])


def end_reason(log: Path, exit_code: int) -> str:
    """Why a process of Flower's ended: the signal, what it wrote below its exit code, or the exit code itself."""
    if exit_code < 0:
        return f"killed by {signal.Signals(-exit_code).name}"
    _, separator, text = tail(log, 40).rpartition("Exit Code: ")
    for sign, reason in KNOWN_REASONS.items():
        if sign in text:
            return reason
    lines = []
    for line in text.splitlines()[1:4]:
        if line.strip() and not line.startswith(("INFO", "For more")):
            lines.append(line.strip())
    return " ".join(lines) if separator and lines else f"exit code {exit_code}"
