# SPDX-License-Identifier: Apache-2.0
"""The recorded path of a GPU, carried out on a CPU: a replay takes the step as it stood when it was recorded.

What Python holds at that moment is frozen, as in a CUDA graph; only what lies in memory may change between replays.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch

from fedquit.core import ClientId, Local, Params, Task
from fedquit.data.federated import Dataset, FederatedData
from fedquit.engine import Address, Ask, SequentialEngine, StackedEngine
from fedquit.engine.stacked import Work
from fedquit.fedavg import Learn
from fedquit.models import FunctionalModel, load_model

EXACT = 1e-12  # of the largest parameter
LOCAL = Local(batch_size=4, lr=0.1)


@dataclass
class Graph:
    """What was recorded."""

    steps: list[Callable[[], None]] = field(default_factory=list)

    def pool(self) -> None:
        pass

    def replay(self) -> None:
        for step in self.steps:
            step()


class Stream:
    def wait_stream(self, other: Stream) -> None:
        pass


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every stacked engine records."""
    now: list[Graph] = []
    taken = Work._step

    @contextlib.contextmanager
    def recording(graph: Graph, pool: object) -> Iterator[None]:
        now.append(graph)
        yield
        now.pop()

    def step(self: Work, width: int, t: int | None = None) -> None:
        if now:  # nothing is computed while a graph is recorded
            now[-1].steps.append(partial(taken, copy.copy(self), width, t))
        else:
            taken(self, width, t)

    monkeypatch.setattr(Work, "_step", step)
    monkeypatch.setattr(StackedEngine, "recording", True)
    stand_ins: dict[str, Any] = {"CUDAGraph": Graph, "graph": recording, "Stream": Stream, "current_stream": Stream}
    for name, stand_in in {**stand_ins, "stream": contextlib.nullcontext}.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)


def world(*sizes: int) -> FederatedData:
    draw, n = torch.Generator().manual_seed(0), sum(sizes)
    x, y = torch.randn(n, 1, 6, 6, generator=draw, dtype=torch.float64), torch.randint(4, (n,), generator=draw)
    parts = dict(enumerate(torch.randperm(n, generator=draw).split(list(sizes))))
    return FederatedData(Dataset(x, y, x, y, 4), parts)


@pytest.fixture(scope="module")
def model() -> FunctionalModel:
    return load_model("cnn", (1, 6, 6), 4, dtype=torch.float64, width=4)


class Both:
    """A stacked engine that records and a sequential one, asked the same."""

    def __init__(self, model: FunctionalModel, data: FederatedData, width: int = 0) -> None:
        self.homes: tuple[dict[str, Params], dict[str, Params]] = {}, {}
        self.stacked = StackedEngine(model, data, self.homes[0], width)
        self.sequential = SequentialEngine(model, data, self.homes[1])
        self.rounds = 0

    def agree(self, task: Task, clients: tuple[ClientId, ...], **sent: Params) -> Params:
        """One round, and where it leads the first client."""
        ask = Ask(task, clients, "all", sent, Address(1, "train", self.rounds))
        self.rounds += 1
        found, expected = list(self.stacked.run(ask)), list(self.sequential.run(ask))
        for a, b in zip(found, expected, strict=True):
            assert (a.client, a.examples) == (b.client, b.examples)
            assert apart(a.params, b.params) <= EXACT
            assert a.loss == pytest.approx(b.loss, rel=1e-11, nan_ok=True)
        return expected[0].params

    @property
    def works(self) -> list[Work]:
        return [work for work in self.stacked.works.values() if isinstance(work, Work)]


def apart(found: Mapping[str, torch.Tensor], expected: Params) -> float:
    scale = max(float(p.abs().max()) for p in expected.values())
    return max(float((found[n] - p).abs().max()) for n, p in expected.items()) / scale


def test_a_width_recorded_after_a_round_that_filled_its_room(model: FunctionalModel) -> None:
    both = Both(model, world(8, 8, 4, 3))
    start = both.agree(Learn(LOCAL), (0, 1, 2), start=model.init(0))
    both.agree(Learn(LOCAL), (0, 2, 3), start=start)
    (work,) = both.works
    assert sorted(work.graphs) == [1, 2, 3]


@pytest.mark.parametrize(
    "local",
    [
        replace(LOCAL, momentum=0.9, weight_decay=1e-2),
        replace(LOCAL, optimizer="adam", lr=1e-2, weight_decay=1e-2),
        replace(LOCAL, optimizer="adamw", lr=1e-2, weight_decay=1e-2),
        replace(LOCAL, clip=0.3, clip_tensor=0.2),
    ],
    ids=lambda local: f"{local.optimizer} momentum {local.momentum} clip {local.clip}",
)
def test_every_way_to_step_gives_the_same_in_every_round(model: FunctionalModel, local: Local) -> None:
    both, start = Both(model, world(13, 4, 9, 1, 0)), model.init(0)
    for _ in range(3):
        start = both.agree(Learn(local), (0, 1, 2, 3, 4), start=start)
    assert len(both.works) == 1, "one recording serves all rounds"
