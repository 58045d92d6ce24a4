# SPDX-License-Identifier: Apache-2.0
"""How often the checks on members alarm where everybody is honest, and how near honest replies come to their bounds.

Federations in one process, over Flower's messages: the digits divided among clients, trained, then one client leaves
(every fourth time with a fifth of its samples only) and the others recover. Every reply is judged as in a deployment.

    python benchmarks/member_checks.py             50 honest erasures, and the table of docs/flower.md
    python benchmarks/member_checks.py --count 200 more of them
    python benchmarks/member_checks.py --json FILE what was measured of each
    python benchmarks/member_checks.py --cheat     clients that train on instead of unlearning: how many are found out
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from flwr.app import Message

from fedquit.core.fedavg import Learn
from fedquit.data import federate, load_dataset
from fedquit.flower import wire
from fedquit.flower.config import ServerConfig
from fedquit.flower.in_process import FIRST_NODE, InProcessFederation, Node
from fedquit.flower.wire.tasks import task_to_body
from fedquit.models import load_model
from fedquit.running.recipe import build

PARTITIONS: dict[str, dict[str, Any]] = {
    "Dirichlet 0.1": {"partition": "lda", "alpha": 0.1},
    "Dirichlet 0.5": {"partition": "lda", "alpha": 0.5},
    "IID": {"partition": "iid"},
}
METHODS: dict[str, dict[str, Any]] = {  # that ask the client that leaves, with rates that unlearn these digits
    "fedquit": {"lr": 1e-3},
    "pga": {},
    "mode": {"unlearning_rounds": 2, "degradation_rounds": 1},
    "fedau": {},
    "ascent": {"epochs": 1.0},
    "fedosd": {"unlearning_rounds": 2},
    "fedunran": {},
    "puf": {"strength": 1.0},
    "scrub": {},
    "bad_teacher": {},
}
TRAININGS: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": "sgd", "lr": 0.1},
    "adam": {"optimizer": "adam", "lr": 1e-3},
}
ALARMS = ("no reply of", "is scaled down", "instead")
SAMPLES = 0.2  # of a client that gives up samples and stays
FOR_SAMPLES = ("fedquit", "mode", "fedau", "ascent", "fedunran", "puf", "scrub", "bad_teacher")


@dataclass(frozen=True)
class Case:
    """One honest erasure."""

    method: str
    partition: str
    training: str
    seed: int
    clients: int = 10
    samples: bool = False
    cheat: bool = False  # the client that leaves trains on, with the steps that it was to unlearn with


@dataclass
class Cheat(Node):
    """A node that does ordinary training whenever it is to unlearn."""

    def answers(self, message: Message) -> list[Message]:
        """The reply to another question than was asked."""
        if message.metadata.message_type == wire.TRAIN:
            record = message.content.config_records[wire.ASK]
            body = json.loads(str(record["words"]))
            if body["address"]["phase"].startswith("unlearn"):
                local = wire.question_from_records(message.content).ask.parts[0].task.local
                record["words"] = json.dumps({**body, "task": task_to_body(Learn(local))})
        return super().answers(message)


@dataclass(frozen=True)
class Measured:
    """What the judge measured: `least` and `most` as shares of what was expected, as the log has them."""

    case: Case
    status: str
    fallback: bool
    alarms: tuple[str, ...]
    rounds: int  # of training and recovery that were bounded by the cohort
    spread: float  # the longest update of a round, in medians
    least: float | None
    most: float | None
    cosine: float | None


def cases(count: int) -> Iterator[Case]:
    """All combinations, the seed changing last, every fourth for samples where the method can."""
    combinations = list(itertools.product(TRAININGS, PARTITIONS, METHODS))
    for number in range(count):
        seed, place = divmod(number, len(combinations))
        training, partition, method = combinations[place]
        clients = (10, 10, 3)[(number + seed) % 3]  # small federations have no cohort of their own
        samples = number % 4 == 3 and method in FOR_SAMPLES
        yield Case(method, partition, training, seed, clients, samples)


def cheats(count: int) -> Iterator[Case]:
    """FedQUIT with a client that leaves and trains on, over all partitions, trainings and seeds."""
    combinations = list(itertools.product(TRAININGS, PARTITIONS))
    for number in range(count):
        seed, place = divmod(number, len(combinations))
        training, partition = combinations[place]
        yield Case("fedquit", partition, training, seed, cheat=True)


def found_out(measured: Sequence[Measured]) -> list[str]:
    """For each partition: how many cheats were refused, and their cosines."""
    lines = ["| partition | cheats | found out | cosine |", "|---|---|---|---|"]
    for partition in PARTITIONS:
        own = [m for m in measured if m.case.partition == partition]
        cosines = [m.cosine for m in own if m.cosine is not None]
        if cosines:
            refused = sum(m.fallback for m in own)
            lines.append(f"| {partition} | {len(own)} | {refused} | {min(cosines):.2f} to {max(cosines):.2f} |")
    return lines


def measure(case: Case, *, rounds: int = 6) -> Measured:
    """Train, let a client leave, and read what the server wrote down."""
    dataset = load_dataset("digits")
    data = federate(dataset, clients=case.clients, seed=case.seed, **PARTITIONS[case.partition])
    model = load_model("mlp", dataset.x.shape[1:], dataset.classes, hidden=64)
    able = [c for c in data.clients if len(data.train[c]) >= 10]
    leaving = able[case.seed % len(able)]
    with tempfile.TemporaryDirectory(prefix="fedquit-members-") as folder:
        federation = InProcessFederation(data, model, Path(folder))
        if case.cheat:
            node = federation.grid.nodes[FIRST_NODE + leaving]
            federation.grid.nodes[node.id] = Cheat(**vars(node))
        settings: dict[str, Any] = {
            "state": str(Path(folder) / "state"),
            "seed": case.seed,
            "train": {"rounds": rounds, "batch_size": 16, **TRAININGS[case.training]},
            "method": {"name": case.method, **METHODS[case.method]},
            "recover_rounds": 1,
        }
        federation.serve(build(ServerConfig, settings, "fedquit"))
        federation.outbox(leaving).file(fraction=SAMPLES if case.samples else 0.0)
        result = federation.serve(build(ServerConfig, settings, "fedquit"))
        log = (Path(folder) / "state" / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in log]
    notes = [e["text"] for e in events if e["event"] == "note"]
    unlearning = [e for e in events if e["event"] == "unlearning"]
    steps = [e["largest"] for e in events if e["event"] == "steps"]
    (erasure,) = result.erasures
    return Measured(
        case,
        erasure.status,
        erasure.fallback,
        tuple(note for note in notes if any(word in note for word in ALARMS)),
        len(steps),
        max(steps, default=0.0),
        _extreme(min, [e["least"] for e in unlearning if "least" in e]),
        _extreme(max, [e["most"] for e in unlearning if "most" in e]),
        _extreme(max, [e["cosine"] for e in unlearning if "cosine" in e]),
    )


def _extreme(which: Any, values: Sequence[float]) -> float | None:  # noqa: ANN401 - min or max
    return which(values) if values else None


def table(measured: Sequence[Measured]) -> list[str]:
    """For each method: erasures, alarms, and the honest extremes."""
    lines = [
        "| method | erasures | alarms | moved, least | moved, most | cosine, largest |",
        "|---|---|---|---|---|---|",
    ]
    for method in METHODS:
        own = [m for m in measured if m.case.method == method]
        if not own:
            continue
        least = _extreme(min, [m.least for m in own if m.least is not None])
        most = _extreme(max, [m.most for m in own if m.most is not None])
        cosine = _extreme(max, [m.cosine for m in own if m.cosine is not None])
        figures = ["" if x is None else f"{x:.2f}" for x in (least, most, cosine)]
        lines.append(f"| {method} | {len(own)} | {sum(bool(m.alarms) for m in own)} | {' | '.join(figures)} |")
    return lines


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; 1 if anybody honest was alarmed about."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--count", type=int, default=50, help="honest erasures")
    parser.add_argument("--json", type=Path, help="write what was measured of each to this file")
    parser.add_argument("--only", default="", help="one method")
    parser.add_argument("--cheat", action="store_true", help="clients that train on instead of unlearning")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.cheat:
        print("\n".join(found_out([measure(case) for case in cheats(options.count)])))
        return 0
    began = time.perf_counter()
    measured = []
    for case in cases(options.count):
        if options.only in ("", case.method):
            measured.append(measure(case))
            for alarm in measured[-1].alarms:
                print(f"{case}: {alarm}", file=sys.stderr)
    print("\n".join(table(measured)))
    rounds = sum(m.rounds for m in measured)
    spread = max(m.spread for m in measured)
    alarmed = sum(bool(m.alarms) for m in measured)
    print(
        f"\n{len(measured)} erasures, {alarmed} with an alarm; {rounds} rounds, the longest update {spread:.2f} medians"
    )
    print(f"{time.perf_counter() - began:.0f} s")
    if options.json:
        options.json.write_text(json.dumps([asdict(m) for m in measured], indent=1) + "\n")
    return int(alarmed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
