# SPDX-License-Identifier: Apache-2.0
"""What the evaluation costs: beside the training that it judges, and by itself.

The setting is that of the FedQUIT paper: 50,000 training images of 32x32 over 10 clients, 10,000 test images,
ResNet-18, 200 rounds in which each client takes 157 steps of 32. On a CPU, the network's part is measured on some
images and a few steps and scaled; the figures say so. On a GPU all images are evaluated. Training is scaled from one
client's steps on either: it takes hours.
"""

from __future__ import annotations

import copy
import json
import random
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedquit.audit.attacks import ATTACKS
from fedquit.audit.attacks.svc import svc
from fedquit.audit.evaluation import Evaluation
from fedquit.audit.passes import Passes
from fedquit.audit.scores import score_examples
from fedquit.bench.measure import Bench, Figure, chosen_device, machine, seconds
from fedquit.core import Local, Model, Params, Request
from fedquit.core.fedavg import Learn
from fedquit.data.federated import Dataset, FederatedData
from fedquit.engine import Examples, evaluation_model_of, run_client
from fedquit.errors import InputError
from fedquit.models import load_model
from fedquit.report import write_report
from fedquit.running.recipe import Recipe, build
from fedquit.running.runner import run

IMAGE, CLASSES = (3, 32, 32), 10
TRAIN, TEST, CLIENTS = 50_000, 10_000, 10
ROUNDS, STEPS, BATCH = 200, 157, 32
TRAINING_STEPS = ROUNDS * STEPS * (CLIENTS + CLIENTS - 1)  # of Original, and of Retrain without one client
MODELS_OF_A_RUN = 4  # Original, Retrain, unlearned, recovered: each is judged
SHARE_LIMIT, SVC_LIMIT, REPORT_LIMIT, SIZE_LIMIT = 10.0, 60.0, 20.0, 5.0


@dataclass(frozen=True)
class Sizes:
    """How much is measured; what is less than the setting is scaled to it."""

    images: int = 1_000  # that the network reads on a CPU
    steps: int = 10  # of training on a CPU
    points: int = 20_000  # of the support-vector attack
    runs: int = 200  # of the report
    model: str = "resnet18"
    train: int = TRAIN
    test: int = TEST


def measured(device: str = "cpu", repeats: int = 3, sizes: Sizes | None = None) -> Bench:
    """All figures of the evaluation on this device."""
    sizes = sizes or Sizes()
    if repeats < 1 or min(sizes.images, sizes.steps, sizes.points, sizes.runs) < 1:
        raise InputError("a benchmark needs at least one repeat, image, step, point and run: give 1 or more.")
    at = chosen_device(device)
    where = machine(at)  # before this adds to its load
    figures = [*_share(at, repeats, sizes), *_support_vectors(repeats, sizes.points), *_report(repeats, sizes.runs)]
    return Bench("Evaluation", figures, where)


class _Logits:
    """A network whose examples are its logits: what an evaluation costs beside the network."""

    def init(self, seed: int) -> Params:
        return {}

    def __call__(self, params: Params, x: Tensor) -> Tensor:
        return x


def _share(device: torch.device, repeats: int, sizes: Sizes) -> Iterator[Figure]:
    model = load_model(sizes.model, IMAGE, CLASSES)
    params = {n: p.to(device) for n, p in model.init(0).items()}
    draw = torch.Generator().manual_seed(0)
    whole = device.type == "cuda"
    evaluation_model = evaluation_model_of(
        model, "bf16" if whole else "float32", device
    )  # as runs evaluate, unless they are told otherwise
    steps = STEPS if whole else sizes.steps
    x, y = _images(steps * BATCH, draw, device)
    task, mine = Learn(Local(epochs=1, batch_size=BATCH, lr=0.1)), Examples.unmarked(x, y)
    training = seconds(lambda: run_client(model, task, mine, {"start": params}, 0), repeats + 1, device)[1:]
    train = tuple(t / steps * TRAINING_STEPS for t in training)
    hours = tuple(t / 3600 for t in train)
    said = f"scaled from {steps} steps"
    yield Figure("training Original and Retrain", "h", hours, note=said)

    if whole:
        evaluation = _evaluation(evaluation_model, sizes, lambda n: _images(n, draw, device))
        judging = seconds(
            lambda: replace(evaluation, passes=Passes()).judge(params), repeats, device
        )  # nothing remembered
        said = "all images, measured"
    else:
        some = _images(sizes.images, draw, device)
        reading = seconds(lambda: score_examples(evaluation_model, params, *some), repeats)
        evaluation = _evaluation(_Logits(), sizes, lambda n: _logits(n, draw))
        beside = seconds(lambda: replace(evaluation, passes=Passes()).judge({}), repeats)
        times = (sizes.train + sizes.test) / sizes.images
        judging = tuple(times * a + b for a, b in zip(reading, beside, strict=True))
        said = f"the network's part scaled from {sizes.images:,} images, the attacks on all"
        yield Figure("all attacks and measures, without the network", "s", beside)
    yield Figure("evaluating one model", "s", judging, note=said)
    one = tuple(100 * a / b for a, b in zip(judging, train, strict=True))
    yield Figure("evaluating one model, of the training", "%", one, SHARE_LIMIT, said)
    four = tuple(MODELS_OF_A_RUN * share for share in one)
    yield Figure("evaluating the four models of a run, of the training", "%", four, SHARE_LIMIT, said)


