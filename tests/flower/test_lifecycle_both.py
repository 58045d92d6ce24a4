# SPDX-License-Identifier: Apache-2.0
"""One life, two drivers: whatever happens to a federation, the simulator and the Flower server end in the same place.

A federation trains, forgets (a client, several, samples, before the first round too), takes new clients in, is killed
at any write and goes on. After every step both sides have the same model, memories, members, clock and costs.

Who was forgotten and comes back is a new client here: over Flower it has a new key, hence a new number. Under its old
number it can come back in the simulator alone (`tests/test_lifecycle.py`). Of several clients that leave together, one
that itself refuses the task is served by the fallback alone over Flower, and takes the others with it in the simulator,
where nobody knows who refused: such a client leaves alone here. Of the costs, FLOPs and what clients keep at home are
not compared: a real server cannot know them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="needs the extra `flower`")

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from fedquit.core import ClientId, Memory, Request
from fedquit.data.federated import FederatedData
from fedquit.flower.ledger import Ledger
from fedquit.flower.roster import Roster
from fedquit.flower.server import ServerResult
from fedquit.running.lifecycle import next_turn
from fedquit.running.session import Progress
from fedquit.running.setup import Setup, build_setup
from fedquit.running.simulation import Simulation
from fedquit.running.store import DiskMemory, StateFile
from fedquit.utils import files
from flower import grid_world
from worlds import tiny

pytestmark = pytest.mark.flower

TRAIN = {"rounds": 1, "batch_size": 8, "lr": 0.1}
RECOVERY_ROUNDS = 1
METHODS: dict[str, dict[str, Any]] = {
    "fukd": {"epochs": 1.0},  # the server adds up what each client contributed, and marks who is incomplete
    "pga": {"epochs": 1.0, "batch_size": 8, "weighted": True},  # a client keeps its last model at home
    "federaser": {},  # the server keeps a history, and replays as many rounds as there were
    "seam_methods:CountTwice": {},  # a client builds on what it kept at home, for samples too
    "fedosd": {"unlearning_rounds": 1, "recovery": "projected"},  # one client at a time, a recovery of its own
}
COMPARED_COSTS = ("down_bytes", "up_bytes", "participations", "client_epochs", "server_epochs", "server_storage_bytes")
SEARCHING = not settings().derandomize  # with `--hypothesis-profile=search`


class Killed(BaseException):
    """The machine stops."""


@dataclass(frozen=True)
class Kill:
    """At which write the machine stops, and on which side of it."""

    write: int
    after: bool


@contextlib.contextmanager
def armed(kill: Kill | None) -> Iterator[None]:
    write_atomic, writes = files.write_atomic, itertools.count(1)

    def deadly(path: Path, content: bytes) -> None:
        due = kill is not None and next(writes) == kill.write
        if due and not (kill and kill.after):
            raise Killed
        write_atomic(path, content)
        if due:
            raise Killed

    files.write_atomic = deadly
    try:
        yield
    finally:
        files.write_atomic = write_atomic


@cache
def setup_of(method: str) -> Setup:
    """Six clients in float64, of whom four are there from the beginning."""
    name: dict[str, Any] = {"name": method, **METHODS[method]}
    recipe = tiny(method=name, data={"clients": 6}, train=TRAIN, evaluate={"attacks": []})
    whole = build_setup(recipe)
    few = dataclasses.replace(whole.data, train={c: whole.data.train[c] for c in range(4)}, holdout={})
    return dataclasses.replace(whole, data=few)


@cache
def everybody(method: str) -> FederatedData:
    return build_setup(setup_of(method).recipe).data


@dataclass
class Both:
    """A federation in the simulator and over Flower, led through the same life."""

    method: str
    folder: Path
    together: bool = True  # whether several requests are served as one; the server's checks on members would refuse to
    rounds: int = 0  # of training that were asked for
    costs: list[tuple[float, ...]] = field(default_factory=list)  # of each erasure, in the simulator
    steps: list[Callable[[Simulation], object]] = field(default_factory=list)  # which a simulator that died does again

    def __post_init__(self) -> None:
        self.setup = setup_of(self.method)
        self.data = self.setup.data  # everybody who ever was, with all that they ever had
        self.places_forgotten: dict[ClientId, int] = dict.fromkeys(self.data.clients, 0)
        self.world = grid_world.Setup(self.setup.data, self.setup.model, self.folder / "flower")
        self.simulation = self._new_simulation()
        self.result: ServerResult | None = None

    def _new_simulation(self) -> Simulation:
        self.costs.clear()
        fallback = self.world.config().build_fallback()
        return Simulation(self.setup, self.folder / "simulator", fallback=fallback)

    # What may happen.

    def train(self, kill: Kill | None = None) -> None:
        self.rounds += 1
        self._simulate(lambda simulation: simulation.train(1), kill)
        self._serve(kill)
        self.compare()

    def forget(self, whole: Sequence[ClientId], samples: Sequence[ClientId] = (), kill: Kill | None = None) -> None:
        """Whole clients and samples of others: what is asked for together is served together, whole clients first."""
        for client in whole:
            self.world.outbox(client).file()
        marked: dict[ClientId, torch.Tensor] = {}
        for client in samples:
            first = self.places_forgotten[client]
            places = [first, first + 1]
            self.world.outbox(client).file(positions=places)
            marked[client] = self.data.train[client][places]
            self.places_forgotten[client] += 2
        for request in (Request(tuple(sorted(whole))), Request(tuple(sorted(samples)), samples=True)):
            if request.clients:
                self._simulate(partial(self._forget, waiting=request, samples=marked), kill)
        if self.rounds:  # before the first round the server has nothing to do: it hears of them when it begins
            self._serve(kill)
            self.compare()

    def join(self, back: ClientId | None = None) -> ClientId:
        """A new client, or one that was forgotten with a new key: the data that it has left is the same."""
        number = len(self.data.train)
        if back is None:
            mine = everybody(self.method).train[number % 6]
        else:
            mine = self.simulation.data_before_leaving[back].train[back]
        self.data = dataclasses.replace(self.data, train={**self.data.train, number: mine})
        self.places_forgotten[number] = 0
        self.world.data = self.data
        node = self.world.node(number)
        self.world.grid.nodes[node.id] = node
        data = self.data
        self._simulate(lambda simulation: simulation.enrol(number, data), None)
        return number

    def refuses(self, client: ClientId) -> bool:
        """Whether the client itself will refuse to unlearn: PGA begins with what it kept at home."""
        assert self.simulation.memories is not None
        return self.method == "pga" and f"{client}/own" not in self.simulation.memories.clients

    # In the simulator, and over Flower.

    def _simulate(self, step: Callable[[Simulation], object], kill: Kill | None) -> None:
        self.steps.append(step)
        try:
            with armed(kill):
                step(self.simulation)
        except Killed:
            self.simulation = self._new_simulation()
            for done in self.steps:
                done(self.simulation)

    def _forget(self, simulation: Simulation, waiting: Request, samples: Mapping[ClientId, torch.Tensor]) -> None:
        while waiting.clients:
            members = simulation.life.membership
            request = next_turn(waiting, members, self.setup.method, together=self.together).request
            if simulation.state.clock == 0:
                request = waiting
            marks = {c: samples[c] for c in request.clients} if request.samples else None
            self._serve_in_simulator(simulation, request, simulation.data.mark(request, marks))
            left = tuple(c for c in waiting.clients if c not in request.clients)
            waiting = dataclasses.replace(waiting, clients=left)

    def _serve_in_simulator(self, simulation: Simulation, request: Request, marked: FederatedData) -> None:
        if simulation.state.clock == 0:
            simulation.leave_untrained(request, marked)
            return
        unlearned = simulation.unlearn(request, marked)
        recovery = simulation.recovery(unlearned)
        most = RECOVERY_ROUNDS if unlearned.method.recovers else 0
        progress: Progress = next(p for p in recovery.rounds if p.state.round >= most)
        simulation.erase(unlearned, progress, recovery.memories)
        both = dataclasses.asdict(unlearned.progress.costs), dataclasses.asdict(progress.costs)
        self.costs += [compared_costs(*both)] * len(request.clients)  # as the ledger has them: for each client

    def _serve(self, kill: Kill | None) -> None:
        train = {**TRAIN, "rounds": self.rounds}
        method: dict[str, Any] = {"name": self.method, **METHODS[self.method]}
        settings = {"together": self.together, "check_members": not self.together}
        config = self.world.config(train=train, method=method, recover_rounds=RECOVERY_ROUNDS, **settings)
        try:
            with armed(kill):
                self.result = self.world.serve(config)
        except Killed:
            self.result = self.world.serve(config)

    # What must be the same.

    def compare(self) -> None:
        assert self.result is not None
        self._compare_models(self.result)
        self._compare_members(self.result)
        self._compare_memories()
        self._compare_costs(self.result)

    def _compare_models(self, result: ServerResult) -> None:
        simulated = self.simulation.state
        assert list(result.params) == list(simulated.params)
        for name, tensor in simulated.params.items():
            torch.testing.assert_close(result.params[name], tensor, rtol=1e-12, atol=1e-12)
        assert result.rounds == self.simulation.life.phase.trained + simulated.round == self.rounds
        phase = self._ledger.phase
        stored = StateFile(self._state / "phases" / f"{phase.number:06d}" / "state.safetensors").load()
        assert stored is not None
        assert (stored[0].clock, stored[0].round) == (simulated.clock, simulated.round)
        assert phase.name == self.simulation.life.phase.name

    def _compare_members(self, result: ServerResult) -> None:
        members = self.simulation.life.membership
        assert result.erased == members.erased
        everybody_there = sorted(Roster(self._state).members)
        assert self._ledger.life(everybody_there).membership == members
        examples = {c: m.examples for c, m in Roster(self._state).members.items() if c in members.active}
        assert examples == {c: len(self.simulation.data.train[c]) for c in members.active}

    def _compare_memories(self) -> None:
        assert self.simulation.memories is not None
        kept = DiskMemory(self._state / "memory")
        of_methods = {key: kept[key] for key in kept if not key.startswith("members/")}  # the simulator has no judge
        same_entries(of_methods, self.simulation.memories.server)
        at_home: dict[str, Any] = {}
        for client in self.data.clients:
            at_home |= DiskMemory(self.world.home(client) / "memory" / self._ledger.federation)
        same_entries(at_home, self.simulation.memories.clients)

    def _compare_costs(self, result: ServerResult) -> None:
        served = [e.costs for e in result.erasures if e.costs]
        over_flower = [compared_costs(costs["unlearning"], costs["recovery"]) for costs in served]
        assert sorted(over_flower) == sorted(self.costs)

    @property
    def _state(self) -> Path:
        return self.folder / "flower" / "state"

    @property
    def _ledger(self) -> Ledger:
        return Ledger(self._state, {})


def compared_costs(*phases: Mapping[str, Any]) -> tuple[float, ...]:
    return tuple(costs[name] for costs in phases for name in COMPARED_COSTS)


def same_entries(a: Memory | Mapping[str, Any], b: Memory) -> None:
    assert sorted(a) == sorted(b)
    for key in b:
        for name, tensor in b[key].items():
            torch.testing.assert_close(a[key][name], tensor, rtol=1e-12, atol=1e-12)


KILLS = st.none() | st.builds(Kill, write=st.integers(1, 40), after=st.booleans())


class Lives(RuleBasedStateMachine):
    """All lives that a federation may have."""

    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory()

    @initialize(
        method=st.sampled_from(sorted(METHODS)),
        early=st.sampled_from(["nobody", "client", "samples"]),
        together=st.booleans(),
    )
    def begin(self, method: str, early: str, together: bool) -> None:
        self.both = Both(method, Path(self._folder.name), together)
        if early != "nobody":
            self.both.forget([1] if early == "client" else [], [1] if early == "samples" else [])
        self.both.train()

    def teardown(self) -> None:
        self._folder.cleanup()

    @property
    def members(self) -> tuple[ClientId, ...]:
        return self.both.simulation.life.membership.active

    @rule(kill=KILLS)
    def train(self, kill: Kill | None) -> None:
        self.both.train(kill)

    @precondition(lambda self: len(self.members) > 2)
    @rule(data=st.data(), kill=KILLS)
    def forget_clients(self, data: st.DataObject, kill: Kill | None) -> None:
        most = min(2, len(self.members) - 2)
        leaving = data.draw(st.lists(st.sampled_from(self.members), min_size=1, max_size=most, unique=True))
        refusing = [c for c in leaving if self.both.refuses(c)]
        self.both.forget(refusing[:1] or leaving, kill=kill)

    @rule(data=st.data(), kill=KILLS)
    def forget_samples(self, data: st.DataObject, kill: Kill | None) -> None:
        able = [c for c in self.members if self.both.places_forgotten[c] < 8]
        if able:
            asking = data.draw(st.lists(st.sampled_from(able), min_size=1, max_size=2, unique=True))
            self.both.forget([], asking, kill)

    @precondition(lambda self: len(self.both.data.train) < 9)
    @rule(data=st.data())
    def join(self, data: st.DataObject) -> None:
        forgotten = sorted(self.both.simulation.life.membership.erased)
        self.both.join(data.draw(st.sampled_from([None, *forgotten])))


Lives.TestCase.settings = settings(
    max_examples=100 if SEARCHING else 10,
    stateful_step_count=12 if SEARCHING else 5,
    deadline=None,
)
TestLives = Lives.TestCase


@pytest.mark.parametrize("method", METHODS)
def test_a_whole_life_is_the_same_on_both_sides(method: str, tmp_path: Path) -> None:
    both = Both(method, tmp_path)
    both.train()
    both.forget([1], [0], Kill(3, after=True))
    newcomer = both.join()
    back = both.join(1)
    both.train(Kill(5, after=False))
    both.forget([back, newcomer])
    both.train()
    both.forget([0])
