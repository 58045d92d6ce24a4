# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from fedquit.core import Batch, Local, Model, Params, Program, Reply, Request, Sent, Split, State, Task
from fedquit.core.fedavg import Learn
from fedquit.core.params import mix
from fedquit.data.federated import Dataset, FederatedData
from fedquit.engine import SequentialEngine
from fedquit.errors import RequestError, UnknownNameError
from fedquit.methods.fedau import FedAU, LearnBoth, SendHead, TrainHead, head_names, random_labels
from fedquit.models import FunctionalModel
from fedquit.running.runner import run
from fedquit.running.session import Session
from fedquit.running.setup import build_setup
from methods.method_world import (
    LOCAL,
    BodyAndHead,
    Scripted,
    batch,
    close,
    column,
    numbers,
    same,
    served,
    trained,
    work,
)
from worlds import tiny

LEAVES = Request((0,))
AUTHORS = FedAU(**FedAU.presets["authors"])


def net(body: float = 1.0, weight: float = 0.0, bias: float = 0.0) -> Params:
    return {
        "body": numbers(body, body),
        "head.weight": torch.full((2, 2), weight, dtype=torch.float64),
        "head.bias": numbers(bias, bias),
    }


def head(weight: float, bias: float) -> Params:
    return {"head.weight": torch.full((2, 2), weight, dtype=torch.float64), "head.bias": numbers(bias, bias)}


# The mix


@pytest.mark.parametrize("method", [FedAU(weight=0.75), FedAU(when="during", weight=0.75)])
def test_the_heads_are_mixed_and_the_body_is_left_bit_for_bit(method: FedAU) -> None:
    fed = Scripted(lambda question, client: head(4, -8))
    state = method.unlearn(fed, State(net(0.1, 8, 16), clock=4), trained(net()), LEAVES)
    # 0.25 * 8 + 0.75 * 4 and 0.25 * 16 - 0.75 * 8
    close(state.params, net(0.1, 5, -2))
    assert torch.equal(state.params["body"], net(0.1)["body"])
    assert list(state.params) == list(net())
    assert (state.round, state.clock) == (1, 4)


def test_the_weights_are_those_of_the_port_and_of_the_authors_code() -> None:
    fed = Scripted(lambda question, client: head(1, 1))
    close(FedAU().unlearn(fed, State(net()), trained(net()), LEAVES).params, net(1, 0.96, 0.96))
    close(AUTHORS.unlearn(fed, State(net()), trained(net()), LEAVES).params, net(1, 0.9, 0.9))


@pytest.mark.parametrize("when", ["afterwards", "during"])
def test_several_clients_heads_count_alike_whatever_their_examples(when: str) -> None:
    method = FedAU(when=when, weight=1.0)  # type: ignore[arg-type]
    fed = Scripted(lambda question, client: head(2.0 * client, 1), {0: 99, 1: 1, 2: 5})
    state = method.unlearn(fed, State(net()), trained(net()), Request((0, 1)))
    close(state.params, net(1, 1, 1))  # (0 + 2) / 2
    assert [q.clients for q in fed.asked] == [(0, 1)]


# The head


def test_the_head_is_the_last_layer_unless_named() -> None:
    assert head_names(net(), "") == ["head.weight", "head.bias"]
    assert head_names(net(), "head.w") == ["head.weight"]
    assert head_names({"a.0.weight": numbers(1), "a.1.weight": numbers(1), "a.1.bias": numbers(1)}, "") == [
        "a.1.weight",
        "a.1.bias",
    ]
    assert head_names(net(), "body") == ["body"]


def test_an_unknown_head_is_answered_with_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown head 'haed.': did you mean 'head.'\?"):
        head_names(net(), "haed.")
    with pytest.raises(UnknownNameError, match="unknown head"):
        FedAU(head="nothing").unlearn(Scripted(), State(net()), trained(net()), LEAVES)


def test_a_named_head_alone_is_mixed() -> None:
    fed = Scripted(lambda question, client: {"body": numbers(3, 3)})
    state = FedAU(head="body", weight=0.5).unlearn(fed, State(net(1, 7, 7)), trained(net()), LEAVES)
    close(state.params, net(2, 7, 7))
    assert fed.asked[0].sent["head"].keys() == {"body"}


# Afterwards


