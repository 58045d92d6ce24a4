# SPDX-License-Identifier: Apache-2.0
"""Captured steps, replayed on a CPU: a stand-in for a CUDA graph repeats the step as it was at its capture.

What Python holds at that moment is frozen, as in a CUDA graph; only what lies in memory may change between replays.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import pytest
import torch

from fedquit.bench import agree
from fedquit.core import ClientId, Local, Params, Task
from fedquit.core.fedavg import Learn
from fedquit.data.federated import Dataset, FederatedData
from fedquit.data.preprocessing import Pixels
from fedquit.engine import Address, Ask, SequentialEngine, StackedEngine
from fedquit.engine.cuda.gradient_buffer import GradientBuffer
from fedquit.engine.stacked import inputs
from fedquit.engine.stacked.capture import CapturedSteps, without_garbage_collection
from fedquit.engine.stacked.graph_cache import MAX_CAPTURED
from fedquit.engine.stacked.schedule import Job
from fedquit.engine.stacked.work import Work
from fedquit.methods.fedau import LearnBoth
from fedquit.methods.fukd import Imitate
from fedquit.models import FunctionalModel, load_model
from graph_stand_ins import capture_on_cpu
from seam_methods import FromOwn

EXACT = 1e-12  # of the largest parameter
LOCAL = Local(batch_size=4, lr=0.1)


@pytest.fixture(autouse=True)
def captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every stacked engine captures its steps."""
    capture_on_cpu(monkeypatch)


def setup(*sizes: int) -> FederatedData:
    draw, n = torch.Generator().manual_seed(0), sum(sizes)
    x, y = torch.randn(n, 1, 6, 6, generator=draw, dtype=torch.float64), torch.randint(4, (n,), generator=draw)
    parts = dict(enumerate(torch.randperm(n, generator=draw).split(list(sizes))))
    return FederatedData(Dataset(x, y, x, y, 4), parts)


@pytest.fixture(scope="module")
def model() -> FunctionalModel:
    return load_model("cnn", (1, 6, 6), 4, dtype=torch.float64, width=4)


class Both:
    """A stacked engine that captures its steps and a sequential one, asked the same, with the same client memories."""

    def __init__(self, model: FunctionalModel, data: FederatedData, width: int = 0) -> None:
        self.homes: tuple[dict[str, Params], dict[str, Params]] = {}, {}
        self.stacked = StackedEngine(model, data, self.homes[0], width)
        self.sequential = SequentialEngine(model, data, self.homes[1])
        self.rounds = 0

    def keep(self, name: str, kept: Mapping[ClientId, Params]) -> None:
        """Put that into the clients' memories."""
        for home in self.homes:
            home.update({f"{client}/{name}": part for client, part in kept.items()})

    def agree(self, task: Task, clients: tuple[ClientId, ...], **sent: Params) -> Params:
        """One round, and where it leads the first client."""
        ask = Ask(task, clients, "all", sent, Address(1, "train", self.rounds))
        self.rounds += 1
        replies, expected = list(self.stacked.run(ask)), list(self.sequential.run(ask))
        for a, b in zip(replies, expected, strict=True):
            assert (a.client, a.examples) == (b.client, b.examples)
            assert apart(a.params, b.params) <= EXACT
            assert a.loss == pytest.approx(b.loss, rel=1e-11, nan_ok=True)
        one, other = self.homes
        assert one.keys() == other.keys()
        assert all(apart(one[key], kept) <= EXACT for key, kept in other.items())
        return expected[0].params

    @property
    def captured(self) -> list[CapturedSteps]:
        """What was captured."""
        return list(self.stacked.graphs.captured.values())


def apart(actual: Params, expected: Params) -> float:
    assert actual.keys() == expected.keys()
    scale = max(float(p.abs().max()) for p in expected.values())
    return max(float((actual[n] - p).abs().max()) for n, p in expected.items()) / scale


def test_a_width_captured_after_a_round_that_filled_its_schedule(model: FunctionalModel) -> None:
    both = Both(model, setup(8, 8, 4, 3))
    start = both.agree(Learn(LOCAL), (0, 1, 2), start=model.init(0))
    both.agree(Learn(LOCAL), (0, 2, 3), start=start)
    (steps,) = both.captured
    assert sorted(steps.graphs) == [1, 2, 3]


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
    assert len(both.captured) == 1, "one capture serves all rounds"


def test_other_clients_every_round(model: FunctionalModel) -> None:
    both, start = Both(model, setup(13, 4, 9, 1, 0, 16)), model.init(0)
    widths = []
    for clients in ((0, 4, 5), (0, 3, 4), (5, 2, 0), (4, 1, 5), (0, 4, 5)):
        start = both.agree(Learn(replace(LOCAL, momentum=0.9)), clients, start=start)
        (steps,) = both.captured
        widths.append(sorted(steps.graphs))
    assert widths == [[2], [1, 2], [1, 2, 3], [1, 2, 3], [1, 2, 3]], "each is captured when it is first needed"


