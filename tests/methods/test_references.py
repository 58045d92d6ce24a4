# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

from fedquit.core import Request, State
from fedquit.methods.baselines import Natural, Retrain
from fedquit.running.runner import run
from methods.method_world import Scripted, close, moves, same, trained, vec
from worlds import tiny

LEAVES = Request((0,))
EXAMPLES = {0: 5, 1: 1, 2: 3}


def test_natural_does_nothing_at_all() -> None:
    fed, state = Scripted(), State(vec(1, 2), clock=4)
    assert Natural().unlearn(fed, state, trained(vec(1, 2)), LEAVES) is state
    assert Natural().rounds(trained(vec(1, 2)), LEAVES) == 0
    assert fed.asked == []


def test_natural_recovers_by_training_on_without_the_client() -> None:
    fed = Scripted(moves({1: vec(4), 2: vec(8)}), EXAMPLES)
    state = Natural().recover(fed, State(vec(1), clock=2), trained(vec(1), examples=EXAMPLES), LEAVES)
    close(state.params, vec(8))  # 1 + (1 * 4 + 3 * 8) / 4
    (question,) = fed.asked
    assert (question.clients, question.split, question.task.local.lr) == ((1, 2), "retain", 0.125)
    assert (state.round, state.clock) == (1, 3)


def test_in_a_whole_run_natural_leaves_the_original_model(tmp_path: Path) -> None:
    rows = {r["phase"]: r for r in run(tiny(method={"name": "natural"}), tmp_path / "a")["rows"]}
    assert rows["unlearned"]["fingerprint"] == rows["original"]["fingerprint"] != rows["recovered"]["fingerprint"]
    assert (rows["unlearned"]["rounds"], rows["unlearned"]["participations"]) == (0, 0)


def test_retrain_begins_from_the_initial_model_with_the_first_rate() -> None:
    fed = Scripted(moves({1: vec(4), 2: vec(8)}), EXAMPLES)
    what = trained(vec(100), initial=vec(1), examples=EXAMPLES)
    first = Retrain().unlearn(fed, State(vec(100), clock=4), what, LEAVES)
    second = Retrain().unlearn(fed, first, what, LEAVES)
    close(second.params, vec(15))
    same(fed.asked[0].sent["start"], vec(1))
    same(fed.asked[1].sent["start"], vec(8))
    assert [(q.clients, q.split) for q in fed.asked] == [((1, 2), "retain")] * 2
    assert [q.task.local.lr for q in fed.asked] == [0.5, 0.25]
    assert (first.clock, second.clock) == (1, 2)
    assert Retrain().rounds(what, LEAVES) == 4
    assert not Retrain.recovers
