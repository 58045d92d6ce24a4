# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedquit.core import ClientId, Local, Params, Request, State
from fedquit.core.fedavg import Learn
from fedquit.core.params import fingerprint
from fedquit.errors import RequestError
from fedquit.methods.fedosd import FedOSD, Unlikely, flat, orthogonal_to, unflat
from fedquit.running.runner import run
from fedquit.running.setup import build_setup
from methods.method_world import (
    LOCAL,
    Line,
    Question,
    Scripted,
    batch,
    close,
    column,
    moves,
    numbers,
    same,
    trained,
    vec,
)
from worlds import tiny

LEAVES = Request((0,))
AUTHORS = FedOSD(**FedOSD.presets["authors"])


def down(*values: float) -> Params:
    """The move of a client whose update w - w_k is this."""
    return vec(*(-v for v in values))


def test_the_unlearning_cross_entropy_in_numbers() -> None:
    found = Unlikely().loss(Line(), vec(math.log(3), 0), {}, batch(column(1.0, 1.0, 0.0), [0, 1, 0]))
    # p_y = 3/4, 1/4 and 1/2.
    torch.testing.assert_close(found, -torch.log(numbers(5 / 8, 7 / 8, 3 / 4)), rtol=0, atol=1e-12)


def test_it_has_a_bottom_and_a_top() -> None:
    sure = Unlikely().loss(Line(), vec(500, -500), {}, batch(column(1.0, -1.0), [0, 0]))
    torch.testing.assert_close(sure, numbers(math.log(2), 0), rtol=0, atol=1e-12)


def test_descending_it_lowers_the_true_class() -> None:
    w = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    Unlikely().loss(Line(), {"w": w}, {}, batch(column(2.0), [1])).sum().backward()
    # dL/dp = (1/2) / (1 - p/2) = 2/3 at p = 1/2; dp_1/dw = x p (1 - p) (-1, 1) = (-1/2, 1/2).
    torch.testing.assert_close(w.grad, numbers(-1 / 3, 1 / 3), rtol=0, atol=1e-12)


def test_for_sequences_it_is_the_mean_over_the_positions() -> None:
    class Table(Line):
        def __call__(self, params: Params, x: Tensor) -> Tensor:
            return params["w"].expand(len(x), 2, 2)

    logits = torch.tensor([[[math.log(3), 0.0], [0.0, 0.0]]], dtype=torch.float64)
    found = Unlikely().loss(Table(), {"w": logits}, {}, batch(column(1.0), [[0, 0]]))  # type: ignore[list-item]
    torch.testing.assert_close(found, -(torch.log(numbers(5 / 8)) + torch.log(numbers(3 / 4))) / 2)


def test_a_round_in_numbers() -> None:
    fed = Scripted(moves({0: down(3, 4, 0)}, {1: down(1, 0, 0), 2: down(-2, 0, 0)}))
    state = FedOSD().unlearn(fed, State(vec(1, 1, 1), clock=4), trained(vec(1, 1, 1)), LEAVES)
    # Of (3, 4, 0) only (0, 4, 0) is orthogonal to (1, 0, 0) and (-2, 0, 0); at length 5 it is (0, 5, 0).
    close(state.params, vec(1, -4, 1))
    assert [(type(q.task), q.clients, q.split) for q in fed.asked] == [
        (Unlikely, (0,), "forget"),
        (Learn, (1, 2), "retain"),
    ]
    assert (state.round, state.clock) == (1, 4)


def test_the_step_is_orthogonal_to_every_retained_update_and_as_long_as_the_leaving_one() -> None:
    generator = torch.Generator().manual_seed(3)
    examples = dict.fromkeys(range(7), 1)
    scales = [1.0, 0.1, 30.0, 1.0, 5.0, 0.5, 1.0]  # clients with much and little data move by different lengths
    update = {c: scales[c] * torch.randn(40, generator=generator).double() for c in examples}
    update[5] = update[4] + 0.1 * update[5]  # two that nearly agree

    def answer(question: Question, client: ClientId) -> Params:
        return {"w": question.sent["start"]["w"] - update[client]}

    w = {"w": torch.randn(40, generator=generator).double()}
    state = FedOSD().unlearn(Scripted(answer, examples), State(w), trained(w), LEAVES)
    step = w["w"] - state.params["w"]
    for c in range(1, 7):
        assert abs(float(step @ update[c])) < 1e-9 * float(step.norm() * update[c].norm()), c
    torch.testing.assert_close(step.norm(), update[0].norm(), rtol=1e-12, atol=0)
    assert float(step @ update[0]) > 0, "it still descends the leaving client's loss"


