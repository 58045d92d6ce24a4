# SPDX-License-Identifier: Apache-2.0
"""What the data costs: time to load, memory for a hundred clients, and what the input takes of a training step.

The setting is `settings/cifar100-lda-100-clients` on a CPU. Memory is measured in a process of its own, from its start
to the end of some real steps: loading, dealing out, the engine, training, unlearning and evaluating.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fedquit.audit.evaluation import accuracy
from fedquit.bench.measure import Bench, Figure, machine, seconds
from fedquit.core import ClientId, Local, Reply
from fedquit.core.fedavg import Learn
from fedquit.core.params import mean
from fedquit.data import load_dataset
from fedquit.data.catalog import data_folder
from fedquit.data.cifar import CIFAR100
from fedquit.data.federated import Dataset
from fedquit.engine import Address, Ask, ClientIndices, Examples, run_client
from fedquit.errors import InputError
from fedquit.methods.fedquit import FedQUIT
from fedquit.running.recipe import Recipe, build, load
from fedquit.running.setup import Setup, build_setup
from fedquit.running.smoke import images

RECIPE = "settings/cifar100-lda-100-clients"
LOAD_LIMIT, MEMORY_LIMIT, COPIES_LIMIT, SHARE_LIMIT, CALLS_LIMIT = 5.0, 1.5, 1.1, 10.0, 1.0
GB = 1e9
EVALUATED = "after evaluation"  # the last stage, and so the peak of all
ONE_STEP = 1e-6  # of an epoch: an engine takes at least one step


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    clients: int = 10  # that train in the process whose memory is measured
    steps: int = 20  # of the input alone; a tenth of that in training
    evaluated: int = 500  # test images
    settings: tuple[str, ...] = ()  # of the recipe, on top


def whole(*, examples: int = CIFAR100.images, size: int = 32, augment: bool = True) -> Dataset:
    """Random pixels, as many as CIFAR-100 has: for machines without it."""
    made = images(like="cifar100", examples=examples + CIFAR100.test_images, size=size, augment=augment)
    return replace(made, x=made.x[:examples], y=made.y[:examples], test_x=made.x[examples:], test_y=made.y[examples:])


def measured(folder: Path | None = None, repeats: int = 3, sizes: Sizes | None = None) -> Bench:
    """All figures of the data."""
    sizes = sizes or Sizes()
    if repeats < 1 or min(sizes.clients, sizes.steps, sizes.evaluated) < 1:
        raise InputError("a benchmark needs at least one repeat, client, step and image: give 1 or more.")
    where = machine(torch.device("cpu"))
    real = CIFAR100.source.place(data_folder(folder)).exists()
    settings = ["engine.device=cpu", *([] if real else [f"data.name={__name__}:whole"]), *sizes.settings]
    recipe = load(RECIPE, settings)
    recipe = replace(recipe, data=replace(recipe.data, folder=str(folder or "")))
    said = "the published files" if real else f"random pixels of the same size: {data_folder(folder)} has no CIFAR-100"
    figures = [*_loading(recipe, repeats, real, said), *_in_a_process(recipe, repeats, sizes, said)]
    return Bench("Data", [*figures, *_input(build_setup(recipe), repeats, sizes, said)], where)


def _loading(recipe: Recipe, repeats: int, real: bool, said: str) -> Iterator[Figure]:
    spec = recipe.data
    took = seconds(lambda: load_dataset(spec.name, folder=spec.folder or None, **spec.options), repeats)
    yield Figure("loading CIFAR-100", "s", took, LOAD_LIMIT if real else None, said)


def _in_a_process(recipe: Recipe, repeats: int, sizes: Sizes, said: str) -> Iterator[Figure]:
    """What a federation takes in a new process, which owes nothing to this one."""
    request: dict[str, Any] = {"recipe": recipe.to_dict(), "folder": recipe.data.folder}
    request |= {"clients": sizes.clients, "evaluated": sizes.evaluated}
    reports = [_child(request) for _ in range(repeats)]
    for stage in reports[0]["peaks"]:
        peaks = tuple(f["peaks"][stage] / GB for f in reports)
        last = stage == EVALUATED
        name = f"{recipe.data.clients} clients, {recipe.model.name}, {stage}"
        yield Figure(f"peak memory, {name}", "GB", peaks, MEMORY_LIMIT if last else None, said if last else "")
    copies = tuple(f["copies"] for f in reports)
    yield Figure("copies of the images in memory", "", copies, COPIES_LIMIT, "at most, while a client is at work")


def _child(request: dict[str, Any]) -> dict[str, Any]:
    root = str(Path(__file__).parents[2])  # so that it imports the same package, installed or not
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    code = f"import sys; from {__name__} import federation; federation(sys.stdin.read())"
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, input=json.dumps(request), env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        last = (done.stderr.strip() or "no word").splitlines()[-1]
        raise InputError(f"the federation whose memory is measured ended early ({last}): free some memory.")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def federation(request: str) -> None:
    """Open a federation, train, unlearn and evaluate a little, and print what it took."""
    asked = json.loads(request)
    peaks = {"before anything is loaded": peak_memory()}
    recipe = build(Recipe, asked["recipe"], "recipe")
    setup = build_setup(replace(recipe, data=replace(recipe.data, folder=asked["folder"])))
    engine = setup.engine(setup.data, {})
    peaks["once the data is dealt out"] = peak_memory()
    clients = _largest(setup)[: asked["clients"]]
    copies = 0.0

    def trained() -> Iterator[Reply]:
        nonlocal copies
        task = Learn(replace(recipe.train.training().task.local, epochs=ONE_STEP))
        for reply in engine.run(Ask(task, clients, "all", {"start": setup.initial}, Address(0, "train"))):
            copies = max(copies, _copies(setup.data.dataset))  # the client's own part is still held
            yield reply

    params = mean(trained())
    peaks[f"after a step of {len(clients)}"] = peak_memory()
    forget = FedQUIT(epochs=ONE_STEP).distill
    params = mean(engine.run(Ask(forget, clients[:1], "all", {"start": params}, Address(0, "unlearn"))))
    peaks["after a step of unlearning"] = peak_memory()
    test = setup.data.dataset
    accuracy(setup.model, params, test.test_x[: asked["evaluated"]], test.test_y[: asked["evaluated"]])
    peaks[EVALUATED] = peak_memory()
    sys.stdout.write(json.dumps({"peaks": peaks, "copies": copies}))


def _largest(setup: Setup) -> list[ClientId]:
    """Clients, from the one with most data on."""
    return sorted(setup.data.clients, key=lambda c: -len(setup.data.train[c]))


def _copies(dataset: Dataset) -> float:
    """All bytes that any tensor of pixels holds, as multiples of the data set's; what two tensors share counts once."""
    held = {}
    for thing in gc.get_objects():
        if type(thing) is torch.Tensor and thing.dtype == torch.uint8:
            storage = thing.untyped_storage()
            held[storage.data_ptr()] = storage.nbytes()
    return sum(held.values()) / (dataset.x.nbytes + dataset.test_x.nbytes)


