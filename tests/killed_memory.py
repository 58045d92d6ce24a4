# SPDX-License-Identifier: Apache-2.0
"""A phase whose every round builds on what the last one kept, and adds to a history, killed with SIGKILL at any moment.

A process of its own, so that torch is imported once: each attempt is a fork, and the kills are real.

    python killed_memory.py FOLDER -> prints JSON: the kills, the last sum, and the sum over the history
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from fedquit.core import Params, Reply, State
from fedquit.engine import Ask
from fedquit.running import session as sessions
from fedquit.running.memory import Bounds, Memories
from fedquit.running.session import Session, advance
from fedquit.running.store import StateFile

ROUNDS = 60
MOST_KILLS = 12
PAUSE = 0.006  # seconds in each round: all of them outlast two of the longest attempts, however fast the machine is
LENGTH = 30_000
BOUNDS = Bounds(device=10**9, host=3 * 4 * LENGTH, waiting=2 * 4 * LENGTH, small=1000)


class NoEngine:
    """Nobody is asked."""

    model: Any = None

    def run(self, ask: Ask) -> Iterator[Reply]:
        return iter(())


def entry(value: float) -> Params:
    return {"w": torch.full((LENGTH,), value)}


def expected() -> list[float]:
    """After each round r the sum is 2 * sum + r modulo 1,001; the history holds every sum."""
    total, history = 0, 0
    for number in range(ROUNDS):
        total = (2 * total + number) % 1001
        history += total
    return [float(total), float(history)]


def attempt(folder: Path) -> None:
    """From where the last attempt left off to the end."""
    memories = Memories.open(folder, bounds=BOUNDS)
    memory = memories.server
    session = Session(NoEngine(), 0, (), memories=memories.own)

    def step(state: State) -> State:
        time.sleep(PAUSE)
        last = float(memory["sum"]["w"][-1]) if "sum" in memory else 0.0
        total = (2 * last + state.round) % 1001
        memory["sum"] = entry(total)
        memory[f"history/{state.round:03d}"] = entry(total)
        return state.next(state.params)

    for _ in advance(session, "p", State(entry(0.0)), step, StateFile(folder / "state.safetensors"), ROUNDS):
        pass


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    sessions.CHEAP = 0.0  # states are stored seldom, as those of a large model are
    draw = random.Random(0)
    kills = 0
    while kills < MOST_KILLS:
        child = os.fork()
        if child == 0:
            attempt(folder)
            os._exit(0)
        time.sleep(draw.uniform(0.01, 0.15))
        os.kill(child, signal.SIGKILL)
        if os.WIFEXITED(os.waitpid(child, 0)[1]):
            break
        kills += 1
    attempt(folder)
    memory = Memories.open(folder).server
    history = sum(float(memory[key]["w"][0]) for key in memory if key.startswith("history/"))
    sys.stdout.write(json.dumps({"kills": kills, "sums": [float(memory["sum"]["w"][0]), history]}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