def test_more_and_fewer_clients_and_steps(model: FunctionalModel) -> None:
    both, start = Both(model, setup(13, 4, 9, 1, 0, 33)), model.init(0)
    for clients in ((0, 1), (0, 1, 2, 3), (5,), (4,), (0, 1), (3, 4), (5,)):
        start = both.agree(Learn(LOCAL), clients, start=start)


def test_what_each_client_has_in_its_memory_is_that_of_this_round(model: FunctionalModel) -> None:
    both, start = Both(model, setup(13, 4, 9)), model.init(0)
    for number in range(3):
        both.keep("own", {client: model.init(10 * number + client) for client in range(3)})
        start = both.agree(FromOwn(LOCAL, radius=0.3), (0, 1, 2), start=start)
    assert len(both.captured) == 1


def test_what_all_are_sent_is_that_of_this_round(model: FunctionalModel) -> None:
    both, start = Both(model, setup(13, 4, 9)), model.init(0)
    for number in range(3):
        start = both.agree(Imitate(LOCAL), (0, 1, 2), start=start, teacher=model.init(number + 1))
    assert len(both.captured) == 1


def test_two_groups_of_the_same_size_on_one_capture(model: FunctionalModel) -> None:
    both, start = Both(model, setup(13, 4, 9, 15), width=2), model.init(0)
    for _ in range(2):
        start = both.agree(Learn(replace(LOCAL, momentum=0.9)), (0, 1, 2, 3), start=start)
    assert len(both.captured) == 1


def test_two_groups_of_the_same_size_with_and_without_something_in_memory(model: FunctionalModel) -> None:
    both, start = Both(model, setup(13, 4, 9, 15)), model.init(0)
    head = {n: start[n] for n in list(start)[-2:]}
    both.keep("auxiliary", {client: {n: p + client for n, p in head.items()} for client in (1, 3)})
    for _ in range(3):  # after the first, all have something
        start = both.agree(LearnBoth(LOCAL), (0, 1, 2, 3), start=start)
    assert len(both.captured) > 1