def test_equal_updates_of_two_clients_do_no_harm() -> None:
    others = torch.stack([numbers(1, 0, 0), numbers(1, 0, 0), numbers(0, 2, 0), numbers(1, 1, 0), numbers(0, 0, 0)])
    found = orthogonal_to(numbers(1, 2, 2), others)
    torch.testing.assert_close(found, numbers(0, 0, 3), rtol=0, atol=1e-9)


def test_nobody_to_be_orthogonal_to_in_that_direction_leaves_the_step_as_it_is() -> None:
    found = orthogonal_to(numbers(0, 3, 4), torch.stack([numbers(5, 0, 0)]))
    torch.testing.assert_close(found, numbers(0, 3, 4))


def test_clients_without_examples_are_left_out() -> None:
    fed = Scripted(moves({0: down(3, 4)}, {1: down(1, 0), 2: down(0, 0)}), {0: 1, 1: 1, 2: 0})
    state = FedOSD().unlearn(fed, State(vec(0, 0)), trained(vec(0, 0)), LEAVES)
    close(state.params, vec(0, -5))


def test_without_any_data_of_those_who_stay_there_is_nothing_to_be_orthogonal_to() -> None:
    fed = Scripted(moves({0: down(3, 4)}, {1: down(0, 0), 2: down(0, 0)}), {0: 1, 1: 0, 2: 0})
    with pytest.raises(RequestError, match="no client that stays has any data"):
        FedOSD().unlearn(fed, State(vec(0, 0)), trained(vec(0, 0)), LEAVES)


@pytest.mark.parametrize("recovery", ["fedavg", "projected"])
def test_partial_participation_is_that_of_training(recovery: str) -> None:
    fed = Scripted(examples=dict.fromkeys(range(9), 1))
    method, what = FedOSD(recovery=recovery), trained(vec(0, 0), per_round=3)  # type: ignore[arg-type]
    method.unlearn(fed, State(vec(0, 0)), what, LEAVES)
    method.recover(fed, State(vec(0, 0)), what, LEAVES)
    leaving, *staying = (q.clients for q in fed.asked)
    assert leaving == (0,)
    assert [len(clients) for clients in staying] == [3, 3]
    assert not any(0 in clients for clients in staying)


def test_several_leaving_clients_are_refused_unless_allowed() -> None:
    with pytest.raises(RequestError, match=r"defined for one leaving client.*method\.several = true"):
        FedOSD().check(Request((0, 1)))
    FedOSD(several=True).check(Request((0, 1)))
    AUTHORS.check(Request((0, 1)))
    FedOSD().check(Request((0,), samples=True))


def test_several_leaving_clients_count_alike_whatever_their_examples() -> None:
    fed = Scripted(moves({0: down(0, 9, 0), 1: down(4, -1, 0)}, {2: down(0, 0, 1)}), {0: 90, 1: 1, 2: 5})
    state = FedOSD(several=True).unlearn(fed, State(vec(0, 0, 0)), trained(vec(0, 0, 0)), Request((0, 1)))
    close(state.params, vec(-2, -4, 0))
    assert [q.clients for q in fed.asked] == [(0, 1), (2,)]


def test_the_model_before_unlearning_is_kept_through_all_rounds() -> None:
    fed = Scripted(
        moves({0: down(3, 4)}, {1: down(1, 0), 2: down(1, 0)}, {0: down(0, 1)}, {1: down(1, 0), 2: down(2, 0)})
    )
    first = FedOSD().unlearn(fed, State(vec(1, 1)), trained(vec(7, 7)), LEAVES)
    second = FedOSD().unlearn(fed, first, trained(vec(7, 7)), LEAVES)
    same(dict(first.kept["before"]), vec(1, 1))
    same(dict(second.kept["before"]), vec(1, 1))
    close(second.params, vec(1, -5))


def test_the_rate_is_fixed_or_that_of_training_or_the_authors_with_its_own_decay() -> None:
    def local(method: FedOSD, round: int) -> Local:
        fed = Scripted(moves({0: down(0, 1)}, {1: down(1, 0), 2: down(1, 0)}))
        what = trained(vec(0, 0), local=Local(2.0, 8, "adam", 0.5, momentum=0.9, weight_decay=0.1))
        method.unlearn(fed, State(vec(0, 0), clock=2, round=round), what, LEAVES)
        (locals_,) = {q.task.local for q in fed.asked}
        return locals_

    assert local(FedOSD(), 0) == local(FedOSD(), 3) == Local(2.0, 8, "sgd", 1e-3), "plain descent for both"
    assert local(FedOSD(lr=0.0), 0) == local(FedOSD(lr=0.0), 3) == Local(2.0, 8, "sgd", 0.125)
    assert local(FedOSD(batch_size=5), 0).batch_size == 5
    authors = local(AUTHORS, 3)
    assert authors.batch_size == 200
    assert authors.lr == pytest.approx(4e-4 * 0.999**3)
    assert (FedOSD().rounds(trained(vec(0)), LEAVES), AUTHORS.rounds(trained(vec(0)), LEAVES)) == (10, 100)


