# SPDX-License-Identifier: Apache-2.0
"""Measurements, programs and monitored tasks: what they mean, and that every engine gives the same."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

from fedquit.core import (
    SERVER,
    Batch,
    ClientId,
    EarlyStopping,
    Effort,
    Local,
    Measurement,
    Memory,
    Model,
    Params,
    Part,
    Program,
    Reply,
    Sent,
    Split,
    Step,
    Task,
    per_example_gradients,
)
from fedquit.core.fedavg import Learn, cross_entropy
from fedquit.core.params import fingerprint
from fedquit.data.federated import Dataset, FederatedData
from fedquit.data.preprocessing import Pixels
from fedquit.engine import Address, Ask, Engine, Examples, SequentialEngine, StackedEngine, ThreadedEngine, run_client
from fedquit.engine.plan import make_plan
from fedquit.errors import InputError
from fedquit.models import FunctionalModel
from seam_methods import Climb, Fisher, Patiently, Return

HERE = Address(seed=5, phase="unlearn-0", round=2, question=1)
LOCAL = Local(epochs=2.0, batch_size=4, lr=0.05)
EVERYBODY = (0, 1, 2, 3, 4, 5)
ENGINES: dict[str, Callable[[Model, FederatedData, Memory], Engine]] = {
    "sequential": SequentialEngine,
    "threaded": lambda model, data, memory: ThreadedEngine(model, data, memory, workers=2),
    "stacked": StackedEngine,
}


@pytest.fixture(scope="module")
def ragged(toy_data: FederatedData) -> FederatedData:
    """Clients of 23, 8, 17, 30, 5 and 1 examples; of some, a part is marked, of client 1 all."""
    train = {**toy_data.train, 5: toy_data.train[3][:1]}
    forget = {0: train[0][:9], 1: train[1], 3: train[3][::2], 5: train[5]}
    return replace(toy_data, train=train, forget=forget)


@dataclass(frozen=True)
class Toy:
    """A federation and a model, and what an engine answers there."""

    model: FunctionalModel
    data: FederatedData
    start: Params

    def ask(
        self,
        task: Task | Program,
        engine: str = "sequential",
        *,
        split: Split = "all",
        memory: Memory | None = None,
        clients: tuple[ClientId, ...] = EVERYBODY,
        **sent: Params,
    ) -> list[Reply]:
        ask = Ask(task, clients, split, {"start": self.start, **sent}, HERE)
        return list(ENGINES[engine](self.model, self.data, {} if memory is None else memory).run(ask))

    def examples(self, client: ClientId, split: Split) -> Examples:
        at = self.data.view(client, split)
        forget = torch.isin(at, self.data.forget.get(client, at[:0]))
        return replace(Examples.unmarked(self.data.x[at], self.data.y[at]), forget=forget)


@pytest.fixture
def toy(toy_model: FunctionalModel, ragged: FederatedData, toy_start: Params) -> Toy:
    return Toy(toy_model, ragged, toy_start)


def close(actual: Params, expected: Params, atol: float = 1e-12) -> None:
    assert list(actual) == list(expected)
    for n, p in expected.items():
        torch.testing.assert_close(actual[n], p, rtol=0, atol=atol)


# Measurements


def fisher_by_hand(model: Model, params: Params, x: Tensor, y: Tensor) -> Params:
    """One backward pass for each example, squared and averaged."""
    total = {n: torch.zeros_like(p) for n, p in params.items()}
    for i in range(len(y)):
        leaves = {n: p.detach().clone().requires_grad_() for n, p in params.items()}
        nn.functional.cross_entropy(model(leaves, x[i : i + 1]), y[i : i + 1]).backward()
        for n, p in leaves.items():
            assert p.grad is not None
            total[n] += p.grad.square() / len(y)
    return total


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("batch_size", [1, 3, 1000])
def test_a_measurement_is_the_mean_over_single_examples_whatever_the_batches_and_the_engine(
    batch_size: int, engine: str, toy: Toy
) -> None:
    for reply in toy.ask(Fisher(Local(batch_size=batch_size)), engine):
        at = toy.data.view(reply.client, "all")
        close(reply.params, fisher_by_hand(toy.model, toy.start, toy.data.x[at], toy.data.y[at]))
        assert (reply.examples, reply.efforts) == (len(at), ())
        assert math.isnan(reply.loss)


def test_measurements_of_splits_add_up_with_the_numbers_of_their_examples(toy: Toy) -> None:
    by_split = {s: toy.ask(Fisher(), split=s, clients=(0,))[0] for s in ("all", "forget", "retain")}
    forget, retain = by_split["forget"], by_split["retain"]
    assert (forget.examples, retain.examples) == (9, 14)
    both = {n: (9 * forget.params[n] + 14 * retain.params[n]) / 23 for n in toy.start}
    close(by_split["all"].params, both)


@pytest.mark.parametrize("engine", ENGINES)
def test_who_has_no_example_answers_with_zeros_that_weigh_nothing(engine: str, toy: Toy) -> None:
    (reply,) = toy.ask(Fisher(), engine, split="forget", clients=(2,))
    assert reply.examples == 0
    close(reply.params, {n: torch.zeros_like(p) for n, p in toy.start.items()}, atol=0.0)


@dataclass(frozen=True)
class Draws(Measurement):
    """Show what a batch holds: the examples' own numbers, and the uniform ones."""

    augments: ClassVar[bool] = True  # which a measurement ignores

    def statistic(self, model: Model, params: Params, sent: Sent, batch: Batch) -> Params:
        order = torch.arange(len(batch.y)).double()
        rows = {"x": batch.x.flatten(1).double(), "u": batch.u.double(), "marked": batch.forget.double()}
        return {**rows, "first": (order == 0).double()}

    def zeros(self, sent: Sent) -> Params:
        zero = torch.zeros((), dtype=torch.float64)
        return {
            "x": torch.zeros(sent["size"]["x"].numel(), dtype=torch.float64),
            "u": zero,
            "marked": zero,
            "first": zero,
        }


