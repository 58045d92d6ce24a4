# SPDX-License-Identifier: Apache-2.0
"""Ends the processes that a process started, also if that process was killed and could not do so itself.

Flower starts children, some in sessions of their own, so a process group does not hold all of them. But all of them
inherit the environment: every process that we start carries a mark there, by which it is found again.

Run as a script, this file waits on a pipe whose other end only its parent holds. When the pipe closes without the word
`done`, the parent was killed, and every process with its mark is ended. The script needs nothing but Python.
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
READABLE = Path("/proc/self/environ").exists()  # whether this system shows the environment of other processes
DONE = "done"  # written by a parent that has ended its processes itself


def marked(mark: str) -> list[int]:
    """The ids of the processes whose mark begins with this one; none where `READABLE` is false."""
    sign = f"\0{VARIABLE}={mark}".encode()
    process_ids = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended, or belongs to another user; a zombie's environment is empty
            if sign in b"\0" + (folder / "environ").read_bytes() and int(folder.name) != os.getpid():
                process_ids.append(int(folder.name))
    return process_ids


def end(mark: str, groups: Sequence[int] = (), grace: float = 5.0) -> None:
    """End the marked processes: SIGTERM first, then SIGKILL.

    Args:
        mark: the beginning of their mark.
        groups: process groups to kill where the system does not show marks.
        grace: seconds between the two signals.
    """
    for process_id in marked(mark):
        _signal(process_id, signal.SIGTERM)
    deadline = time.monotonic() + grace
    while marked(mark) and time.monotonic() < deadline:
        time.sleep(0.1)
    kill(mark)
    if not READABLE:  # elsewhere the id of a group that has ended may belong to another program by now
        for group in groups:
            _signal(group, signal.SIGKILL, group=True)


def kill(mark: str) -> None:
    """Kill the marked processes, repeatedly, since one of them may be starting another."""
    deadline = time.monotonic() + 10.0
    while (process_ids := marked(mark)) and time.monotonic() < deadline:
        for process_id in process_ids:
            _signal(process_id, signal.SIGKILL)
        time.sleep(0.02)


def _signal(number: int, which: signal.Signals, *, group: bool = False) -> None:
    send = os.killpg if group else os.kill
    with contextlib.suppress(ProcessLookupError, PermissionError):
        send(number, which)


def main(mark: str) -> None:
    """Wait for the parent's end, and end its processes unless it has. Each line of the input names a process group."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)  # it must outlive its parent for a moment
    groups: list[int] = []
    for line in sys.stdin:
        if line.strip() == DONE:
            return
        groups.append(int(line))
    end(mark, groups, grace=2.0)


if __name__ == "__main__":
    main(sys.argv[1])