def test_recovery_can_be_fedavg_with_weights() -> None:
    examples = {0: 5, 1: 1, 2: 3}
    fed = Scripted(moves({1: vec(4, 0), 2: vec(0, 4)}), examples)
    state = State(vec(2, 0), clock=4, kept={"before": vec(0, 0)})
    found = FedOSD(recovery="fedavg").recover(fed, state, trained(vec(0, 0), examples=examples), LEAVES)
    close(found.params, vec(3, 3))
    assert (found.clock, found.round, dict(found.kept)) == (5, 1, {})
    assert fed.asked[0].task.local == Local(LOCAL.epochs, LOCAL.batch_size, "sgd", LOCAL.lr / 16)
    assert fed.asked[0].split == "retain", "samples that are to be forgotten are not learnt again"


def test_projected_recovery_takes_no_step_back_and_keeps_each_client_s_length() -> None:
    examples = {0: 5, 1: 1, 2: 3}
    fed = Scripted(moves({1: down(3, 4), 2: down(-1, 0.001)}), examples)
    method = FedOSD(recovery_lr=1e-6, lr_decay=0.5)
    state = State(vec(2, 0), clock=4, round=3, kept={"before": vec(-5, 0)})
    found = method.recover(fed, state, trained(vec(-5, 0), examples=examples), LEAVES)
    # (3, 4) without its part along (7, 0), at length 5, is (0, 5); (-1, 0.001) becomes (0, 1.0000005). Unweighted.
    close(found.params, vec(2, -(5 + math.hypot(1, 0.001)) / 2))
    same(dict(found.kept["before"]), vec(-5, 0))
    assert (found.clock, found.round) == (5, 4)
    (question,) = fed.asked
    assert (question.clients, question.split) == ((1, 2), "retain")
    assert question.task.local.lr == 1e-6 * 0.5**3


def test_projected_recovery_steps_as_training_does_unless_it_has_a_rate_of_its_own() -> None:
    def local(method: FedOSD) -> Local:
        fed = Scripted(moves({1: down(3, 4), 2: down(1, 0)}))
        what = trained(vec(0, 0), local=Local(2.0, 8, "adam", 0.5, momentum=0.9, weight_decay=0.1))
        method.recover(fed, State(vec(2, 0), clock=2, kept={"before": vec(0, 0)}), what, LEAVES)
        return fed.asked[0].task.local

    assert local(FedOSD()) == Local(2.0, 8, "adam", 0.125), "neither momentum nor weight decay, as in the unlearning"
    assert local(FedOSD(recovery_lr=0.25)) == Local(2.0, 8, "sgd", 0.25)
    assert local(AUTHORS) == Local(2.0, 200, "sgd", 1e-6)


def test_projected_recovery_from_the_model_before_unlearning_has_no_way_back_to_bar() -> None:
    fed = Scripted(moves({1: down(3, 4), 2: down(1, 0)}))
    state = State(vec(2, 0), kept={"before": vec(2, 0)})
    found = FedOSD().recover(fed, state, trained(vec(2, 0)), LEAVES)
    close(found.params, vec(0, -2))


def test_projected_recovery_without_a_kept_model_takes_the_one_that_was_trained() -> None:
    fed = Scripted(moves({1: down(3, 4), 2: down(3, 4)}))
    found = FedOSD().recover(fed, State(vec(2, 0)), trained(vec(-5, 0)), LEAVES)
    close(found.params, vec(2, -5))
    same(dict(found.kept["before"]), vec(-5, 0))


def test_a_vector_of_all_parameters_there_and_back() -> None:
    like: Params = {"a": torch.tensor([[1.0, 2.0]]), "b": torch.tensor(3.0)}
    vector = flat(like)
    assert vector.dtype == torch.float64
    assert vector.tolist() == [1, 2, 3]
    same(unflat(vector, like), like)


def test_the_authors_preset_runs_with_several_clients(tmp_path: Path) -> None:
    recipe = tiny(method={"name": "fedosd", "preset": "authors", "unlearning_rounds": 2}, request=[{"clients": [0, 1]}])
    rows = {r["phase"]: r for r in run(recipe, tmp_path / "a")["rows"]}
    assert rows["unlearned"]["participations"] == 8
    assert rows["unlearned"]["server_storage_bytes"] == 2 * rows["original"]["server_storage_bytes"]
    assert rows["recovered"]["fingerprint"] != rows["unlearned"]["fingerprint"]
    assert fingerprint(build_setup(recipe).initial) != rows["recovered"]["fingerprint"]
