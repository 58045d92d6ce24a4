# SPDX-License-Identifier: Apache-2.0
"""Kills a fetch before every single thing that it does to files, and looks at what is left. Prints the faults as JSON.

Run with the folder to work in. All forks share one import.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from data.fetch_world import CONTENT, complete_part, contents, tiny
from fedquit.data.fetch import fetch

TOUCHES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod", "os.utime"}


def killed_before(touch: int, folder: Path) -> bool:
    """Fetch in a child that dies before that touch; False where it came to its end."""
    child = os.fork()
    if child == 0:
        seen = 0

        def watch(event: str, _: tuple[object, ...]) -> None:
            nonlocal seen
            if event in TOUCHES:
                seen += 1
                if seen == touch:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(watch)
        fetch(tiny(), folder)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def main(where: Path) -> None:
    os.sync = lambda: None  # a kill loses nothing that was written, and a busy disk takes its time
    faults: list[str] = []
    states: set[str] = set()
    touch = 0
    while True:
        touch += 1
        folder = where / str(touch)
        folder.mkdir()
        complete_part(folder)
        killed = killed_before(touch, folder)
        state = "whole" if (folder / "tiny-set").exists() else "nothing"
        states.add(state if killed else "end")
        if state == "whole" and contents(folder / "tiny-set") != CONTENT:
            faults.append(f"touch {touch} left a part of the data set")
        fetch(tiny(), folder)
        left = sorted(path.name for path in folder.iterdir())
        if left != [".tiny.lock", "tiny-set"] or contents(folder / "tiny-set") != CONTENT:
            faults.append(f"after touch {touch} the next fetch left {left}")
        if not killed:
            break
    print(json.dumps({"touches": touch, "states": sorted(states), "faults": faults}))  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]))
