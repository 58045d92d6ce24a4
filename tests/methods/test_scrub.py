# SPDX-License-Identifier: Apache-2.0
"""SCRUB against its paper: the two losses, the alternation of Algorithm 1, and the rewinding of SCRUB+R."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedquit.core import SERVER, Local, Params, Program, Request, State
from fedquit.errors import InputError
from fedquit.methods.scrub import SCRUB, Diverge, Errors, Repair
from fedquit.running.costs import Metered
from fedquit.running.runner import run
from methods.method_world import Line, Question, Scripted, batch, close, column, numbers, trained, vec
from methods.plain_torch import Loss, World, average
from worlds import tiny

OPTIONS: dict[str, Any] = {
    "name": "scrub",
    "max_steps": 2,
    "min_steps": 3,
    "lr": 0.01,
    "weight_decay": 1e-2,
    "alpha": 0.4,
    "gamma": 0.7,
    "temperature": 3.0,
    "batch_size": 5,
    "retain_batch_size": 4,
}


def test_the_losses_by_hand() -> None:
    """With T = 2 and w as logits: the teacher is (9, 1) / 10 at T = 1, so (3, 1) / 4; the student (1, 1) / 2."""
    sent = {"teacher": vec(math.log(9), 0)}
    some = batch(column(1.0), [1])
    kl = 3 / 4 * math.log(3 / 2) + 1 / 4 * math.log(1 / 2)
    away = Diverge(temperature=2.0).loss(Line(), vec(0, 0), sent, some)
    torch.testing.assert_close(away, numbers(-4 * kl), rtol=0, atol=1e-12)
    back = Repair(alpha=0.5, gamma=3.0, temperature=2.0).loss(Line(), vec(0, 0), sent, some)
    torch.testing.assert_close(back, numbers(0.5 * 4 * kl + 3 * math.log(2)), rtol=0, atol=1e-12)


def divergence(teacher: nn.Module, student: nn.Module, x: Tensor, temperature: float) -> Tensor:
    """As anybody writes it: the mean over the batch, times the square of the temperature."""
    with torch.no_grad():
        target = functional.softmax(teacher(x) / temperature, 1)
    known = functional.log_softmax(student(x) / temperature, 1)
    return functional.kl_div(known, target, reduction="batchmean") * temperature**2


def losses(world: World) -> tuple[Loss, Loss]:
    teacher = world.network(world.state.params)

    def away(student: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return -divergence(teacher, student, x, 3.0)

    def back(student: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return 0.4 * divergence(teacher, student, x, 3.0) + 0.7 * functional.cross_entropy(student(x), y)

    return away, back


def locals_of(optimizer: str = "adam", momentum: float = 0.0) -> tuple[Local, Local]:
    return Local(1.0, 5, optimizer, 0.01, momentum, 1e-2), Local(1.0, 4, optimizer, 0.01, momentum, 1e-2)


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
@pytest.mark.parametrize("optimizer", [{}, {"optimizer": "sgd", "momentum": 0.9}], ids=["adam", "sgd"])
def test_whole_clients_alternate_with_those_who_stay(engine: str, optimizer: dict[str, Any], tmp_path: Path) -> None:
    request = Request((1, 3))
    world = World.of(tmp_path, {**OPTIONS, **optimizer}, request, engine={"name": engine})
    states = world.unlearned()
    forget, retain = locals_of(**optimizer)
    away, back = losses(world)
    w = world.state.params
    for number in range(3):
        question = 0
        if number < 2:
            left = {
                c: world.train(w, world.examples(c, "forget"), forget, world.seed(c, number, 0), away)
                for c in request.clients
            }
            w = average(left, world.counts("forget"))
            question = 1
        repaired = {
            c: world.train(w, world.examples(c, "retain"), retain, world.seed(c, number, question), back)
            for c in world.stay
        }
        w = average(repaired, world.counts("retain"))
        close(states[number].params, w, atol=1e-12 if number == 0 else 1e-9)
    assert len(states) == 3
    assert any(not torch.equal(p, world.state.params[n]) for n, p in w.items())


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
def test_a_client_that_gives_up_samples_does_it_all_in_one_visit(engine: str, tmp_path: Path) -> None:
    request = Request((1,), samples=True)
    world = World.of(tmp_path, OPTIONS, request, engine={"name": engine})
    meter = Metered(world.session)
    after = world.setup.method.unlearn(meter, world.state, world.trained, request)
    forget, retain = locals_of()
    away, back = losses(world)
    w = world.state.params
    visit = [("forget", forget, away), ("retain", retain, back)] * 2 + [("retain", retain, back)]
    for part, (split, local, loss) in enumerate(visit):
        w = world.train(w, world.examples(1, split), local, world.seed(1, 0, 0, part), loss)  # type: ignore[arg-type]
    close(after.params, w)
    assert world.setup.method.rounds(world.trained, request) == 1
    model = meter.costs.up_bytes
    assert (meter.costs.participations, meter.costs.client_epochs) == (1, 5.0)
    assert meter.costs.down_bytes == model, "the teacher is the model that the client receives anyway"


def test_who_is_asked_for_what() -> None:
    fed = Scripted(lambda question, client: {"w": question.sent["start"]["w"] + 1})
    method = SCRUB(max_steps=1, min_steps=2)
    state = State(vec(5), clock=4)
    for _ in range(2):
        state = method.unlearn(fed, state, trained(vec(5)), Request((1,)))
    assert [(q.clients, q.split, type(q.task)) for q in fed.asked] == [
        ((1,), "forget", Diverge),
        ((0, 2), "retain", Repair),
        ((0, 2), "retain", Repair),
    ]
    assert [float(q.sent["start"]["w"]) for q in fed.asked] == [5, 6, 7]
    assert [float(q.sent["teacher"]["w"]) for q in fed.asked] == [5, 5, 5], "the model before the first round"
    assert (state.round, state.clock) == (2, 4)
    assert fed.asked[0].task.local == Local(1.0, 32, "adam", 5e-5, 0.0, 5e-4)


def test_a_cohort_of_those_who_stay_repairs() -> None:
    fed = Scripted(examples=dict.fromkeys(range(9), 1))
    SCRUB().unlearn(fed, State(vec(5)), trained(vec(5), per_round=3), Request((1,)))
    assert len(fed.asked[1].clients) == 3
    assert 1 not in fed.asked[1].clients


# SCRUB+R


def rewinding(errors: list[float], reference: float, request: Request) -> tuple[State, Scripted]:
    """Three rounds whose models are 1, 2 and 3, with these errors on the forgotten data."""
    rounds = iter([1.0, 2.0, 3.0])
    left = iter(errors)

    def answer(question: Question, client: int) -> Params:
        if isinstance(question.task, Errors):
            return {"wrong": torch.tensor(reference if client == SERVER else next(left))}
        if isinstance(question.task, Diverge):
            return question.sent["start"]
        return vec(next(rounds))

    fed = Scripted(answer, {0: 1, 1: 1})
    method = SCRUB(max_steps=1, min_steps=3, rewind=True)
    state = State(vec(9))
    for _ in range(method.rounds(trained(vec(9)), request)):
        state = method.unlearn(fed, state, trained(vec(9)), request)
    return state, fed


@pytest.mark.parametrize(
    ("errors", "reference", "chosen"),
    [([0.2, 0.5, 0.9], 0.45, 2.0), ([0.2, 0.5, 0.9], 0.1, 1.0), ([0.2, 0.5, 0.9], 1.0, 3.0)],
)
@pytest.mark.parametrize("samples", [False, True])
def test_rewinding_takes_the_model_whose_error_is_nearest_to_that_of_unseen_data(
    errors: list[float], reference: float, chosen: float, samples: bool
) -> None:
    state, fed = rewinding(errors, reference, Request((1,), samples=samples))
    assert float(state.params["w"]) == chosen
    assert state.kept == {}, "the other models are dropped"
    measured = [(q.clients, q.split, float(q.sent["start"]["w"])) for q in fed.asked if isinstance(q.task, Errors)]
    assert measured == [((1,), "forget", w) for w in (1.0, 2.0, 3.0)] + [((SERVER,), "all", 3.0)]
    if samples:
        programs = [q.task for q in fed.asked if isinstance(q.task, Program)]
        assert [[p.split for p in program.parts] for program in programs] == [
            ["forget", "retain"],
            ["retain"],
            ["retain"],
        ]


def test_the_error_is_the_share_of_wrong_predictions() -> None:
    some = batch(column(1.0, 1.0, -1.0), [0, 1, 1])
    (wrong,) = Errors().statistic(Line(), vec(2, 0), {}, some).values()
    assert wrong.tolist() == [0.0, 1.0, 0.0]


def test_only_rewinding_needs_data_of_the_server_s_own() -> None:
    assert not SCRUB().needs_public_data
    assert SCRUB(rewind=True).needs_public_data
    with pytest.raises(InputError, match=r"data\.public"):
        run(tiny(method={"name": "scrub", "rewind": True}, data={"public": 0.0}), Path("nowhere"))


@pytest.mark.parametrize("wrong", [{"max_steps": 4}, {"max_steps": -1}, {"max_steps": 0, "min_steps": 0}])
def test_a_min_epoch_follows_each_max_epoch(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="a min epoch follows each max epoch"):
        SCRUB(**wrong)


@pytest.mark.parametrize("request_", [{"clients": [1]}, {"clients": [0, 1]}, {"clients": [1], "samples": 0.5}])
def test_in_a_whole_run_max_epochs_raise_the_forget_loss(request_: dict[str, object], tmp_path: Path) -> None:
    """Without any repair (alpha and gamma are 0), so that what the max epochs do is seen."""
    rises = {}
    for max_steps in (0, 2):
        method = {
            **OPTIONS,
            "alpha": 0.0,
            "gamma": 0.0,
            "optimizer": "sgd",
            "lr": 0.5,
            "batch_size": 1,
            "max_steps": max_steps,
        }
        recipe = tiny(method=method, request=[request_], train={"rounds": 6})
        rows = {r["phase"]: r for r in run(recipe, tmp_path / str(max_steps))["rows"]}
        rises[max_steps] = rows["unlearned"]["forget_loss"] - rows["original"]["forget_loss"]
    assert abs(rises[0]) < 0.1, "weight decay alone"
    assert rises[2] > 0.2


def test_in_a_whole_run_rewinding_keeps_the_models_and_measures_them(tmp_path: Path) -> None:
    rows = {r["phase"]: r for r in run(tiny(method={**OPTIONS, "rewind": True}), tmp_path / "a")["rows"]}
    unlearned = rows["unlearned"]
    model = rows["original"]["server_storage_bytes"]
    assert unlearned["server_epochs"] == 1.0
    assert unlearned["participations"] == 2 * 1 + 3 * 3 + 3, (
        "two max epochs, three min epochs of three, three measurements"
    )
    assert unlearned["client_epochs"] == unlearned["participations"]
    assert model * 4 < unlearned["server_storage_bytes"] < model * 4 + 100, (
        "teacher, two models beside the last, errors"
    )