def test_a_measurement_augments_nothing_and_draws_the_same_numbers_in_batches_of_any_size(toy_model: Model) -> None:
    stored = torch.randint(0, 256, (12, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    pixels = Pixels((0.5,) * 3, (0.2,) * 3, vary="rotate-pad-crop-flip")
    labels = torch.arange(12) % 5
    data = FederatedData(Dataset(stored, labels, stored, labels, 5, pixels), train={0: torch.arange(12)})
    size = {"x": torch.zeros(3 * 8 * 8)}
    asks = [Ask(Draws(Local(batch_size=b)), (0,), "all", {"start": {}, "size": size}, HERE) for b in (1, 5, 12)]
    replies = [next(iter(SequentialEngine(toy_model, data, {}).run(ask))) for ask in asks]
    plain = pixels.plain(stored).flatten(1).double().mean(0)
    for reply in replies:
        torch.testing.assert_close(reply.params["x"], plain, rtol=0, atol=1e-7)
        torch.testing.assert_close(reply.params["u"], replies[0].params["u"], rtol=0, atol=1e-12)
    assert [round(float(r.params["first"]) * 12) for r in replies] == [12, 3, 1], "the batches that were computed"


def test_a_measurement_sees_which_examples_are_marked(toy: Toy) -> None:
    size = {"x": torch.zeros(36)}
    (reply,) = toy.ask(Draws(), clients=(0,), size=size)
    assert float(reply.params["marked"]) == pytest.approx(9 / 23)


@dataclass(frozen=True)
class Flat(Fisher):
    """A statistic of other shapes than `zeros` says."""

    def statistic(self, model: Model, params: Params, sent: Sent, batch: Batch) -> Params:
        return {n: g.sum(0) for n, g in super().statistic(model, params, sent, batch).items()}


def test_a_statistic_must_have_a_row_for_each_example(toy: Toy) -> None:
    with pytest.raises(InputError, match="let `zeros` return the names and shapes"):
        toy.ask(Flat(), clients=(0,))


def test_a_measurement_goes_over_the_data_once_and_has_no_loss(toy: Toy) -> None:
    with pytest.raises(InputError, match=r"not 2\.0 times"):
        Fisher(Local(epochs=2.0))
    empty = torch.zeros(0)
    with pytest.raises(InputError, match="Fisher is a measurement"):
        Fisher().loss(toy.model, toy.start, {}, Batch(empty, empty, empty, empty, empty))


@dataclass(frozen=True)
class Numbers(Measurement):
    """The examples themselves, in float32; their mean in float32 or in float64."""

    double: bool = True

    def statistic(self, model: Model, params: Params, sent: Sent, batch: Batch) -> Params:
        return {"x": batch.x}

    def zeros(self, sent: Sent) -> Params:
        return {"x": torch.zeros((), dtype=torch.float64 if self.double else torch.float32)}


@pytest.mark.parametrize("batch_size", [1, 64])
def test_sums_are_in_float64_whatever_the_network_computes_in(batch_size: int) -> None:
    x = torch.cat([torch.full((1,), 2.0**25), torch.ones(63)])  # in float32, 2**25 + 1 is 2**25
    mine = Examples.unmarked(x, torch.zeros(64, dtype=torch.long))
    model = FunctionalModel(lambda: nn.Linear(1, 1))
    for double in (False, True):
        task = Numbers(Local(batch_size=batch_size), double=double)
        mean = run_client(model, task, mine, {"start": {}}, 0).answer["x"]
        assert torch.equal(mean, torch.tensor((2**25 + 63) / 64, dtype=torch.float64 if double else torch.float32))


def test_a_network_that_cannot_be_vectorised_is_measured_example_by_example() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layer(x)
            return out if float(x.sum()) > 0 else 2 * out

    model = FunctionalModel(Branching, torch.float64)
    params = model.init(0)
    x = torch.randn(5, 3, dtype=torch.float64)
    y = torch.tensor([0, 1, 1, 0, 1])
    nothing = torch.zeros(5)

    def loss(at: Params, batch: Batch) -> Tensor:
        return cross_entropy(model(at, batch.x), batch.y)

    found = per_example_gradients(loss, params, Batch(x, y, nothing, nothing, nothing))
    assert {n: tuple(g.shape) for n, g in found.items()} == {"layer.weight": (5, 2, 3), "layer.bias": (5, 2)}
    close({n: g.square().mean(0) for n, g in found.items()}, fisher_by_hand(model, params, x, y))


# Programs


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("split", ["all", "forget", "retain"])
@pytest.mark.parametrize(
    "task", [Learn(LOCAL, remember="own"), Patiently(LOCAL), Fisher()], ids=lambda t: type(t).__name__
)
def test_a_program_of_one_part_is_that_part_bit_for_bit(task: Task, split: Split, engine: str, toy: Toy) -> None:
    one: dict[str, Params] = {}
    other: dict[str, Params] = {}
    plain = toy.ask(task, "sequential", split=split, memory=one)
    program = toy.ask(Program((Part(task, split),)), engine, memory=other)
    for a, b in zip(plain, program, strict=True):
        assert (a.client, a.examples) == (b.client, b.examples)
        assert fingerprint(a.params) == fingerprint(b.params)
        assert a.loss == b.loss or math.isnan(a.loss)
        assert b.efforts == (a.efforts or (Effort(a.examples, task.local.steps(a.examples)),))
    assert {k: fingerprint(v) for k, v in one.items()} == {k: fingerprint(v) for k, v in other.items()}


PARTS = (
    Part(Fisher(Local(batch_size=3), remember="fisher"), "retain"),
    Part(Climb(replace(LOCAL, momentum=0.9)), "forget"),
    Part(Return(LOCAL), "retain"),
)


@pytest.mark.parametrize("engine", ENGINES)
def test_each_part_starts_where_the_last_one_ended_and_knows_the_model_that_was_received(engine: str, toy: Toy) -> None:
    memory: dict[str, Params] = {}
    replies = toy.ask(Program(PARTS), engine, memory=memory)
    for reply in replies:
        c = reply.client
        at = toy.data.view(c, "retain")
        fisher = {n: torch.zeros_like(p) for n, p in toy.start.items()}
        if len(at):
            fisher = fisher_by_hand(toy.model, toy.start, toy.data.x[at], toy.data.y[at])
        sent: dict[str, Params] = {"start": toy.start}
        first = run_client(toy.model, PARTS[1].task, toy.examples(c, "forget"), sent, HERE.seed_for(c, 1))
        sent = {"start": first.params, "received": toy.start, "fisher": fisher}
        second = run_client(toy.model, PARTS[2].task, toy.examples(c, "retain"), sent, HERE.seed_for(c, 2))
        close(reply.params, second.params)
        counts = [len(toy.data.view(c, part.split)) for part in PARTS]
        steps = [part.task.local.steps(n) for part, n in zip(PARTS, counts, strict=True)]
        assert reply.efforts == tuple(map(Effort, counts, steps))
        assert reply.examples == len(toy.data.view(c, "all")), "forget and retain together are all"
        assert reply.loss == pytest.approx(second.loss, nan_ok=True)
        close(memory[f"{c}/fisher"], fisher)
    assert fingerprint(replies[0].params) != fingerprint(replies[2].params)


def test_the_parts_of_a_visit_draw_different_numbers() -> None:
    seeds = [HERE.seed_for(3), *(HERE.seed_for(3, part) for part in range(4)), HERE.seed_for(4, 1)]
    assert seeds[0] == seeds[1]
    assert len(set(seeds)) == 5


@dataclass(frozen=True)
class Head(Task):
    """Train the head alone."""

    names: ClassVar[tuple[str, ...]] = ("7.weight", "7.bias")

    def begin(self, sent: Sent) -> Params:
        return {n: sent["start"][n] for n in self.names}

    def loss(self, model: Model, params: Params, sent: Sent, batch: Batch) -> Tensor:
        return cross_entropy(model({**sent["start"], **params}, batch.x), batch.y)


def test_what_an_earlier_part_trained_is_in_the_reply_also_where_the_last_one_trains_less(toy: Toy) -> None:
    (both,) = toy.ask(Program((Part(Learn(LOCAL)), Part(Head(LOCAL)))), clients=(0,))
    (first,) = toy.ask(Learn(LOCAL), clients=(0,))
    assert list(both.params) == list(toy.start)
    assert torch.equal(both.params["0.weight"], first.params["0.weight"])
    assert not torch.equal(both.params["7.weight"], first.params["7.weight"])
    (head,) = toy.ask(Program((Part(Head(LOCAL)), Part(Head(LOCAL)))), clients=(0,))
    assert set(head.params) == set(Head.names), "what nobody trained does not travel"


def test_a_measurement_at_the_end_is_the_reply_and_one_before_leaves_the_model_alone(toy: Toy) -> None:
    (last,) = toy.ask(Program((Part(Learn(LOCAL)), Part(Fisher()))), clients=(0,))
    (trained,) = toy.ask(Learn(LOCAL), clients=(0,))
    at = toy.data.view(0, "all")
    close(last.params, fisher_by_hand(toy.model, trained.params, toy.data.x[at], toy.data.y[at]))
    assert math.isnan(last.loss)


@dataclass(frozen=True)
class Other(Learn):
    """Answers with a tensor that the model does not have."""

    def answer(self, params: Params, sent: Sent) -> Params:
        return {"other": params["7.bias"]}


def test_only_the_last_part_may_answer_with_something_else_than_the_model(toy: Toy) -> None:
    with pytest.raises(InputError, match=r"part 1 of the program, Other, answers with 'other'"):
        toy.ask(Program((Part(Other(LOCAL)), Part(Learn(LOCAL)))), clients=(0,))
    (reply,) = toy.ask(Program((Part(Learn(LOCAL)), Part(Other(LOCAL)))), clients=(0,))
    assert set(reply.params) == {*toy.start, "other"}


@pytest.mark.parametrize(
    ("splits", "expected"),
    [(("forget",), 9), (("forget", "retain"), 23), (("retain", "retain"), 14), (("all", "forget"), 23)],
)
def test_every_example_counts_once(splits: tuple[Split, ...], expected: int, toy: Toy) -> None:
    program = Program(tuple(Part(Learn(LOCAL), split) for split in splits))
    (reply,) = toy.ask(program, clients=(0,))
    assert reply.examples == expected


def test_a_program_says_what_cannot_be_asked_with_it(toy_start: Params) -> None:
    with pytest.raises(InputError, match="at least one"):
        Program(())
    program = Program((Part(Learn()),))
    program.check("all", {"start": toy_start})
    with pytest.raises(InputError, match="leave out split='forget'"):
        program.check("forget", {"start": toy_start})
    with pytest.raises(InputError, match="send it as `start`"):
        program.check("all", {"teacher": toy_start})
    with pytest.raises(InputError, match="'received' is what a program calls"):
        program.check("all", {"start": toy_start, "received": toy_start})


# Monitored tasks


@dataclass(frozen=True)
class LearnPatiently(Learn):
    """Ordinary training that stops early."""

    patience: int = 1
    restore: bool = False

    @property
    def stopping(self) -> EarlyStopping:
        return EarlyStopping(self.patience, self.restore)

    def monitor_start(self, params: Params) -> Params:
        return self.stopping.start(params)

    def monitor(self, state: Params, step: Step, params: Params) -> Params:
        return self.stopping.observe(state, step, params)

    def monitor_end(self, state: Params, params: Params) -> Params:
        return self.stopping.end(state, params)


def by_hand(toy: Toy, client: ClientId, task: LearnPatiently) -> tuple[Params, int]:
    """A plain loop over epochs: the parameters that it ends with, and its steps."""
    at = toy.data.view(client, "all")
    x, y = toy.data.x[at], toy.data.y[at]
    local = task.local
    leaves = {n: p.clone().requires_grad_() for n, p in toy.start.items()}
    optimizer = torch.optim.SGD(leaves.values(), local.lr, momentum=local.momentum)
    steps = make_plan(len(y), local, HERE.seed_for(client)).steps
    per_epoch = math.ceil(len(y) / local.batch_size)
    best, waited, kept = math.inf, 0, dict[str, Tensor]()
    for number in range(0, len(steps), per_epoch):
        total = 0.0
        for batch in steps[number : number + per_epoch]:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(toy.model(leaves, x[batch]), y[batch])
            loss.backward()
            optimizer.step()
            total += float(loss.detach()) * len(batch)
        waited += 1
        if total / len(y) < best:
            best, waited = total / len(y), 0
            kept = {n: p.detach().clone() for n, p in leaves.items()}
        if waited >= task.patience:
            last = {n: p.detach() for n, p in leaves.items()}
            return kept if task.restore else last, number + per_epoch
    return {n: p.detach() for n, p in leaves.items()}, len(steps)


UNSTEADY = Local(epochs=12.0, batch_size=4, lr=0.6, momentum=0.5)  # so large a rate that the loss rises at times


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("restore", [False, True])
@pytest.mark.parametrize("patience", [1, 2, 3])
def test_training_ends_after_so_many_epochs_without_a_lower_loss(
    patience: int, restore: bool, engine: str, toy: Toy
) -> None:
    task = LearnPatiently(UNSTEADY, patience=patience, restore=restore)
    clients = (0, 2, 3, 4)
    steps = []
    for reply in toy.ask(task, engine, clients=clients):
        expected, taken = by_hand(toy, reply.client, task)
        close(reply.params, expected, atol=1e-9)
        assert reply.efforts == (Effort(reply.examples, taken),)
        steps.append(taken / task.local.steps(reply.examples))
    assert min(steps) < 1, "somebody stopped early"


def test_who_never_stops_takes_the_steps_of_the_plain_task(toy: Toy) -> None:
    plain = toy.ask(Learn(LOCAL))
    patient = toy.ask(LearnPatiently(LOCAL, patience=100, restore=True))
    for a, b in zip(plain, patient, strict=True):
        assert fingerprint(a.params) == fingerprint(b.params)
        assert a.loss == b.loss
        assert b.efforts == (Effort(a.examples, LOCAL.steps(a.examples)),)


@dataclass(frozen=True)
class StopAt(Learn):
    """Stop after a step, and write down what the hook saw in the reply."""

    at: int = 5

    def monitor_start(self, params: Params) -> Params:
        return {name: torch.zeros(64, dtype=torch.float64) for name in ("loss", "examples", "ends")} | {
            "halted": torch.zeros((), dtype=torch.bool)
        }

    def monitor(self, state: Params, step: Step, params: Params) -> Params:
        here = torch.arange(64) == step.number - 1
        rows = {"loss": step.loss, "examples": step.examples, "ends": step.ends_epoch}
        seen = {name: torch.where(here, value.double(), state[name]) for name, value in rows.items()}
        return {**seen, "halted": step.number >= self.at}

    def monitor_end(self, state: Params, params: Params) -> Params:
        return {**params, **{f"seen:{n}": state[n] for n in ("loss", "examples", "ends")}}


def test_the_hook_sees_every_step_with_its_loss_and_the_ends_of_epochs(toy: Toy) -> None:
    local = Local(epochs=2.5, batch_size=8, lr=0.1)
    (reply,) = toy.ask(StopAt(local, at=100), clients=(2,))  # 17 examples: 3 batches an epoch
    at = toy.data.view(2, "all")
    plan = make_plan(17, local, HERE.seed_for(2))
    assert reply.efforts == (Effort(17, 7),)
    assert reply.params["seen:examples"][:8].tolist() == [8, 8, 1, 8, 8, 1, 8, 0]
    assert reply.params["seen:ends"][:8].tolist() == [0, 0, 1, 0, 0, 1, 0, 0]
    first = nn.functional.cross_entropy(
        toy.model(toy.start, toy.data.x[at[plan.steps[0]]]), toy.data.y[at[plan.steps[0]]]
    )
    assert float(reply.params["seen:loss"][0]) == pytest.approx(float(first), rel=1e-12)
    assert reply.loss == pytest.approx(float(reply.params["seen:loss"][:7].mean()), rel=1e-12)


def test_after_the_halt_nothing_is_computed_and_the_parameters_stay(toy: Toy) -> None:
    calls: list[int] = []

    @dataclass(frozen=True)
    class Counted(StopAt):
        def loss(self, model: Model, params: Params, sent: Sent, batch: Batch) -> Tensor:
            calls.append(len(batch.y))
            return super().loss(model, params, sent, batch)

    (reply,) = toy.ask(Counted(LOCAL, at=5), clients=(3,))
    assert len(calls) == 5
    assert reply.efforts == (Effort(30, 5),)
    five = make_plan(30, LOCAL, HERE.seed_for(3)).steps[:5]
    leaves = {n: p.clone().requires_grad_() for n, p in toy.start.items()}
    optimizer = torch.optim.SGD(leaves.values(), LOCAL.lr)
    at = toy.data.view(3, "all")
    for batch in five:
        optimizer.zero_grad()
        nn.functional.cross_entropy(toy.model(leaves, toy.data.x[at[batch]]), toy.data.y[at[batch]]).backward()
        optimizer.step()
    close({n: reply.params[n] for n in toy.start}, {n: p.detach() for n, p in leaves.items()})


def test_a_halt_within_a_program_ends_that_part_alone(toy: Toy) -> None:
    program = Program((Part(LearnPatiently(UNSTEADY)), Part(Learn(LOCAL), "retain")))
    (reply,) = toy.ask(program, clients=(0,))
    params, steps = by_hand(toy, 0, LearnPatiently(UNSTEADY))
    assert steps < UNSTEADY.steps(23)
    after = run_client(toy.model, Learn(LOCAL), toy.examples(0, "retain"), {"start": params}, HERE.seed_for(0, 1))
    close(reply.params, after.params, atol=1e-9)
    assert reply.efforts == (Effort(23, steps), Effort(14, LOCAL.steps(14)))


def test_patience_is_at_least_one_epoch() -> None:
    with pytest.raises(InputError, match="patience is 0"):
        EarlyStopping(0)


def test_the_hooks_of_early_stopping_can_be_stacked() -> None:
    """Branch-free in the values of tensors: `vmap` over clients gives what each gives alone."""
    stopping = EarlyStopping(1, restore_best=True)
    params = {"w": torch.randn(3, 2, dtype=torch.float64)}
    losses = torch.tensor([[3.0, 1.0], [2.0, 2.0], [1.0, 3.0], [2.0, 0.5]], dtype=torch.float64).repeat(1, 2)[:, :3]

    def steps(row: Tensor) -> Step:
        return Step(torch.tensor(1), row, torch.tensor(4), torch.tensor(True))

    def one(client: int) -> Params:
        state = stopping.start({"w": params["w"][client]})
        for t in range(4):
            state = stopping.observe(state, steps(losses[t, client]), {"w": params["w"][client] + t + 1})
        return state

    stacked = torch.func.vmap(lambda w: stopping.start({"w": w}))(params["w"])
    for t in range(4):
        move = torch.func.vmap(lambda s, loss, w, t=t: stopping.observe(s, steps(loss), {"w": w + t + 1}))
        stacked = move(stacked, losses[t], params["w"])
    for client in range(3):
        close({n: p[client] for n, p in stacked.items()}, one(client), atol=0.0)


# The server's own data


def test_the_server_measures_and_stops_early_on_its_own_data(toy: Toy) -> None:
    public = toy.data.public
    (reply,) = toy.ask(Fisher(), clients=(SERVER,))
    close(reply.params, fisher_by_hand(toy.model, toy.start, toy.data.x[public], toy.data.y[public]))
    (stopped,) = toy.ask(StopAt(LOCAL, at=2), clients=(SERVER,))
    assert stopped.efforts == (Effort(len(public), 2),)
