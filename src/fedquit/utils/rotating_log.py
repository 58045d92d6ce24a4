# SPDX-License-Identifier: Apache-2.0
"""Writes what another process prints to a log of bounded size, and loses no line of it while the disk takes them.

Run as a script, it copies its input to `PATH` until all who could write have ended. A file that is full becomes
`PATH.1`, the one before it `PATH.2`, and the oldest is dropped; a line is never divided between two files. It is a
process of its own so that the last lines are written even if whoever started both was killed. It needs nothing but
Python.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys

MAX_BYTES = 10_000_000  # of a file
BACKUPS = 3  # older files that are kept
CHUNK = 65_536
MODE = 0o600


def rotate(path: str, backups: int = BACKUPS) -> None:
    """Give a full file the name of the next older one, and so on; the oldest is dropped."""
    for number in range(backups, 0, -1):
        older = f"{path}.{number}"
        newer = f"{path}.{number - 1}" if number > 1 else path
        with contextlib.suppress(FileNotFoundError):
            os.replace(newer, older)  # noqa: PTH105 - pathlib would be most of what this script loads


class RotatingFile:
    """A log file that is given another name when it is full.

    Args:
        path: the file.
        max_bytes: from which it is full; a line that is longer than that stays whole.
        backups: older files that are kept.
    """

    def __init__(self, path: str, max_bytes: int = MAX_BYTES, backups: int = BACKUPS) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._backups = backups
        self._open()

    def _open(self) -> None:
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, MODE)
        self._size = os.fstat(self._descriptor).st_size

    def write(self, content: bytes) -> None:
        """Append, and begin a new file at the first line end after this one is full."""
        while content:
            room = max(0, self._max_bytes - self._size)
            end = content.find(b"\n", max(0, room - 1)) + 1 if len(content) >= room else 0
            self._append(content[:end] if end else content)
            if not end:
                return
            content = content[end:]
            with contextlib.suppress(OSError):  # the file goes on to grow, and is given up at the next line end
                self._rotate()

    def _append(self, content: bytes) -> None:
        while content:
            written = os.write(self._descriptor, content)
            self._size += written
            content = content[written:]

    def _rotate(self) -> None:
        """Begin a new file; where that fails the old one is still open, whatever name it has by then."""
        full = self._descriptor
        if os.path.exists(self._path):  # noqa: PTH110 - else an earlier attempt has come so far
            rotate(self._path, self._backups)
        self._open()
        os.close(full)


def main(path: str, max_bytes: int = MAX_BYTES) -> None:
    """Copy standard input to a log until it ends."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)  # it ends with those who write, and not before
    file: RotatingFile | None = None
    while content := os.read(0, CHUNK):
        with contextlib.suppress(OSError):  # a full disk: what is logged is lost, and nobody is kept waiting
            file = file or RotatingFile(path, max_bytes)
            file.write(content)


if __name__ == "__main__":
    main(sys.argv[1], *(int(word) for word in sys.argv[2:]))
