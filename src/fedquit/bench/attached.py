# SPDX-License-Identifier: Apache-2.0
"""What the methods that watch a training cost it: rounds with nothing attached, and with methods attached.

Three trainings take turns, a round each, so that whatever else the machine does hits all of them alike: one with
nothing attached, one with all methods that watch but FedEraser, and one with FedEraser. Each is a training as runs
have it, with memories, states on disk and all. A ratio is that of two rounds in the same turn.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from fedquit.bench.measure import Bench, Figure, chosen_device, machine
from fedquit.bench.settings import RAGGED, Setting, chosen_setting
from fedquit.core import Request, State, Training
from fedquit.core.fedavg import Learn
from fedquit.core.method import Method
from fedquit.core.params import nbytes
from fedquit.engine import GraphCache, Precision, open_engine
from fedquit.errors import InputError
from fedquit.methods import METHODS
from fedquit.running.costs import Metered
from fedquit.running.session import Progress, Session, advance
from fedquit.running.store import Memories, StateFile
from fedquit.running.training_cache import Hooks

LIMIT = 1.1  # times the bare training
HISTORY = "federaser"  # keeps every update: exempt from the limit
WARM_UP = 2  # rounds in which kernels are compiled and steps are captured
TRAINING_ROUNDS = 200  # of the paper's training, over which what is written at the end is spread
BARE, WATCHED, WITH_HISTORY = "nothing attached", "all methods but FedEraser", "FedEraser"


@dataclass
class Attached:
    """A training with some methods attached, round by round."""

    memories: Memories
    rounds: Iterator[Progress]
    device: torch.device
    seconds: list[float] = field(default_factory=list)  # of each round
    processor: list[float] = field(default_factory=list)  # seconds of all threads: what a busy machine does not disturb

    def take(self) -> None:
        """One more round, until the last kernel is done."""
        began = time.perf_counter()
        processor_began = time.process_time()
        next(self.rounds)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds.append(time.perf_counter() - began)
        self.processor.append(time.process_time() - processor_began)

    @property
    def steady(self) -> list[float]:
        """The rounds after the warm-up and before the last one, which ends with everything on disk."""
        return self.seconds[WARM_UP:-1]

    @property
    def at_the_end(self) -> float:
        """Seconds that the last round took longer than the others: what it wrote."""
        return max(0.0, self.seconds[-1] - statistics.median(self.steady))


def watching_methods() -> dict[str, Method]:
    """All methods that take part in ordinary training, as they are unless told otherwise."""
    built = {name: method() for name, method in METHODS.items()}
    return {name: method for name, method in built.items() if method.shapes_training}


def training(
    setting: Setting, methods: Mapping[str, Method], folder: Path, rounds: int, graphs: GraphCache
) -> Attached:
    """A training of some rounds on a setting.

    Args:
        setting: the federation, the network and how its clients step.
        methods: which are attached, by name.
        folder: for its states and memories.
        rounds: how many.
        graphs: what the engine keeps, shared by trainings on the same data.
    """
    precision: Precision = "bf16" if setting.device.type == "cuda" else "float32"
    memories = Memories.open(folder, device=setting.device)
    data = setting.data
    engine = open_engine("auto", setting.model, data, memories.clients, precision, 0, graphs)
    session = Session(engine, 0, data.clients, memories=memories.own)
    meter = Metered(session)
    hooks = Hooks(methods, memories.of, Request((data.clients[0],)))
    plan = Training(Learn(setting.local), rounds)

    def step(state: State) -> State:
        return hooks.round(meter, state, plan, data.clients)

    file = StateFile(folder / "state.safetensors")
    progress = advance(session, "train", State(setting.start), step, file, rounds, meter)
    next(progress)  # where it stands before the first round
    return Attached(memories, progress, setting.device)


def compare_trainings(setting: Setting, rounds: int, folder: Path) -> list[Figure]:
    """Train three times, in turns.

    Args:
        setting: the federation, the network and how its clients step.
        rounds: of each training, at least `WARM_UP` + 2.
        folder: for states and memories.
    """
    if rounds < WARM_UP + 2:
        raise InputError(f"the benchmark needs at least {WARM_UP + 2} rounds: give as many or more.")
    watching = watching_methods()
    others = {name: method for name, method in watching.items() if name != HISTORY}
    sets: dict[str, Mapping[str, Method]] = {BARE: {}, WATCHED: others, WITH_HISTORY: {HISTORY: watching[HISTORY]}}
    graphs = GraphCache()
    ways = {
        name: training(setting, methods, folder / str(number), rounds, graphs)
        for number, (name, methods) in enumerate(sets.items())
    }
    for _ in range(rounds):
        for way in ways.values():
            way.take()
    is_whole = setting.whole == 1
    figures = list(_figures(ways, ", ".join(others), LIMIT if is_whole else None))
    if not is_whole:  # in a part of the steps, what is done for each reply weighs more than it really does
        figures.append(_scaled(ways[WATCHED], ways[BARE], setting))
    return [*figures, Figure("one model", "MB", (nbytes(setting.start) / 1e6,))]


def _scaled(way: Attached, bare: Attached, setting: Setting) -> Figure:
    """What methods do for a client's reply does not grow with its steps: the ratio with as many as it really takes."""
    times = setting.whole * len(setting.data.clients) / len(RAGGED)  # the steps that a client really takes
    pairs = zip(way.processor[WARM_UP:], bare.processor[WARM_UP:], strict=True)
    ratio = tuple(1 + (a - b) / (times * b) for a, b in pairs)
    name = f"processor time with {WATCHED}, times the bare training's, with all steps of a round"
    return Figure(name, "x", ratio, LIMIT, f"{times:.0f} times the steps that were measured")


