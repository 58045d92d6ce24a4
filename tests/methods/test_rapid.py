# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest

from fedquit.core import Local, Request, State
from fedquit.core.fedavg import Learn
from fedquit.methods.rapid import RapidRetraining
from fedquit.running.runner import run
from methods.method_world import Scripted, close, moves, same, trained, vec
from worlds import tiny

LEAVES = Request((0,))
EXAMPLES = {0: 5, 1: 1, 2: 3}


def test_it_begins_from_the_initial_model_and_goes_on_from_its_own() -> None:
    fed = Scripted(moves({1: vec(4), 2: vec(8)}), EXAMPLES)
    what = trained(vec(100), initial=vec(1), examples=EXAMPLES)
    first = RapidRetraining().unlearn(fed, State(vec(100), clock=4), what, LEAVES)
    same(fed.asked[0].sent["start"], vec(1))
    close(first.params, vec(1 + 7))  # (1 * 4 + 3 * 8) / 4
    second = RapidRetraining().unlearn(fed, first, what, LEAVES)
    same(fed.asked[1].sent["start"], first.params)
    close(second.params, vec(8 + 7))
    assert [(q.clients, q.split) for q in fed.asked] == [((1, 2), "retain")] * 2


def test_the_clock_stays_where_training_left_it() -> None:
    fed = Scripted(moves({1: vec(4), 2: vec(8)}), EXAMPLES)
    what = trained(vec(100), initial=vec(1), examples=EXAMPLES)
    state = State(vec(100), clock=4)
    for r in range(1, 3):
        state = RapidRetraining().unlearn(fed, state, what, LEAVES)
        assert (state.round, state.clock) == (r, 4)
    assert RapidRetraining().recover(fed, state.fresh(), what, LEAVES).clock == 5
    assert fed.asked[-1].task.local.lr == what.training.task.local.lr / 2**4, "recovery goes on with training's rate"


def test_the_clients_precondition_their_steps_at_a_rate_without_decay_and_without_decay_of_weights() -> None:
    local = Local(2.0, 8, "sgd", 0.5, momentum=0.9, weight_decay=0.1)
    what = trained(vec(1), examples=EXAMPLES, local=local)
    fed = Scripted(moves({1: vec(4), 2: vec(8)}), EXAMPLES)
    for r in (0, 3):
        RapidRetraining().unlearn(fed, State(vec(1), clock=4, round=r), what, LEAVES)
    assert [q.task for q in fed.asked] == [Learn(Local(2.0, 8, "adam", 1e-3))] * 2
    changed = RapidRetraining(lr=0.3, **RapidRetraining.presets["adahessian"])
    changed.unlearn(fed, State(vec(1)), what, LEAVES)
    assert fed.asked[-1].task == Learn(Local(2.0, 8, "adahessian", 0.3))


@pytest.mark.parametrize(("given", "rounds", "expected"), [(0, 8, 4), (0, 7, 3), (0, 1, 1), (5, 8, 5)])
def test_it_takes_half_the_rounds_of_training_unless_given(given: int, rounds: int, expected: int) -> None:
    assert RapidRetraining(retraining_rounds=given).rounds(trained(vec(0), rounds=rounds), LEAVES) == expected


def test_for_samples_everybody_retrains_on_what_is_left() -> None:
    fed = Scripted(examples=EXAMPLES)
    RapidRetraining().unlearn(fed, State(vec(1)), trained(vec(1)), Request((0,), samples=True))
    assert [(q.clients, q.split) for q in fed.asked] == [((0, 1, 2), "retain")]


def test_partial_participation_is_that_of_training() -> None:
    fed = Scripted(examples=dict.fromkeys(range(9), 1))
    RapidRetraining().unlearn(fed, State(vec(1)), trained(vec(1), per_round=3), LEAVES)
    (question,) = fed.asked
    assert len(question.clients) == 3
    assert 0 not in question.clients


@pytest.mark.parametrize("preset", [{}, {"preset": "adahessian"}])
def test_a_whole_run_learns_from_scratch(preset: dict[str, str], tmp_path: Path) -> None:
    recipe = tiny(method={"name": "rapid", "lr": 0.05, "retraining_rounds": 3, **preset})
    rows = {r["phase"]: r for r in run(recipe, tmp_path / "a")["rows"]}
    assert rows["unlearned"]["rounds"] == 3
    assert rows["unlearned"]["retain_acc"] > 40
