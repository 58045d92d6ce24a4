# SPDX-License-Identifier: Apache-2.0
"""The phases of a federation's life over Flower: `lifecycle` decides, this asks real nodes and writes to disk."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from fedquit.audit.canaries import NATURAL, fields_of
from fedquit.core import ClientId, Model, Params, Reply, Request, State, Trained
from fedquit.core.method import Method
from fedquit.engine import Ask
from fedquit.errors import FedquitError, NoExamplesError, UnreachableError
from fedquit.flower.client import ClientData
from fedquit.flower.config import ServerConfig
from fedquit.flower.grid_engine import GridEngine, TooFewReplies
from fedquit.flower.intake import Intake
from fedquit.flower.judgement import DilutedError, Judge, Witness, is_unchanged
from fedquit.flower.ledger import Erasure, Ledger
from fedquit.flower.presence import Presence
from fedquit.flower.roster import Roster
from fedquit.flower.state_folder import PhaseMemory, StateFolder
from fedquit.flower.transport import PATIENCE, Clock, OutgoingMessage
from fedquit.flower.wire import (
    QUERY,
    AuditModels,
    InvalidMessage,
    Serving,
    audit_to_records,
    body_from_records,
    counts_from_body,
)
from fedquit.running import lifecycle
from fedquit.running.costs import Metered
from fedquit.running.lifecycle import Hooks, Life, Turn
from fedquit.running.memory import CPU
from fedquit.running.session import Progress, Session, advance, place_of
from fedquit.running.store import Bounds, Journal, StateFile

Evaluate = Callable[[Params], float]
TRIES = 3  # of a round that too few clients answered


@dataclass(frozen=True)
class ServerParts:
    """What the phases of one federation work with."""

    config: ServerConfig
    model: Model
    initial: Params
    public: ClientData | None  # the server's own data
    evaluate: Evaluate | None
    folder: StateFolder
    ledger: Ledger
    roster: Roster
    nodes: Presence
    intake: Intake
    clock: Clock
    say: Callable[[str], None]


@dataclass
class _Stage:
    """One phase at work."""

    session: Session
    fed: Metered
    engine: GridEngine
    memory: PhaseMemory
    file: StateFile
    state: State
    examples: dict[ClientId, int] = field(default_factory=dict)  # as the clients say in this round


class Phases:
    """Goes on with the phase that the ledger names, until training is over and no request waits."""

    def __init__(self, parts: ServerParts) -> None:
        self._parts = parts
        self._config = parts.config
        self._folder = parts.folder
        self._ledger = parts.ledger
        self._roster = parts.roster
        self._nodes = parts.nodes
        self._intake = parts.intake
        self._say = parts.say
        self._method = parts.config.build_method()
        self._training = parts.config.training
        self._failures = 0  # rounds in a row that too few clients answered

    @property
    def life(self) -> Life:
        """Where the federation stands."""
        return self._ledger.life(sorted(self._roster.members))

    def go_on(self) -> bool:
        """Go on with the phase at hand; False once there is nothing left to do."""
        phases = {"train": self._train, "unlearn": self._unlearn, "recover": self._recover, "erase": self.erase}
        try:
            return phases[self._ledger.phase.kind]()
        except TooFewReplies as error:
            self._failures += 1
            if self._failures >= TRIES:
                raise
            self._say(f"the round is repeated: {error}")
            self._parts.clock.sleep(PATIENCE)
            return True

    def accuracy(self, state: State) -> float | None:
        """Of a model in percent, where the server can measure it."""
        return self._parts.evaluate(state.params) if self._parts.evaluate else None

    def _enter(self, life: Life, state: State) -> None:
        """The next phase: its model is on disk first; the ledger turns to it; then what came before is deleted."""
        self._folder.model(life.phase).save(lifecycle.entered(life.phase.kind, state), 0.0)
        self._ledger.follow(life)
        self._ledger.save()
        self._failures = 0
        self._folder.clean(life.phase)

    # Ordinary training, and requests between its rounds.

    def _train(self) -> bool:
        """Ordinary training, until a request waits or all rounds are done."""
        stage = self._stage()
        phase = self._ledger.phase
        hooks = self._hooks(stage)

        def step(state: State) -> State:
            self._gather(stage)
            self._intake.begin_round()
            with self._round(stage):
                after = hooks.round(stage.fed, state, self._training, stage.session.present)
            self._roster.note(stage.examples)
            lifecycle.require_usable(after, state, f"phase {phase.name!r}")
            return after

        for progress in advance(stage.session, phase.name, stage.state, step, stage.file, meter=stage.fed):
            done = phase.trained + progress.state.round
            if progress.state.round > stage.state.round:
                self._failures = 0
                self._say_trained(done, len(stage.examples), progress.state)
            due = self._config.sweep and done % self._config.sweep == 0 and done > phase.trained
            if due or done >= self._training.rounds:
                self._nodes.sweep(self.life.membership.active)
            if self._intake.take():
                self._serve_next(progress.state)
                return True
            if done >= self._training.rounds:
                return False
        return True

    def _say_trained(self, done: int, replies: int, state: State) -> None:
        accuracy = self.accuracy(state)
        measured = "" if accuracy is None else f", accuracy {accuracy:.1f}"
        self._say(f"training round {done} of {self._training.rounds} ({replies} replies{measured})")

    def _serve_next(self, state: State) -> None:
        """Begin with those that wait."""
        if not lifecycle.has_been_trained(state):
            self._leave_untrained()
            return
        chosen = self._intake.next_turn(self.life.membership, self._method)
        if chosen:
            self._start(*chosen, state)

    def _leave_untrained(self) -> None:
        """Before the first round the model has seen nobody's data: who asks to leave need only be left out."""
        waiting = self._ledger.waiting
        clients = {e.client for e in waiting}
        memory = self._folder.memory(self._ledger.phase)  # a round that was cut off may have left something
        memory.purge(lifecycle.names_to_erase(clients, with_marks=True))
        whole = tuple(sorted({e.client for e in waiting if e.kind == "client"}))
        self._ledger.follow(self.life.leave_untrained(Request(whole)))
        self._ledger.change([e.id for e in waiting], lambda e: e.now("done", reason="nothing had been trained yet"))
        self._ledger.save()

    def _start(self, turn: Turn, names: tuple[str, ...], state: State) -> None:
        start = lifecycle.entered("unlearn", state)
        self._folder.before.save(start, 0.0)
        if turn.request.samples:
            self._roster.begin_erasing_samples(turn.request.clients, self._nodes.enrolled)
        measured = self._measured("before", start)
        method = self._config.fallback if turn.fallback else self._config.method_name
        changes = {"method": method, "fallback": turn.fallback, "reason": turn.reason}
        self._ledger.change(names, lambda e: measured(e).now("started", **changes))
        why = f" ({turn.reason})" if turn.reason else ""
        self._say(f"{', '.join(names)} started, with {method}{why}")
        life = self.life.begin_unlearning(
            turn.request,
            rounds=state.round,
            serving=names,
            fallback=turn.fallback,
            began=self._parts.clock.now(),
        )
        self._enter(life, start)

    # A request: unlearn, recover, erase.

    def _unlearn(self) -> bool:
        """The method's own rounds; whoever must answer is asked until the deadline, then the fallback is taken."""
        life = self.life
        phase = life.phase
        stage = self._stage(journal=self._folder.journal(phase))
        method = self._serving_method
        trained = self._trained(stage)
        rounds = method.rounds(trained, life.requested)
        if life.required:
            stage.engine.required = life.required
            stage.engine.deadline = phase.began + self._config.deadline

        def step(state: State) -> State:
            self._gather(stage)
            fed = Witness(stage.fed, life.required)
            with self._round(stage):
                after = lifecycle.unlearning_round(method, fed, state, trained, life.requested)
            if self._config.check_members and len(life.required) > 1:
                fed.require_lasting(state.params, after.params)
            self._failures = 0
            return after

        try:
            for progress in advance(stage.session, phase.name, stage.state, step, stage.file, rounds, stage.fed):
                self._say(f"unlearning round {progress.state.round} of {rounds}")
            self._require_changed(progress.state, trained)
        except DilutedError as error:
            self._serve_one_by_one(str(error))
            return True
        except FedquitError as error:
            if not lifecycle.is_reason_to_fall_back(error):
                raise
            concerned = error.clients if isinstance(error, UnreachableError) else life.requested.clients
            self._fall_back(str(error), concerned)
            return True
        self._end_of_unlearning(progress)
        return True

    def _require_changed(self, state: State, trained: Trained) -> None:
        """Refuse an unlearning whose rounds have left the model as it was, by whatever answers."""
        if self._config.check_members and state.round and is_unchanged(trained.params, state.params):
            raise lifecycle.UnusableModelError("the model after the unlearning is the one before it")

    def _serve_one_by_one(self, reason: str) -> None:
        """Serve the first of the requests alone; the others wait for their turn."""
        life = self.life
        first, *others = self._ledger.serving
        names = [entry.id for entry in others]
        before = self._folder.before.load()
        assert before is not None, "the model before a request is kept until the request is done"
        self._say(f"{', '.join(life.phase.serving)} are served one by one: {reason}")
        self._ledger.change(names, lambda e: e.now("received"))
        alone = replace(life.requested, clients=(first.client,))
        self._enter(life.narrow(alone, [first.id]), before[0])

    def _end_of_unlearning(self, progress: Progress) -> None:
        names = self._ledger.phase.serving
        costs = asdict(progress.costs)
        measured = self._measured("unlearned", progress.state)
        self._ledger.change(names, lambda e: measured(replace(e, costs={"unlearning": costs})).now("unlearned"))
        self._say(f"{', '.join(names)} unlearned")
        self._enter(self.life.begin_recovery(), progress.state)

    def _fall_back(self, reason: str, clients: Collection[ClientId]) -> None:
        """Serve these of the clients otherwise; the others, which did nothing wrong, wait for their own turn."""
        life = self.life
        others = [e.id for e in self._ledger.serving if e.client not in clients]
        names = tuple(name for name in life.phase.serving if name not in others)
        before = self._folder.before.load()
        assert before is not None, "the model before a request is kept until the request is done"
        self._ledger.change(others, lambda e: e.now("received"))
        if life.phase.fallback:  # nothing is left to try
            self._ledger.change(names, lambda e: e.now("failed", reason=reason))
            self._say(f"{', '.join(names)} failed: {reason}")
            self._enter(life.give_up(), before[0])
            return
        fallback = self._config.fallback
        self._say(f"{reason}: {fallback} serves the request instead")
        self._ledger.change(names, lambda e: replace(e, method=fallback, fallback=True, reason=reason))
        remaining = tuple(c for c in life.requested.clients if c in clients)
        self._enter(life.fall_back(replace(life.requested, clients=remaining), names), before[0])

    def _recover(self) -> bool:
        """Ordinary training without the forgotten data."""
        life = self.life
        stage = self._stage()
        method = self._serving_method
        hooks = self._hooks(stage)
        trained = self._trained(stage)
        most = lifecycle.recovery_rounds(method, self._config.recover_rounds)

        def step(state: State) -> State:
            self._gather(stage)
            with self._round(stage):
                after = lifecycle.recovery_round(method, hooks, stage.fed, state, trained, life.requested)
            self._roster.note(stage.examples)
            return after

        for progress in advance(stage.session, life.phase.name, stage.state, step, stage.file, meter=stage.fed):
            if progress.state.round > stage.state.round:
                self._failures = 0
            accuracy = self.accuracy(progress.state)
            measured = "" if accuracy is None else f", accuracy {accuracy:.1f}"
            self._say(f"recovery round {progress.state.round} of at most {most}{measured}")
            if lifecycle.recovery_is_over(progress.state.round, most, accuracy, self._config.recover_until or None):
                break
        self._end_of_recovery(progress)
        return True

    def _end_of_recovery(self, progress: Progress) -> None:
        costs = asdict(progress.costs)
        measured = self._measured("recovered", progress.state)
        audits = self._audited_by_clients(progress.state) if self._config.audit else {}
        self._ledger.change(
            self._ledger.phase.serving,
            lambda e: measured(replace(e, costs={**e.costs, "recovery": costs}, audit=audits.get(e.client, {}))).now(
                "recovered"
            ),
        )
        self._enter(self.life.begin_erasing(), progress.state)

    def _audited_by_clients(self, state: State) -> dict[ClientId, dict[str, Any]]:
        """What whole clients that leave find with their own canaries, as far as they are online and have some."""
        before = self._folder.before.load()
        assert before is not None, "the model before a request is kept until the request is done"
        self._nodes.refresh()
        here = self._nodes.here
        leaving = [e for e in self._ledger.serving if e.kind == "client" and e.client in here]
        messages = []
        for entry in leaving:
            models = AuditModels(entry.request, before[0].params, state.params)
            messages.append(OutgoingMessage(here[entry.client], QUERY, audit_to_records(models)))
        clients = {here[entry.client]: entry.client for entry in leaving}
        audits = {}
        for message, reply in self._nodes.transport.exchange(messages, self._config.timeout):
            client = clients[message.node]
            try:
                if isinstance(reply, str):
                    raise InvalidMessage(reply)
                counts = counts_from_body(body_from_records(reply.content))
            except InvalidMessage as error:
                self._say(f"no audit of {self._roster[client].title}: {error}")
                continue
            if counts is not None:
                audits[client] = fields_of({NATURAL: counts.judged()})
                self._say(f"one-run audit of {self._roster[client].title}: {counts.judged().sentence}")
        return audits

    def erase(self) -> bool:
        """Delete what lies under the names of the clients of a request: only then it is done."""
        life = self.life
        memory = self._folder.memory(life.phase)
        memory.move(-1)  # before the first place of the phase, which is to find it gone
        lifecycle.erase(life, self._method, memory.shelf(self._config.method_name), memory.purge)
        memory.close()
        served = [e.id for e in self._ledger.serving if e.status == "recovered"]
        if served:
            self._folder.wipe_messages(self._say)
            self._ledger.change(served, lambda e: e.now("done"))
        self._ledger.follow(life.resume_training())
        self._ledger.save()
        if served:
            self._say(f"{', '.join(served)} done")
        return True

    # What the phases have in common.

    @property
    def _serving_method(self) -> Method:
        return self._config.build_fallback() if self._ledger.phase.fallback else self._method

    def _hooks(self, stage: _Stage) -> Hooks:
        return Hooks.of(self._config.method_name, self._method, stage.memory.shelf)

    def _trained(self, stage: _Stage) -> Trained:
        before = self._folder.before.load()
        assert before is not None, "the model before a request is kept until the request is done"
        shelf = stage.memory.shelf(self._config.method_name)
        return self.life.trained(before[0], self._parts.initial, self._training, self._roster.examples, shelf)

    def _measured(self, when: str, state: State) -> Callable[[Erasure], Erasure]:
        accuracy = self.accuracy(state)
        return lambda e: e if accuracy is None else replace(e, accuracy={**e.accuracy, when: accuracy})

    def _stage(self, *, journal: Journal | None = None) -> _Stage:
        phase = self._ledger.phase
        file = self._folder.model(phase)
        stored = file.load()
        assert stored is not None, "a phase begins with its model on disk"
        memory = self._folder.memory(phase, Bounds.of(CPU))
        engine = GridEngine(
            self._parts.model,
            self._nodes,
            self._ledger.federation,
            phase.number,
            self._config.timeout,
            self._config.min_replies,
            serving={e.client: Serving(e.kind, e.request) for e in self._ledger.serving},
            public=self._parts.public,
        )
        if self._config.check_members:
            training = phase.kind in ("train", "recover")
            engine.judge = Judge(memory.shelf("members"), training=training, log=self._folder.append)
        session = Session(engine, self._config.run_seed, (), journal, (memory,), self._folder.append, lenient=True)
        meter = Metered(session, partial(memory.stored, self._config.method_name))
        stage = _Stage(session, meter, engine, memory, file, stored[0])
        engine.arrived = partial(_arrived, stage, journal)
        return stage

    def _gather(self, stage: _Stage) -> None:
        """Wait until enough of those that may take part are here, and let only these be asked."""
        left_out = self.life.left_out
        needed = max(1, self._config.min_nodes - len(left_out))

        def here() -> list[ClientId]:
            return sorted(c for c in self._nodes.here if c not in left_out)

        def missing() -> str:
            if len(here()) >= needed:
                return "one that has examples"
            known = [m.title for c, m in sorted(self._roster.members.items()) if c not in {*left_out, *here()}]
            return ", ".join(known[:8]) or f"{needed - len(here())} nodes that have never been here"

        def able() -> list[ClientId]:
            return [c for c in here() if self._roster[c].examples]

        what = f"the round needs {needed} nodes that may take part"
        self._nodes.wait(lambda: len(here()) >= needed and bool(able()), what, missing, self._config.wait)
        # Who leaves is not waited for here: it has a deadline of its own.
        stage.session.present = self.life.askable(able())

    @contextmanager
    def _round(self, stage: _Stage) -> Iterator[None]:
        """Where nobody who was asked has an example, too few have replied, and these are not asked again."""
        stage.examples.clear()
        try:
            yield
        except NoExamplesError as error:
            required = stage.engine.required
            empty = {c: n for c, n in stage.examples.items() if n == 0 and c not in required}
            if not empty:  # those that leave gave none, and would not the next time
                raise
            self._roster.note(empty)
            if stage.session.journal:
                stage.session.journal.clear()  # or a server that is started again would find the same replies
            raise TooFewReplies(str(error)) from error


def _arrived(stage: _Stage, journal: Journal | None, ask: Ask, reply: Reply) -> None:
    """A reply is here: of a client that leaves, it is on disk at once, before others are waited for."""
    stage.examples[reply.client] = reply.examples
    if journal and reply.client in stage.engine.required:
        journal.put(place_of(ask), reply)