def test_afterwards_the_leaving_client_trains_a_fresh_head_at_the_last_rate_of_training() -> None:
    fed = Scripted(lambda question, client: head(0, 0))
    local = Local(2.0, 8, "adam", 0.5, momentum=0.9, weight_decay=0.1)
    FedAU().unlearn(fed, State(net(), clock=4), trained(net(), local=local), LEAVES)
    (question,) = fed.asked
    assert (question.clients, question.split) == ((0,), "forget")
    assert question.task == TrainHead(Local(10.0, 32, "adam", 0.5**4, momentum=0.9, weight_decay=0.1))
    assert question.sent.keys() == {"start", "head"}


@pytest.mark.parametrize(
    ("given", "optimizer", "lr"),
    [
        ({}, "adamw", 0.5**4),
        ({"optimizer": "sgd"}, "sgd", 0.5**4),
        ({"lr": 0.3}, "adamw", 0.3),
        ({"optimizer": "adam", "lr": 0.3}, "adam", 0.3),
    ],
)
def test_the_head_s_optimizer_and_rate_are_those_of_training_unless_given(
    given: dict[str, Any], optimizer: str, lr: float
) -> None:
    fed = Scripted(lambda question, client: head(0, 0))
    local = Local(2.0, 8, "adamw", 0.5, weight_decay=0.1)
    FedAU(**given).unlearn(fed, State(net(), clock=4), trained(net(), local=local), LEAVES)
    assert fed.asked[0].task.local == Local(10.0, 32, optimizer, lr, weight_decay=0.1)


def test_where_training_uses_sgd_without_momentum_the_head_is_trained_as_before() -> None:
    fed = Scripted(lambda question, client: head(0, 0))
    local = Local(2.0, 8, "sgd", 0.5, weight_decay=0.1, clip=5.0)
    FedAU().unlearn(fed, State(net(), clock=4), trained(net(), local=local), LEAVES)
    assert fed.asked[0].task.local == Local(10.0, 32, "sgd", 0.5**4, weight_decay=0.1, clip=5.0)


CLASSES = 20
ADAMW = Local(1.0, 8, "adamw", 3e-4, weight_decay=1e-3)  # as MiT-B0 is trained


@dataclass(frozen=True)
class WideHead:
    """Features as they come, and a head for twenty classes."""

    def init(self, seed: int) -> Params:
        zero = torch.zeros(CLASSES, CLASSES, dtype=torch.float64)
        return {"body": torch.ones(CLASSES).double(), "head.weight": zero, "head.bias": zero[0]}

    def __call__(self, params: Params, x: Tensor) -> Tensor:
        return (x * params["body"]) @ params["head.weight"].T + params["head.bias"]


def auxiliary_head(method: FedAU, request: Request) -> tuple[Params, Params, FederatedData]:
    """The fresh head, what the leaving client makes of it after AdamW training, and the data."""
    generator = torch.Generator().manual_seed(3)
    y = torch.arange(800) % CLASSES
    x = torch.eye(CLASSES, dtype=torch.float64)[y] + 0.1 * torch.randn(800, CLASSES, generator=generator).double()
    data = FederatedData(Dataset(x, y, x, y, CLASSES), {0: torch.arange(0, 400), 1: torch.arange(400, 800)})
    data = data.mark(request, {0: torch.arange(0, 200)} if request.samples else None)
    session = Session(SequentialEngine(WideHead(), data, {}), 0, data.clients)
    session.enter("unlearn-0", 0)
    model = WideHead().init(0)
    fresh: list[Params] = []

    @dataclass
    class Spy(Scripted):
        def run(
            self, task: Task | Program, clients: Sequence[int], *, split: Split = "all", **sent: Params
        ) -> Iterator[Reply]:
            fresh.append(sent["head"])
            return session.run(task, clients, split=split, **sent)

    mixed = method.unlearn(Spy(), State(model, clock=1), trained(model, local=ADAMW), request).params
    return fresh[0], {n: mixed[n] for n in fresh[0]}, data


@pytest.mark.parametrize(("optimizer", "learns"), [("", True), ("sgd", False)])
def test_after_training_with_adamw_the_auxiliary_head_learns_what_sgd_at_that_rate_does_not(
    optimizer: str, learns: bool
) -> None:
    """On the samples that stay the labels are true: a head that learned knows them, and one that did not guesses."""
    method = FedAU(weight=1.0, batch_size=4, optimizer=optimizer)
    _, learned, data = auxiliary_head(method, Request((0,), samples=True))
    kept = data.view(0, "retain")
    logits = WideHead()({**WideHead().init(0), **learned}, data.x[kept])
    accuracy = float((logits.argmax(-1) == data.y[kept]).double().mean())
    assert (accuracy > 0.95) if learns else (accuracy < 4 / CLASSES), accuracy


