# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from fedquit.core import Local, Params, Request, State
from fedquit.core.fedavg import Learn
from fedquit.core.params import norm, sub
from fedquit.errors import RequestError
from fedquit.methods.pga import PGA, Ascend
from fedquit.running.runner import run
from fedquit.running.setup import build_setup
from methods.method_world import LOCAL, Line, Scripted, close, column, moves, numbers, same, served, trained, vec, work
from worlds import tiny

LEAVES = Request((0,))
FAR = Line(draw=lambda seed: vec(1.0, float(seed)))  # at distance `seed` from (1, 0)
AUTHORS = PGA(**PGA.presets["authors"])


def ball(threshold: float, *, reference: Params | None = None, own: Params | None = None) -> dict[str, Params]:
    return {
        "reference": reference or vec(0, 0),
        "own": own or vec(0, 0),
        "ball": {"threshold": torch.tensor(threshold, dtype=torch.float64)},
    }


def asked(
    method: PGA, examples: dict[int, int], request: Request = LEAVES, local: Local = LOCAL, clock: int = 0
) -> list[Ascend]:
    """The tasks that the leaving clients get."""
    fed = Scripted(examples=examples, seed=40)
    method.unlearn(fed, State(vec(0, 0), clock=clock), trained(vec(0, 0), examples=examples, local=local), request)
    tasks = [q.task for q in fed.asked]
    assert all(isinstance(t, Ascend) for t in tasks)
    return [t for t in tasks if isinstance(t, Ascend)]


def test_the_reference_is_what_the_mean_of_the_others_was() -> None:
    own, others = vec(9, 0), [vec(1, 2), vec(3, 4), vec(-1, 0)]
    mean = {"w": (own["w"] + others[0]["w"] + others[1]["w"] + others[2]["w"]) / 4}
    found = Ascend(share=1 / 4).prepare(FAR, {"start": mean, "own": own})
    close(dict(found["reference"]), vec(1, 2))  # (1 + 3 - 1) / 3, (2 + 4 + 0) / 3
    same(dict(found["start"]), mean)


def test_the_reference_in_numbers() -> None:
    found = Ascend(share=1 / 4).prepare(FAR, {"start": vec(3, 0), "own": vec(9, 0)})
    close(dict(found["reference"]), vec(1, 0))  # (3 - 9/4) / (3/4)


def test_the_share_is_one_of_so_many_clients_or_that_of_the_examples() -> None:
    examples = {0: 6, 1: 1, 2: 2, 3: 3}
    assert asked(PGA(), examples)[0].share == 1 / 4
    assert asked(PGA(weighted=True), examples)[0].share == 1 / 2
    assert not AUTHORS.weighted


def test_the_threshold_is_a_third_of_the_mean_distance_from_random_models() -> None:
    sent = {"start": vec(3, 0), "own": vec(9, 0)}  # the reference is (1, 0)
    plain = Ascend(share=1 / 4, seed=6, random_models=3).prepare(FAR, sent)
    assert float(plain["ball"]["threshold"]) == pytest.approx(7 / 3)  # 6, 7 and 8 away
    squared = Ascend(share=1 / 4, seed=6, random_models=3, squared=True).prepare(FAR, sent)
    assert float(squared["ball"]["threshold"]) == pytest.approx((36 + 49 + 64) / 9)
    assert float(Ascend(share=1 / 4, seed=6).prepare(FAR, sent)["ball"]["threshold"]) == pytest.approx(2)


@pytest.mark.parametrize(
    ("squared", "new", "expected"),
    [
        (False, (3, 4), (1.2, 1.6)),  # 5 > 4: to length 2 along (3, 4)
        (False, (0, 3), (0, 3)),  # longer than the radius, but not beyond the threshold
        (True, (0, 3), (0, 2)),  # 9 > 4
        (True, (0, 1.9), (0, 1.9)),  # 3.61 < 4
        (True, (-6, 8), (-1.2, 1.6)),
    ],
)
def test_beyond_the_threshold_a_step_is_projected_to_its_square_root(
    squared: bool, new: tuple[float, float], expected: tuple[float, float]
) -> None:
    task = Ascend(squared=squared, halt=math.inf)
    close(task.after_step(vec(*new), vec(0, 0), ball(4.0)), vec(*expected))


