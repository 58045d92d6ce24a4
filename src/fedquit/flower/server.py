# SPDX-License-Identifier: Apache-2.0
"""The server's side: trains with FedAvg, takes erasure requests, unlearns, excludes the forgotten, recovers, goes on.

    @app.main()
    def main(grid, context):
        serve(grid, context, model=lambda context: Net())

Flower does not resume runs. Here every step is on disk before the next: start the app again with the same state folder,
and it goes on from the last round that was committed. No checkpoint from before an unlearning survives it.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from logging import INFO
from pathlib import Path

from flwr.app import Context
from flwr.common.logger import log
from flwr.serverapp import Grid

from fedquit.core import ClientId, Params, Reply, Request, State, Trained
from fedquit.core.method import Method, is_of
from fedquit.core.params import fingerprint, require_finite, require_same_shapes
from fedquit.engine import Address, Ask
from fedquit.errors import FedquitError, InputError, NoExamplesError, RequestError, StoreError
from fedquit.flower.client import ClientData, ModelOf, functional
from fedquit.flower.config import ServerConfig
from fedquit.flower.grid_engine import (
    PATIENCE,
    Clock,
    GridEngine,
    Nodes,
    NodesMissing,
    Post,
    TooFewReplies,
    Unreachable,
)
from fedquit.flower.ledger import Erasure, Ledger, Phase, request_of
from fedquit.flower.outbox import Inbox
from fedquit.flower.roster import Roster
from fedquit.flower.sqlite_wipe import DATABASE, FOLDER, wipe_traces
from fedquit.flower.wire import MOST_PENDING, PHASE_PLACES, Pending, Serving
from fedquit.running.costs import Metered
from fedquit.running.membership import Membership
from fedquit.running.memory import CPU
from fedquit.running.session import Event, Session, advance, place_of
from fedquit.running.store import END, Bounds, DiskMemory, Journal, PrefixedMemory, StateFile, locked, save_params
from fedquit.running.training_cache import Hooks
from fedquit.utils.files import append_line, remove_half_written, write_json

Evaluate = Callable[[Params], float]
STATUS = 120.0  # seconds in which a node must say who it is; a process starts for that
TRIES = 3  # of a round that too few clients answered
MOST_REQUESTS = 64  # of a client that takes no part, of each kind
MOST_BETWEEN_ROUNDS = MOST_PENDING  # requests of a client, of each kind, between two rounds of training
NOBODY = Request(())  # the request that a real federation knows of in advance


@dataclass(frozen=True)
class Outcome:
    """What a run leaves behind."""

    params: Params
    rounds: int  # of ordinary training
    erasures: tuple[Erasure, ...]
    erased: frozenset[ClientId]


def serve(
    grid: Grid,
    context: Context,
    *,
    model: ModelOf,
    evaluate: Evaluate | None = None,
    public: ClientData | None = None,
    config: ServerConfig | None = None,
    clock: Clock | None = None,
) -> Outcome:
    """Run a federation that can forget, from the beginning or from where its state folder says.

    Args:
        grid: Flower's way to the nodes.
        context: of the run; its configuration has the table `fedquit`, see `ServerConfig`.
        model: the network, given the context: the same as the clients'.
        evaluate: the accuracy of a model, in percent, where the server can measure it: ends recoveries, and is noted.
        public: data of the server's own, for methods that need some.
        config: instead of what the context says.
        clock: instead of the machine's.
    """
    config = config or ServerConfig.of(context.run_config)
    state = Path(config.state)
    try:
        with locked(state):
            return _Server(grid, partial(model, context), config, state, evaluate, public, clock or Clock()).run()
    except FedquitError as error:
        log(INFO, "fedquit: stopped: %s", error)
        raise


class _PhaseMemory(DiskMemory):
    """One memory for all phases: the places of a later phase come after those of an earlier one."""

    def __init__(self, folder: Path, number: int, bounds: Bounds | None = None) -> None:
        super().__init__(folder, bounds=bounds)
        self._offset = number * PHASE_PLACES

    def move(self, place: int) -> None:
        """Go to a place of the phase."""
        super().move(place if place == END else self._offset + place)


@dataclass
class _Stage:
    """What a phase works with."""

    session: Session
    fed: Metered
    engine: GridEngine
    memory: DiskMemory
    file: StateFile
    state: State
    examples: dict[ClientId, int] = field(default_factory=dict)  # as the clients say in this round


class _Server:
    """One run of the server app."""

    def __init__(
        self,
        grid: Grid,
        make_model: Callable[[], object],
        config: ServerConfig,
        state: Path,
        evaluate: Evaluate | None,
        public: ClientData | None,
        clock: Clock,
    ) -> None:
        self.config, self.folder, self.evaluate, self.public, self.clock = config, state, evaluate, public, clock
        self.model = functional(make_model)  # type: ignore[arg-type]
        self.method, self.training = config.build_method(), config.training
        if self.method.needs_public_data and public is None:
            raise InputError(f"{config.method_name} needs data of the server's own: give `public` to serve().")
        self.initial = self.model.init(Address(config.run_seed, "init").seed_for("server"))
        self.ledger = Ledger(state, {"seed": config.run_seed, "network": fingerprint(self.initial)})
        self.roster = Roster(state)
        post = Post(grid, self.say, clock)
        seconds = min(config.timeout, STATUS)
        self.nodes = Nodes(post, self.roster, self._hear, self.ledger.verdicts, seconds)
        self.failures = 0
        self.taken: Counter[tuple[ClientId, str]] = Counter()  # requests since the last round of training began

    def say(self, sentence: str) -> None:
        """Tell the operator, and keep it."""
        log(INFO, "fedquit: %s", sentence)
        self._event({"event": "note", "text": sentence})

    def _event(self, event: Event) -> None:
        append_line(self.folder / "events.jsonl", json.dumps(event))

    # What a run is: phases, until all rounds are trained and no request is open.

    def run(self) -> Outcome:
        """From where the books say to the end."""
        self._begin()
        self._clean()
        self._finish()
        self.nodes.refresh()
        while True:
            while self._phase():
                pass
            self.nodes.sweep([c for c in self.roster.members if self.ledger.verdicts(c)])
            if not self.ledger.waiting:
                return self._outcome()

    def _phase(self) -> bool:
        """Go on with the phase at hand; False once there is nothing left to do."""
        phases = {"train": self._train, "unlearn": self._unlearn, "recover": self._recover}
        try:
            return phases[self.ledger.phase.kind]()
        except TooFewReplies as error:
            self.failures += 1
            if self.failures >= TRIES:
                raise
            self.say(f"the round is repeated: {error}")
            self.clock.sleep(PATIENCE)
            return True

    def _begin(self) -> None:
        """The first model, then the books: where there are books there is a model."""
        if not self.ledger.path.exists():
            if self.roster.path.exists():
                raise StoreError(
                    f"{self.folder} has clients but no {self.ledger.path.name}, which says who must never take part "
                    "again: restore it from a backup, or take a new folder."
                )
            self._file(self.ledger.phase).save(State(self.initial), 0.0)
            self.ledger.save()
        if not self._file(self.ledger.phase).path.exists():
            raise StoreError(f"{self.folder} has books but no model: restore it from a backup, or take a new folder.")

    def _file(self, phase: Phase) -> StateFile:
        return StateFile(self.folder / "phases" / f"{phase.number:06d}" / "state.safetensors")

    @property
    def _before(self) -> StateFile:
        """The model that a request found: methods look back at it while they unlearn; then it is deleted."""
        return StateFile(self.folder / "before.safetensors")

    def _enter(self, phase: Phase, state: State) -> None:
        """The next phase: its model is on disk first; the books turn to it; then what came before is deleted."""
        self._file(phase).save(state, 0.0)
        self.ledger.phase = phase
        self.ledger.save()
        self.failures = 0
        self._clean()

    def _clean(self) -> None:
        """Delete every checkpoint that the books have left behind, also one that a kill left half-way."""
        current = self._file(self.ledger.phase).path.parent
        for folder in sorted((self.folder / "phases").glob("*")):
            if folder != current:
                shutil.rmtree(folder)
        remove_half_written(self.folder)
        remove_half_written(self.folder / "memory")
        if self.ledger.phase.kind == "train":
            self._before.path.unlink(missing_ok=True)
        if self.ledger.phase.kind == "recover":
            self._published.unlink(missing_ok=True)

    @property
    def _published(self) -> Path:
        """The model at the end of a run."""
        return self.folder / "model.safetensors"

    def _finish(self) -> None:
        """Requests are done once nothing from before them is left on disk."""
        served = [e for e in self.ledger.entries.values() if e.status == "recovered"]
        if served and self.ledger.phase.kind == "train":
            self._forget({e.client for e in served})
            wipe_traces(self.folder / FOLDER / DATABASE, self.say)
            ready = [e.id for e in served]
            self.ledger.change(ready, lambda e: e.now("done"))
            self.ledger.save()
            self.say(f"{', '.join(ready)} done")

    def _forget(self, clients: Collection[ClientId]) -> None:
        """Delete what the method kept of them; of samples too: what was computed with them would bring them back."""
        memory = _PhaseMemory(self.folder / "memory", self.ledger.phase.number)
        memory.move(-1)  # before the first place of the phase, which is to find it gone
        self.method.forget(_method_memory(memory, self.config.method_name), clients)
        memory.purge(lambda key: is_of(key, clients))  # of every method that ever watched, in every version

    def _outcome(self) -> Outcome:
        phase = self.ledger.phase
        found = self._file(phase).load()
        assert found is not None
        state, rounds = found[0], phase.trained + found[0].round
        save_params(self._published, state.params)
        entries = tuple(self.ledger.entries.values())
        result = {"rounds": rounds, "accuracy": self._accuracy(state), "erasures": [asdict(e) for e in entries]}
        write_json(self.folder / "result.json", result)
        return Outcome(state.params, rounds, entries, self.ledger.erased)

    def _accuracy(self, state: State) -> float | None:
        return self.evaluate(state.params) if self.evaluate else None

    def _measured(self, when: str, state: State) -> Callable[[Erasure], Erasure]:
        accuracy = self._accuracy(state)
        return lambda e: e if accuracy is None else replace(e, accuracy={**e.accuracy, when: accuracy})

    # Requests come in.

    def _hear(self, client: ClientId, pending: Sequence[Pending], settled: Sequence[str]) -> None:
        """A client has spoken: whatever it asks for is in the books before anything else happens."""
        self.ledger.told(client, settled)
        for request in pending:
            self._receive(client, "samples" if request.kind == "samples" else "client", request.request, "client")

    def _receive(self, client: ClientId, kind: str, request: str, source: str) -> None:
        member = self.roster[client]
        if self._asks_without_end(client, kind, source):
            return
        entry = self.ledger.receive(client, kind, request, source, member.authenticated)  # type: ignore[arg-type]
        if entry is None:
            return
        self.taken[client, kind] += 1
        what = "to be forgotten" if kind == "client" else "for some of its samples to be forgotten"
        self.say(f"{entry.id}: {member.title} asks {what} (filed by the {source})")
        if not member.authenticated and not self.config.allow_unauthenticated:
            self._fail(
                [entry],
                "the node has no registered key, so nobody knows who asks; register keys and use TLS, or set "
                "fedquit.allow-unauthenticated = true",
            )

    def _asks_without_end(self, client: ClientId, kind: str, source: str) -> bool:
        """Whether taking one more would keep the server from ending; what is not taken waits in the client's outbox."""
        if client in self.ledger.erased:
            return sum((e.client, e.kind) == (client, kind) for e in self.ledger.entries.values()) >= MOST_REQUESTS
        return source == "client" and self.taken[client, kind] >= MOST_BETWEEN_ROUNDS

    def _fail(self, entries: Sequence[Erasure], reason: str) -> None:
        self.ledger.change([e.id for e in entries], lambda e: e.now("failed", reason=reason))
        self.ledger.save()
        self.say(f"{', '.join(e.id for e in entries)} failed: {reason}")

    def _take(self) -> bool:
        """Take what the operator filed into the books; whether any request waits."""
        inbox = Inbox(self.folder)
        for filed in inbox.waiting():
            try:
                self._receive(self.roster.find(filed.client).number, "client", filed.id, "operator")
            except RequestError as error:
                self.say(f"the operator's request {filed.id} cannot be taken: {error}")
            inbox.remove(filed)
        for entry in sorted(self.ledger.waiting, key=lambda e: e.kind):  # whole clients first: they may bring one back
            if entry.client in self.ledger.erased:
                self._take_of_excluded(entry)
        return bool(self.ledger.waiting)

    def _take_of_excluded(self, entry: Erasure) -> None:
        """A client that takes no part asks: it was forgotten, or only left out because no method could serve it."""
        own = [e for e in self.ledger.entries.values() if e.client == entry.client and e.kind == "client"]
        if any(e.status == "done" for e in own):
            reason = "the client had been forgotten already"
            self.ledger.change([entry.id], lambda e: e.now("done", reason=reason))
            self.ledger.save()
        elif entry.kind == "client":
            self.ledger.erased -= {entry.client}  # it is tried again
            self.ledger.save()
        else:
            self._fail(
                [entry],
                "the client takes no part since it could not be forgotten as a whole: ask for that again, which "
                "includes its samples",
            )

    @property
    def _members(self) -> Membership:
        return self.ledger.membership(tuple(sorted(self.roster.members)))

    def _serve_next(self, state: State) -> None:
        """Begin with those that wait: whole clients first; together, where that is wanted and the method allows it."""
        if state.clock == 0:
            self._nothing_to_forget()
            return
        whole = [e for e in self.ledger.waiting if e.kind == "client"]
        first: dict[ClientId, Erasure] = {}
        for entry in whole or self.ledger.waiting:
            first.setdefault(entry.client, entry)
        candidates = list(first.values())
        groups = [candidates, candidates[:1]] if self.config.together else [candidates[:1]]
        reason = ""
        for group in groups:
            request = request_of(group)
            try:
                self._members.check(request)
                self.method.check(request)
            except RequestError as error:
                reason = str(error)
            else:
                self._start(group, state, fallback=False)
                return
        try:
            self._members.check(request_of(candidates[:1]))
        except RequestError as error:
            self._fail(candidates[:1], str(error))
            return
        self._start(candidates[:1], state, fallback=True, reason=reason)

    def _nothing_to_forget(self) -> None:
        """Before the first round the model has seen nobody's data: who asks to leave need only be left out."""
        waiting = self.ledger.waiting
        self._forget({e.client for e in waiting})  # a round that was cut off may have left something
        self.ledger.erased |= {e.client for e in waiting if e.kind == "client"}
        self.ledger.change([e.id for e in waiting], lambda e: e.now("done", reason="nothing had been trained yet"))
        self.ledger.save()

    def _start(self, group: Sequence[Erasure], state: State, *, fallback: bool, reason: str = "") -> None:
        phase, ids = self.ledger.phase, tuple(e.id for e in group)
        start = state.settled().fresh()
        self._before.save(start, 0.0)
        measured = self._measured("before", start)
        method = self.config.fallback if fallback else self.config.method_name
        self.ledger.change(ids, lambda e: measured(e).now("started", method=method, fallback=fallback, reason=reason))
        self.say(f"{', '.join(ids)} started, with {method}{f' ({reason})' if reason else ''}")
        trained, number = phase.trained + state.round, phase.number + 1
        began, served = self.clock.now(), phase.served + 1
        self._enter(Phase(number, "unlearn", trained, served, ids, fallback, began), start)

    # The three kinds of phase.

    def _stage(self, *, journal: bool = False) -> _Stage:
        phase, config = self.ledger.phase, self.config
        file = self._file(phase)
        found = file.load()
        assert found is not None, "a phase begins with its model on disk"
        memory = _PhaseMemory(self.folder / "memory", phase.number, Bounds.of(CPU))  # flushed with the phase's state
        serving = {e.client: Serving(e.kind, e.request) for e in self.ledger.serving}
        engine = GridEngine(
            self.model,
            self.nodes,
            self.ledger.federation,
            phase.number,
            config.timeout,
            config.min_replies,
            serving=serving,
            public=self.public,
        )
        book = Journal(file.path.parent / "journal") if journal else None
        session = Session(engine, config.run_seed, (), book, (memory,), self._event, lenient=True)
        stored = partial(_stored, memory, config.method_name)
        stage = _Stage(session, Metered(session, stored), engine, memory, file, found[0])
        engine.arrived = partial(_arrived, stage, book)
        return stage

    def _gather(self, stage: _Stage, leaving: frozenset[ClientId] = frozenset()) -> None:
        """Wait until enough of those that may take part are here, and let only these be asked."""
        out = self.ledger.erased | leaving
        needed = max(1, self.config.min_nodes - len(out))

        def here() -> list[ClientId]:
            return sorted(c for c in self.nodes.here if c not in out)

        def missing() -> str:
            if len(here()) >= needed:
                return "one that has examples"
            known = [m.title for c, m in sorted(self.roster.members.items()) if c not in {*out, *here()}]
            return ", ".join(known[:8]) or f"{needed - len(here())} nodes that have never been here"

        def able() -> list[ClientId]:
            return [c for c in here() if self.roster[c].examples]

        what = f"the round needs {needed} nodes that may take part"
        self.nodes.wait(lambda: len(here()) >= needed and bool(able()), what, missing, self.config.wait)
        stage.session.present = tuple(able())

    @contextmanager
    def _round(self, stage: _Stage) -> Iterator[None]:
        """Where nobody who was asked has an example, too few have replied, and these are not asked again."""
        stage.examples.clear()
        try:
            yield
        except NoExamplesError as error:
            empty = {c: n for c, n in stage.examples.items() if n == 0 and c not in stage.engine.required}
            if not empty:  # those that leave gave none, and would not the next time
                raise
            self.roster.note(empty)
            if stage.session.journal:
                stage.session.journal.clear()  # or a server that is started again would find the same replies
            raise TooFewReplies(str(error)) from error

    def _train(self) -> bool:
        """Ordinary training, until a request waits or all rounds are done."""
        stage, phase = self._stage(), self.ledger.phase
        name, attached = self.config.method_name, {}
        if self.method.shapes_training:
            attached = {name: self.method}
        hooks = Hooks(attached, partial(_method_memory, stage.memory), NOBODY)

        def step(state: State) -> State:
            self._gather(stage)
            self.taken.clear()
            with self._round(stage):
                after = hooks.round(stage.fed, state, self.training, stage.session.present)
            self.roster.note(stage.examples)
            return self._sound(after, state)

        for progress in advance(stage.session, phase.name, stage.state, step, stage.file, meter=stage.fed):
            done = phase.trained + progress.state.round
            if progress.state.round > stage.state.round:
                self.failures = 0
                accuracy = self._accuracy(progress.state)
                seen = f"{len(stage.examples)} replies" + ("" if accuracy is None else f", accuracy {accuracy:.1f}")
                self.say(f"training round {done} of {self.training.rounds} ({seen})")
            due = self.config.sweep and done % self.config.sweep == 0 and done > phase.trained
            if due or done >= self.training.rounds:
                self.nodes.sweep(self._members.active)
            if self._take():
                self._serve_next(progress.state)
                return True
            if done >= self.training.rounds:
                return False
        return True

    def _sound(self, after: State, before: State) -> State:
        """What is stored must be a model, whatever a client sent."""
        whose = f"the model after round {before.round + 1} of phase {self.ledger.phase.name!r}"
        require_finite(after.params, whose)
        require_same_shapes(after.params, before.params, whose)
        return after

    @property
    def _serving_method(self) -> Method:
        return self.config.build_fallback() if self.ledger.phase.fallback else self.method

    def _trained(self, stage: _Stage) -> Trained:
        """What the request found."""
        found = self._before.load()
        assert found is not None, "the model before a request is kept until the request is done"
        before = found[0]
        training = replace(self.training, rounds=max(1, before.clock))
        examples = {c: m.examples for c, m in sorted(self.roster.members.items())}
        return Trained(
            before.params, self.initial, training, examples, _method_memory(stage.memory, self.config.method_name)
        )

    def _unlearn(self) -> bool:
        """The method's own rounds; whoever must answer is asked until the deadline, then the fallback is taken."""
        stage, phase, method = self._stage(journal=True), self.ledger.phase, self._serving_method
        trained, request = self._trained(stage), request_of(self.ledger.serving)
        leaving = frozenset(request.clients)
        rounds = method.rounds(trained, request)
        if not phase.fallback:
            stage.engine.required, stage.engine.deadline = leaving, phase.began + self.config.deadline

        def step(state: State) -> State:
            self._gather(stage, frozenset() if request.samples else leaving)
            asked = {*stage.session.present, *stage.engine.required}  # who leaves is waited for by its own deadline
            stage.session.present = tuple(sorted(asked))
            with self._round(stage):
                after = method.unlearn(stage.fed, state, trained, request)
            after = self._sound(after, state)
            self.failures = 0
            return after

        try:
            for progress in advance(stage.session, phase.name, stage.state, step, stage.file, rounds, stage.fed):
                self.say(f"unlearning round {progress.state.round} of {rounds}")
        except (TooFewReplies, NodesMissing, StoreError):
            raise
        except FedquitError as error:
            self._fall_back(str(error), error.clients if isinstance(error, Unreachable) else request.clients)
            return True
        state, costs = progress.state, asdict(progress.costs)
        measured = self._measured("unlearned", state)
        self.ledger.change(phase.serving, lambda e: measured(replace(e, costs={"unlearning": costs})).now("unlearned"))
        if not request.samples:
            self.ledger.erased = self._members.serve(request).erased
        self.say(f"{', '.join(phase.serving)} unlearned")
        self._enter(replace(phase, number=phase.number + 1, kind="recover"), state.fresh())
        return True

    def _fall_back(self, reason: str, clients: Collection[ClientId]) -> None:
        """Serve these of the clients otherwise; the others, which did nothing wrong, wait for their own turn."""
        others = [e.id for e in self.ledger.serving if e.client not in clients]
        self.ledger.change(others, lambda e: e.now("received"))
        phase = replace(self.ledger.phase, serving=tuple(i for i in self.ledger.phase.serving if i not in others))
        found = self._before.load()
        assert found is not None
        if phase.fallback:  # nothing is left to try: the clients take no part any more, and the books say why
            whole = {e.client for e in self.ledger.serving if e.kind == "client"}
            self.ledger.erased |= whole
            self.ledger.change(phase.serving, lambda e: e.now("failed", reason=reason))
            self.say(f"{', '.join(phase.serving)} failed: {reason}")
            self._enter(Phase(phase.number + 1, "train", phase.trained, phase.served), found[0])
            self._forget(whole)
            return
        self.say(f"{reason}: {self.config.fallback} serves the request instead")
        self.ledger.change(
            phase.serving, lambda e: replace(e, method=self.config.fallback, fallback=True, reason=reason)
        )
        self._enter(replace(phase, number=phase.number + 1, fallback=True), found[0])

    def _recover(self) -> bool:
        """Ordinary training without the forgotten data."""
        stage, phase, method = self._stage(), self.ledger.phase, self._serving_method
        trained, request = self._trained(stage), request_of(self.ledger.serving)
        most = self.config.recover_rounds if method.recovers else 0

        def step(state: State) -> State:
            self._gather(stage)
            with self._round(stage):
                after = method.recover(stage.fed, state, trained, request)
            self.roster.note(stage.examples)
            return self._sound(after, state)

        for progress in advance(stage.session, phase.name, stage.state, step, stage.file, meter=stage.fed):
            if progress.state.round > stage.state.round:
                self.failures = 0
            accuracy = self._accuracy(progress.state)
            seen = "" if accuracy is None else f", accuracy {accuracy:.1f}"
            self.say(f"recovery round {progress.state.round} of at most {most}{seen}")
            until = self.config.recover_until
            if progress.state.round >= most or (until and accuracy is not None and accuracy >= until):
                break
        state, costs = progress.state, asdict(progress.costs)
        measured = self._measured("recovered", state)
        self.ledger.change(
            phase.serving, lambda e: measured(replace(e, costs={**e.costs, "recovery": costs})).now("recovered")
        )
        self._enter(Phase(phase.number + 1, "train", phase.trained, phase.served), state.settled().fresh())
        self._finish()
        return True


def _method_memory(memory: DiskMemory, method: str) -> PrefixedMemory:
    return PrefixedMemory(memory, f"{method}/")


def _stored(memory: DiskMemory, method: str) -> tuple[int, int]:
    return sum(memory.size_of(key) for key in memory if key.startswith(f"{method}/")), 0


def _arrived(stage: _Stage, journal: Journal | None, ask: Ask, reply: Reply) -> None:
    """A reply is here: of a client that leaves, it is on disk at once, before others are waited for."""
    stage.examples[reply.client] = reply.examples
    if journal and reply.client in stage.engine.required:
        journal.put(place_of(ask), reply)
