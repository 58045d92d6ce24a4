# SPDX-License-Identifier: Apache-2.0
"""Runs two processes as one: a SuperLink or SuperNode, and beside it the process that runs apps, as another user.

Run as a script with a description in JSON, it needs nothing but Python. When one of the two ends, the other is ended
too, so that no app outlives the node that it belongs to.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

GRACE = 8.0  # seconds between SIGTERM and SIGKILL


def start(description: dict[str, Any]) -> subprocess.Popen[bytes]:
    """Start one of the two processes, as the user that its description names, if it names one."""
    options: dict[str, Any] = {}
    if description.get("uid") is not None:
        options = {"user": description["uid"], "group": description["gid"], "extra_groups": []}
    environment = {**os.environ, **description.get("environment", {})}
    return subprocess.Popen(description["command"], env=environment, cwd=description.get("folder"), **options)


def main(text: str) -> int:
    """Run both until one ends; its exit code."""
    descriptions = json.loads(text)
    stopping: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda received, _frame: stopping.append(received))
    processes = [start(description) for description in descriptions]
    while not stopping and all(process.poll() is None for process in processes):
        time.sleep(0.1)
    codes = [process.poll() for process in processes]
    end(processes)
    return next((code for code in codes if code is not None), 0)


def end(processes: list[subprocess.Popen[bytes]]) -> None:
    """End the processes: SIGTERM first, then SIGKILL."""
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + GRACE
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.1, deadline - time.monotonic()))
        if process.poll() is None:
            process.kill()
            process.wait()


if __name__ == "__main__":
    code = main(sys.argv[1])
    sys.exit(code if code >= 0 else 128 - code)