def test_the_ball_is_around_the_reference_over_all_tensors_together() -> None:
    reference = {"a": numbers(1), "b": numbers(1, 1)}
    new = {"a": numbers(1 + 2), "b": numbers(1 + 4, 1 + 4)}  # (2, 4, 4) is 6 long
    sent = {"reference": reference, "own": reference, "ball": {"threshold": torch.tensor(4.0).double()}}
    found = Ascend(halt=math.inf).after_step(new, reference, sent)
    close(found, {"a": numbers(1 + 2 / 3), "b": numbers(1 + 4 / 3, 1 + 4 / 3)})


def test_it_halts_once_far_from_its_own_model_but_never_before_the_first_step() -> None:
    task, sent = Ascend(halt=6.0), ball(100.0, own=vec(10, 0))
    close(task.after_step(vec(2, 0), vec(1, 0), sent), vec(1, 0))  # 9 away: stays where it was
    close(task.after_step(vec(2, 0), vec(0, 0), sent), vec(2, 0))  # 10 away, but at the reference: the first step
    close(task.after_step(vec(6, 0), vec(5, 0), sent), vec(6, 0))  # 5 away: goes on
    close(task.after_step(vec(5, 0), vec(4, 0), sent), vec(5, 0))  # exactly 6 is not beyond
    squared = Ascend(halt=6.0, squared=True)
    close(squared.after_step(vec(8, 0), vec(7, 0), sent), vec(7, 0))  # 9 > 6 in squares
    close(squared.after_step(vec(9, 0), vec(8, 0), sent), vec(9, 0))  # 4 < 6


def test_once_halted_a_client_is_frozen_for_the_rest_of_its_steps() -> None:
    def after(epochs: float, halt: float) -> Params:
        task = Ascend(Local(epochs=epochs, batch_size=1, lr=0.1), share=0.5, seed=60, halt=halt)
        return work(FAR, task, column(2.0, 1.0), [0, 0], start=vec(0, 0), own=vec(3, 0))

    same(after(3.0, 1.0), after(0.5, 1.0))  # the first step of six
    assert not torch.equal(after(3.0, 9.0)["w"], after(0.5, 9.0)["w"])


def test_without_a_step_the_answer_is_the_reference() -> None:
    task = Ascend(Local(epochs=0.0), share=1 / 4)
    close(work(FAR, task, column(1.0), [0], start=vec(3, 0), own=vec(9, 0)), vec(1, 0))


def test_a_step_climbs_the_loss_from_the_reference() -> None:
    task = Ascend(Local(lr=0.1), share=0.5, seed=900, halt=100.0)
    # The reference is 2 (2, 2) - (4, 4) = (0, 0): both classes at 1/2. The gradient of the loss of class 0 at x = 3 is
    # (p_0 - 1, p_1) x = (-1.5, 1.5); ascent moves along it.
    close(work(FAR, task, column(3.0), [0], start=vec(2, 2), own=vec(4, 4)), vec(-0.15, 0.15))


def test_the_gradient_is_clipped_tensor_by_tensor_or_as_the_authors_do_over_all_together() -> None:
    port, authors = asked(PGA(), {0: 1, 1: 1})[0].local, asked(AUTHORS, {0: 1, 1: 1})[0].local
    assert port == Local(5.0, 512, "sgd", 1e-2, 0.9, clip=0.0, clip_tensor=5.0)
    assert authors == Local(5.0, 128, "sgd", 1e-2, 0.9, clip=5.0, clip_tensor=0.0)


ADAMW = Local(2.0, 8, "adamw", 0.5, weight_decay=0.1)
MOMENTUM = Local(2.0, 8, "sgd", 0.5, momentum=0.5, weight_decay=0.1)


@pytest.mark.parametrize(
    ("given", "training", "expected"),
    [
        ({}, LOCAL, ("sgd", 1e-2, 0.9)),
        ({}, MOMENTUM, ("sgd", 1e-2, 0.9)),
        ({}, ADAMW, ("adamw", 0.5**4, 0.0)),
        ({"lr": 0.3}, ADAMW, ("adamw", 0.3, 0.0)),
        ({"lr": 0.3}, LOCAL, ("sgd", 0.3, 0.9)),
        ({"optimizer": "sgd"}, ADAMW, ("sgd", 1e-2, 0.9)),
        ({"optimizer": "adam", "momentum": 0.5}, LOCAL, ("adam", 0.5**4, 0.0)),
        ({"momentum": 0.0}, LOCAL, ("sgd", 1e-2, 0.0)),
        (PGA.presets["authors"], ADAMW, ("sgd", 1e-2, 0.9)),
    ],
)
def test_the_optimizer_is_that_of_training_unless_given_and_its_rate_and_momentum_follow(
    given: dict[str, Any], training: Local, expected: tuple[str, float, float]
) -> None:
    (task,) = asked(PGA(**given), {0: 1, 1: 1}, local=training, clock=3)
    assert (task.local.optimizer, task.local.lr, task.local.momentum) == expected
    assert task.local.weight_decay == 0


