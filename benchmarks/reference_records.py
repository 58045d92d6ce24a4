# SPDX-License-Identifier: Apache-2.0
"""Record Original and Retrain of a setting, which no unlearning method changes.

    python benchmarks/reference_records.py settings/cifar100-lda --targets 0,1,2 --state STATE --out OUT
        [--set key=value ...] [--seed 0] [--retrain-seeds 0] [--without-original] [--seconds 540]

A record is one JSON file (rows of the last ten rounds in the schema of results.json, the hash of data, partition and
training, code version, hardware, fingerprint of the final parameters) and one safetensors file (per-example scores of
the final model in half precision). After `--seconds` the training stops at a round's end with its state in `--state`,
and the same command goes on from there. Weights are not recorded.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file

from fedquit.audit.evaluation import Set, measures_of
from fedquit.audit.scores import Scores, score_examples
from fedquit.core import ClientId, Request, State
from fedquit.core.fedavg import fedavg
from fedquit.core.params import fingerprint
from fedquit.data.federated import FederatedData
from fedquit.running.costs import Metered
from fedquit.running.recipe import Recipe, load
from fedquit.running.runner import versions
from fedquit.running.session import Progress, Session, advance
from fedquit.running.setup import Setup, build_setup
from fedquit.running.store import Memories, StateFile
from fedquit.running.training_cache import training_hash
from fedquit.utils.files import read_json, write_json
from fedquit.utils.version import code_version

WINDOW = 10  # rounds at the end of a training that are recorded
STORED = ("phi", "entropy", "modified_entropy")
LARGE = ("roc", "entropy")  # curves and densities: of the last round alone
Row = dict[str, Any]


@dataclass(frozen=True)
class Unit:
    """One training: Original (no target), or the Retrain of a target."""

    seed: int
    target: ClientId | None = None

    @property
    def name(self) -> str:
        """The folder of its record."""
        return f"original-seed{self.seed}" if self.target is None else f"retrain-client{self.target}-seed{self.seed}"


class Recorder:
    """Trains the units of a setting one after the other and writes their records."""

    def __init__(self, recipe: Recipe, targets: Sequence[ClientId], state: Path, deadline: float) -> None:
        self.recipe = recipe
        self.targets = targets
        self.state = state
        self.deadline = deadline
        self.pool = ProcessPoolExecutor(12, mp_context=get_context("spawn"))

    def record(self, unit: Unit) -> bool:
        """Train a unit to its end and write its record; False where time is up before."""
        folder = self.state / unit.name
        if (folder / "record.json").exists():
            return True
        recipe = replace(self.recipe, seed=unit.seed)
        setup = build_setup(recipe)
        data = setup.data
        if unit.target is not None:
            request = Request((unit.target,))
            data = data.mark(request).after(request)
        rows_file = folder / "rows.json"
        rows: dict[str, list[Row]] = read_json(rows_file) if rows_file.exists() else {}
        waiting: list[tuple[str, Row, Future[Row]]] = []
        file = StateFile(folder / "state.safetensors")
        scores: tuple[Scores, Scores] | None = None
        for progress in self._rounds(setup, data, file, folder):
            recorded = max((row["rounds"] for row in next(iter(rows.values()), [])), default=0)
            if progress.state.round > max(setup.training.rounds - WINDOW, recorded):
                scores = self._scores(setup, progress)
                waiting += self._rows(unit, setup, recipe, progress, scores)
            if time.monotonic() > self.deadline and progress.state.round < setup.training.rounds:
                self._keep(rows, waiting, rows_file)
                file.save(progress.state, progress.seconds, asdict(progress.costs))
                print(f"{unit.name}: stopped after round {progress.state.round}", flush=True)
                return False
        self._keep(rows, waiting, rows_file)
        assert scores is not None
        self._write(unit, setup, data, recipe, rows, scores, folder)
        file.path.unlink()
        last = next(row[-1] for row in rows.values())
        print(
            f"{unit.name}: test {last['test_acc']:.2f} retain {last['retain_acc']:.2f} forget {last['forget_acc']:.2f} "
            f"yeom {last['mia_yeom']:.1f} {last['seconds']:.0f} s {last['fingerprint']}",
            flush=True,
        )
        return True

    def _rounds(self, setup: Setup, data: FederatedData, file: StateFile, folder: Path) -> Any:  # noqa: ANN401
        memories = Memories.open(folder, device=setup.device)
        session = Session(setup.engine(data, memories.clients), setup.recipe.seed, data.clients, memories=memories.own)
        meter = Metered(session, work=setup.flops)

        def step(state: State) -> State:
            return fedavg(meter, state, setup.training, data.clients)

        return advance(session, "train", State(setup.initial), step, file, setup.training.rounds, meter)

    def _scores(self, setup: Setup, progress: Progress) -> tuple[Scores, Scores]:
        """Per-example scores of all training data, in the order of the data set, and of the test data."""
        source = setup.data.dataset
        model, params = setup.evaluation_model, progress.state.params
        return (
            score_examples(model, params, source.x, source.y),
            score_examples(model, params, source.test_x, source.test_y),
        )

    def _rows(
        self, unit: Unit, setup: Setup, recipe: Recipe, progress: Progress, scores: tuple[Scores, Scores]
    ) -> list[tuple[str, Row, Future[Row]]]:
        everything, test = scores
        head = {
            "method": "original" if unit.target is None else "retrain",
            "phase": "original" if unit.target is None else "retrained",
            "request": 0,
            "samples": False,
            "seed": unit.seed,
            "rounds": progress.state.round,
            "seconds": round(progress.seconds, 3),
            **asdict(progress.costs),
            "fingerprint": fingerprint(progress.state.params),
        }
        rows = []
        for target in self.targets if unit.target is None else [unit.target]:
            marked = setup.data.mark(Request((target,)))
            retain = everything.take(marked.pooled("retain").numpy())
            forget = everything.take(marked.pooled("forget", (target,)).numpy())
            held = marked.holdout.get(target, torch.tensor([], dtype=torch.int64)).numpy()
            holdout = everything.take(held) if len(held) else None
            by_set: dict[Set, Scores | None] = {"retain": retain, "test": test, "forget": forget, "holdout": holdout}
            job = self.pool.submit(measures_of, by_set, recipe.evaluate.attacks, recipe.seed)
            rows.append((str(target), {**head, "clients": [target]}, job))
        return rows

    def _keep(self, rows: dict[str, list[Row]], waiting: list[tuple[str, Row, Future[Row]]], path: Path) -> None:
        for target, head, job in waiting:
            row = {**head, **job.result()}
            for earlier in rows.setdefault(target, []):
                for key in LARGE:
                    earlier.pop(key, None)
            rows[target].append(row)
        waiting.clear()
        write_json(path, rows)

    def _write(
        self,
        unit: Unit,
        setup: Setup,
        data: FederatedData,
        recipe: Recipe,
        rows: dict[str, list[Row]],
        scores: tuple[Scores, Scores],
        folder: Path,
    ) -> None:
        everything, test = scores
        sets = {"test": test}
        if unit.target is None:
            sets["train"] = everything  # in the order of the data set: the forget and hold-out data of every target
        else:
            marked = setup.data.mark(Request((unit.target,)))
            sets["forget"] = everything.take(marked.pooled("forget", (unit.target,)).numpy())
            held = marked.holdout.get(unit.target)
            if held is not None and len(held):
                sets["holdout"] = everything.take(held.numpy())
        arrays = {f"{name}.{key}": getattr(s, key).astype(np.float16) for name, s in sets.items() for key in STORED}
        arrays |= {f"{name}.correct": s.correct.astype(np.uint8) for name, s in sets.items()}
        save_file(arrays, folder / "scores.safetensors")
        cuda = setup.device.type == "cuda"
        record = {
            "schema": 1,
            "kind": "reference",
            "role": "original" if unit.target is None else "retrained",
            "target": [] if unit.target is None else [unit.target],
            "seed": unit.seed,
            "training_hash": training_hash(setup, data, {}, None),
            "recipe": recipe.to_dict(),
            "versions": versions(),
            "code": code_version(),
            "computed": {
                "device": torch.cuda.get_device_name(setup.device) if cuda else setup.device.type,
                "precision": setup.precision,
            },
            "clients": setup.data.label_counts(),
            "scores": {name: len(s) for name, s in sets.items()},
            "rows": rows,
        }
        write_json(folder / "record.json", record)


def main() -> None:
    """Record what the command line names, as far as time allows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe")
    parser.add_argument("--targets", required=True)
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--retrain-seeds", default="")
    parser.add_argument("--without-original", action="store_true")
    parser.add_argument("--seconds", type=float, default=1e9)
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    recipe = load(options.recipe, options.set)
    targets = [int(t) for t in options.targets.split(",")]
    seeds = [int(s) for s in (options.retrain_seeds or str(options.seed)).split(",")]
    originals = [] if options.without_original else [Unit(options.seed)]
    units = [*originals, *(Unit(seed, target) for target in targets for seed in seeds)]
    recorder = Recorder(recipe, targets, options.state, deadline)
    finished = 0
    for unit in units:
        if time.monotonic() > deadline or not recorder.record(unit):
            break
        finished += 1
    recorder.pool.shutdown()
    print(json.dumps({"finished": finished, "of": len(units)}))


if __name__ == "__main__":
    main()
