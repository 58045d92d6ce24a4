# SPDX-License-Identifier: Apache-2.0
"""What every method must keep to, whatever it does: run through a federation that records and forbids."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from fedquit.core import ClientId, Federation, Model, Params, Program, Reply, Request, Split, State, Task, Trained
from fedquit.core.method import Method
from fedquit.core.params import fingerprint
from fedquit.core.types import parts_of
from fedquit.data.federated import FederatedData
from fedquit.errors import RequestError
from fedquit.methods import METHODS
from fedquit.running.recipe import build
from fedquit.running.session import Session
from fedquit.running.setup import Setup, build_setup
from fedquit.running.store import Memories
from fedquit.running.training_cache import Silent, train
from worlds import tiny

REQUESTS = {
    "one client": Request((1,)),
    "several clients": Request((1, 3)),
    "samples of one": Request((1,), samples=True),
    "samples of several": Request((0, 2), samples=True),
}
REFUSES = {  # what the method's paper does not define
    "federaser": {"samples of one", "samples of several"},
    "pga": {"samples of one", "samples of several"},
    "fukd": {"samples of one", "samples of several"},
    "fedosd": {"several clients", "samples of several"},
}


@dataclass
class Guarded:
    """A federation that forbids what nobody may do, and records what was done."""

    inner: Federation
    request: Request
    phase: str = "unlearn"
    asked: list[tuple[str, ClientId, Split]] = field(default_factory=list)

    @property
    def model(self) -> Model:
        return self.inner.model

    @property
    def clients(self) -> tuple[ClientId, ...]:
        return self.inner.clients

    @property
    def seed(self) -> int:
        return self.inner.seed

    def run(
        self, task: Task | Program, clients: Sequence[ClientId], *, split: Split = "all", **sent: Params
    ) -> Iterator[Reply]:
        for part in parts_of(task, split):
            for client in clients:
                self.check_split(client, part.split)
            for value in part.task.__dict__.values():
                scalar = isinstance(value, int | float | str | bool) or dataclasses.is_dataclass(value)
                assert scalar, "tasks are scalars"
        return self.inner.run(task, clients, split=split, **sent)

    def check_split(self, client: ClientId, split: Split) -> None:
        leaving = client in self.request.clients
        if leaving and not self.request.samples:
            assert self.phase == "unlearn", f"client {client} was asked after it had left"
            assert split == "forget", f"the leaving client {client} was asked to use its {split!r} data"
        if not leaving:
            assert split != "forget", f"client {client} has nothing to forget"
        if leaving and self.request.samples and self.phase == "recover":
            assert split == "retain", "forgotten samples were used after the unlearning"
        self.asked.append((self.phase, client, split))

    def run_at_server(self, task: Task, **sent: Params) -> Params:
        return self.inner.run_at_server(task, **sent)


@dataclass(frozen=True)
class Stage:
    """Everything that a method finds when a request comes in."""

    setup: Setup
    method: Method
    request: Request
    fed: Guarded
    session: Session
    state: State
    trained: Trained


def marked(setup: Setup, request: Request) -> FederatedData:
    if not request.samples:
        return setup.data.mark(request)
    return setup.data.mark(request, {c: setup.data.train[c][:5] for c in request.clients})


def staged(name: str, request: Request, where: Path, preset: str = "") -> Stage:
    setup = build_setup(tiny(method={"name": name, **({"preset": preset} if preset else {})}, train={"rounds": 4}))
    data = marked(setup, request)
    before = data if setup.method.knows_request else setup.data
    attached = {name: setup.method}
    found = train(setup, before, where / "cache", reporter=Silent(), attached=attached, request=request)
    kept = Memories.open(where / "unlearning", found.memories)
    session = Session(setup.engine(data, kept.clients), 0, data.clients, memories=kept.own)
    session.enter("unlearn-0", 0)
    trained = dataclasses.replace(found.trained, memory=kept.of(name))
    guarded = Guarded(session, request)
    return Stage(setup, setup.method, request, guarded, session, found.progress.state.fresh(), trained)


def unlearned(stage: Stage) -> list[State]:
    states, state = [], stage.state
    for number in range(stage.method.rounds(stage.trained, stage.request)):
        stage.session.enter("unlearn-0", number)
        state = stage.method.unlearn(stage.fed, state, stage.trained, stage.request)
        states.append(state)
    return states


CASES = [
    pytest.param(name, preset, kind, id=f"{name}{'-' + preset if preset else ''}: {kind}")
    for name, cls in METHODS.items()
    for preset in ("", *cls.presets)
    for kind in REQUESTS
]


@pytest.mark.parametrize(("name", "preset", "kind"), CASES)
def test_a_method_reads_only_what_it_may_and_leaves_its_input_alone(
    name: str, preset: str, kind: str, tmp_path: Path
) -> None:
    request = REQUESTS[kind]
    cls = METHODS[name]
    method = build(cls, dict(cls.presets.get(preset, {})), "method")
    several_allowed = getattr(method, "several", False)
    if kind in REFUSES.get(name, set()) and not (name == "fedosd" and several_allowed):
        with pytest.raises(RequestError, match=r"(?s).{60,}"):
            method.check(request)
        return
    method.check(request)

    stage = staged(name, request, tmp_path, preset)
    before = fingerprint(stage.state.params), fingerprint(stage.trained.initial)
    states = unlearned(stage)
    assert [s.round for s in states] == list(range(1, len(states) + 1))
    assert (fingerprint(stage.state.params), fingerprint(stage.trained.initial)) == before, "its input is untouched"
    last = states[-1] if states else stage.state
    assert last.params.keys() == stage.state.params.keys()
    assert all(bool(torch.isfinite(p).all()) for p in last.params.values())

    stage.fed.phase = "recover"
    stage.session.present = tuple(request.stay(stage.session.present))
    stage.session.enter("recover-0", 0)
    recovered = stage.method.recover(stage.fed, last.fresh(), stage.trained, request)
    assert recovered.round == 1
    assert {c for phase, c, _ in stage.fed.asked if phase == "recover"} == set(request.stay(stage.setup.data.clients))


@pytest.mark.parametrize("name", METHODS)
def test_a_method_repeats(name: str, tmp_path: Path) -> None:
    first, second = (unlearned(staged(name, Request((1,)), tmp_path / str(i))) for i in range(2))
    for a, b in zip(first, second, strict=True):
        for n, p in a.params.items():
            torch.testing.assert_close(p, b.params[n], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", METHODS)
def test_a_method_goes_on_from_its_state_alone(name: str, tmp_path: Path) -> None:
    straight = unlearned(staged(name, Request((1,)), tmp_path / "straight"))
    if len(straight) < 2:
        return
    half = len(straight) // 2
    stage = staged(name, Request((1,)), tmp_path / "again")  # another object, after a restart
    state = straight[half - 1]
    for number in range(half, len(straight)):
        stage.session.enter("unlearn-0", number)
        state = stage.method.unlearn(stage.fed, state, stage.trained, stage.request)
    for n, p in straight[-1].params.items():
        torch.testing.assert_close(p, state.params[n], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", METHODS)
def test_a_method_file_names_its_paper_and_its_class_says_what_it_is(name: str) -> None:
    import sys

    module = sys.modules[METHODS[name].__module__]
    assert module.__doc__
    assert METHODS[name].__doc__
    if name not in ("natural", "retrain", "ascent"):
        assert any(year in module.__doc__ for year in map(str, range(2016, 2027))) or "Mora" in module.__doc__