def test_with_adamw_it_climbs_in_a_whole_run(tmp_path: Path) -> None:
    recipe = tiny(method={"name": "pga", "batch_size": 8}, train={"optimizer": "adamw", "lr": 1e-2})
    rows = {r["phase"]: r for r in run(recipe, tmp_path / "a")["rows"]}
    assert rows["unlearned"]["forget_loss"] > rows["original"]["forget_loss"] + 0.1
    assert rows["recovered"]["test_loss"] < rows["unlearned"]["test_loss"]


def test_the_presets_differ_in_distances_stop_and_random_models() -> None:
    port, authors = asked(PGA(), {0: 1, 1: 1})[0], asked(AUTHORS, {0: 1, 1: 1})[0]
    assert (port.squared, port.halt, port.random_models, port.seed) == (False, 6.0, 1, 40)
    assert (authors.squared, authors.halt, authors.random_models, authors.seed) == (True, 2.2, 10, 40)


def test_only_the_leaving_clients_are_asked_and_their_mean_becomes_the_model() -> None:
    examples = {0: 3, 1: 1, 2: 5}
    fed = Scripted(moves({0: vec(4, 0)}, {1: vec(0, 8)}), examples)
    state = PGA().unlearn(fed, State(vec(1, 1), clock=4), trained(vec(1, 1), examples=examples), Request((0, 1)))
    assert [(q.clients, q.split) for q in fed.asked] == [((0,), "forget"), ((1,), "forget")]
    assert all(q.sent.keys() == {"start"} for q in fed.asked)
    close(state.params, vec(4, 3))  # (1, 1) + (3 (4, 0) + 1 (0, 8)) / 4
    assert (state.round, state.clock) == (1, 4)


def test_every_client_keeps_its_last_model_at_home() -> None:
    assert PGA().training_task(Learn(), 2, LEAVES) == Learn(remember="own")
    assert PGA.at_home == ("own",)
    assert PGA().shapes_training
    assert not PGA().knows_request


def test_without_its_own_last_model_a_client_says_so() -> None:
    with pytest.raises(
        RequestError, match="no last local model at home: it took part in no round, or PGA was not attached"
    ):
        Ascend().prepare(FAR, {"start": vec(3, 0)})


def test_requests_for_samples_are_refused_with_a_reason() -> None:
    with pytest.raises(RequestError, match="PGA forgets whole clients: its reference model takes all of a client"):
        PGA().check(Request((0,), samples=True))
    PGA().check(Request((0, 1)))


def test_in_a_whole_run_the_model_ends_in_the_ball_around_the_mean_of_the_others(tmp_path: Path) -> None:
    settings = {"name": "pga", "weighted": True, "squared": True, "halt": 1e9, "lr": 1.0, "epochs": 20.0}
    setup = build_setup(tiny(method={**settings, "batch_size": 8}))
    session, state, what = served(setup, tmp_path, Request((1,)))
    unlearned = setup.method.unlearn(session, state, what, Request((1,))).params
    homes = session.engine.memory  # type: ignore[attr-defined]
    assert sorted(homes) == ["0/own", "1/own", "2/own", "3/own"]
    stay = {c: what.examples[c] for c in (0, 2, 3)}
    total = sum(stay.values())
    reference = {n: sum(homes[f"{c}/own"][n] * k for c, k in stay.items()) / total for n in state.params}
    session.enter("unlearn-0", 0)
    drawn = setup.model.init(session.seed)
    radius = norm(sub(reference, drawn)) / math.sqrt(3)
    torch.testing.assert_close(norm(sub(unlearned, reference)), radius, rtol=1e-9, atol=0)


def test_it_destroys_the_model_and_recovery_brings_it_back(tmp_path: Path) -> None:
    recipe = tiny(method={"name": "pga", "lr": 0.5, "batch_size": 8}, recover={"max_rounds": 3})
    rows = {r["phase"]: r for r in run(recipe, tmp_path / "a")["rows"]}
    assert rows["unlearned"]["forget_loss"] > rows["original"]["forget_loss"]
    assert rows["recovered"]["test_loss"] < rows["unlearned"]["test_loss"]
    assert rows["unlearned"]["participations"] == 1
    assert rows["unlearned"]["client_storage_bytes"] == 4 * rows["unlearned"]["server_storage_bytes"]