def peak_memory() -> int:
    """The most memory that this process has held so far, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():  # Linux hands the peak of a parent on in ru_maxrss; this one is the process's own
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _input(setup: Setup, repeats: int, sizes: Sizes, said: str) -> Iterator[Figure]:
    """The batches of a client without a network, beside the steps that use them."""
    largest = _largest(setup)[0]
    mine = Examples.of(setup.data, ClientIndices.of(setup.data, largest, "all", 0))
    local = setup.recipe.train.training().task.local

    def input_alone() -> None:
        for _ in range(sizes.steps):
            _batch(mine, local.batch_size)

    trained = max(1, sizes.steps // 10)
    some = replace(local, epochs=float(trained), batch_size=min(local.batch_size, len(mine.y)))
    few = Examples.unmarked(mine.x[: some.batch_size], mine.y[: some.batch_size], mine.look)  # one batch an epoch
    training = seconds(_steps(setup, some, few), repeats + 1)[1:]
    alone = seconds(input_alone, repeats)
    per_step = tuple(t / trained for t in training)
    per_batch = tuple(t / sizes.steps for t in alone)
    batch = f"batches of {local.batch_size}"
    yield Figure("input alone", "steps/s", tuple(1 / t for t in per_batch), note=f"{batch}, normalised and augmented")
    yield Figure("training", "steps/s", tuple(1 / t for t in per_step), note=f"{batch}, {setup.recipe.model.name}")
    share = tuple(100 * a / b for a, b in zip(per_batch, per_step, strict=True))
    yield Figure("input, of a training step", "%", share, SHARE_LIMIT, said)
    more = _calls(lambda: _batch(mine, len(mine.y))) - _calls(lambda: _batch(mine, 1))
    note = f"for all {len(mine.y):,} images of a client in one batch, beyond those for one image"
    yield Figure("Python calls for each image", "", (more / max(1, len(mine.y) - 1),), CALLS_LIMIT, note)


def _batch(mine: Examples, count: int) -> None:
    """What an engine does for every step before the network."""
    positions = torch.randperm(len(mine.y))[:count]
    mine.batch(positions, torch.zeros(len(positions)), torch.rand(len(positions), mine.look.draws))


def _steps(setup: Setup, local: Local, mine: Examples) -> Callable[[], object]:
    return lambda: run_client(setup.model, Learn(local), mine, {"start": setup.initial}, 0)


def _calls(work: Callable[[], object]) -> int:
    """How many functions, of Python or of C, a piece of work calls."""
    count = 0

    def counted(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    work()  # what is done once only does not count
    before = sys.getprofile()
    sys.setprofile(counted)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count
