# SPDX-License-Identifier: Apache-2.0
"""Does FedEraser's memory grow with its history? A real one, of a model as large as ResNet-18, on disk.

    python benchmarks/federaser_memory.py --rounds 5,10,20 --folder SOMEWHERE

Trains a federation of 10 clients (a perceptron of 11.2 million parameters on a few synthetic images) with FedEraser
attached, forgets one client by replaying the history, and prints for each number of rounds the bytes on disk and the
peak memory of the process. Each number of rounds is a process of its own. Needs 0.45 GB of disk for each round.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def recipe(rounds: int) -> dict[str, Any]:
    """Large model, little data: it is the history that counts here."""
    return {
        "data": {
            "name": "synthetic",
            "options": {"examples": 100, "test_examples": 20, "size": 28},
            "partition": "iid",
        },
        "model": {"name": "mlp", "options": {"hidden": 14100}},
        "train": {"rounds": rounds, "lr": 0.01},
        "request": [{"clients": [0]}],
        "method": {"name": "federaser"},
        "recover": {"until": "rounds", "max_rounds": 0},
        "retrain": False,
    }


def measured(rounds: int, folder: Path) -> dict[str, float]:
    """One history, built and replayed in this process."""
    from fedquit.running.recipe import Recipe, build
    from fedquit.running.runner import run

    began = time.perf_counter()
    results = run(build(Recipe, recipe(rounds), "recipe"), folder / "run")
    row = next(r for r in results["rows"] if r["phase"] == "unlearned")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    seconds = time.perf_counter() - began
    stored = row["server_storage_bytes"] / 1e9
    return {"rounds": rounds, "stored_gb": stored, "peak_memory_gb": peak, "seconds": seconds}


def main() -> None:
    """Measure each number of rounds in a fresh process, and clean up."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", default="5,10,20")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        print(json.dumps(measured(int(options.rounds), options.folder)))
        return
    for rounds in options.rounds.split(","):
        folder = options.folder / f"history-{rounds}"
        command = [sys.executable, __file__, "--here", "--rounds", rounds, "--folder", str(folder)]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        shutil.rmtree(folder)
        print(
            f"{found['rounds']:4d} rounds: {found['stored_gb']:6.2f} GB stored, "
            f"peak memory {found['peak_memory_gb']:.2f} GB, {found['seconds']:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
