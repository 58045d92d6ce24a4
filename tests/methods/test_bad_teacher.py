# SPDX-License-Identifier: Apache-2.0
"""Bad teaching against its paper: the two teachers, and which of them a client follows with which data."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedquit.core import Local, Program, Request, State
from fedquit.engine.plan import make_plan
from fedquit.methods.bad_teacher import BadTeacher, Teach
from fedquit.running.costs import Metered
from fedquit.running.runner import run
from methods.method_world import Line, Scripted, batch, close, column, numbers, same, trained, vec
from methods.plain_torch import Loss, World, average, optimizer_of, weights
from worlds import tiny

OPTIONS: dict[str, Any] = {
    "name": "bad_teacher",
    "lr": 0.01,
    "epochs": 2.0,
    "batch_size": 4,
    "temperature": 2.0,
    "retain_epochs": 0.6,
}
FORGET, RETAIN = Local(2.0, 4, "adam", 0.01), Local(0.6, 4, "adam", 0.01)


def test_a_marked_example_follows_the_incompetent_teacher_and_any_other_the_competent_one() -> None:
    """With w as logits: the incompetent teacher is (1, 3) / 4, the competent one (4, 1) / 5, the student uniform."""
    sent = {"incompetent": vec(0, math.log(3)), "competent": vec(math.log(4), 0)}
    some = batch(column(1.0, 1.0), [0, 0], forget=[True, False])
    bad = 1 / 4 * math.log(1 / 2) + 3 / 4 * math.log(3 / 2)
    good = 4 / 5 * math.log(8 / 5) + 1 / 5 * math.log(2 / 5)
    expected = {"both": (bad, good), "incompetent": (bad, bad), "competent": (good, good)}
    for teachers, losses in expected.items():
        found = Teach(teachers=teachers).loss(Line(), vec(0, 0), sent, some)
        torch.testing.assert_close(found, numbers(*losses), rtol=0, atol=1e-12)


def test_each_client_draws_the_incompetent_teacher_by_itself() -> None:
    sent = Teach(seed=7).prepare(Line(), {"start": vec(1, 2)})
    same(sent["incompetent"], vec(7, 0))  # what `Line` draws
    assert "incompetent" not in Teach(teachers="competent").prepare(Line(), {"start": vec(1, 2)})


def following(teacher: nn.Module) -> Loss:
    def loss(student: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            target = functional.softmax(teacher(x) / 2.0, 1)
        return functional.kl_div(functional.log_softmax(student(x) / 2.0, 1), target, reduction="batchmean")

    return loss


def teachers(world: World) -> tuple[nn.Module, nn.Module]:
    """The incompetent one is a fresh draw with the seed of the round; the competent one is the model."""
    world.session.enter("unlearn-0", 0)
    drawn = world.setup.model.init(world.session.seed)
    return world.network(drawn), world.network(world.state.params)


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
def test_those_who_leave_follow_the_one_and_those_who_stay_then_the_other(engine: str, tmp_path: Path) -> None:
    world = World.of(tmp_path, OPTIONS, Request((1, 3)), engine={"name": engine})
    incompetent, competent = teachers(world)
    (state,) = world.unlearned()
    w = world.state.params
    left = {
        c: world.train(w, world.examples(c, "forget"), FORGET, world.seed(c, 0, 0), following(incompetent))
        for c in (1, 3)
    }
    w = average(left, world.counts("forget"))
    repaired = {
        c: world.train(w, world.examples(c, "retain"), RETAIN, world.seed(c, 0, 1), following(competent))
        for c in world.stay
    }
    close(state.params, average(repaired, world.counts("retain")))


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
def test_samples_are_mixed_with_the_client_s_other_data(engine: str, tmp_path: Path) -> None:
    world = World.of(tmp_path, OPTIONS, Request((1,), samples=True), engine={"name": engine})
    incompetent, competent = teachers(world)
    (state,) = world.unlearned()
    x, y = world.examples(1, "all")
    marked = torch.isin(world.data.view(1, "all"), world.data.forget[1])
    student = world.network(world.state.params)
    optimizer = optimizer_of(student, FORGET)
    kinds = set()
    for step in make_plan(len(y), FORGET, world.seed(1, 0, 0)).steps:
        with torch.no_grad():
            bad = functional.softmax(incompetent(x[step]) / 2.0, 1)
            good = functional.softmax(competent(x[step]) / 2.0, 1)
        label = marked[step].double().unsqueeze(1)  # 1 for a sample to forget, 0 for one to retain
        target = label * bad + (1 - label) * good
        optimizer.zero_grad()
        known = functional.log_softmax(student(x[step]) / 2.0, 1)
        functional.kl_div(known, target, reduction="batchmean").backward()
        optimizer.step()
        kinds.add(len(set(marked[step].tolist())))
    close(state.params, weights(student))
    assert 2 in kinds, "some batches hold both"


def test_in_phases_the_visit_is_a_program(tmp_path: Path) -> None:
    world = World.of(tmp_path, {**OPTIONS, "samples": "phases"}, Request((1,), samples=True))
    incompetent, competent = teachers(world)
    meter = Metered(world.session)
    state = world.setup.method.unlearn(meter, world.state, world.trained, world.request)
    w = world.train(
        world.state.params, world.examples(1, "forget"), FORGET, world.seed(1, 0, 0), following(incompetent)
    )
    w = world.train(w, world.examples(1, "retain"), RETAIN, world.seed(1, 0, 0, 1), following(competent))
    close(state.params, w)
    assert meter.costs.participations == 1
    assert meter.costs.client_epochs == pytest.approx(2.6)


def test_who_is_asked_for_what() -> None:
    fed = Scripted(lambda question, client: {"w": question.sent["start"]["w"] + 1}, seed=11)
    state = BadTeacher().unlearn(fed, State(vec(5), clock=4), trained(vec(5)), Request((1,)))
    assert [(q.clients, q.split) for q in fed.asked] == [((1,), "forget"), ((0, 2), "retain")]
    first, second = (q.task for q in fed.asked)
    assert first == Teach(Local(1.0, 32, "adam", 3e-4), teachers="incompetent", seed=11)
    assert second == Teach(Local(0.3, 32, "adam", 3e-4), teachers="competent")
    assert [float(q.sent["start"]["w"]) for q in fed.asked] == [5, 6]
    assert float(fed.asked[1].sent["competent"]["w"]) == 5, "the model as it was before"
    assert "competent" not in fed.asked[0].sent, "who leaves does not need it"
    assert (float(state.params["w"]), state.round, state.clock) == (7, 1, 4)
    for samples, kind in (("mixed", Teach), ("phases", Program)):
        fed.asked.clear()
        BadTeacher(samples=samples).unlearn(fed, State(vec(5)), trained(vec(5)), Request((1,), samples=True))  # type: ignore[arg-type]
        assert [(q.clients, type(q.task)) for q in fed.asked] == [((1,), kind)]


@pytest.mark.parametrize("samples", ["mixed", "phases"])
@pytest.mark.parametrize("request_", [{"clients": [1]}, {"clients": [0, 1]}, {"clients": [1], "samples": 0.5}])
def test_in_a_whole_run_the_forget_loss_rises(request_: dict[str, Any], samples: str, tmp_path: Path) -> None:
    method = {"name": "bad_teacher", "lr": 0.02, "batch_size": 4, "samples": samples}
    rows = {
        r["phase"]: r for r in run(tiny(method=method, request=[request_], train={"rounds": 6}), tmp_path / "a")["rows"]
    }
    assert rows["unlearned"]["forget_loss"] > rows["original"]["forget_loss"]
    assert rows["recovered"]["test_loss"] < rows["unlearned"]["test_loss"]
