# SPDX-License-Identifier: Apache-2.0
"""The recorded path of a GPU, carried out on a CPU: a replay takes the step as it stood when it was recorded.

What Python holds at that moment is frozen, as in a CUDA graph; only what lies in memory may change between replays.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch

from fedquit.bench import agree
from fedquit.core import ClientId, Local, Params, Task
from fedquit.core.fedavg import Learn
from fedquit.data.federated import Dataset, FederatedData
from fedquit.data.preprocessing import Pixels
from fedquit.engine import Address, Ask, SequentialEngine, StackedEngine
from fedquit.engine.cuda.ops import Room
from fedquit.engine.stacked import engine as stacked
from fedquit.engine.stacked.engine import Job, Work
from fedquit.methods.fedau import LearnBoth
from fedquit.methods.fukd import Imitate
from fedquit.models import FunctionalModel, load_model
from seam_methods import FromOwn

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
    def __init__(self, device: torch.device | None = None) -> None:
        pass

    def wait_stream(self, other: Stream) -> None:
        pass


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every stacked engine records."""
    now: list[Graph] = []
    taken = Work._step

    @contextlib.contextmanager
    def recording(graph: Graph, pool: object, stream: Stream) -> Iterator[None]:
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


def setup(*sizes: int) -> FederatedData:
    draw, n = torch.Generator().manual_seed(0), sum(sizes)
    x, y = torch.randn(n, 1, 6, 6, generator=draw, dtype=torch.float64), torch.randint(4, (n,), generator=draw)
    parts = dict(enumerate(torch.randperm(n, generator=draw).split(list(sizes))))
    return FederatedData(Dataset(x, y, x, y, 4), parts)


@pytest.fixture(scope="module")
def model() -> FunctionalModel:
    return load_model("cnn", (1, 6, 6), 4, dtype=torch.float64, width=4)


class Both:
    """A stacked engine that records and a sequential one, asked the same, with the same at home."""

    def __init__(self, model: FunctionalModel, data: FederatedData, width: int = 0) -> None:
        self.homes: tuple[dict[str, Params], dict[str, Params]] = {}, {}
        self.stacked = StackedEngine(model, data, self.homes[0], width)
        self.sequential = SequentialEngine(model, data, self.homes[1])
        self.rounds = 0

    def keep(self, name: str, kept: Mapping[ClientId, Params]) -> None:
        """Put that into the clients' homes."""
        for home in self.homes:
            home.update({f"{client}/{name}": part for client, part in kept.items()})

    def agree(self, task: Task, clients: tuple[ClientId, ...], **sent: Params) -> Params:
        """One round, and where it leads the first client."""
        ask = Ask(task, clients, "all", sent, Address(1, "train", self.rounds))
        self.rounds += 1
        found, expected = list(self.stacked.run(ask)), list(self.sequential.run(ask))
        for a, b in zip(found, expected, strict=True):
            assert (a.client, a.examples) == (b.client, b.examples)
            assert apart(a.params, b.params) <= EXACT
            assert a.loss == pytest.approx(b.loss, rel=1e-11, nan_ok=True)
        one, other = self.homes
        assert one.keys() == other.keys()
        assert all(apart(one[key], kept) <= EXACT for key, kept in other.items())
        return expected[0].params

    @property
    def works(self) -> list[Work]:
        """What was recorded."""
        return [work for work in self.stacked.works.values() if isinstance(work, Work)]


def apart(found: Params, expected: Params) -> float:
    assert found.keys() == expected.keys()
    scale = max(float(p.abs().max()) for p in expected.values())
    return max(float((found[n] - p).abs().max()) for n, p in expected.items()) / scale


def test_a_width_recorded_after_a_round_that_filled_its_room(model: FunctionalModel) -> None:
    both = Both(model, setup(8, 8, 4, 3))
    start = both.agree(Learn(LOCAL), (0, 1, 2), start=model.init(0))
    both.agree(Learn(LOCAL), (0, 2, 3), start=start)
    (work,) = both.works
    assert sorted(work.graphs) == [1, 2, 3]


@pytest.mark.parametrize(
    "local",
    [
        LOCAL,
        replace(LOCAL, momentum=0.9, weight_decay=1e-2),
        replace(LOCAL, optimizer="adam", lr=1e-2, weight_decay=1e-2),
        replace(LOCAL, optimizer="adamw", lr=1e-2, weight_decay=1e-2),
        replace(LOCAL, clip=0.3, clip_tensor=0.2),
    ],
    ids=["sgd", "momentum", "adam", "adamw", "clipped"],
)
def test_every_round_has_its_own_start_and_rate(model: FunctionalModel, local: Local) -> None:
    """Of clients with more than a batch, one, fewer, one example and none."""
    both, start = Both(model, setup(13, 4, 9, 1, 3, 0)), model.init(0)
    for number in range(3):
        task = Learn(replace(local, lr=local.lr * 0.9**number))
        start = both.agree(task, (0, 1, 2, 3, 4, 5), start=start)
    both.agree(Learn(local), (0, 1, 2, 3, 4, 5), start=model.init(1))
    assert len(both.works) == 1, "one recording serves all rounds"


