# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest

from fedquit.core import Request, State
from fedquit.methods.puf import PUF
from fedquit.running.runner import run
from methods.method_world import Scripted, close, moves, same, trained, vec
from worlds import tiny

LEAVES = Request((0,))
EXAMPLES = {0: 4, 1: 1, 2: 3}
SPECIAL = PUF(**PUF.presets["special"])


def test_in_a_regular_round_the_leaving_update_counts_negatively_among_all() -> None:
    fed = Scripted(moves({0: vec(1, 0)}, {1: vec(8, 8), 2: vec(0, 8)}), EXAMPLES)
    state = PUF().unlearn(fed, State(vec(1, 1), clock=2), trained(vec(1, 1), examples=EXAMPLES), LEAVES)
    # (1, 1) + (1 (8, 8) + 3 (0, 8) - 20 * 4 (1, 0)) / 8
    close(state.params, vec(1 + 1 - 10, 1 + 4))
    assert [(q.clients, q.split) for q in fed.asked] == [((0,), "forget"), ((1, 2), "retain")]
    assert (state.round, state.clock) == (1, 3)


def test_in_a_special_round_it_is_alone() -> None:
    fed = Scripted(moves({0: vec(1, -3)}), EXAMPLES)
    state = SPECIAL.unlearn(fed, State(vec(1, 1), clock=2), trained(vec(1, 1), examples=EXAMPLES), LEAVES)
    close(state.params, vec(1 - 2, 1 + 6))
    assert [(q.clients, q.split) for q in fed.asked] == [((0,), "forget")]


def test_several_leaving_clients_count_by_their_examples() -> None:
    fed = Scripted(moves({0: vec(1, 0), 2: vec(0, 1)}, {1: vec(8, 8)}), EXAMPLES)
    state = PUF(strength=2.0).unlearn(fed, State(vec(0, 0)), trained(vec(0, 0), examples=EXAMPLES), Request((0, 2)))
    close(state.params, vec((8 - 2 * 4) / 8, (8 - 2 * 3) / 8))
    fed = Scripted(moves({0: vec(1, 0), 2: vec(0, 1)}), EXAMPLES)
    alone = SPECIAL.unlearn(fed, State(vec(0, 0)), trained(vec(0, 0), examples=EXAMPLES), Request((0, 2)))
    close(alone.params, vec(-2 * 4 / 7, -2 * 3 / 7))


def test_all_do_what_they_do_in_training_at_its_present_rate() -> None:
    fed = Scripted(examples=EXAMPLES)
    what = trained(vec(1, 1), examples=EXAMPLES)
    state = PUF().unlearn(fed, State(vec(1, 1), clock=2), what, LEAVES)
    assert [q.task for q in fed.asked] == [what.training.task_at(2)] * 2
    assert fed.asked[0].task.local.lr == what.training.task.local.lr / 4
    same(state.params, vec(1, 1))  # nobody moved


def test_partial_participation_is_that_of_training() -> None:
    fed = Scripted(examples=dict.fromkeys(range(9), 1))
    PUF().unlearn(fed, State(vec(1)), trained(vec(1), per_round=3), LEAVES)
    assert len(fed.asked[1].clients) == 3
    assert 0 not in fed.asked[1].clients


def test_for_samples_the_client_is_also_among_those_who_stay() -> None:
    fed = Scripted(examples=EXAMPLES)
    PUF().unlearn(fed, State(vec(1)), trained(vec(1)), Request((0,), samples=True))
    assert [(q.clients, q.split) for q in fed.asked] == [((0,), "forget"), ((0, 1, 2), "retain")]


@pytest.mark.parametrize(("preset", "asked"), [({}, 4), ({"preset": "special"}, 1)])
def test_a_whole_run_forgets_and_recovers(preset: dict[str, str], asked: int, tmp_path: Path) -> None:
    rows = {r["phase"]: r for r in run(tiny(method={"name": "puf", **preset}), tmp_path / "a")["rows"]}
    assert rows["unlearned"]["participations"] == asked
    assert rows["unlearned"]["forget_loss"] > rows["original"]["forget_loss"]
    assert rows["recovered"]["test_loss"] < rows["unlearned"]["test_loss"]