def _figures(ways: Mapping[str, Attached], others: str, most: float | None) -> Iterator[Figure]:
    bare = ways[BARE]
    for name, way in ways.items():
        yield Figure(f"a round with {name}", "s", tuple(way.steady), note=others if name == WATCHED else "")
    for name, way in ways.items():
        if way is not bare:
            ratio = tuple(a / b for a, b in zip(way.steady, bare.steady, strict=True))
            limit = most if name == WATCHED else None
            yield Figure(f"a round with {name}, times the bare round", "x", ratio, limit)
    for name, way in ways.items():
        if way is not bare:
            total = sum(way.processor[WARM_UP:]) / sum(bare.processor[WARM_UP:])
            note = "of all threads, with all that is written: a busy machine does not disturb it"
            yield Figure(f"processor time with {name}, times the bare training's", "x", (total,), note=note)
    for name, way in ways.items():
        yield Figure(f"written at the end with {name}", "s", (way.at_the_end,))
    for name, way in ways.items():
        if way is not bare:
            limit = most if name == WATCHED else None
            note = f"medians, scaled from {len(bare.seconds)} rounds, with what is written at the end"
            ratio = (_whole(way) / _whole(bare),)
            yield Figure(
                f"a training of {TRAINING_ROUNDS} rounds with {name}, times the bare one", "x", ratio, limit, note
            )


def _whole(way: Attached) -> float:
    """Seconds of the paper's training."""
    return TRAINING_ROUNDS * statistics.median(way.steady) + way.at_the_end


def measured(device: str = "cpu", *, rounds: int = 0, steps: int = 10, folder: Path | None = None) -> Bench:
    """What attached methods cost a training of ResNet-18.

    Args:
        device: cpu or cuda.
        rounds: of each of the three trainings; 0: 20 on a GPU, 6 on a CPU.
        steps: on a CPU, of each of two clients; a GPU trains ten clients with 5,000 images each.
        folder: where states and memories are written, and deleted; somewhere temporary unless given. On a GPU,
            FedEraser's history takes 0.45 GB for each round.
    """
    at = chosen_device(device)
    where = machine(at)
    setting = chosen_setting(at, steps)
    with tempfile.TemporaryDirectory(dir=folder) as work:
        figures = compare_trainings(setting, rounds or (20 if at.type == "cuda" else 6), Path(work))
    return Bench("Methods that watch a training", figures, where)
