# SPDX-License-Identifier: Apache-2.0
"""That every engine computes what the sequential one does, on any device: `fedquit bench agree`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from fedquit.bench.measure import Bench, Figure, chosen_device, machine
from fedquit.bench.settings import Setting, Timed, engine, noisy
from fedquit.core import Local, Params, Sent, Task
from fedquit.core.fedavg import Learn
from fedquit.core.params import placed
from fedquit.data.federated import FederatedData
from fedquit.engine import ENGINES, Address, Ask, open_engine
from fedquit.methods.ascent import Climb
from fedquit.methods.bad_teacher import Teach
from fedquit.methods.fedau import LearnBoth, TrainHead
from fedquit.methods.fedosd import Unlikely
from fedquit.methods.fedquit import Distill
from fedquit.methods.fedunran import Mislabel, MislabelPatiently
from fedquit.methods.fukd import Imitate
from fedquit.methods.fused import ADAPTER, TrainAdapters, places
from fedquit.methods.mode import Guide
from fedquit.methods.pga import Ascend
from fedquit.methods.scrub import Diverge, Repair
from fedquit.methods.ssd import FisherDiagonal
from fedquit.models import FunctionalModel, load_model

LIMITS = {("cpu", "float64"): 1e-12, ("cuda", "float64"): 1e-12, ("cpu", "float32"): 1e-4, ("cuda", "float32"): 1e-3}
SEEDS = 5
CHANCE = 1.5  # points: what the draw of a thousand test images alone moves an accuracy by
SIZES = (23, 8, 1, 30, 5, 0)  # more than a batch, one, fewer, one example, none
# Who takes part, and at how much of the rate. Of the first four of all, one, two or four step together; of the second
# four, one or three: they need what was recorded for the first, and a width more.
ROUNDS = (((0, 1, 2, 3, 4, 5), 1.0), ((5, 4, 3, 2), 0.5))
LOCAL = Local(epochs=1.5, batch_size=8, lr=0.05)
LOCALS = {
    "sgd": LOCAL,
    "momentum, weight decay": replace(LOCAL, momentum=0.9, weight_decay=1e-2),
    "clipped": replace(LOCAL, clip=0.5, clip_tensor=0.3),
    "adam": replace(LOCAL, optimizer="adam", lr=1e-3, weight_decay=1e-2),
    "adamw": replace(LOCAL, optimizer="adamw", lr=1e-3, weight_decay=1e-2),
    "adahessian": replace(LOCAL, optimizer="adahessian", lr=1e-3),
}


@dataclass(frozen=True)
class Case:
    """A task with what it is sent, and what the clients have at home."""

    task: Task
    sent: Sent
    home: Mapping[str, Params]


def cases(model: FunctionalModel, device: torch.device) -> dict[str, Case]:
    """Every task of every method, and ordinary training with every optimizer."""
    start, other = (placed(model.init(seed), device) for seed in (0, 1))
    names = list(start)[-2:]
    head = {n: other[n] for n in names}
    adapter = {ADAPTER + names[0]: torch.ones(len(places(start[names[0]].shape, 0.1, 0))).to(start[names[0]])}
    given: dict[str, tuple[Task, dict[str, Params], dict[str, Params]]] = {
        **{f"training, {n}": (Learn(local), {}, {}) for n, local in LOCALS.items()},
        "distillation": (Distill(LOCALS["adam"]), {}, {}),
        "ascent": (Climb(LOCALS["clipped"]), {}, {}),
        "projected ascent": (Ascend(LOCALS["momentum, weight decay"]), {}, {"own": other}),
        "unlikely": (Unlikely(LOCAL), {}, {}),
        "mislabel": (Mislabel(LOCAL), {}, {}),
        "guide": (Guide(LOCAL), {"degraded": other}, {}),
        "imitate": (Imitate(LOCAL), {"teacher": other}, {}),
        "head": (TrainHead(LOCAL), {"head": head}, {}),
        "both heads": (LearnBoth(LOCAL), {}, {"auxiliary": head}),
        "adapters": (TrainAdapters(LOCAL), {"adapters": adapter}, {}),
        "diverge": (Diverge(LOCAL), {"teacher": other}, {}),
        "repair": (Repair(LOCAL, alpha=0.5), {"teacher": other}, {}),
        "two teachers": (Teach(LOCALS["adam"], seed=5), {"competent": other}, {}),
        "early stop": (MislabelPatiently(replace(LOCAL, epochs=9.0), patience=1), {}, {}),
        "Fisher diagonal": (FisherDiagonal(Local(batch_size=8)), {}, {}),
    }
    return {n: Case(task, {"start": start, **sent}, home) for n, (task, sent, home) in given.items()}


def measured(device: str = "cpu", *, rounds: int = 8) -> Bench:
    """The largest differences, relative to the largest parameter; a limit that is not kept is a failure."""
    at = chosen_device(device)
    figures = [figure for dtype in (torch.float64, torch.float32) for figure in _agreement(at, dtype)]
    if device == "cuda":
        figures += _low_precision(at, rounds)
    return Bench("Do the engines agree?", figures, machine(at))


def _federation(device: torch.device) -> FederatedData:
    dataset = noisy(sum(SIZES), 5, test=50).to(device)
    train = dict(enumerate(torch.randperm(sum(SIZES), generator=torch.Generator().manual_seed(1)).split(list(SIZES))))
    return FederatedData(dataset, train, {c: at[::2] for c, at in train.items()})


def _agreement(device: torch.device, dtype: torch.dtype) -> Iterator[Figure]:
    data, word = _federation(device), str(dtype).removeprefix("torch.")
    model = load_model("cnn", data.dataset.shape, 5, dtype=dtype, look=data.dataset.look, width=4)
    limit = LIMITS[device.type, word]
    for name in (n for n in ENGINES if n not in ("auto", "sequential")):
        if name == "threaded" and device.type == "cuda":
            continue
        apart = {n: _apart(model, data, case, name) for n, case in cases(model, device).items()}
        worst = max(apart, key=lambda n: apart[n])
        yield Figure(f"{name} engine, {word}", "of the largest", (apart[worst],), limit, f"worst: {worst}")


def _apart(model: FunctionalModel, data: FederatedData, case: Case, name: str) -> float:
    """Over several rounds of the same engine: what it wrote down in one must serve the next."""
    at_home = data.clients if "own" in case.home else (0, 1, 3)
    homes = [{f"{c}/{n}": _scaled(part, 1 + c / 10) for c in at_home for n, part in case.home.items()} for _ in "ab"]
    engines = open_engine(name, model, data, homes[0], width=4), open_engine("sequential", model, data, homes[1])
    far = 0.0
    for number, (clients, factor) in enumerate(ROUNDS):
        task = replace(case.task, local=replace(case.task.local, lr=factor * case.task.local.lr))
        sent = {n: _scaled(part, 1 - number / 10) for n, part in case.sent.items()}
        ask = Ask(task, clients, "all", sent, Address(3, "agree", number))
        replies, expected = (list(engine.run(ask)) for engine in engines)
        far = max(far, *(_distance(a.params, b.params) for a, b in zip(replies, expected, strict=True)))
    return far


def _scaled(params: Params, factor: float) -> Params:
    return {n: factor * p for n, p in params.items()}


def _distance(params: Params, expected: Params) -> float:
    scale = max(float(p.abs().max()) for p in expected.values())
    far = max(float((params[n] - p).abs().max()) for n, p in expected.items())
    if math.isnan(far):
        return float("inf")  # as far as can be
    return far / scale if scale else far  # who has no example measures zeros


def _low_precision(device: torch.device, rounds: int, network: str = "resnet18") -> list[Figure]:
    """How far bfloat16 leads from float32 on average, beside how far one seed leads from another."""
    dataset = noisy(2_000, 10).to(device)
    data = FederatedData(dataset, dict(enumerate(torch.arange(2_000).split([700, 150, 400, 33, 717]))))
    model = load_model(network, dataset.shape, 10, look=dataset.look)
    setting = Setting("a small run", data, model, placed(model.init(0), device), Local(lr=0.05))
    full = _accuracies(engine(setting, "sequential", torch.get_num_threads()), rounds)
    low = _accuracies(engine(setting, "stacked", torch.get_num_threads(), "bf16"), rounds)
    spread, said = max(full) - min(full), f"after a small run with {SEEDS} seeds"
    note = f"bfloat16 {_listed(low)}, float32 {_listed(full)}; the limit is float32's spread, or what chance gives"
    away = abs(statistics.mean(low) - statistics.mean(full))
    return [
        Figure(f"accuracy {said}, float32's lie apart", "points", (spread,)),
        Figure(f"accuracy {said}, bfloat16's mean from float32's", "points", (away,), max(spread, CHANCE), note),
    ]


def _accuracies(way: Timed, rounds: int) -> list[float]:
    accuracies = []
    for seed in range(SEEDS):
        way.params = placed(way.setting.model.init(seed), way.setting.device)
        way.rounds(rounds)
        accuracies.append(way.setting.accuracy(way.params))
    return accuracies


def _listed(accuracies: list[float]) -> str:
    return " ".join(f"{a:.1f}" for a in accuracies) + " %"