def _images(count: int, draw: torch.Generator, device: torch.device) -> tuple[Tensor, Tensor]:
    x, y = torch.randn(count, *IMAGE, generator=draw), torch.randint(CLASSES, (count,), generator=draw)
    return x.to(device), y.to(device)


def _logits(count: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Of a network that is mostly right, and never equally sure."""
    y = torch.randint(CLASSES, (count,), generator=draw)
    x = torch.randn(count, CLASSES, generator=draw)
    return x + 3 * torch.rand(count, 1, generator=draw) * torch.nn.functional.one_hot(y, CLASSES), y


def _evaluation(model: Model, sizes: Sizes, made: Callable[[int], tuple[Tensor, Tensor]]) -> Evaluation:
    (x, y), (test_x, test_y) = made(sizes.train), made(sizes.test)
    parts = torch.arange(sizes.train).chunk(CLIENTS)
    held = {c: part[: len(part) // 10] for c, part in enumerate(parts)}
    trained = {c: part[len(part) // 10 :] for c, part in enumerate(parts)}
    request = Request((0,))
    data = FederatedData(Dataset(x, y, test_x, test_y, CLASSES), trained, holdout=held).mark(request)
    return Evaluation(model, data, request, tuple(ATTACKS))


def _support_vectors(repeats: int, points: int) -> Iterator[Figure]:
    """Confidences that overlap, which is what takes the solver longest."""
    draw = np.random.default_rng(0)
    members, outsiders, suspects = draw.beta(5, 2, points // 2), draw.beta(4, 2, points // 2), draw.beta(4, 2, 5_000)
    name = f"support-vector attack on {points:,} points"
    yield Figure(name, "s", seconds(lambda: svc(members, outsiders, suspects, seed=0), repeats), SVC_LIMIT)
    plain = seconds(lambda: svc(members, outsiders, suspects, seed=0, grid=0), 1)
    yield Figure(f"{name}, every point fitted", "s", plain, SVC_LIMIT, "the attack rounds to a thousandth")


def _report(repeats: int, runs: int) -> Iterator[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        top = Path(folder) / "comparison"
        made_up(top, runs)
        out = Path(folder) / "report.html"
        took = seconds(lambda: write_report([top], out), repeats)
        size = out.stat().st_size / 1e6
    yield Figure(f"report over {runs} runs", "s", took, REPORT_LIMIT)
    yield Figure(f"size of the report over {runs} runs", "MB", (size,), SIZE_LIMIT)


SMALL: dict[str, Any] = {
    "title": "A run to copy",
    "data": {
        "name": "synthetic",
        "options": {"examples": 400, "test_examples": 200, "size": 6},
        "partition": "lda",
        "alpha": 1.0,
        "holdout": 0.2,
    },
    "train": {"rounds": 8},
    "request": [{"clients": [0]}],
    "recover": {"until": "rounds", "max_rounds": 6, "budgets": [0.05, 0.1, 0.2, 0.25, 0.5]},
}


def made_up(top: Path, runs: int, methods: int = 10) -> None:
    """A comparison of so many runs: one real run, copied with other numbers, methods and clients."""
    results = run(build(Recipe, SMALL, "recipe"), top.parent / "real")
    draw = random.Random(0)
    folders = []
    for number in range(runs):
        method, client, seed = f"method-{number % methods}", number // methods % CLIENTS, number // (methods * CLIENTS)
        altered = copy.deepcopy(results)
        altered["recipe"] |= {"seed": seed, "method": {"name": method}}
        altered["recipe"]["request"][0]["clients"] = [client]
        for row in altered["rows"]:
            row |= {"clients": [client], "seed": seed, **_shaken(row, draw)}
            row["method"] = method if row["phase"] in ("unlearned", "recovered", "budget") else row["method"]
        folders.append(f"seed-{seed}/client-{client}/{method}")
        (top / folders[-1]).mkdir(parents=True)
        (top / folders[-1] / "results.json").write_text(json.dumps(altered))
    floor = {"method": "retrain again", "phase": "floor", "gaps": {"forget_acc": 2.0, "retain_acc": 1.0}}
    (top / "comparison.json").write_text(json.dumps({"schema": 1, "table": [floor], "failed": [], "runs": folders}))


def _shaken(row: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """Accuracies and attacks somewhere else, inside 0 to 100; the curve with them."""
    keys = [k for k in row if k.endswith("_acc") or k.startswith("mia_")]
    moved = {k: min(100.0, max(0.0, row[k] + draw.gauss(0, 5))) for k in keys if isinstance(row[k], float)}
    if "curve" in row:
        moved["curve"] = [p | {"test_acc": p["test_acc"] + draw.gauss(0, 2)} for p in row["curve"]]
    return moved
