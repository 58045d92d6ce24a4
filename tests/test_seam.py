# SPDX-License-Identifier: Apache-2.0
"""The seam carries what the methods of this field need: each thing is shown by a small method, through a whole run."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from by_hand import run_client
from fedquit.core import Local, Request, State
from fedquit.core.fedavg import Learn
from fedquit.core.params import add, fingerprint, sub
from fedquit.data.federated import FederatedData
from fedquit.engine import Address
from fedquit.running.runner import run
from fedquit.running.session import Session, advance
from fedquit.running.setup import Setup, build_setup
from fedquit.running.store import Memories, StateFile
from fedquit.running.training_cache import Federated, Silent
from fedquit.running.training_cache import train as train_federation
from seam_methods import FromOwn, Imitate, LearnHead
from worlds import tiny

NAMES = [
    "Degrade",
    "SubtractAndDistil",
    "SecondHead",
    "HeadOnly",
    "ClimbFromOwn",
    "SecondOrder",
    "Dampen",
    "ClimbAndReturn",
    "StopEarly",
]


def train(setup: Setup, data: FederatedData, cache: Path, request: Request | None) -> Federated:
    attached = {setup.recipe.method_name: setup.method}
    return train_federation(setup, data, cache, reporter=Silent(), attached=attached, request=request)


def served(setup: Setup, where: Path, request: Request) -> tuple[Session, State, Any]:
    """A session at the beginning of the unlearning phase."""
    original = train(setup, setup.data, where / "cache", request)
    kept = Memories.open(where / "unlearning", original.memories)
    data = setup.data.mark(request)
    session = Session(setup.engine(data, kept.clients), setup.recipe.seed, data.clients, memories=kept.own)
    session.enter("unlearn-0", 0)
    trained = dataclasses.replace(original.trained, memory=kept.of(setup.recipe.method_name))
    return session, original.progress.state.fresh(), trained


@pytest.mark.parametrize("name", NAMES)
def test_a_whole_run_works_with(name: str, tmp_path: Path) -> None:
    results = run(tiny(method={"name": f"seam_methods:{name}"}), tmp_path / "a")
    prints = {row["phase"]: row["fingerprint"] for row in results["rows"]}
    assert prints["original"] != prints["unlearned"] != prints["recovered"]
    again = run(tiny(method={"name": f"seam_methods:{name}"}), tmp_path / "elsewhere" / "b")
    assert [r["fingerprint"] for r in again["rows"]] == [r["fingerprint"] for r in results["rows"]]


def test_several_rounds_go_on_from_the_server_state_that_the_method_declared(tmp_path: Path) -> None:
    setup = build_setup(tiny(method={"name": "seam_methods:Degrade"}))
    request = Request((1,))
    session, state, trained = served(setup, tmp_path, request)

    def driven(file: StateFile) -> list[State]:
        rounds = advance(session, "u", state, lambda s: setup.method.unlearn(session, s, trained, request), file, 3)
        return [p.state for p in rounds]

    straight = driven(StateFile(tmp_path / "straight"))
    assert [s.round for s in straight] == [0, 1, 2, 3]
    stopped = StateFile(tmp_path / "stopped")
    stopped.save(straight[2], 0.0)
    resumed = driven(stopped)
    assert [s.round for s in resumed] == [2, 3]
    assert fingerprint(resumed[-1].params) == fingerprint(straight[-1].params)
    assert fingerprint(dict(resumed[-1].kept["degraded"])) == fingerprint(dict(straight[-1].kept["degraded"]))


def test_a_watcher_keeps_exactly_the_target_s_updates(tmp_path: Path) -> None:
    setup = build_setup(tiny(method={"name": "seam_methods:SubtractAndDistil", "target": 1}))
    request = Request((1,))
    _, _, trained = served(setup, tmp_path, request)
    w, total = setup.initial, None
    for clock in range(3):
        place, replies = Address(0, "train", clock), []
        for c in setup.data.clients:
            mine = setup.data.view(c, "all")
            task = setup.training.task_at(clock)
            x, y = setup.data.x[mine], setup.data.y[mine]
            params, _ = run_client(setup.model, task, x, y, {"start": w}, place.seed_for(c))
            replies.append((params, len(mine)))
        update = sub(replies[1][0], w)
        total = update if total is None else add(total, update)
        n = sum(size for _, size in replies)
        w = {k: sum(p[k] * size for p, size in replies) / n for k in w}  # type: ignore[misc]
    assert total is not None
    for name, tensor in trained.memory["sum"].items():
        torch.testing.assert_close(tensor, total[name], rtol=0, atol=1e-14)


def test_the_server_trains_on_its_public_data_and_nothing_else(tmp_path: Path) -> None:
    setup = build_setup(tiny(method={"name": "seam_methods:SubtractAndDistil"}, engine={"name": "sequential"}))
    session, state, _ = served(setup, tmp_path, Request((1,)))
    task = Imitate()
    found = session.run_at_server(task, start=setup.initial, teacher=state.params)
    x, y = setup.data.x[setup.data.public], setup.data.y[setup.data.public]
    sent = {"start": setup.initial, "teacher": state.params}
    expected, _ = run_client(setup.model, task, x, y, sent, Address(0, "unlearn-0", 0, 0).seed_for(-1))
    assert fingerprint(found) == fingerprint(expected)
    assert len(x) == 24
    assert not set(setup.data.public.tolist()) & set(setup.data.pooled("all").tolist())


def test_a_replaced_task_changes_the_training_of_that_client_alone(tmp_path: Path) -> None:
    plain = build_setup(tiny(train={"rounds": 1}))
    changed = build_setup(tiny(train={"rounds": 1}, method={"name": "seam_methods:SecondHead"}))
    a = train(plain, plain.data, tmp_path, Request((1,)))
    b = train(changed, changed.data, tmp_path, Request((1,)))
    assert fingerprint(a.progress.state.params) != fingerprint(b.progress.state.params)
    assert list(b.memories.clients) == ["1/second"]
    assert set(b.progress.state.params) == set(a.progress.state.params), "the second head never reaches the server"
    alone = {c: t for c, t in changed.data.train.items() if c != 1}
    without = FederatedData(changed.data.dataset, alone, public=changed.data.public)
    c = train(plain, without, tmp_path, None)
    d = train(changed, without, tmp_path, Request((1,)))
    assert fingerprint(c.progress.state.params) == fingerprint(d.progress.state.params)


def test_a_reply_may_hold_a_part_of_the_parameters(tmp_path: Path) -> None:
    setup = build_setup(tiny(method={"name": "seam_methods:HeadOnly"}))
    session, state, trained = served(setup, tmp_path, Request((1,)))
    (reply,) = session.run(LearnHead(), [1], split="forget", start=state.params)
    assert set(reply.params) == {"head.weight", "head.bias"}
    unlearned = setup.method.unlearn(session, state, trained, Request((1,)))
    assert torch.equal(unlearned.params["body.weight"], state.params["body.weight"])
    assert not torch.equal(unlearned.params["head.weight"], state.params["head.weight"])


def test_a_client_finds_at_home_what_it_kept_in_the_last_round(tmp_path: Path) -> None:
    setup = build_setup(tiny(method={"name": "seam_methods:ClimbFromOwn"}, engine={"name": "sequential"}))
    request = Request((1,))
    session, state, trained = served(setup, tmp_path, request)
    own = session.engine.memory["1/own"]  # type: ignore[attr-defined]
    shorter = build_setup(
        tiny(train={"rounds": 2}, method={"name": "seam_methods:ClimbFromOwn"}, engine={"name": "sequential"})
    )
    before = train(shorter, setup.data, tmp_path, request)
    mine = setup.data.view(1, "all")
    expected, _ = run_client(
        setup.model,
        setup.training.task_at(2),
        setup.data.x[mine],
        setup.data.y[mine],
        {"start": before.progress.state.params},
        Address(0, "train", 2).seed_for(1),
    )
    assert fingerprint(own) == fingerprint(expected), "its own model of the last round of training"
    unlearned = setup.method.unlearn(session, state, trained, request)
    centre = FromOwn().begin({"start": state.params, "own": own})
    distance = torch.stack([(unlearned.params[n] - centre[n]).square().sum() for n in centre]).sum().sqrt()
    torch.testing.assert_close(distance, torch.tensor(0.1, dtype=torch.float64), rtol=0, atol=1e-12)


def test_second_derivatives_reach_the_optimizer(tmp_path: Path) -> None:
    first = run(tiny(method={"name": "seam_methods:SecondOrder"}), tmp_path / "a")
    rows = {r["phase"]: r for r in first["rows"]}
    setup = build_setup(tiny(method={"name": "seam_methods:SecondOrder"}))
    mine = setup.data.view(0, "all")
    x, y = setup.data.x[mine], setup.data.y[mine]
    tasks = [Learn(Local(optimizer=name, lr=0.05)) for name in ("adamw", "adahessian")]
    first_order, second_order = (run_client(setup.model, t, x, y, {"start": setup.initial}, 0)[0] for t in tasks)
    assert fingerprint(first_order) != fingerprint(second_order)
    assert rows["unlearned"]["rounds"] == 2
    assert rows["unlearned"]["retain_acc"] > 40, "two rounds from scratch learn something"


def test_watchers_are_part_of_the_cache_s_key(tmp_path: Path) -> None:
    run(tiny(), tmp_path / "a")
    before = set((tmp_path / "cache").iterdir())
    run(tiny(method={"name": "natural"}), tmp_path / "b")
    assert set((tmp_path / "cache").iterdir()) == before, "a second method trains neither Original nor Retrain again"
    run(tiny(method={"name": "seam_methods:SubtractAndDistil", "target": 1}), tmp_path / "c")
    watched = set((tmp_path / "cache").iterdir()) - before
    assert len(watched) == 1, "its watcher asks for an Original of its own, and takes Retrain from the cache"


def test_the_log_tells_who_was_asked_for_what(tmp_path: Path) -> None:
    run(tiny(), tmp_path / "a")
    events = [json.loads(line) for line in (tmp_path / "a" / "events.jsonl").read_text().splitlines()]
    unlearning = [e for e in events if e["phase"] == "unlearn-0"]
    assert [(e["client"], e["split"], e["task"]) for e in unlearning] == [(1, "forget", "Distill")]
    assert {e["client"] for e in events if e["phase"] == "recover-0"} == {0, 2, 3}