@pytest.mark.parametrize(("optimizer", "moves"), [("", True), ("sgd", False)])
def test_after_training_with_adamw_the_auxiliary_head_leaves_its_random_draw(optimizer: str, moves: bool) -> None:
    """A head that is 96 % of the draw it began with has learned nothing from random labels either."""
    fresh, learned, _ = auxiliary_head(FedAU(weight=1.0, batch_size=4, optimizer=optimizer), LEAVES)
    drawn = torch.cat([p.flatten() for p in fresh.values()])
    ended = torch.cat([p.flatten() for p in learned.values()])
    still = float(torch.nn.functional.cosine_similarity(drawn, ended, 0))
    assert (still < 0.8) if moves else (still > 0.96), still


def test_the_fresh_head_is_small_normal_and_drawn_from_the_server_s_seed() -> None:
    def drawn(seed: int) -> Params:
        big = {"body": numbers(1), "head.weight": torch.zeros(50, 100).double(), "head.bias": torch.zeros(50).double()}
        fed = Scripted(lambda question, client: dict(question.sent["head"]), seed=seed)
        FedAU().unlearn(fed, State(big), trained(big), LEAVES)
        return dict(fed.asked[0].sent["head"])

    weight = drawn(1)["head.weight"]
    assert weight.dtype == torch.float64
    assert abs(float(weight.mean())) < 4 * 0.01 / math.sqrt(5000)
    assert abs(float(weight.std()) - 0.01) < 4 * 0.01 / math.sqrt(2 * 5000)
    assert float(drawn(1)["head.bias"].abs().max()) < 0.05
    same(drawn(1), drawn(1))
    assert not torch.equal(drawn(2)["head.weight"], weight)


def test_only_the_head_is_trained_and_sent_back() -> None:
    task = TrainHead(Local(lr=0.5))
    # The label drawn is random; whichever it is, from a zero head with features (6, 6) the gradient is +-1/2 of them.
    found = work(BodyAndHead(), task, column(3.0), [0], start=net(2, 9, 9), head=head(0, 0))
    assert found.keys() == {"head.weight", "head.bias"}
    torch.testing.assert_close(found["head.bias"].abs(), numbers(0.25, 0.25), rtol=0, atol=1e-12)
    assert float(found["head.bias"].sum()) == 0
    torch.testing.assert_close(found["head.weight"], (6 * found["head.bias"]).unsqueeze(1).expand(2, 2))


def test_examples_to_forget_get_labels_drawn_anew_and_others_keep_their_own() -> None:
    some = batch(column(1.0, 1.0, 1.0), [0, 0, 1], u=[0.9, 0.9, 0.1], fixed=[0.1] * 3, forget=[True, False, True])
    params = {"head.weight": torch.zeros(2, 2).double(), "head.bias": numbers(math.log(3), 0)}  # p = (3/4, 1/4)
    found = TrainHead().loss(BodyAndHead(), params, {"start": net()}, some)
    # Labels: 1 (drawn), 0 (own), 0 (drawn).
    torch.testing.assert_close(found, -torch.log(numbers(1 / 4, 3 / 4, 3 / 4)), rtol=0, atol=1e-12)


def test_for_samples_the_client_works_on_all_of_its_data() -> None:
    fed = Scripted(lambda question, client: head(0, 0))
    FedAU().unlearn(fed, State(net()), trained(net()), Request((0,), samples=True))
    assert fed.asked[0].split == "all"


def test_random_labels_are_uniform_over_all_classes() -> None:
    uniforms = (torch.arange(1000) + 0.5) / 1000
    counts = random_labels(uniforms, torch.zeros(1, 5)).bincount(minlength=5)
    assert counts.tolist() == [200] * 5
    assert random_labels(torch.tensor([0.0, 1.0]), torch.zeros(1, 5)).tolist() == [0, 4], "a rounded 1 is a class too"


