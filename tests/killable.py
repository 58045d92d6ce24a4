# SPDX-License-Identifier: Apache-2.0
"""Runs a recipe again and again, killing it with SIGKILL at every point where it writes to the disk.

A process of its own, so that torch is imported once: each attempt is a fork, and the kills are real.

    python killable.py RECIPE.json WORK one|all -> prints JSON: the writes, and what differed

With `one`, each write is killed at one of three moments in turn; with `all`, at each of them.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fedquit.running.recipe import Recipe, build
from fedquit.running.runner import run
from fedquit.utils import files

MOMENTS = ("before", "half-written", "after")


def attempt(recipe: Recipe, out: Path, kill: Callable[[int, Path, bytes], None] | None) -> int:
    """Run in a fork; the exit status as `waitpid` gives it."""
    child = os.fork()
    if child == 0:
        if kill:
            arm(kill)
        run(recipe, out)
        os._exit(0)
    return os.waitpid(child, 0)[1]


def arm(kill: Callable[[int, Path, bytes], None]) -> None:
    """Let `kill` see every atomic write: number 1, 2, …; negative once the write is done."""
    write, count = files.write_atomic, 0

    def watched(path: Path, content: bytes) -> None:
        nonlocal count
        count += 1
        kill(count, path, content)
        write(path, content)
        kill(-count, path, content)

    files.write_atomic = watched


def killer(point: int, moment: str) -> Callable[[int, Path, bytes], None]:
    """Die at one write: before it, with half of it in a temporary file, or right after it."""

    def kill(count: int, path: Path, content: bytes) -> None:
        if moment == "half-written" and count == point:
            path.parent.mkdir(parents=True, exist_ok=True)
            (path.parent / f".{path.name}.torn").write_bytes(content[: len(content) // 2])
        if count == (-point if moment == "after" else point):
            os.kill(os.getpid(), signal.SIGKILL)

    return kill


def outcome(out: Path) -> list[dict[str, Any]]:
    """The rows, without the clock."""
    rows: list[dict[str, Any]] = json.loads((out / "results.json").read_text())["rows"]
    return [{k: v for k, v in row.items() if k != "seconds"} for row in rows]


def asked_twice(out: Path, phase: str) -> list[str]:
    """Questions of an unlearning phase that a client was asked again although it had answered."""
    lines = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    places = [f"{e['round']}/{e['question']}/{e['client']}" for e in lines if e["phase"] == phase]
    return sorted({p for p in places if places.count(p) > 1})


def main(recipe_file: Path, work: Path, moments: str) -> None:
    torch.set_num_threads(1)
    recipe = build(Recipe, json.loads(recipe_file.read_text()), "recipe")
    run(recipe, work / "warm" / "run")  # import all there is to import, once for all forks
    count = work / "count"

    def counting(number: int, path: Path, _content: bytes) -> None:
        if number > 0:
            with count.open("a") as file:
                file.write(f"{path.relative_to(work)}\n")

    assert attempt(recipe, work / "straight" / "run", counting) == 0
    expected, writes = outcome(work / "straight" / "run"), count.read_text().splitlines()
    faults = []
    points = range(1, len(writes) + 1)
    tries = [(p, MOMENTS[p % 3]) for p in points] if moments == "one" else [(p, m) for p in points for m in MOMENTS]
    for point, moment in tries:
        out = work / "killed" / "run"
        status = attempt(recipe, out, killer(point, moment))
        assert os.WIFSIGNALED(status), f"not killed at write {point}"
        assert os.WTERMSIG(status) == signal.SIGKILL
        if attempt(recipe, out, None) != 0:
            faults.append(f"{moment} write {point} ({writes[point - 1]}): did not go on")
        elif outcome(out) != expected:
            faults.append(f"{moment} write {point} ({writes[point - 1]}): another result")
        elif again := asked_twice(out, "unlearn-0"):
            faults.append(f"{moment} write {point} ({writes[point - 1]}): asked again {again}")
        shutil.rmtree(work / "killed")
    print(json.dumps({"writes": writes, "faults": faults}))  # noqa: T201 - what the test reads


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
