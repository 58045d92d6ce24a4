# SPDX-License-Identifier: Apache-2.0
"""One life of a federation with a method: training, a request, recovery, erasure; on disk, as in every run."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from fedquit.check.digest import digest
from fedquit.check.federation import RECOVERY_ROUNDS, SmallFederation
from fedquit.core import ClientId, Memory, Params, Reply, Request, State, Trained
from fedquit.core.method import Method
from fedquit.core.params import fingerprint, nbytes
from fedquit.engine import Engine
from fedquit.running.costs import Costs
from fedquit.running.lifecycle import recovery_rounds
from fedquit.running.session import Event
from fedquit.running.simulation import Simulation
from fedquit.running.store import Memories
from fedquit.running.training_cache import Silent, train

PHASES = {"train": "training", "unlearn": "unlearning", "recover": "recovery"}  # by the beginning of their addresses
Place = tuple[str, int]  # a phase in words, and the number of rounds behind it
Interrupt = Callable[[str, int, str], None]  # (phase, round from 0, moment: "begin", "reply" or "end")


class Spectator(Protocol):
    """Looks at a life from outside."""

    def observe(self, method: Method) -> Method:
        """Return the method with whatever is to be seen of it wrapped."""

    def engine(self, engine: Engine) -> Engine:
        """Return the engine with whatever is to be seen of it wrapped."""

    def enter(self, phase: str, round: int) -> None:
        """A round begins."""

    def before_erasure(self, shelf: Memory, homes: Memory) -> None:
        """The recovery is over; this is what the server and the clients keep."""

    def erased(self, shelf: Memory) -> None:
        """The request has been served; this is what the server still keeps for the method."""


@dataclass
class Trace:
    """What happened: the state after every round, what was remembered, and what it cost."""

    states: dict[Place, State] = field(default_factory=dict)
    memories: dict[str, str] = field(default_factory=dict)  # a digest at the end of a phase
    costs: dict[str, Costs] = field(default_factory=dict)  # by phase
    rounds: int = 0  # of unlearning that the method wants
    kept_bytes: int = 0  # that the server keeps for the method after the training
    promised_bytes: int = 0  # that the method said it would keep, and those of one model

    def fingerprints(self) -> dict[str, str]:
        """A hash of the state after each round and of the memories, by a place in words."""
        prints = {_in_words(place): _fingerprint(state) for place, state in sorted(self.states.items(), key=_in_order)}
        return prints | {f"what is remembered after the {phase}": seen for phase, seen in self.memories.items()}


def _in_order(entry: tuple[Place, State]) -> tuple[int, int]:
    (phase, number), _ = entry
    return list(PHASES.values()).index(phase), number


def _in_words(place: Place) -> str:
    return f"{place[0]} round {place[1]}"


def _fingerprint(state: State) -> str:
    parts = {name: fingerprint(dict(part)) for name, part in sorted(state.kept.items()) if part}
    return f"{fingerprint(state.params)} {state.clock} {parts}"


def first_difference(a: Mapping[str, str], b: Mapping[str, str], *, partial: bool = False) -> str:
    """The first place at which two lives differ; "" where they are the same.

    Args:
        a: the fingerprints of one.
        b: those of the other.
        partial: whether `b` went on with what others had begun, and knows the places since then alone.
    """
    places = [place for place in a if place in b or not partial]
    return next((place for place in places if a[place] != b.get(place)), "")


def largest_deviation(a: Trace, b: Trace) -> tuple[float, str]:
    """How far two lives lie apart: the largest difference of two parameters over the largest parameter.

    Returns:
        The deviation, and the first place at which it is more than a thousandth of that.
    """
    by_place: dict[str, float] = {}
    for place, state in sorted(a.states.items(), key=_in_order):
        other = b.states.get(place)
        by_place[_in_words(place)] = _deviation(state.params, other.params) if other else math.inf
    worst = max(by_place.values(), default=0.0)
    first = next((place for place, apart in by_place.items() if apart >= worst / 1000 and apart > 0), "")
    return worst, first


def _deviation(a: Params, b: Params) -> float:
    size = max((float(p.abs().max()) for p in a.values() if p.numel()), default=0.0)
    apart = [float((p - b[n]).abs().max()) for n, p in a.items() if p.numel()]
    return max(apart, default=0.0) / max(size, 1e-12)


def lead_life(
    federation: SmallFederation,
    kind: str,
    folder: Path,
    *,
    cache: Path | None = None,
    engine: str = "sequential",
    spectator: Spectator | None = None,
    interrupt: Interrupt | None = None,
    life: Trace | None = None,
) -> Trace:
    """Lead a federation with a new object of the method through a request, or go on with what the folder holds.

    Args:
        federation: that the method is checked in.
        kind: of the request.
        folder: for all that it stores.
        cache: of trainings; else a folder of its own.
        engine: that computes.
        spectator: looks on.
        interrupt: is called at every moment at which a run may be killed, and may raise.
        life: of an earlier attempt, to go on with.

    Raises:
        RequestError: where the method refuses the request.
    """
    life = life or Trace()
    interrupt = interrupt or _go_on
    method = federation.build_method()
    observed = spectator.observe(method) if spectator else copy.copy(method)
    _trace(observed, federation, life, interrupt)
    request = federation.request(kind)
    observed.check(request)
    setup = federation.setup(observed, spectator.engine if spectator else None, engine)
    marked = federation.marked(request)
    federated = train(
        setup,
        marked if method.knows_request else federation.data,
        cache or folder / "cache",
        reporter=Silent(),
        attached={federation.name: observed},
        request=request,
    )
    life.kept_bytes, _ = federated.memories.stored(federation.name, ())
    model_bytes = nbytes(setup.initial)
    life.promised_bytes = method.history_bytes(setup.training, len(federation.clients), model_bytes) + model_bytes
    life.states["training", federated.progress.state.round] = federated.progress.state
    life.memories["training"] = _remembered(federated.memories)

    simulation = Simulation(setup, folder / "run", log=_log(interrupt))
    simulation.adopt(federated)
    unlearned = simulation.unlearn(request, marked)
    life.states["unlearning", unlearned.progress.state.round] = unlearned.progress.state
    life.costs["unlearning"] = unlearned.progress.costs

    recovery = simulation.recovery(unlearned)
    progress = next(recovery.rounds)
    while progress.state.round < recovery_rounds(method, RECOVERY_ROUNDS):
        if spectator:
            spectator.enter("recovery", progress.state.round)
        interrupt("recovery", progress.state.round, "begin")
        progress = next(recovery.rounds)
        life.states["recovery", progress.state.round] = progress.state
    life.costs["recovery"] = progress.costs
    recovery.memories.close()
    life.memories["recovery"] = _remembered(recovery.memories)
    if spectator:
        spectator.before_erasure(recovery.memories.of(federation.name), recovery.memories.clients)
    simulation.erase(unlearned, progress, recovery.memories)
    assert simulation.memories is not None
    life.memories["erasure"] = _remembered(simulation.memories)
    if spectator:
        spectator.erased(simulation.memories.of(federation.name))
    return life


def _remembered(memories: Memories) -> str:
    return digest([dict(memory) for memory in memories.own])


def _go_on(phase: str, round: int, moment: str) -> None:
    """Interrupt nothing."""


def _log(interrupt: Interrupt) -> Callable[[Event], None]:
    """A log of replies that interrupts the life when the first reply of a round is here and stored."""

    def log(event: Event) -> None:
        phase = PHASES[str(event["phase"]).partition("-")[0]]
        interrupt(phase, int(str(event["round"])), "reply")

    return log


def _trace(observed: Method, federation: SmallFederation, life: Trace, interrupt: Interrupt) -> None:
    """Note the state after each round of a method's own, and interrupt at the moments that only it knows."""

    def rounds(trained: Trained, request: Request) -> int:
        life.rounds = wanted_rounds(trained, request)
        return min(life.rounds, federation.most_rounds) if federation.most_rounds else life.rounds

    def unlearn(*given: Any) -> State:  # noqa: ANN401 - passed on
        before: State = given[1]
        interrupt("unlearning", before.round, "begin")
        after = own_unlearn(*given)
        life.states["unlearning", after.round] = after
        interrupt("unlearning", before.round, "end")
        return after

    def recover(*given: Any) -> State:  # noqa: ANN401 - passed on
        before: State = given[1]
        after = own_recover(*given)
        interrupt("recovery", before.round, "end")
        return after

    def watch(memory: Memory, round: int, start: Params, reply: Reply) -> None:
        own_watch(memory, round, start, reply)
        if round < federation.recipe.train.rounds:  # later ones are of the recovery
            interrupt("training", round, "reply")

    def after_round(memory: Memory, round: int, examples: Mapping[ClientId, int]) -> None:
        own_after_round(memory, round, examples)
        if round < federation.recipe.train.rounds:
            interrupt("training", round, "end")

    wanted_rounds, own_unlearn, own_recover = observed.rounds, observed.unlearn, observed.recover
    own_watch, own_after_round = observed.watch, observed.after_round
    for hook in (rounds, unlearn, recover, watch, after_round):
        object.__setattr__(observed, hook.__name__, hook)
