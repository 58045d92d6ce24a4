# SPDX-License-Identifier: Apache-2.0
"""Runs a small study again and again, killing it with SIGKILL where it writes to the disk.

    python killable_study.py WORK EVERY -> prints JSON: how many kills were tried, and what differed

Every EVERY-th write is killed, at one of three moments in turn, and the study goes on in a copy of its folder.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from fedquit.studies.plan import Plan
from killable import MOMENTS, arm, killer
from study_world import carried_out, planned, records

BLOCK = {
    "recipe": "tiny.toml",
    "set": ["train.rounds=2", "recover.max_rounds=1"],
    "retrain_seeds": [10],
    "methods": ["pga"],
    "control": True,
}


def attempt(plan: Plan, out: Path, kill: Callable[[int, Path, bytes], None] | None) -> int:
    """Carry the study out in a fork; the exit status as `waitpid` gives it."""
    child = os.fork()
    if child == 0:
        if kill:
            arm(kill)
        carried_out(plan, out)
        os._exit(0)
    return os.waitpid(child, 0)[1]


def main(work: Path, every: int) -> None:
    torch.set_num_threads(1)
    plan = planned(work, BLOCK)
    carried_out(plan, work / "warm")  # import all there is to import, once for all forks
    expected = records(work / "warm")
    count = work / "count"

    def counting(number: int, path: Path, _content: bytes) -> None:
        if number > 0:
            with count.open("a") as file:
                file.write(f"{path.relative_to(work)}\n")

    assert attempt(plan, work / "straight", counting) == 0
    writes = count.read_text().splitlines()
    faults = []
    points = range(1, len(writes) + 1, every)
    for number, point in enumerate(points):
        moment = MOMENTS[number % 3]
        what = f"{moment} write {point} ({writes[point - 1]})"
        status = attempt(plan, work / "killed", killer(point, moment))
        assert os.WIFSIGNALED(status), f"not killed at write {point}"
        assert os.WTERMSIG(status) == signal.SIGKILL
        shutil.copytree(work / "killed", work / "elsewhere") if (work / "killed").exists() else None
        if attempt(plan, work / "elsewhere", None) != 0:
            faults.append(f"{what}: did not go on")
        elif records(work / "elsewhere") != expected:
            faults.append(f"{what}: other records")
        shutil.rmtree(work / "killed", ignore_errors=True)
        shutil.rmtree(work / "elsewhere", ignore_errors=True)
    print(json.dumps({"tried": len(points), "faults": faults}))  # noqa: T201 - what the test reads


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
