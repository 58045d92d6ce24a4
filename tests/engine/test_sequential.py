# SPDX-License-Identifier: Apache-2.0
"""The reference meaning of a task."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

from by_hand import run_client
from fedquit.core import SERVER, Batch, Local, Memory, Model, Params, Request, Sent, Split, Task
from fedquit.core.fedavg import Learn
from fedquit.core.params import fingerprint
from fedquit.data.federated import FederatedData
from fedquit.engine import Address, Ask, SequentialEngine
from fedquit.engine.plan import make_plan
from fedquit.errors import UnknownNameError
from fedquit.models import FunctionalModel
from fedquit.models.small import cnn

HERE = Address(seed=5, phase="train", round=2, question=1)


def torch_optimizer(params: list[nn.Parameter], local: Local) -> torch.optim.Optimizer:
    if local.optimizer == "sgd":
        return torch.optim.SGD(params, local.lr, momentum=local.momentum, weight_decay=local.weight_decay)
    if local.optimizer == "adam":
        return torch.optim.Adam(params, local.lr, eps=1e-7, weight_decay=local.weight_decay)
    return torch.optim.AdamW(params, local.lr, eps=1e-7, weight_decay=local.weight_decay)


def torch_loop(start: Params, x: Tensor, y: Tensor, local: Local, seed: int) -> tuple[Params, float]:
    """How anybody would write it: a module, an optimizer, and the same batches."""
    module = cnn((1, 6, 6), 5, width=4).double()
    module.load_state_dict(start)
    optimizer = torch_optimizer(list(module.parameters()), local)
    losses = []
    for step in make_plan(len(y), local, seed).steps:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(module(x[step]), y[step])
        loss.backward()
        if local.clip:
            nn.utils.clip_grad_norm_(module.parameters(), local.clip)
        optimizer.step()
        losses.append(loss.item())
    return {n: p.detach() for n, p in module.named_parameters()}, sum(losses) / len(losses)


def assert_close(a: Params, b: Params) -> None:
    assert a.keys() == b.keys()
    for n, p in a.items():
        torch.testing.assert_close(p, b[n], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "local",
    [
        Local(epochs=2, batch_size=8),
        Local(epochs=2, batch_size=7, momentum=0.9, weight_decay=1e-3),
        Local(epochs=1.5, batch_size=4, optimizer="adam", lr=0.01, weight_decay=1e-2),
        Local(epochs=1, batch_size=5, optimizer="adamw", lr=0.01, weight_decay=1e-2, clip=0.3),
        Local(epochs=3, batch_size=100, clip=0.5),
        Local(epochs=1, batch_size=1, lr=0.02),
    ],
    ids=str,
)
@pytest.mark.parametrize("client", [0, 4])
def test_a_client_trains_like_a_plain_torch_loop(
    toy_model: FunctionalModel, toy_data: FederatedData, toy_start: Params, local: Local, client: int
) -> None:
    mine = toy_data.train[client]
    x, y = toy_data.x[mine], toy_data.y[mine]
    before = fingerprint(toy_start)
    params, loss = run_client(toy_model, Learn(local), x, y, {"start": toy_start}, seed=3)
    expected, expected_loss = torch_loop(toy_start, x, y, local, seed=3)
    assert_close(params, expected)
    assert loss == pytest.approx(expected_loss, rel=1e-12)
    assert fingerprint(toy_start) == before != fingerprint(params)
    assert not any(p.requires_grad for p in [*params.values(), *toy_start.values()])


def test_a_client_without_data_answers_what_it_was_sent(toy_model: FunctionalModel, toy_start: Params) -> None:
    x, y = torch.zeros(0, 1, 6, 6, dtype=torch.float64), torch.zeros(0, dtype=torch.long)
    params, loss = run_client(toy_model, Learn(), x, y, {"start": toy_start}, seed=0)
    assert fingerprint(params) == fingerprint(toy_start)
    assert math.isnan(loss)


def test_a_client_with_one_example_takes_one_step_for_each_epoch(
    toy_model: FunctionalModel, toy_data: FederatedData, toy_start: Params
) -> None:
    x, y = toy_data.x[:1], toy_data.y[:1]
    local = Local(epochs=3, batch_size=8)
    params, _ = run_client(toy_model, Learn(local), x, y, {"start": toy_start}, seed=0)
    assert_close(params, torch_loop(toy_start, x, y, local, seed=0)[0])


def test_half_an_epoch_of_two_is_the_first_batch(
    toy_model: FunctionalModel, toy_data: FederatedData, toy_start: Params
) -> None:
    local = Local(epochs=0.5, batch_size=8)
    mine = toy_data.train[2][:16]
    params, _ = run_client(toy_model, Learn(local), toy_data.x[mine], toy_data.y[mine], {"start": toy_start}, seed=1)
    first = mine[make_plan(16, local, seed=1).steps[0]]
    whole = Local(epochs=1, batch_size=8)
    x, y = toy_data.x[first], toy_data.y[first]
    expected, _ = run_client(toy_model, Learn(whole), x, y, {"start": toy_start}, seed=9)
    assert_close(params, expected)


def test_an_unknown_optimizer_offers_the_nearest(
    toy_model: FunctionalModel, toy_data: FederatedData, toy_start: Params
) -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'sgd'"):
        run_client(toy_model, Learn(Local(optimizer="sdg")), toy_data.x, toy_data.y, {"start": toy_start}, seed=0)


@dataclass(frozen=True)
class Frozen(Learn):
    """After every step, biases go back to where they started."""

    def after_step(self, new: Params, old: Params, sent: Sent) -> Params:
        return {n: sent["start"][n] * 1 if n.endswith("bias") else p for n, p in new.items()}


@dataclass(frozen=True)
class Halved(Learn):
    """After every step, only half of it is taken."""

    def after_step(self, new: Params, old: Params, sent: Sent) -> Params:
        return {n: (p + old[n]) / 2 for n, p in new.items()}


def one_client(model: Model, data: FederatedData, task: Task, start: Params, homes: Memory | None = None) -> Params:
    engine = SequentialEngine(model, data, {} if homes is None else homes)
    (reply,) = engine.run(Ask(task, [3], "all", {"start": start}, HERE))
    return reply.params


def test_after_step_has_the_last_word_on_every_step(
    toy_model: FunctionalModel, toy_data: FederatedData, toy_start: Params
) -> None:
    local = Local(epochs=2, batch_size=7)
    frozen = one_client(toy_model, toy_data, Frozen(local), toy_start)
    for n, p in frozen.items():
        assert torch.equal(p, toy_start[n]) == n.endswith("bias")
    halved = one_client(toy_model, toy_data, Halved(local), toy_start)
    slower = one_client(toy_model, toy_data, Learn(replace(local, lr=local.lr / 2)), toy_start)
    assert_close(halved, slower)


@dataclass(frozen=True)
class Head(Learn):
    """Trains the last layer only, and answers with that."""

    def begin(self, sent: Sent) -> Params:
        return {n: p for n, p in sent["start"].items() if n.startswith("7.")}

    def loss(self, model: Model, params: Params, sent: Sent, batch: Batch) -> Tensor:
        return super().loss(model, {**sent["start"], **params}, sent, batch)


def test_a_task_may_train_some_parameters_only(
    toy_model: FunctionalModel, toy_data: FederatedData, toy_start: Params
) -> None:
    answer = one_client(toy_model, toy_data, Head(), toy_start)
    assert sorted(answer) == ["7.bias", "7.weight"]
    assert not torch.equal(answer["7.weight"], toy_start["7.weight"])
    module = cnn((1, 6, 6), 5, width=4).double()
    module.load_state_dict(toy_start)
    optimizer = torch.optim.SGD(list(module.parameters())[-2:], lr=0.1)
    mine = toy_data.train[3]
    for step in make_plan(30, Local(), HERE.seed_for(3)).steps:
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(toy_data.x[mine[step]]), toy_data.y[mine[step]]).backward()
        optimizer.step()
    torch.testing.assert_close(answer["7.weight"], list(module.parameters())[-2].detach(), rtol=1e-12, atol=1e-12)


@dataclass(frozen=True)
class Remember(Learn):
    """Answers with the change, keeps the model, and starts from the kept one where there is one."""

    needs: ClassVar[tuple[str, ...]] = ("mine",)

    def begin(self, sent: Sent) -> Params:
        return sent.get("mine", sent["start"])

    def answer(self, params: Params, sent: Sent) -> Params:
        return {n: p - sent["start"][n] for n, p in params.items()}

    def keep(self, params: Params, sent: Sent) -> Mapping[str, Params]:
        return {"mine": params}


def test_answers_go_back_and_keepsakes_stay_with_the_client_that_needs_them(
    toy_model: FunctionalModel, toy_data: FederatedData, toy_start: Params
) -> None:
    homes: Memory = {}
    first = one_client(toy_model, toy_data, Remember(), toy_start, homes)
    trained = one_client(toy_model, toy_data, Learn(), toy_start)
    assert list(homes) == ["3/mine"]
    assert_close(homes["3/mine"], trained)
    assert_close(first, {n: p - toy_start[n] for n, p in trained.items()})
    one_client(toy_model, toy_data, Remember(), toy_start, homes)
    went_on = one_client(toy_model, toy_data, Learn(), trained)
    assert_close(homes["3/mine"], went_on)
    engine = SequentialEngine(toy_model, toy_data, homes)
    (other,) = engine.run(Ask(Remember(), [1], "all", {"start": toy_start}, HERE))
    (plain,) = engine.run(Ask(Learn(), [1], "all", {"start": toy_start}, HERE))
    assert_close(other.params, {n: p - toy_start[n] for n, p in plain.params.items()})


def test_a_client_sees_only_the_memory_that_the_task_needs(
    toy_model: FunctionalModel, toy_data: FederatedData, toy_start: Params
) -> None:
    seen: list[list[str]] = []

    @dataclass(frozen=True)
    class Spy(Learn):
        needs: ClassVar[tuple[str, ...]] = ("b", "missing")

        def begin(self, sent: Sent) -> Params:
            seen.append(sorted(sent))
            return sent["start"]

    homes: Memory = {"3/a": toy_start, "3/b": toy_start, "1/missing": toy_start}
    one_client(toy_model, toy_data, Spy(Local(epochs=0)), toy_start, homes)
    assert seen == [["b", "start"]]


def replies(
    model: Model, data: FederatedData, start: Params, clients: list[int], address: Address = HERE
) -> dict[int, str]:
    engine = SequentialEngine(model, data, {})
    asked = Ask(Learn(Local(batch_size=4)), clients, "all", {"start": start}, address)
    return {r.client: fingerprint(r.params) for r in engine.run(asked)}


def test_the_same_question_gets_the_same_replies_in_the_order_of_asking(
    toy_model: FunctionalModel, toy_data: FederatedData, toy_start: Params
) -> None:
    torch.manual_seed(1)
    some = replies(toy_model, toy_data, toy_start, [3, 0, 4])
    torch.manual_seed(2)
    everybody = replies(toy_model, toy_data, toy_start, [0, 1, 2, 3, 4])
    assert list(some) == [3, 0, 4]
    assert all(everybody[c] == some[c] for c in some), "a reply does not depend on who else is asked"


@pytest.mark.parametrize(
    "other",
    [replace(HERE, seed=6), replace(HERE, phase="recover"), replace(HERE, round=3), replace(HERE, question=2)],
    ids=str,
)
def test_another_place_in_the_run_gives_other_batches(
    toy_model: FunctionalModel, toy_data: FederatedData, toy_start: Params, other: Address
) -> None:
    here = replies(toy_model, toy_data, toy_start, [0, 3])
    there = replies(toy_model, toy_data, toy_start, [0, 3], other)
    assert here[0] != there[0]
    assert here[3] != there[3]


def test_clients_with_the_same_data_get_other_batches(
    toy_model: FunctionalModel, toy_data: FederatedData, toy_start: Params
) -> None:
    twins = replace(toy_data, train={0: toy_data.train[3], 1: toy_data.train[3]})
    both = replies(toy_model, twins, toy_start, [0, 1])
    assert both[0] != both[1]


def test_a_split_decides_which_examples_are_used(
    toy_model: FunctionalModel, toy_data: FederatedData, toy_start: Params
) -> None:
    data = toy_data.mark(Request((3,), samples=True), {3: toy_data.train[3][:12]})
    engine = SequentialEngine(toy_model, data, {})
    sizes: dict[Split, int] = {"all": 30, "forget": 12, "retain": 18}
    for split, expected in sizes.items():
        (reply,) = engine.run(Ask(Learn(), [3], split, {"start": toy_start}, HERE))
        assert reply.examples == expected
        mine = data.view(3, split)
        params, loss = run_client(
            toy_model, Learn(), data.x[mine], data.y[mine], {"start": toy_start}, HERE.seed_for(3)
        )
        assert fingerprint(reply.params) == fingerprint(params)
        assert reply.loss == loss


def test_the_server_works_on_its_public_data(
    toy_model: FunctionalModel, toy_data: FederatedData, toy_start: Params
) -> None:
    (reply,) = SequentialEngine(toy_model, toy_data, {}).run(Ask(Learn(), [SERVER], "all", {"start": toy_start}, HERE))
    assert reply.examples == 12
    ours = toy_data.public
    expected, _ = run_client(
        toy_model, Learn(), toy_data.x[ours], toy_data.y[ours], {"start": toy_start}, HERE.seed_for(SERVER)
    )
    assert fingerprint(reply.params) == fingerprint(expected)


def test_replies_stream_one_client_at_a_time(
    toy_model: FunctionalModel, toy_data: FederatedData, toy_start: Params
) -> None:
    homes: Memory = {}
    stream = SequentialEngine(toy_model, toy_data, homes).run(
        Ask(Remember(), [0, 1, 2], "all", {"start": toy_start}, HERE)
    )
    assert next(stream).client == 0
    assert list(homes) == ["0/mine"], "client 1 has not begun"


def test_a_task_sees_a_uniform_number_for_each_label(toy_model: FunctionalModel, toy_start: Params) -> None:
    seen: list[Tensor] = []

    @dataclass(frozen=True)
    class Spy(Learn):
        def loss(self, model: Model, params: Params, sent: Sent, batch: Batch) -> Tensor:
            seen.append(batch.u)
            assert batch.u.shape == batch.y.shape
            return params["7.bias"].sum() * batch.u.flatten(1).sum(1).double()

    y = torch.zeros(10, 3, dtype=torch.long)
    run_client(toy_model, Spy(Local(batch_size=4)), torch.zeros(10, 1), y, {"start": toy_start}, seed=2)
    assert [tuple(u.shape) for u in seen] == [(4, 3), (4, 3), (2, 3)]
    assert torch.equal(torch.cat(seen), torch.cat(make_plan(10, Local(batch_size=4), 2, (3,)).noise))