def test_other_clients_every_round(model: FunctionalModel) -> None:
    both, start = Both(model, setup(13, 4, 9, 1, 0, 16)), model.init(0)
    widths = []
    for clients in ((0, 4, 5), (0, 3, 4), (5, 2, 0), (4, 1, 5), (0, 4, 5)):
        start = both.agree(Learn(replace(LOCAL, momentum=0.9)), clients, start=start)
        (work,) = both.works
        widths.append(sorted(work.graphs))
    assert widths == [[2], [1, 2], [1, 2, 3], [1, 2, 3], [1, 2, 3]], "each is recorded when it is first needed"


def test_more_and_fewer_clients_and_steps(model: FunctionalModel) -> None:
    both, start = Both(model, setup(13, 4, 9, 1, 0, 33)), model.init(0)
    for clients in ((0, 1), (0, 1, 2, 3), (5,), (4,), (0, 1), (3, 4), (5,)):
        start = both.agree(Learn(LOCAL), clients, start=start)


def test_what_each_client_has_at_home_is_that_of_this_round(model: FunctionalModel) -> None:
    both, start = Both(model, setup(13, 4, 9)), model.init(0)
    for number in range(3):
        both.keep("own", {client: model.init(10 * number + client) for client in range(3)})
        start = both.agree(FromOwn(LOCAL, radius=0.3), (0, 1, 2), start=start)
    assert len(both.works) == 1


def test_what_all_are_sent_is_that_of_this_round(model: FunctionalModel) -> None:
    both, start = Both(model, setup(13, 4, 9)), model.init(0)
    for number in range(3):
        start = both.agree(Imitate(LOCAL), (0, 1, 2), start=start, teacher=model.init(number + 1))
    assert len(both.works) == 1


def test_two_groups_of_the_same_size_on_one_recording(model: FunctionalModel) -> None:
    both, start = Both(model, setup(13, 4, 9, 15), width=2), model.init(0)
    for _ in range(2):
        start = both.agree(Learn(replace(LOCAL, momentum=0.9)), (0, 1, 2, 3), start=start)
    assert len(both.works) == 1


def test_two_groups_of_the_same_size_with_and_without_something_at_home(model: FunctionalModel) -> None:
    both, start = Both(model, setup(13, 4, 9, 15)), model.init(0)
    head = {n: start[n] for n in list(start)[-2:]}
    both.keep("auxiliary", {client: {n: p + client for n, p in head.items()} for client in (1, 3)})
    for _ in range(3):  # after the first, all have something
        start = both.agree(LearnBoth(LOCAL), (0, 1, 2, 3), start=start)
    assert len(both.works) > 1


@pytest.mark.parametrize("ready", ["all", "in parts", "none"])
def test_images_are_augmented_anew_every_round(ready: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacked, "READY_AT_ONCE", 16 if ready == "in parts" else stacked.READY_AT_ONCE)
    monkeypatch.setattr(stacked, "READY_BYTES", 0 if ready == "none" else stacked.READY_BYTES)
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randint(256, (26, 3, 8, 8), generator=draw, dtype=torch.uint8), torch.arange(26) % 4
    look = Pixels((0.5,) * 3, (0.25,) * 3, size=12, vary="enlarge-crop-flip")
    data = FederatedData(Dataset(x, y, x, y, 4, look), dict(enumerate(torch.arange(26).split([13, 4, 9]))))
    model = load_model("cnn", data.dataset.shape, 4, dtype=torch.float64, look=look, width=4)
    both, start = Both(model, data), model.init(0)
    for _ in range(2):
        start = both.agree(Learn(LOCAL), (0, 1, 2), start=start)
    (work,) = both.works
    assert (work.ready is None) == (ready == "none")


def test_only_what_was_used_last_stays_recorded(model: FunctionalModel) -> None:
    both, start = Both(model, setup(*range(3, 11))), model.init(0)
    for clients in range(1, stacked.RECORDED + 1):
        start = both.agree(Learn(LOCAL), tuple(range(clients)), start=start)
    first, second, *_ = both.works
    start = both.agree(Learn(LOCAL), (1,), start=start)
    both.agree(Learn(LOCAL), tuple(range(stacked.RECORDED + 1)), start=start)
    assert len(both.works) == stacked.RECORDED
    assert first in both.works, "it was used again"
    assert second not in both.works


Limit = Callable[[Callable[[Work], bool]], list[int]]


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Limit:
    """Memory that runs out when a recording does not fit; gives the widths that were tried."""
    record = Work.record

    def limited(fits: Callable[[Work], bool]) -> list[int]:
        tried: list[int] = []

        def recorded(self: Work, widths: Sequence[int]) -> None:
            if not self.graphs:
                tried.append(len(self.rows))
            if not fits(self):
                raise torch.OutOfMemoryError("out of memory")
            record(self, widths)

        monkeypatch.setattr(Work, "record", recorded)
        return tried

    return limited


