# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from fedquit.core import ClientId, Params, Request, State
from fedquit.core.fedavg import Learn
from fedquit.methods.mode import Guide, MoDe
from fedquit.running.runner import run
from methods.method_world import (
    LOCAL,
    Line,
    Question,
    Scripted,
    batch,
    close,
    column,
    numbers,
    same,
    trained,
    vec,
    work,
)
from worlds import tiny

LEAVES = Request((0,))
EXAMPLES = {0: 4, 1: 1, 2: 3}


def answers(question: Question, client: ClientId) -> Params:
    """Degrading clients answer 4 and 8, whatever they get; guided ones move by 1, 2 and (the leaving one) -10."""
    if "degraded" in question.sent or question.task.local.lr != LOCAL.lr:
        return vec(float(question.sent["start"]["w"]) + {0: -10.0, 1: 1.0, 2: 2.0}[client])
    return vec({1: 4.0, 2: 8.0}[client])


def test_a_round_degrades_by_momentum_and_then_guides() -> None:
    fed = Scripted(answers, EXAMPLES)
    what = trained(vec(1), initial=vec(-5), examples=EXAMPLES)
    state = MoDe().unlearn(fed, State(vec(1), clock=4), what, LEAVES)
    degrade, retained, target = fed.asked
    # The degraded model is (1 * 4 + 3 * 8) / 4 = 7; the mix is 0.95 * 1 + 0.05 * 7 = 1.3.
    same(degrade.sent["start"], vec(-5))
    close(dict(state.kept["degraded"]), vec(7))
    close(dict(retained.sent["start"]), vec(1.3))
    close(dict(target.sent["start"]), vec(1.3))
    close(dict(target.sent["degraded"]), vec(7))
    # All replies count by their examples: 1.3 + (1 * 1 + 3 * 2 + 4 * -10) / 8.
    close(state.params, vec(1.3 - 33 / 8))
    assert (state.round, state.clock) == (1, 5), "everybody trained, so the schedule goes on"


def test_who_is_asked_for_what() -> None:
    fed = Scripted(answers, EXAMPLES)
    MoDe().unlearn(fed, State(vec(1), clock=4), trained(vec(1), examples=EXAMPLES), LEAVES)
    assert [(type(q.task), q.clients, q.split) for q in fed.asked] == [
        (Learn, (1, 2), "retain"),
        (Learn, (1, 2), "retain"),
        (Guide, (0,), "forget"),
    ]
    assert "degraded" not in fed.asked[0].sent


def test_the_degraded_model_goes_on_from_round_to_round_and_stops_after_some() -> None:
    fed = Scripted(answers, EXAMPLES)
    method, what = MoDe(degradation_rounds=2), trained(vec(1), examples=EXAMPLES)
    before = State(vec(1), round=1, kept={"degraded": vec(5)})
    second = method.unlearn(fed, before, what, LEAVES)
    same(fed.asked[0].sent["start"], vec(5))
    assert len(fed.asked) == 3
    fed.asked.clear()
    third = method.unlearn(fed, second, what, LEAVES)
    assert [type(q.task) for q in fed.asked] == [Learn, Guide], "nobody degrades any more"
    same(fed.asked[0].sent["start"], second.params)  # and nothing is mixed in
    same(dict(fed.asked[1].sent["degraded"]), dict(second.kept["degraded"]))
    same(dict(third.kept["degraded"]), dict(second.kept["degraded"]))
    assert third.kept.keys() == {"degraded"}


def test_the_rounds_are_ten_of_which_six_degrade() -> None:
    method = MoDe()
    assert method.rounds(trained(vec(0)), LEAVES) == 10
    degrading = []
    for r in range(10):
        fed = Scripted(answers, EXAMPLES)
        method.unlearn(fed, State(vec(1), round=r), trained(vec(1), examples=EXAMPLES), LEAVES)
        degrading.append(len(fed.asked) == 3)
    assert degrading == [True] * 6 + [False] * 4


@pytest.mark.parametrize(("preset", "retained", "target"), [("", 5e-4, LOCAL.lr), ("swapped", LOCAL.lr, 5e-4)])
def test_one_of_the_two_rates_is_that_of_training_without_decay(preset: str, retained: float, target: float) -> None:
    method = MoDe(**MoDe.presets[preset]) if preset else MoDe()
    fed = Scripted(lambda question, client: question.sent["start"], EXAMPLES)
    method.unlearn(fed, State(vec(1), clock=4), trained(vec(1), examples=EXAMPLES), LEAVES)
    assert [q.task.local.lr for q in fed.asked] == [LOCAL.lr, retained, target]
    assert {(q.task.local.epochs, q.task.local.batch_size) for q in fed.asked} == {(LOCAL.epochs, LOCAL.batch_size)}


