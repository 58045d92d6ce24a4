# SPDX-License-Identifier: Apache-2.0
"""FedAvg against loops written by hand."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from by_hand import run_client
from fedquit.core import (
    SERVER,
    Batch,
    Federation,
    Local,
    Model,
    Params,
    Program,
    Reply,
    Request,
    Sent,
    Split,
    State,
    Task,
    Training,
)
from fedquit.core.fedavg import Learn, cohort, cross_entropy, fedavg
from fedquit.data.federated import Dataset, FederatedData
from fedquit.engine import Address, Ask, SequentialEngine
from fedquit.errors import InputError
from fedquit.models import FunctionalModel


@dataclass
class Counting:
    """The least that a federation can be: it counts the questions and passes them on."""

    model: Model
    data: FederatedData
    asked: list[tuple[Any, list[int], Split]] = field(default_factory=list)

    @property
    def clients(self) -> tuple[int, ...]:
        return self.data.clients

    @property
    def seed(self) -> int:
        return Address(0, "test", 0, len(self.asked)).seed_for("server")

    def run(
        self, task: Task | Program, clients: Sequence[int], *, split: Split = "all", **sent: Params
    ) -> Iterator[Reply]:
        address = Address(0, "test", 0, len(self.asked))
        self.asked.append((task, list(clients), split))
        return SequentialEngine(self.model, self.data, {}).run(Ask(task, clients, split, sent, address))

    def run_at_server(self, task: Task, **sent: Params) -> Params:
        (reply,) = self.run(task, [SERVER], split="all", **sent)
        return reply.params


@dataclass(frozen=True)
class Squares(Task):
    """(w - x)² / 2: a full step of length lr moves w to w + lr * (mean of x - w)."""

    def loss(self, model: Model, params: Params, sent: Sent, batch: Batch) -> Tensor:
        return (params["w"] - batch.x).square().sum(1) / 2


def no_model() -> Model:
    from fedquit.models import load_model

    return load_model("mlp", (1,), 1)


def squares_world(*clients: list[float]) -> Counting:
    x = torch.tensor([v for mine in clients for v in mine], dtype=torch.float64)[:, None]
    y = torch.zeros(len(x), dtype=torch.long)
    ends = torch.tensor([0, *map(len, clients)]).cumsum(0).tolist()
    train = {k: torch.arange(ends[k], ends[k + 1]) for k in range(len(clients))}
    return Counting(no_model(), FederatedData(Dataset(x, y, x, y, 1), train))


def w(value: float) -> State:
    return State({"w": torch.tensor([value], dtype=torch.float64)})


def whole_batches(lr: float, epochs: int = 1) -> Local:
    return Local(lr=lr, epochs=epochs, batch_size=1000)


def rounds(
    n: int, fed: Federation, state: State, training: Training, clients: Sequence[int], **options: Any
) -> list[State]:
    """The states after each of n rounds."""
    found = []
    for _ in range(n):
        state = fedavg(fed, state, training, clients, **options)
        found.append(state)
    return found


def values(states: list[State]) -> list[float]:
    return [float(s.params["w"]) for s in states]


def test_two_clients_follow_the_closed_form_with_weights_n_k() -> None:
    fed = squares_world([1.0, 3.0, 5.0], [11.0])
    training = Training(Squares(whole_batches(0.5, epochs=2)), rounds=3)
    # A client with mean c maps w to c + (w - c) * 0.5². The pooled mean with weights 3 and 1 is (3 * 3 + 11) / 4 = 5.
    expected = [5 + (0 - 5) * 0.25**t for t in (1, 2, 3)]
    assert values(rounds(3, fed, w(0.0), training, fed.clients)) == pytest.approx(expected, rel=1e-12)
    assert len(fed.asked) == 3


def test_the_learning_rate_decays_by_the_clock_not_by_the_phases_round() -> None:
    fed = squares_world([4.0])
    training = Training(Squares(whole_batches(0.5)), rounds=9, lr_decay=0.5)
    state = replace(w(0.0), clock=2, round=0)
    found = rounds(3, fed, state, training, [0])
    assert [t.local.lr for t, _, _ in fed.asked] == [0.125, 0.0625, 0.03125]
    expected = 4 * (1 - (1 - 0.125) * (1 - 0.0625) * (1 - 0.03125))
    assert float(found[-1].params["w"]) == pytest.approx(expected, rel=1e-12)
    assert [(s.clock, s.round) for s in found] == [(3, 1), (4, 2), (5, 3)]


def test_going_on_from_a_yielded_state_is_going_on() -> None:
    training = Training(Squares(whole_batches(0.5)), rounds=9, lr_decay=0.9)
    fed = squares_world([4.0], [1.0, 2.0])
    straight = rounds(4, fed, w(0.0), training, fed.clients)
    resumed = fedavg(fed, straight[2], training, fed.clients)
    assert torch.equal(resumed.params["w"], straight[3].params["w"])
    assert (resumed.clock, resumed.round) == (straight[3].clock, straight[3].round)


def test_it_is_the_hand_loop_over_the_clients(
    toy_model: FunctionalModel, toy_data: FederatedData, toy_start: Params
) -> None:
    task = Learn(Local(batch_size=8))
    fed = Counting(toy_model, toy_data)
    found = rounds(2, fed, State(toy_start), Training(task, 2), fed.clients)[-1].params
    now = toy_start
    for t in range(2):
        total = {n: torch.zeros_like(p) for n, p in now.items()}
        for c, mine in toy_data.train.items():
            seed = Address(0, "test", 0, t).seed_for(c)
            mine_trained, _ = run_client(toy_model, task, toy_data.x[mine], toy_data.y[mine], {"start": now}, seed)
            total = {n: p + mine_trained[n] * len(mine) for n, p in total.items()}
        now = {n: p / 83 for n, p in total.items()}
    for n, p in found.items():
        torch.testing.assert_close(p, now[n], rtol=1e-12, atol=1e-12)


def test_the_split_reaches_the_clients() -> None:
    fed = squares_world([1.0, 3.0], [10.0])
    fed.data = fed.data.mark(Request((0,), samples=True), {0: torch.tensor([1])})
    training = Training(Squares(whole_batches(1.0)), 1)
    assert values(rounds(1, fed, w(0.0), training, [0], split="retain")) == [1.0]
    assert fed.asked[0][2] == "retain"


def test_nobody_with_data_is_an_error() -> None:
    fed = squares_world([], [1.0])
    with pytest.raises(InputError, match="nothing to average"):
        fedavg(fed, w(0.0), Training(Squares(), 1), [0])


def test_watch_sees_every_reply_with_its_round_and_start() -> None:
    fed = squares_world([1.0], [2.0], [6.0])
    seen: list[tuple[int, float, int, float]] = []

    def watch(round: int, start: Params, reply: Reply) -> None:
        seen.append((round, float(start["w"]), reply.client, float(reply.params["w"])))

    training = Training(Squares(whole_batches(1.0)), 2)
    rounds(2, fed, replace(w(0.0), clock=7), training, fed.clients, watch=watch)
    assert seen == [(7, 0, 0, 1), (7, 0, 1, 2), (7, 0, 2, 6), (8, 3, 0, 1), (8, 3, 1, 2), (8, 3, 2, 6)]


@dataclass(frozen=True)
class Away(Squares):
    """The other way."""

    def loss(self, model: Model, params: Params, sent: Sent, batch: Batch) -> Tensor:
        return -super().loss(model, params, sent, batch)


def test_one_client_may_get_another_task_and_the_same_schedule() -> None:
    fed = squares_world([1.0], [2.0], [6.0])
    training = Training(Squares(whole_batches(0.5)), 1, lr_decay=0.5)
    state = replace(w(0.0), clock=1)
    seen: list[int] = []
    after = fedavg(
        fed,
        state,
        training,
        fed.clients,
        watch=lambda _round, _start, reply: seen.append(reply.client),
        replace_task=lambda task, c: Away(task.local) if c == 1 else task,
    )
    assert values([after]) == pytest.approx([(0.25 - 0.5 + 1.5) / 3])
    assert sorted(seen) == [0, 1, 2]
    assert {(type(t), tuple(who), t.local.lr) for t, who, _ in fed.asked} == {
        (Squares, (0, 2), 0.25),
        (Away, (1,), 0.25),
    }


def test_a_replacement_that_changes_nothing_asks_one_question() -> None:
    fed = squares_world([1.0], [2.0])
    fedavg(fed, w(0.0), Training(Squares(), 1), fed.clients, replace_task=lambda task, _: replace(task))
    assert [who for _, who, _ in fed.asked] == [[0, 1]]


def test_only_the_cohort_is_asked_and_another_one_each_round() -> None:
    fed = squares_world(*[[float(k)] for k in range(10)])
    training = Training(Squares(whole_batches(1.0)), 20, clients_per_round=3)
    found = values(rounds(20, fed, w(0.0), training, range(2, 10)))
    cohorts = [who for _, who, _ in fed.asked]
    assert all(len(set(who)) == 3 and set(who) <= set(range(2, 10)) for who in cohorts)
    assert len({tuple(who) for who in cohorts}) > 5
    assert found == pytest.approx([sum(who) / 3 for who in cohorts])


@settings(max_examples=60)
@given(
    clients=st.lists(st.integers(0, 99), unique=True, min_size=1, max_size=20),
    size=st.integers(0, 25),
    seed=st.integers(0, 2**62),
)
def test_a_cohort_is_seeded_of_its_size_and_in_order(clients: list[int], size: int, seed: int) -> None:
    drawn = cohort(clients, size, seed)
    assert drawn == cohort(clients, size, seed)
    assert len(drawn) == (min(size, len(clients)) if size else len(clients))
    places = [clients.index(c) for c in drawn]
    assert places == sorted(set(places))


def test_every_client_has_the_same_chance_to_be_in_a_cohort() -> None:
    draws = 600
    counts = torch.zeros(6)
    for seed in range(draws):
        counts[cohort(range(6), 2, seed)] += 1
    # Six binomials with p = 1/3: five standard deviations on either side.
    assert bool(((counts - draws / 3).abs() < 5 * math.sqrt(draws * 2 / 9)).all())


def test_cross_entropy_is_torchs_for_each_example_and_the_mean_over_positions() -> None:
    logits, labels = torch.randn(4, 7, 5, dtype=torch.float64), torch.randint(5, (4, 7))
    plain = cross_entropy(logits[:, 0], labels[:, 0])
    torch.testing.assert_close(plain, functional.cross_entropy(logits[:, 0], labels[:, 0], reduction="none"))
    expected = [functional.cross_entropy(z, y).item() for z, y in zip(logits, labels, strict=True)]
    assert cross_entropy(logits, labels).tolist() == pytest.approx(expected)


def test_training_learns_the_toy_classes(
    toy_model: FunctionalModel, toy_data: FederatedData, toy_start: Params
) -> None:
    fed = Counting(toy_model, toy_data)
    training = Training(Learn(Local(batch_size=8, lr=0.1)), 12)
    *_, last = rounds(12, fed, State(toy_start), training, fed.clients)

    def accuracy(params: Params) -> float:
        return float((toy_model(params, toy_data.dataset.test_x).argmax(1) == toy_data.dataset.test_y).double().mean())

    assert accuracy(toy_start) < 0.4 < 0.6 < accuracy(last.params)
