# SPDX-License-Identifier: Apache-2.0
"""Ends what a process leaves behind, also where that process was killed and could not do so itself.

Flower starts children of its own, some in sessions of their own, so a process group does not hold all of them. But all
of them inherit the environment: everything that we start carries a mark there, by which it is found again.

Run as a script, this file is the last resort. It waits on a pipe whose other end only its parent holds; when the pipe
closes without a word, the parent is gone, and whatever carries its mark is ended. It needs nothing but Python.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

VARIABLE = "FEDQUIT_MARK"
READABLE = Path("/proc/self/environ").exists()
DONE = "done"  # the word of a parent that has tidied up


def marked(mark: str) -> list[int]:
    """The processes that carry this mark or one that begins with it; none where the system does not tell."""
    sign, found = f"\0{VARIABLE}={mark}".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # gone meanwhile, or somebody else's; a zombie's environment is empty
            if sign in b"\0" + (folder / "environ").read_bytes() and int(folder.name) != os.getpid():
                found.append(int(folder.name))
    return found


def end(mark: str, groups: Sequence[int] = (), grace: float = 5.0) -> None:
    """End the marked processes: first asked, then killed. The groups count only where marks cannot be read."""
    for process in marked(mark):
        _signal(process, signal.SIGTERM)
    deadline = time.monotonic() + grace
    while marked(mark) and time.monotonic() < deadline:
        time.sleep(0.1)
    kill(mark)
    if not READABLE:  # elsewhere the number of a group that has ended may belong to a stranger by now
        for group in groups:
            _signal(group, signal.SIGKILL, group=True)


def kill(mark: str) -> None:
    """End the marked processes at once; one that is just being born shows up in the next look."""
    deadline = time.monotonic() + 10.0
    while (left := marked(mark)) and time.monotonic() < deadline:
        for process in left:
            _signal(process, signal.SIGKILL)
        time.sleep(0.02)


def _signal(number: int, which: signal.Signals, *, group: bool = False) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        (os.killpg if group else os.kill)(number, which)


def main(mark: str) -> None:
    """Wait for the parent's end; tidy up unless it said that it had done so. Each line names a process group."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)  # it outlives its parent by design, never for long
    groups: list[int] = []
    for line in sys.stdin:
        if line.strip() == DONE:
            return
        groups.append(int(line))
    end(mark, groups, grace=2.0)


if __name__ == "__main__":
    main(sys.argv[1])