def test_both_rates_can_be_given() -> None:
    fed = Scripted(lambda question, client: question.sent["start"], EXAMPLES)
    method = MoDe(retained_lr=0.03, target_lr=0.07)
    method.unlearn(fed, State(vec(1)), trained(vec(1), examples=EXAMPLES), LEAVES)
    assert [q.task.local.lr for q in fed.asked] == [LOCAL.lr, 0.03, 0.07]


def test_the_leaving_client_learns_the_most_likely_class_of_the_degraded_model() -> None:
    sent = {"start": vec(0, 0), "degraded": vec(-1, 1)}
    # At x = 1 the degraded model says class 1, at x = -2 class 0; the own labels (0 and 1) do not count.
    params = vec(math.log(3), 0)
    found = Guide().loss(Line(), params, sent, batch(column(1.0, -2.0), [0, 1]))
    # At x = 1: p = (3/4, 1/4), so log 4. At x = -2: p_0 = (1/9) / (1/9 + 1) = 1/10, so log 10.
    torch.testing.assert_close(found, numbers(math.log(4), math.log(10)), rtol=0, atol=1e-12)


def test_pseudo_labels_of_sequences_are_one_for_each_position() -> None:
    logits = torch.zeros(1, 3, 2).double()  # an embedding of positions: the model ignores x
    sent = {"start": {"w": logits}, "degraded": {"w": logits + torch.tensor([0.0, 1.0])}}

    class Table(Line):
        def __call__(self, params: Params, x: torch.Tensor) -> torch.Tensor:
            return params["w"].expand(len(x), 3, 2)

    found = Guide().loss(Table(), {"w": logits}, sent, batch(column(1.0, 2.0), [0, 0]))
    torch.testing.assert_close(found, numbers(math.log(2), math.log(2)))


def test_a_guided_step_in_numbers() -> None:
    task = Guide(LOCAL)
    # From (0, 0) towards class 1 at x = 2: the gradient is (p_0, p_1 - 1) x = (1, -1); the rate is 0.5, two epochs.
    first = 0.5 * 2 * 0.5
    p0 = math.exp(-first * 2) / (math.exp(-first * 2) + math.exp(first * 2))
    second = first + 0.5 * 2 * p0
    close(work(Line(), task, column(2.0), [0], start=vec(0, 0), degraded=vec(0, 1)), vec(-second, second))


def test_for_samples_the_client_stays_and_is_guided_on_the_marked_ones_alone() -> None:
    fed = Scripted(lambda question, client: question.sent["start"], EXAMPLES)
    MoDe().unlearn(fed, State(vec(1)), trained(vec(1), examples=EXAMPLES), Request((0,), samples=True))
    assert [(q.clients, q.split) for q in fed.asked] == [((0, 1, 2), "retain"), ((0, 1, 2), "retain"), ((0,), "forget")]


def test_partial_participation_is_that_of_training_and_the_same_clients_degrade_and_are_guided() -> None:
    fed = Scripted(examples=dict.fromkeys(range(9), 1))
    MoDe().unlearn(fed, State(vec(1)), trained(vec(1), per_round=3), LEAVES)
    degrading, retained, target = (q.clients for q in fed.asked)
    assert degrading == retained
    assert len(retained) == 3
    assert 0 not in retained
    assert target == (0,)


def test_several_leaving_clients_are_guided_together() -> None:
    fed = Scripted(lambda question, client: question.sent["start"], EXAMPLES)
    MoDe().unlearn(fed, State(vec(1)), trained(vec(1), examples=EXAMPLES), Request((0, 2)))
    assert [q.clients for q in fed.asked] == [(1,), (1,), (0, 2)]


def test_a_whole_run_costs_what_the_paper_says(tmp_path: Path) -> None:
    recipe = tiny(method={"name": "mode"}, recover={"max_rounds": 1})
    rows = {r["phase"]: r for r in run(recipe, tmp_path / "a")["rows"]}
    # Six rounds of the three who stay, ten of all four: with ten clients that would be 154.
    assert rows["unlearned"]["client_epochs"] == 6 * 3 + 10 * 4
    assert rows["unlearned"]["server_storage_bytes"] == 2 * rows["original"]["server_storage_bytes"]
