# SPDX-License-Identifier: Apache-2.0
"""Driving the rounds of a phase: its addresses, the clients that are present, and what is on disk before the next."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace

import torch

from fedquit.core import SERVER, ClientId, Model, Params, Program, Reply, Sent, Split, State, Task
from fedquit.core.local_layers import with_all_layers
from fedquit.core.params import device_of, nbytes, placed, require_finite, require_same_shapes
from fedquit.engine import Address, Ask, Engine
from fedquit.errors import AbsentClientError, InputError
from fedquit.running.costs import Costs, Metered
from fedquit.running.store import DiskMemory, Journal, StateFile

Event = dict[str, object]
CHEAP = 0.1  # seconds: what is stored faster is stored after every round
RATE = 3e8  # bytes a second that a disk is taken to store until it was measured


def _ignore(_event: Event) -> None:
    """A log that keeps nothing."""


@dataclass
class Session:
    """A federation at a place in a run: it numbers the questions, knows who is present, and checks what comes back."""

    engine: Engine
    run_seed: int
    present: tuple[ClientId, ...]
    journal: Journal | None = None  # keeps the replies of the round at hand, where a client may be gone tomorrow
    memories: Sequence[DiskMemory] = ()
    log: Callable[[Event], None] = _ignore
    lenient: bool = False  # whether the engine may leave out clients: real ones may not answer
    layers: Callable[[], Mapping[ClientId, Params]] = dict  # of the clients that keep layers of their own, as they are
    address: Address = field(default=Address(0, ""), init=False)

    @property
    def model(self) -> Model:
        """The network that everybody trains."""
        return self.engine.model

    @property
    def clients(self) -> tuple[ClientId, ...]:
        """The clients that can be asked now."""
        return self.present

    @property
    def seed(self) -> int:
        """For what the server itself draws at this place."""
        return self.address.seed_for("server")

    def enter(self, phase: str, round: int) -> None:
        """Begin a round."""
        self.address = Address(self.run_seed, phase, round)
        self._move_memories(self.address)
        for memory in self.memories:
            memory.begin_round()

    def flush(self) -> None:
        """Have on disk what the memories hold, before the state that needs it."""
        for memory in self.memories:
            memory.flush()

    def settle(self) -> None:
        """Delete from the memories what no stored state needs; the state of this round must be on disk."""
        for memory in self.memories:
            memory.settle()

    def discard(self) -> None:
        """Delete from the memories what a run that was killed wrote after it had stored the state of this round."""
        for memory in self.memories:
            memory.discard()

    def stop(self) -> None:
        """Let nothing be written in the background any more."""
        for memory in self.memories:
            memory.stop()

    def _move_memories(self, address: Address) -> None:
        for memory in self.memories:
            memory.move(address.round * 1_000_000 + address.question)

    def run(
        self, task: Task | Program, clients: Sequence[ClientId], *, split: Split = "all", **sent: Params
    ) -> Iterator[Reply]:
        """Ask these clients; their replies stream in the order of `clients`."""
        if isinstance(task, Program):
            task.check(split, sent)
        for client in clients:
            if client not in self.present:
                raise AbsentClientError(
                    f"client {client} cannot be asked in phase {self.address.phase!r}: it is not in the federation, or "
                    "it has been forgotten; a forgotten client must be enrolled anew."
                )
        return self._replies(self._ask(task, clients, split, sent))

    def run_at_server(self, task: Task, **sent: Params) -> Params:
        """Do a task on the server's own public data."""
        return self.reply_at_server(task, sent).params

    def reply_at_server(self, task: Task, sent: Sent) -> Reply:
        """The reply to a task on the server's own public data: its answer, and what it took."""
        if isinstance(task, Program):
            raise InputError("a program is for clients, whose data has splits: ask the server for one task at a time.")
        ask = self._ask(task, [SERVER], "all", sent)
        (reply,) = self.engine.run(ask)
        if reply.examples == 0:
            raise InputError("the server has no data of its own to work on: set data.public = 0.05.")
        return _checked(reply, ask, SERVER)

    def _ask(self, task: Task | Program, clients: Sequence[ClientId], split: Split, sent: Sent) -> Ask:
        ask = Ask(task, tuple(clients), split, sent, self.address)
        self.address = replace(self.address, question=self.address.question + 1)
        return ask

    def _replies(self, ask: Ask) -> Iterator[Reply]:
        place = place_of(ask)
        stored = {c: reply for c in ask.clients if self.journal and (reply := self.journal.get(place, c))}
        fresh = self.engine.run(replace(ask, clients=tuple(c for c in ask.clients if c not in stored)))
        ahead: Reply | None = None  # of a client further on, where those before it did not answer
        for client in ask.clients:
            if client in stored:
                device = device_of(next(iter(ask.sent.values()), {}))
                yield replace(stored[client], params=placed(stored[client].params, device))
                continue
            self._move_memories(ask.address)
            ahead = ahead or (next(fresh, None) if self.lenient else next(fresh))
            if self.lenient and (ahead is None or ahead.client != client):
                continue
            assert ahead is not None
            reply, ahead = _checked(ahead, ask, client), None
            if self.journal:
                self.flush()  # what the client kept with this answer: nobody will ask it again
                self.journal.put(place, reply)
            self.log(_event(ask, reply))
            yield reply