def test_marks_reach_every_position_of_a_sequence() -> None:
    class Table(BodyAndHead):
        def __call__(self, params: Params, x: Tensor) -> Tensor:
            return params["head.bias"].expand(len(x), 3, 2)

    some = Batch(
        column(1.0, 1.0),
        torch.tensor([[0, 0, 0], [0, 0, 0]]),
        torch.full((2, 3), 0.9),
        torch.zeros(2, 3),
        torch.tensor([True, False]),
    )
    found = TrainHead().loss(Table(), {"head.bias": numbers(math.log(3), 0)}, {"start": net()}, some)
    torch.testing.assert_close(found, -torch.log(numbers(1 / 4, 3 / 4)), rtol=0, atol=1e-12)


def test_afterwards_it_needs_nothing_of_the_training() -> None:
    assert not FedAU().shapes_training
    assert not FedAU().knows_request
    assert FedAU().training_task(Learn(), 0, LEAVES) == Learn()


# During


def test_during_training_the_leaving_clients_alone_learn_two_heads() -> None:
    task = Learn(LOCAL, remember="own")
    assert AUTHORS.shapes_training
    assert AUTHORS.knows_request
    assert AUTHORS.training_task(task, 1, LEAVES) == task
    found = FedAU(when="during", head="head.", carry=0.25).training_task(task, 0, LEAVES)
    assert found == LearnBoth(LOCAL, remember="own", head="head.", carry=0.25)


def test_for_samples_the_auxiliary_head_is_carried_on_whole() -> None:
    found = AUTHORS.training_task(Learn(LOCAL), 0, Request((0,), samples=True))
    assert found == LearnBoth(LOCAL, carry=1.0), "the authors mix the heads for whole clients only"


def test_the_auxiliary_head_begins_as_the_model_s_own_and_is_carried_on_by_half() -> None:
    task = LearnBoth()
    first = task.begin({"start": net(3, 8, 4)})
    close(
        first,
        {**net(3, 8, 4), "auxiliary:head.weight": head(8, 4)["head.weight"], "auxiliary:head.bias": numbers(4, 4)},
    )
    later = LearnBoth(carry=0.25).begin({"start": net(3, 8, 4), "auxiliary": head(0, 12)})
    # 0.75 * 8 + 0.25 * 0 and 0.75 * 4 + 0.25 * 12
    close(
        later,
        {**net(3, 8, 4), "auxiliary:head.weight": head(6, 6)["head.weight"], "auxiliary:head.bias": numbers(6, 6)},
    )


def test_both_heads_are_learned_one_on_the_own_label_and_one_on_the_fixed_random_label() -> None:
    params = {
        **net(),
        "head.bias": numbers(math.log(3), 0),  # p = (3/4, 1/4)
        "auxiliary:head.weight": torch.zeros(2, 2).double(),
        "auxiliary:head.bias": numbers(math.log(9), 0),  # p = (9/10, 1/10)
    }
    some = batch(column(1.0, 1.0), [0, 1], u=[0.1, 0.1], fixed=[0.9, 0.2], forget=[True, False])
    found = LearnBoth().loss(BodyAndHead(), params, {"start": net()}, some)
    # First: label 0, random label 1. Second: not to be forgotten, so label 1 for both.
    torch.testing.assert_close(found, -torch.log(numbers(3 / 4 / 10, 1 / 4 / 10)), rtol=0, atol=1e-12)


def test_the_body_learns_from_both_heads() -> None:
    def body_gradient(auxiliary: float) -> Tensor:
        params = LearnBoth().begin({"start": net(1, 0.0), "auxiliary": head(0, 0)})
        params["auxiliary:head.weight"] = torch.tensor([[auxiliary, 0], [0, 0]]).double()
        body = params["body"].clone().requires_grad_()
        some = batch(column(1.0), [0], fixed=[0.9], forget=[True])
        LearnBoth().loss(BodyAndHead(), {**params, "body": body}, {"start": net()}, some).sum().backward()
        assert body.grad is not None
        return body.grad

    assert body_gradient(0.0).tolist() == [0, 0]
    assert float(body_gradient(1.0)[0]) > 0, "the logit of class 0 is lowered for the random label 1"


