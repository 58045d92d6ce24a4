# SPDX-License-Identifier: Apache-2.0
"""Unlearning and evaluation at full size, and a thousand clients: what they take, and that it grows with the work."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedquit.audit.evaluation import accuracy
from fedquit.bench.measure import Bench, Figure, chosen_device, machine, seconds
from fedquit.bench.settings import Setting, chosen_setting, digits
from fedquit.core import Params, Reply
from fedquit.core.fedavg import Learn
from fedquit.core.params import mean, nbytes
from fedquit.engine import Address, Ask, Engine, Precision, choose, evaluation_model_of, open_engine
from fedquit.errors import InputError
from fedquit.methods.fedquit import FedQUIT

UNLEARN_LIMIT, EVALUATE_LIMIT = 0.5, 1.0  # seconds, on a GPU
FORGET, EVALUATED = 5_000, 60_000  # images
CLIENTS, PER_ROUND = 1_000, 100


def unlearning(device: str = "cpu", *, repeats: int = 3, steps: int = 10, images: int = 500) -> Bench:
    """FedQUIT's unlearning round on 5,000 images, and the evaluation of 60,000; on a CPU scaled from a part."""
    if min(repeats, steps, images) < 1:
        raise InputError("a benchmark needs at least one repeat, step and image: give 1 or more.")
    setting = chosen_setting(chosen_device(device), steps)
    on_gpu = device == "cuda"
    precision: Precision = "bf16" if on_gpu else "float32"
    mine = setting.data.train[0][:FORGET] if on_gpu else setting.data.train[0]
    data = replace(setting.data, train={**setting.data.train, 0: mine}, forget={0: mine})
    runs, alone = (open_engine(name, setting.model, data, {}, precision) for name in ("auto", "sequential"))
    task = FedQUIT(lr=1e-4).distill
    times = 1.0 if on_gpu else FORGET / len(mine)

    def unlearn(engine: Engine) -> Params:
        return mean(engine.run(Ask(task, (0,), "forget", {"start": setting.start}, Address(0, "unlearn"))))

    def timed(engine: Engine, repeats: int) -> tuple[float, ...]:
        return tuple(times * t for t in seconds(lambda: unlearn(engine), repeats, setting.device))

    first = seconds(lambda: unlearn(runs), 1, setting.device)
    unlearn(alone)
    took, slower = timed(runs, repeats), timed(alone, repeats)
    ratio = tuple(b / a for a, b in zip(took, slower, strict=True))
    note = "" if on_gpu else f"scaled from {len(mine):,} images"
    some = _images(setting, EVALUATED if on_gpu else images)
    reading = evaluation_model_of(setting.model, precision, setting.device)

    def evaluate() -> float:
        return accuracy(reading, setting.start, *some)

    evaluate()
    read = tuple(EVALUATED / len(some[1]) * t for t in seconds(evaluate, repeats, setting.device))
    said = "" if on_gpu else f"scaled from {len(some[1]):,} images"
    figures = [
        Figure("FedQUIT's unlearning round on 5,000 images", "s", took, UNLEARN_LIMIT if on_gpu else None, note),
        Figure("the same, sequential engine", "s", slower, note=note),
        Figure("times as fast as the sequential engine", "x", ratio),
        Figure("the first one, with what is recorded once", "s", first),
        Figure("evaluating 60,000 images", "s", read, EVALUATE_LIMIT if on_gpu else None, said),
    ]
    return Bench("Unlearning and evaluation, ResNet-18", figures, machine(setting.device))