def place_of(ask: Ask) -> str:
    """The name under which the journal files the replies to a question."""
    return f"round{ask.address.round}-question{ask.address.question}"


def _checked(reply: Reply, ask: Ask, client: ClientId) -> Reply:
    assert reply.client == client, "an engine answers in the order of the question"
    whose = f"the reply of client {reply.client} in round {ask.address.round + 1} of phase {ask.address.phase!r}"
    require_finite(reply.params, whose)
    start = ask.sent.get("start", {})
    common = reply.params.keys() & start.keys()
    require_same_shapes({n: reply.params[n] for n in common}, {n: start[n] for n in common}, whose)
    return reply


def _event(ask: Ask, reply: Reply) -> Event:
    place = ask.address
    event: Event = {"event": "reply", "phase": place.phase, "round": place.round, "question": place.question}
    event |= {
        "client": reply.client,
        "task": "+".join(type(part.task).__name__ for part in ask.parts),
        "split": "+".join(part.split for part in ask.parts),
        "examples": reply.examples,
    }
    return event | ({"steps": [effort.steps for effort in reply.efforts]} if reply.efforts else {})


@dataclass(frozen=True)
class Progress:
    """A state that is safe on disk, and what it took: seconds, and costs."""

    state: State
    seconds: float
    costs: Costs
    layers: Mapping[ClientId, Params] = field(default_factory=dict)  # BatchNorm of each client's own, where it is local

    @property
    def evaluated(self) -> Params:
        """The model as it is evaluated: with the layers of all clients, where they have any of their own."""
        return with_all_layers(self.state.params, self.layers)


Rounds = Generator[Progress, None, None]  # where a phase stands, then each further round


def _placed(state: State, device: torch.device) -> State:
    parts = {name: placed(part, device) for name, part in state.kept.items()}
    return replace(state, params=placed(state.params, device), kept=parts)


def advance(
    session: Session,
    phase: str,
    start: State,
    step: Callable[[State], State],
    file: StateFile,
    rounds: int | None = None,
    meter: Metered | None = None,
) -> Rounds:
    """Drive a phase: first where it stands (from disk, or `start`), then each further round once it is on disk.

    What the memories hold is flushed before each state is stored, so that a run killed at any moment finds memories
    that fit the state it goes on from. A large model in a phase that only simulates what can be simulated again (no
    journal, a known number of rounds) is stored so seldom that storing it takes a tenth of the time; closing the
    generator stores the last round that is over.

    Args:
        session: the federation, with the memories that its clients and the method's watcher write to.
        phase: its name, part of every address.
        start: where it begins, if nothing is on disk.
        step: one round.
        file: where the state is stored.
        rounds: how many; None: until the caller stops.
        meter: what the steps ask their clients through; its costs are stored with the state, so that nothing is
            counted twice or lost when a round is repeated.
    """
    meter = meter or Metered(session)
    state, seconds, costs = file.load() or (start, 0.0, {})
    state = _placed(state, device_of(start.params))
    meter.costs = Costs(**costs)
    session.enter(phase, state.round)
    if not session.journal:  # what stands in the journal is not asked again, and what was kept with it stays
        session.discard()
    session.settle()
    meter.settle(state)
    yield Progress(state, seconds, meter.costs, session.layers())
    pace = _Pace(repeatable=rounds is not None and not session.journal)
    resumed = state

    def store(size: int) -> None:
        with pace.storing(state.round, size):
            session.flush()
            file.save(state, seconds, asdict(meter.costs))

    try:
        while rounds is None or state.round < rounds:
            session.enter(phase, state.round)
            if pace.stored_round == state.round:
                session.settle()
            began = time.perf_counter()
            state = step(state)
            seconds += time.perf_counter() - began
            meter.settle(state)
            size = _unwritten(session, state)
            if state.round == rounds or pace.is_due(size):
                store(size)
            if session.journal:
                session.journal.clear()
            if state.round == rounds:
                session.enter(phase, state.round)
                session.settle()
            yield Progress(state, seconds, meter.costs, session.layers())
    except GeneratorExit:
        if state is not resumed and pace.stored_round != state.round:
            store(_unwritten(session, state))
        raise
    finally:
        session.stop()


def _unwritten(session: Session, state: State) -> int:
    """The bytes that storing the state would write."""
    parts = [state.params, *state.kept.values()]
    return sum(nbytes(part) for part in parts) + sum(memory.unwritten for memory in session.memories)


@dataclass
class _Pace:
    """Decides after which rounds a state is stored."""

    repeatable: bool  # whether rounds that were not stored can be simulated again
    stored_round: int = -1  # the last one
    stored_at: float = field(default_factory=time.perf_counter)
    rate: float = RATE  # bytes a second, as measured last

    def is_due(self, size: int) -> bool:
        """Whether to store a state of so many bytes now: always, or so seldom that it takes a tenth of the time."""
        cost = size / self.rate
        return not self.repeatable or cost < CHEAP or time.perf_counter() - self.stored_at > 10 * cost

    @contextmanager
    def storing(self, round: int, size: int) -> Iterator[None]:
        """Measure how fast a state of so many bytes is stored."""
        began = time.perf_counter()
        yield
        self.stored_round = round
        self.stored_at = time.perf_counter()
        self.rate = max(size, 1) / max(self.stored_at - began, 1e-6)