def test_all_kinds_of_work_are_recorded_on_one_stream(model: FunctionalModel) -> None:
    both, start = Both(model, setup(8, 8, 4, 3)), model.init(0)
    both.agree(Learn(LOCAL), (0, 1), start=start)
    both.agree(Learn(LOCAL), (0, 1, 2), start=start)
    one, other = both.works
    assert one.side is other.side is not None


def test_a_step_that_runs_out_of_memory_leaves_nothing_behind(
    model: FunctionalModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Halfway through a step of three clients, whatever it holds; no collector of cycles is waited for."""
    held: list[weakref.ref[Work]] = []
    update = Work._update

    def limited(self: Work, width: int, found: Any, each: Any, t: Any) -> None:
        if len(self.rows) > 2:
            held.append(weakref.ref(self))
            raise torch.OutOfMemoryError("out of memory")
        assert not any(work() for work in held), "what failed is still there"
        update(self, width, found, each, t)

    monkeypatch.setattr(Work, "_update", limited)
    gc.disable()
    try:
        both = Both(model, setup(13, 4, 9))
        both.agree(Learn(LOCAL), (0, 1, 2), start=model.init(0))
    finally:
        gc.enable()
    assert len(held) == 2  # as it was, and once more without what others had left


def test_the_streams_meet_in_every_step_also_where_memory_runs_out_on_the_way_back(
    model: FunctionalModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    gradients, update = Work._gradients, Work._update

    def limited(self: Work, *given: Any) -> Any:
        done.append("back")
        if len(self.rows) > 2:
            raise torch.OutOfMemoryError("out of memory")
        return gradients(self, *given)

    def updated(self: Work, *given: Any) -> None:
        done.append("step")
        update(self, *given)

    monkeypatch.setattr(Work, "_gradients", limited)
    monkeypatch.setattr(Work, "_update", updated)
    monkeypatch.setattr(Room, "meet", lambda self: done.append("meet"))
    Both(model, setup(13, 4, 9)).agree(Learn(LOCAL), (0, 1, 2), start=model.init(0))
    said = " ".join(done)
    assert said.startswith("back meet back meet back meet step")  # twice out of memory, then with fewer clients
    assert said.replace("back meet step", "").split() == ["back", "meet"] * 2


def test_out_of_memory_first_gives_up_what_was_recorded_before(
    model: FunctionalModel, memory: Limit, caplog: pytest.LogCaptureFixture
) -> None:
    both, start = Both(model, setup(13, 4, 9)), model.init(0)
    tried = memory(lambda work: len(both.works) == 1)
    start = both.agree(Learn(LOCAL), (0, 1), start=start)
    both.agree(Learn(LOCAL), (0, 1, 2), start=start)
    assert tried == [2, 3, 3]
    assert len(both.works) == 1
    assert not both.stacked.works.fits
    assert not caplog.records, "nothing was halved"


def test_then_it_halves_the_width_and_the_next_engine_knows(model: FunctionalModel, memory: Limit) -> None:
    both, start = Both(model, setup(13, 4, 9, 6)), model.init(0)
    tried = memory(lambda work: len(work.rows) <= 2)
    start = both.agree(Learn(LOCAL), (0, 1, 2, 3), start=start)
    assert tried == [4, 4, 2]
    tried.clear()
    both.stacked = replace(both.stacked)
    both.agree(Learn(replace(LOCAL, momentum=0.9)), (0, 1, 2, 3), start=start)
    assert tried == [2]


def test_one_client_that_does_not_fit_even_alone_is_an_error(model: FunctionalModel, memory: Limit) -> None:
    tried = memory(lambda work: False)
    with pytest.raises(torch.OutOfMemoryError):
        Both(model, setup(13)).agree(Learn(LOCAL), (0,), start=model.init(0))
    assert tried == [1, 1]


def test_the_benchmark_sees_what_a_round_inherits_from_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    load, cpu = Work.load, torch.device("cpu")

    def forgetful(self: Work, jobs: Sequence[Job], lr: float) -> None:
        before = {s: v.clone() for s, v in self.slots.items()}
        load(self, jobs, lr)
        for s, v in before.items():
            self.slots[s].copy_(v)

    case = agree.cases(load_model("cnn", (3, 32, 32), 5, width=4), cpu)["training, momentum, weight decay"]
    monkeypatch.setattr(agree, "cases", lambda *_: {"momentum": case})
    monkeypatch.setattr(agree, "ENGINES", ["stacked"])
    (figure,) = agree._agreement(cpu, torch.float32)
    assert figure.kept
    monkeypatch.setattr(Work, "load", forgetful)
    (figure,) = agree._agreement(cpu, torch.float32)
    assert not figure.kept