def _images(setting: Setting, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    at = torch.arange(count, device=setting.device) % len(setting.data.y)
    return setting.data.x[at], setting.data.y[at]


def scaling(device: str = "cpu", *, repeats: int = 3, rounds: int = 2) -> Bench:
    """A thousand clients: seconds against steps taken for 25, 50, 75 and 100 a round, and how many replies are held."""
    if min(repeats, rounds) < 1:
        raise InputError("a benchmark needs at least one repeat and round: give 1 or more.")
    at = chosen_device(device)
    setting = digits(at)
    parts = torch.arange(CLIENTS * 16).view(CLIENTS, 16) % len(setting.data.y)
    data, start = replace(setting.data, train=dict(enumerate(parts))), setting.start
    name = choose("auto", setting.model, data, start).name
    runs = open_engine("auto", setting.model, data, {}, width=20)
    task = Learn(replace(setting.local, batch_size=8))
    points: list[tuple[int, float]] = []
    held: dict[int, int] = {}
    for turn in range(repeats + 1):  # the first warms up
        for clients in (PER_ROUND // 4, PER_ROUND // 2, PER_ROUND * 3 // 4, PER_ROUND):
            began = time.perf_counter()
            for number in range(rounds):
                chosen = tuple(torch.randperm(CLIENTS)[:clients].tolist())
                watched = _Held()
                mean(watched(runs.run(Ask(task, chosen, "all", {"start": start}, Address(0, "train", number)))))
                held[clients] = watched.most
            if turn:
                points.append((clients * 2, (time.perf_counter() - began) / rounds))
    steps = np.array(sorted({n for n, _ in points}), dtype=float)
    took = np.array([np.median([t for n, t in points if n == s]) for s in steps])  # other work comes and goes
    slope, intercept = (float(v) for v in np.polyfit(steps, took, 1))
    explained = 1 - float(((took - slope * steps - intercept) ** 2).sum() / ((took - took.mean()) ** 2).sum())
    line = f"{slope * 1e3:.3f} ms a client's step + {intercept * 1e3:.1f} ms; explains {100 * explained:.1f} % of it"
    full = tuple(t for n, t in points if n == PER_ROUND * 2)
    uneven = float((took[0] / steps[0]) / (took[-1] / steps[-1]))
    figures = [
        Figure(f"1,000 clients, {PER_ROUND} a round, {name} engine", "s a round", full, note=line),
        *(
            Figure(f"{n} a round", "s a round", tuple(t for s, t in points if s == n * 2))
            for n in held
            if n < PER_ROUND
        ),
        Figure("not explained by a line in the work", "%", (100 * (1 - explained),), 20.0, line),
        Figure(f"a step at {PER_ROUND // 4} clients a round costs, over one at {PER_ROUND}", "x", (uneven,)),
        *(Figure(f"replies held at once, {n} a round", "replies", (float(most),), 21.0) for n, most in held.items()),
        Figure("the server's running sum", "MB", (nbytes(start) / 1e6,)),
    ]
    return Bench("A thousand clients", figures, machine(at))


class _Held:
    """Replies that pass by, and how many of them were alive at once."""

    def __init__(self) -> None:
        self.most = 0

    def __call__(self, replies: Iterator[Reply]) -> Iterator[Reply]:
        alive: list[weakref.ref[Any]] = []
        for reply in replies:
            alive.append(weakref.ref(next(iter(reply.params.values()))))
            yield reply
            del reply
            self.most = max(self.most, sum(r() is not None for r in alive))


def bars(bench: Bench, file: Path) -> None:
    """A bar for everything that takes seconds, with its spread."""
    from matplotlib.figure import Figure as Canvas

    own = [f for f in bench.figures if f.unit == "s"]
    canvas = Canvas(figsize=(9, 1.2 + 0.45 * len(own)), layout="constrained")
    axes = canvas.subplots()
    spread = [[f.value - min(f.repeats) for f in own], [max(f.repeats) - f.value for f in own]]
    axes.barh([f.name for f in own], [f.value for f in own], xerr=spread, color="#4477aa", capsize=3)
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.set_title(bench.title, loc="left")
    canvas.savefig(file, dpi=120)


def drawn(bench: Bench, file: Path) -> None:
    """The seconds of a round against the clients in it."""
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(6, 4), layout="constrained")
    axes = canvas.subplots()
    for figure in bench.figures:
        if figure.unit == "s a round":
            clients = PER_ROUND if figure.name.startswith("1,000") else int(figure.name.split()[0])
            axes.plot([clients] * len(figure.repeats), figure.repeats, "o", color="#4477aa")
    axes.set(xlabel="clients a round", ylabel="seconds a round", xlim=(0, None), ylim=(0, None))
    axes.set_title(bench.figures[0].note, loc="left", fontsize=9)
    canvas.savefig(file, dpi=120)