@pytest.mark.parametrize("ahead", ["all", "in parts", "none"])
def test_images_are_augmented_anew_every_round(ahead: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if ahead == "in parts":
        monkeypatch.setattr(inputs, "PREPROCESSED_AT_ONCE", 16)
    if ahead == "none":
        monkeypatch.setattr(inputs, "MAX_PREPROCESSED_BYTES", 0)
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randint(256, (26, 3, 8, 8), generator=draw, dtype=torch.uint8), torch.arange(26) % 4
    look = Pixels((0.5,) * 3, (0.25,) * 3, size=12, vary="enlarge-crop-flip")
    data = FederatedData(Dataset(x, y, x, y, 4, look), dict(enumerate(torch.arange(26).split([13, 4, 9]))))
    model = load_model("cnn", data.dataset.shape, 4, dtype=torch.float64, look=look, width=4)
    both, start = Both(model, data), model.init(0)
    for _ in range(2):
        start = both.agree(Learn(LOCAL), (0, 1, 2), start=start)
    (steps,) = both.captured
    assert (steps.work.inputs.preprocessed is None) == (ahead == "none")


def test_only_what_was_used_last_stays_captured(model: FunctionalModel) -> None:
    both, start = Both(model, setup(*range(3, 11))), model.init(0)
    for clients in range(1, MAX_CAPTURED + 1):
        start = both.agree(Learn(LOCAL), tuple(range(clients)), start=start)
    first, second, *_ = both.captured
    start = both.agree(Learn(LOCAL), (1,), start=start)
    both.agree(Learn(LOCAL), tuple(range(MAX_CAPTURED + 1)), start=start)
    assert len(both.captured) == MAX_CAPTURED
    assert first in both.captured, "it was used again"
    assert second not in both.captured


Limit = Callable[[Callable[[CapturedSteps], bool]], list[int]]


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Limit:
    """Memory that runs out when a capture does not fit; gives the widths that were tried."""
    capture = CapturedSteps.capture

    def limited(fits: Callable[[CapturedSteps], bool]) -> list[int]:
        tried: list[int] = []

        def captured(self: CapturedSteps, widths: Sequence[int]) -> None:
            if not self.graphs:
                tried.append(len(self.work.losses))
            if not fits(self):
                raise torch.OutOfMemoryError("out of memory")
            capture(self, widths)

        monkeypatch.setattr(CapturedSteps, "capture", captured)
        return tried

    return limited


def test_all_kinds_of_work_are_captured_on_one_stream(model: FunctionalModel) -> None:
    both, start = Both(model, setup(8, 8, 4, 3)), model.init(0)
    both.agree(Learn(LOCAL), (0, 1), start=start)
    both.agree(Learn(LOCAL), (0, 1, 2), start=start)
    one, other = both.captured
    assert one.stream is other.stream


def test_a_step_that_runs_out_of_memory_leaves_nothing_behind(
    model: FunctionalModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Halfway through a step of three clients, whatever it holds; no collector of cycles is waited for."""
    held: list[weakref.ref[Work]] = []
    update = Work._update

    def limited(self: Work, *given: Any) -> None:
        if len(self.losses) > 2:
            held.append(weakref.ref(self))
            raise torch.OutOfMemoryError("out of memory")
        assert not any(work() for work in held), "what failed is still there"
        update(self, *given)

    monkeypatch.setattr(Work, "_update", limited)
    gc.disable()
    try:
        both = Both(model, setup(13, 4, 9))
        both.agree(Learn(LOCAL), (0, 1, 2), start=model.init(0))
    finally:
        gc.enable()
    assert len(held) == 2  # as it was, and once more without what others had left


def test_the_side_stream_is_synchronised_in_every_step_also_where_memory_runs_out_in_the_backward_pass(
    model: FunctionalModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    gradients, update = Work.gradients, Work._update

    def limited(self: Work, *given: Any) -> Any:
        done.append("backward")
        if len(self.losses) > 2:
            raise torch.OutOfMemoryError("out of memory")
        return gradients(self, *given)

    def updated(self: Work, *given: Any) -> None:
        done.append("step")
        update(self, *given)

    monkeypatch.setattr(Work, "gradients", limited)
    monkeypatch.setattr(Work, "_update", updated)
    monkeypatch.setattr(GradientBuffer, "synchronise", lambda self: done.append("sync"))
    Both(model, setup(13, 4, 9)).agree(Learn(LOCAL), (0, 1, 2), start=model.init(0))
    said = " ".join(done)
    assert said.startswith(
        "backward sync backward sync backward sync step"
    )  # twice out of memory, then with fewer clients
    assert said.replace("backward sync step", "").split() == ["backward", "sync"] * 2


def test_out_of_memory_first_drops_what_was_captured_before(
    model: FunctionalModel, memory: Limit, caplog: pytest.LogCaptureFixture
) -> None:
    both, start = Both(model, setup(13, 4, 9)), model.init(0)
    tried = memory(lambda steps: len(both.captured) == 1)
    start = both.agree(Learn(LOCAL), (0, 1), start=start)
    both.agree(Learn(LOCAL), (0, 1, 2), start=start)
    assert tried == [2, 3, 3]
    assert len(both.captured) == 1
    assert not both.stacked.graphs.max_clients
    assert not caplog.records, "nothing was halved"


def test_then_it_halves_the_width_and_the_next_engine_knows(model: FunctionalModel, memory: Limit) -> None:
    both, start = Both(model, setup(13, 4, 9, 6)), model.init(0)
    tried = memory(lambda steps: len(steps.work.losses) <= 2)
    start = both.agree(Learn(LOCAL), (0, 1, 2, 3), start=start)
    assert tried == [4, 4, 2]
    tried.clear()
    both.stacked = replace(both.stacked)
    both.agree(Learn(replace(LOCAL, momentum=0.9)), (0, 1, 2, 3), start=start)
    assert tried == [2]


def test_one_client_that_does_not_fit_even_alone_is_an_error(model: FunctionalModel, memory: Limit) -> None:
    tried = memory(lambda steps: False)
    with pytest.raises(torch.OutOfMemoryError):
        Both(model, setup(13)).agree(Learn(LOCAL), (0,), start=model.init(0))
    assert tried == [1, 1]


def test_the_benchmark_sees_what_a_round_inherits_from_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    load, cpu = Work.load, torch.device("cpu")

    def forgetful(self: Work, jobs: Sequence[Job]) -> None:
        before = {name: slot.clone() for name, slot in self.clients.slots.items()}
        load(self, jobs)
        for name, slot in before.items():
            self.clients.slots[name].copy_(slot)

    case = agree.cases(load_model("cnn", (3, 32, 32), 5, width=4), cpu)["training, momentum, weight decay"]
    monkeypatch.setattr(agree, "cases", lambda *_: {"momentum": case})
    monkeypatch.setattr(agree, "ENGINES", ["stacked"])
    (figure,) = agree._agreement(cpu, torch.float32)
    assert figure.kept
    monkeypatch.setattr(Work, "load", forgetful)
    (figure,) = agree._agreement(cpu, torch.float32)
    assert not figure.kept


def test_garbage_is_collected_again_after_a_capture(model: FunctionalModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """And after one that failed; whoever had turned the collector off keeps it off."""
    data = setup(9, 4)
    ask = Ask(Learn(LOCAL), (0, 1), "all", {"start": model.init(3)}, Address(2, "train"))
    assert gc.isenabled()
    list(StackedEngine(model, data, {}).run(ask))
    assert gc.isenabled()

    def fails(*_: object, **__: object) -> NoReturn:
        raise RuntimeError("capture")

    monkeypatch.setattr(torch.cuda, "graph", fails)
    assert len(list(StackedEngine(model, data, {}).run(ask))) == 2
    assert gc.isenabled()
    gc.disable()
    try:
        with without_garbage_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
