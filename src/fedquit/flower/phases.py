# SPDX-License-Identifier: Apache-2.0
"""The phases of a federation's life over Flower: `lifecycle` decides, this asks real nodes and writes to disk."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from fedquit.audit.canaries import NATURAL, fields_of
from fedquit.core import ClientId, Model, Params, Reply, Request, State, Trained
from fedquit.core.method import Method
from fedquit.engine import Ask
from fedquit.errors import FedquitError, NoExamplesError, StoreError, UnreachableError
from fedquit.flower.client import ClientData
from fedquit.flower.config import ServerConfig, needed_nodes
from fedquit.flower.fairness import Queue
from fedquit.flower.grid_engine import LAST_TRY, GridEngine, Silent, TooFewReplies
from fedquit.flower.intake import Intake
from fedquit.flower.judgement import DilutedError, Judge, Witness, is_unchanged
from fedquit.flower.ledger import MODEL_WITHDRAWN, Erasure, Ledger
from fedquit.flower.notices import unknown_requests
from fedquit.flower.presence import Presence
from fedquit.flower.roster import Roster
from fedquit.flower.state_folder import PhaseMemory, StateFolder
from fedquit.flower.token_bucket import TokenBucket
from fedquit.flower.transport import LONGEST_POLL, PATIENCE, Clock, OutgoingMessage
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
TRIES = 3  # of a round that too few clients answered, and of wiping Flower's database
SWEEP_WHILE_WAITING = 300.0  # seconds after which everybody is asked for requests while clients that are away wait


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
    """The session, meter, memory and state file of the phase at hand."""

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
        self._began = parts.clock.now()
        self._swept_all = self._began  # when everybody was asked for requests while one was waited for (Unix time)
        self._swept: set[str] = set()  # requests that sites have given notice of and that were asked for

    @property
    def life(self) -> Life:
        """Where the federation stands."""
        return self._ledger.life(sorted(self._roster.members))

    def go_on(self) -> bool:
        """Go on with the phase at hand; False once there is nothing left to do."""
        phases = {"train": self._train, "unlearn": self._unlearn, "recover": self._recover, "erase": self.erase}
        try:
            return phases[self._ledger.phase.kind]()
        except _TooFewStay:  # a site was revoked a moment ago: training finds out that it pauses
            return True
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
                if phase.served and not lifecycle.has_been_trained(state):  # the model before was withdrawn
                    lifecycle.give_up_layers(stage.fed, stage.session.present)
                after = hooks.round(stage.fed, state, self._training, stage.session.present)
            self._roster.note(stage.examples, stage.engine.said)
            lifecycle.require_usable(after, state, f"phase {phase.name!r}")
            return after

        for progress in advance(stage.session, phase.name, stage.state, step, stage.file, meter=stage.fed):
            done = phase.trained + progress.state.round
            if progress.state.round > stage.state.round:
                self._failures = 0
                self._say_trained(done, len(stage.examples), progress.state)
            finished = done >= self._training.rounds
            paused = self.paused
            due = self._config.sweep and done % self._config.sweep == 0 and done > phase.trained
            if finished or paused:
                self._nodes.sweep(self.life.membership.active, also_mute=True)
            elif due:
                self._nodes.sweep(self.life.membership.active)
            else:
                self._nodes.sweep(self._noticed())
            if self._intake.take() and self._serve_next(progress.state, patient=finished or bool(paused)):
                return True
            if paused:
                self._say(paused)
            if finished or paused:
                return False
        return True

    def _noticed(self) -> list[ClientId]:
        """The clients whose sites have given notice of a request that the ledger does not know, each asked once."""
        unknown = unknown_requests(self._folder.path, self._ledger.entries.values())
        noticed = []
        for key, requests in unknown.items():
            member = self._roster.by_key(f"key:{key}")
            if member is not None and requests - self._swept and not self._nodes.is_mute(member.number):
                self._swept |= requests
                noticed.append(member.number)
        return noticed

    def _say_trained(self, done: int, replies: int, state: State) -> None:
        accuracy = self.accuracy(state)
        measured = "" if accuracy is None else f", accuracy {accuracy:.1f}"
        self._say(f"training round {done} of {self._training.rounds} ({replies} replies{measured})")

    def queue(self, *, patient: bool) -> Queue:
        """The requests that wait now.

        Args:
            patient: whether nobody else would be kept waiting by a client that does not answer.
        """
        config = self._config
        now = self._parts.clock.now()
        self._began = min(self._began, now)  # a clock that is set back must not put the start into the future
        return Queue(
            tuple(self._ledger.entries.values()),
            frozenset(self._nodes.here),
            now,
            TokenBucket(config.request_burst, config.request_every),
            config.deadline,
            config.timeout,
            patient and len({e.client for e in self._ledger.waiting}) <= 1,
            self._began,
            self._grace,
            self._nodes.revoked(),
        )

    def wait_for_turn(self) -> bool:
        """Wait until a request can be served whose client is away, since there is nothing else to do.

        Returns:
            Whether there is something to do: one can be served now, or training pauses or need not pause any more.
            False where none waits, or only such whose client must wait for its turn.
        """
        paused = bool(self.paused)
        queue = self.queue(patient=True)
        if queue.waits_for_clients and not queue.ready():
            self._say(f"{', '.join(e.id for e in self._ledger.waiting)} wait for clients that are away")
        while queue.waits_for_clients and not queue.ready():
            self._parts.clock.sleep(LONGEST_POLL)
            self._sweep_while_waiting()
            self._intake.take()
            if bool(self.paused) != paused:
                return True
            queue = self.queue(patient=True)
        return bool(queue.ready())

    def _sweep_while_waiting(self) -> None:
        """Ask those that have given notice of a request, and everybody who may answer now and then."""
        now = self._parts.clock.now()
        if now - self._swept_all >= SWEEP_WHILE_WAITING:
            self._swept_all = now
            self._nodes.sweep([c for c in self.life.membership.active if c not in self.life.required])
        else:
            self._nodes.sweep(self._noticed())

    @property
    def _grace(self) -> float:
        """Seconds that a client has at least after the server was started, whatever its deadline was."""
        return min(max(LAST_TRY, self._config.wait), self._config.deadline)

    def _serve_next(self, state: State, *, patient: bool) -> bool:
        """Begin with those that wait and can be started now; whether there are any."""
        if not lifecycle.has_been_trained(state):
            self._leave_untrained()
            return True
        chosen = self._intake.next_turn(self.queue(patient=patient), self.life.membership, self._method)
        if chosen is None:
            return False
        request = chosen.turn.request
        too_few = self._too_few(() if request.samples else request.clients)
        if too_few:
            self._withdraw(too_few, chosen.names, request)
        else:
            self._start(chosen.turn, chosen.names, state)
        return True

    # The floor.

    @property
    def _floor(self) -> int:
        return self._config.floor_of(closed=self._nodes.sites() is not None)

    def _staying(self, leaving: Collection[ClientId] = ()) -> float:
        """How many may take part: of a closed federation the sites that were neither revoked nor forgotten.

        Without a list of sites nobody knows who may still come, until somebody leaves.
        """
        gone = {*self._ledger.erased, *leaving}
        sites = self._nodes.sites()
        if sites is not None:
            keys = {self._roster[c].key for c in gone}
            return sum(f"key:{site.identity}" not in keys for site in sites.values())
        return len(self._roster.members.keys() - gone) if gone else math.inf

    def _too_few(self, leaving: Collection[ClientId] = ()) -> str:
        """A sentence if fewer than the floor may take part once these have left; "" otherwise."""
        staying = self._staying(leaving)
        if staying >= self._floor:
            return ""
        return f"{staying:.0f} may take part, and the floor is {self._floor}"

    @property
    def paused(self) -> str:
        """Why training pauses; "" if it does not."""
        too_few = self._too_few()
        return f"training pauses: {too_few}; it goes on when more are enrolled" if too_few else ""

    def _withdraw(self, too_few: str, names: Sequence[str], request: Request | None = None) -> None:
        """Meet a request that leaves too few to recover the model: drop the model, and all that it has learned.

        Args:
            too_few: why.
            names: of the requests in the ledger.
            request: who is to be forgotten; None where the request is being served already.
        """
        reason = f"{too_few}: the model was withdrawn, and everything that it had learned is dropped"
        if request is not None:
            now = self._parts.clock.now()
            self._ledger.change(names, lambda e: e.now("started", attempts=(*e.attempts, now)))
        changes = {"method": MODEL_WITHDRAWN, "fallback": True, "reason": reason}
        self._ledger.change(names, lambda e: e.now("unlearned", **changes))
        self._say(f"{', '.join(names)}: {reason}")
        self._enter(self.life.withdraw(request, names), State(self._parts.initial))

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
        now = self._parts.clock.now()
        changes = {"method": method, "fallback": turn.fallback, "reason": turn.reason}
        self._ledger.change(names, lambda e: measured(e).now("started", **changes, attempts=(*e.attempts, now)))
        why = f" ({turn.reason})" if turn.reason else ""
        self._say(f"{', '.join(names)} started, with {method}{why}")
        life = self.life.begin_unlearning(
            turn.request,
            rounds=state.round,
            serving=names,
            fallback=turn.fallback,
            began=now,
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
            received = [e.since or phase.began for e in self._ledger.serving]
            stage.engine.deadline = min(*received, self._parts.clock.now()) + self._config.deadline
            stage.engine.grace = self._grace
            stage.engine.may_wait = self._nobody_else_waits

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
        except _TooFewStay as error:
            self._withdraw(str(error), phase.serving)
            return True
        except Silent as error:
            self._postpone(str(error), error.clients)
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
        first = self._ledger.serving[0].client
        own = [entry.id for entry in self._ledger.serving if entry.client == first]
        others = [name for name in life.phase.serving if name not in own]
        before = self._folder.before.load()
        assert before is not None, "the model before a request is kept until the request is done"
        self._say(f"{', '.join(life.phase.serving)} are served one by one: {reason}")
        self._ledger.change(others, _not_tried)
        self._enter(life.narrow(replace(life.requested, clients=(first,)), own), before[0])

    def _nobody_else_waits(self) -> bool:
        """Whether training is over, and no other request waits: only then may a silent client be waited for."""
        trained = self._ledger.phase.trained >= self._training.rounds
        if not trained or self._intake.operator_waits:
            return False
        self._sweep_while_waiting()
        return not {e.client for e in self._ledger.waiting} - set(self.life.requested.clients)

    def _postpone(self, reason: str, silent: Collection[ClientId]) -> None:
        """Let training go on: who is silent is tried again later, and the others are served before."""
        before = self._folder.before.load()
        assert before is not None, "the model before a request is kept until the request is done"
        entries = self._ledger.serving
        punctual = [e.id for e in entries if e.client not in silent]
        self._ledger.change(punctual, _not_tried)
        self._ledger.change([e.id for e in entries if e.client in silent], lambda e: e.now("received"))
        names = [e.id for e in entries]
        self._say(f"{reason}: {', '.join(names)} waits, and training goes on")
        self._enter(self.life.postpone(), before[0])

    def _end_of_unlearning(self, progress: Progress) -> None:
        names = self._ledger.phase.serving
        costs = asdict(progress.costs)
        measured = self._measured("unlearned", progress.state)
        self._ledger.change(names, lambda e: measured(replace(e, costs={"unlearning": costs})).now("unlearned"))
        self._say(f"{', '.join(names)} unlearned")
        self._enter(self.life.begin_recovery(anew=self._serving_method.begins_anew), progress.state)

    def _fall_back(self, reason: str, clients: Collection[ClientId]) -> None:
        """Serve these of the clients otherwise; the others, which did nothing wrong, wait for their own turn."""
        life = self.life
        others = [e.id for e in self._ledger.serving if e.client not in clients]
        names = tuple(name for name in life.phase.serving if name not in others)
        before = self._folder.before.load()
        assert before is not None, "the model before a request is kept until the request is done"
        self._ledger.change(others, _not_tried)
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
            self._roster.note(stage.examples, stage.engine.said)
            return after

        try:
            for progress in advance(stage.session, life.phase.name, stage.state, step, stage.file, meter=stage.fed):
                if progress.state.round > stage.state.round:
                    self._failures = 0
                accuracy = self.accuracy(progress.state)
                measured = "" if accuracy is None else f", accuracy {accuracy:.1f}"
                self._say(f"recovery round {progress.state.round} of at most {most}{measured}")
                if lifecycle.recovery_is_over(progress.state.round, most, accuracy, self._config.recover_until or None):
                    break
        except _TooFewStay as error:
            self._withdraw(str(error), life.phase.serving)
            return True
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
        if any(e.method == MODEL_WITHDRAWN for e in self._ledger.serving):
            memory.purge(lambda _: True)  # it belongs to a model that is no more
        memory.close()
        served = [e.id for e in self._ledger.serving if e.open]
        if served:
            if not self._folder.wipe_messages(self._say):
                return self._erase_later(served)
            self._failures = 0
            self._ledger.change(served, lambda e: e.now("done"))
        self._ledger.follow(life.resume_training())
        self._ledger.save()
        if served:
            self._say(f"{', '.join(served)} done")
        return True

    def _erase_later(self, served: Sequence[str]) -> bool:
        """Keep the phase: a request is not done while Flower's database holds what was sent for it."""
        self._failures += 1
        if self._failures >= TRIES:
            raise StoreError(
                f"{', '.join(served)} cannot be finished: Flower's database cannot be rewritten without what it has "
                "deleted. See to its disk and to who else uses it; a run tries it again."
            )
        self._parts.clock.sleep(PATIENCE)
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
            floor=self._floor if self._nodes.sites() is not None else 0,
            serving=_served_as_one(self._ledger.serving),
            public=self._parts.public,
            anew=phase.number if phase.kind == "unlearn" and self._serving_method.begins_anew else phase.anew,
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
        too_few = self._too_few(left_out)
        if too_few:
            raise _TooFewStay(too_few)
        leaving = {e.client for e in self._ledger.waiting if e.kind == "client"}
        # A client that did not answer when its request was tried: training goes on without it.
        postponed = {e.client for e in self._ledger.waiting if e.kind == "client" and e.attempts}

        def here() -> list[ClientId]:
            return sorted(c for c in self._nodes.here if c not in left_out and c not in postponed)

        def needed() -> int:
            """Nor is one waited for that is about to leave and away."""
            return self._needed({*left_out, *postponed, *(leaving - self._nodes.here.keys())})

        def missing() -> str:
            if len(here()) >= needed():
                return "one that has examples"
            known = [m.title for c, m in sorted(self._roster.members.items()) if c not in {*left_out, *here()}]
            return ", ".join(known[:8]) or f"{needed() - len(here())} nodes that have never been here"

        def able() -> list[ClientId]:
            return [c for c in here() if self._roster[c].examples]

        self._nodes.refresh()
        what = f"the round needs {needed()} nodes that may take part"
        self._nodes.wait(lambda: len(here()) >= needed() and bool(able()), what, missing, self._config.wait)
        # Who leaves is not waited for here: it has a deadline of its own.
        stage.session.present = self.life.askable(able())

    def _needed(self, left_out: Collection[ClientId]) -> int:
        """How many nodes a round waits for: it falls when clients leave, and never below the floor."""
        staying = int(self._staying(left_out)) if self._nodes.sites() is not None else None
        return needed_nodes(self._config.min_nodes, self._floor, self._config.quorum, len(left_out), staying)

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


class _TooFewStay(FedquitError):
    """Fewer than the floor may take part, so that no round can begin."""


def _not_tried(entry: Erasure) -> Erasure:
    """A request that waits again because another client, which was served with it, did not answer."""
    return entry.now("received", attempts=entry.attempts[:-1])


def _served_as_one(entries: Iterable[Erasure]) -> dict[ClientId, Serving]:
    """What each client is served: requests for samples as one."""
    requests: dict[ClientId, list[Erasure]] = {}
    for entry in entries:
        requests.setdefault(entry.client, []).append(entry)
    return {
        client: Serving(own[0].kind, own[0].request, tuple(e.request for e in own[1:]))
        for client, own in requests.items()
    }


def _arrived(stage: _Stage, journal: Journal | None, ask: Ask, reply: Reply) -> None:
    """A reply is here: of a client that leaves, it is on disk at once, before others are waited for."""
    stage.examples[reply.client] = reply.examples
    if journal and reply.client in stage.engine.required:
        journal.put(place_of(ask), reply)