def test_the_auxiliary_head_stays_at_home() -> None:
    task = LearnBoth(remember="own")
    params = {**net(1, 2, 3), "auxiliary:head.weight": head(7, 8)["head.weight"], "auxiliary:head.bias": numbers(8, 8)}
    same(task.answer(params, {}), net(1, 2, 3))
    kept = task.keep(params, {})
    assert kept.keys() == {"own", "auxiliary"}
    same(dict(kept["own"]), net(1, 2, 3))
    same(dict(kept["auxiliary"]), head(7, 8))
    assert LearnBoth().keep(params, {}).keys() == {"auxiliary"}
    assert FedAU.at_home == ("auxiliary",)


SEEN: dict[float, set[int]] = {}


@dataclass(frozen=True)
class Spying(LearnBoth):
    """Writes down which random label each example gets."""

    needs: ClassVar[tuple[str, ...]] = ("auxiliary",)

    def loss(self, model: Model, params: Params, sent: Sent, batch: Batch) -> Tensor:
        losses = super().loss(model, params, sent, batch)
        drawn = random_labels(batch.fixed, torch.zeros(1, 5))
        for example, label in zip(batch.x.flatten(1).sum(1).tolist(), drawn.tolist(), strict=True):
            SEEN.setdefault(example, set()).add(label)
        return losses


def test_an_example_has_the_same_random_label_in_every_epoch_and_round(
    toy_model: FunctionalModel, toy_data: FederatedData, toy_start: Params
) -> None:
    SEEN.clear()
    data = toy_data.mark(Request((3,)))
    session = Session(SequentialEngine(toy_model, data, {}), 5, data.clients)
    for r in range(2):
        session.enter("train", r)
        list(session.run(Spying(Local(epochs=2.0, batch_size=7)), [3], start=toy_start))
    assert len(SEEN) == len(data.view(3, "all")) == 30
    assert all(len(labels) == 1 for labels in SEEN.values())
    assert {label for labels in SEEN.values() for label in labels} == set(range(5)), "every class is among them"


def test_the_head_from_home_is_asked_for_without_training() -> None:
    fed = Scripted(lambda question, client: head(0, 0))
    AUTHORS.unlearn(fed, State(net()), trained(net()), Request((0, 2)))
    (question,) = fed.asked
    assert (question.clients, question.split) == ((0, 2), "forget")
    assert isinstance(question.task, SendHead)
    assert question.task.local.epochs == 0
    found = work(BodyAndHead(), question.task, column(1.0), [0], start=net(1, 2, 3), auxiliary=head(7, 8))
    same(found, head(7, 8))


def test_without_an_auxiliary_head_at_home_a_client_says_so() -> None:
    with pytest.raises(RequestError, match="no auxiliary head at home: FedAU's preset 'authors' must be attached"):
        work(BodyAndHead(), SendHead(Local(epochs=0.0)), column(1.0), [0], start=net())


def test_a_whole_run_with_the_authors_preset_mixes_in_the_head_from_home(tmp_path: Path) -> None:
    setup = build_setup(tiny(method={"name": "fedau", "preset": "authors"}))
    session, state, what = served(setup, tmp_path, Request((1,)))
    homes = session.engine.memory  # type: ignore[attr-defined]
    assert list(homes) == ["1/auxiliary"]
    unlearned = setup.method.unlearn(session, state, what, Request((1,)))
    own = {n: state.params[n] for n in ("head.weight", "head.bias")}
    close({n: unlearned.params[n] for n in own}, mix(homes["1/auxiliary"], own, 0.9))
    assert torch.equal(unlearned.params["body.weight"], state.params["body.weight"])
    rows = {r["phase"]: r for r in run(setup.recipe, tmp_path / "a")["rows"]}
    assert rows["unlearned"]["client_epochs"] == 0
    assert rows["unlearned"]["up_bytes"] == (8 * 3 + 3) * 8, "only the head travels up"
    assert rows["unlearned"]["client_storage_bytes"] == (8 * 3 + 3) * 8
    assert rows["unlearned"]["forget_loss"] > rows["original"]["forget_loss"]


@pytest.mark.parametrize("preset", [{}, {"preset": "authors"}])
def test_a_whole_run_for_samples(preset: dict[str, str], tmp_path: Path) -> None:
    recipe = tiny(method={"name": "fedau", **preset}, request=[{"clients": [0, 1], "samples": 0.5}])
    rows = {r["phase"]: r for r in run(recipe, tmp_path / "a")["rows"]}
    assert rows["unlearned"]["participations"] == 2
    assert rows["unlearned"]["fingerprint"] != rows["original"]["fingerprint"]
