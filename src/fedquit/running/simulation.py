# SPDX-License-Identifier: Apache-2.0
"""A simulated federation on disk, driven through the state machine of `lifecycle`.

Nothing says on disk which step comes next: a program that was killed does the same steps again, in the same folder,
and each goes on from its last stored round.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from fedquit.core import ClientId, Memory, Request, State, Trained
from fedquit.core.local_layers import home_key, layers_by_client
from fedquit.core.method import Method
from fedquit.data.federated import FederatedData
from fedquit.errors import FedquitError, RequestError
from fedquit.methods.baselines import Natural
from fedquit.running import lifecycle
from fedquit.running.costs import Costs, Metered
from fedquit.running.lifecycle import Hooks, Life, TransitionError
from fedquit.running.membership import Membership
from fedquit.running.session import Event, Progress, Rounds, Session, advance
from fedquit.running.setup import Setup
from fedquit.running.store import Journal, Memories, StateFile
from fedquit.running.training_cache import Federated, Reporter, Silent, driven


@dataclass(frozen=True)
class UnlearnedRequest:
    """A request whose unlearning is over, and all that its recovery needs."""

    request: Request
    folder: Path
    retained: FederatedData  # what remains: the forgotten data is out of reach
    trained: Trained  # what the request found
    memories: Memories  # as the unlearning left them
    method: Method  # that serves it: the recipe's own, or the fallback
    progress: Progress  # where the unlearning ended


@dataclass(frozen=True)
class RecoveryRun:
    """One recovery: its rounds as they are stored, and the memories that it writes."""

    rounds: Iterator[Progress]
    memories: Memories


def _ignore(_event: Event) -> None:
    """Where no log is kept."""


class Simulation:
    """A federation of simulated clients.

    Args:
        setup: the recipe's data, network, training and method.
        folder: for everything that the federation stores.
        log: is given each reply as an event.
        reporter: is told how far a phase is.
        fallback: serves requests that the recipe's method cannot serve; without one, such a request is an error.
        journal: whether every reply of an unlearning is stored before it is acted on, so that no client is asked twice.
            Simulated clients answer the same again: without a journal a killed run repeats its round, and is faster.
    """

    def __init__(
        self,
        setup: Setup,
        folder: Path,
        *,
        log: Callable[[Event], None] = _ignore,
        reporter: Reporter | None = None,
        fallback: Method | None = None,
        journal: bool = True,
    ) -> None:
        self.setup = setup
        self.folder = folder
        self.fallback = fallback
        self.journal = journal
        self.data = setup.data
        self.life = Life(Membership(setup.data.clients))
        self.state = State(setup.initial)  # the model now; its `round` counts those of the phase at hand
        self.progress = Progress(self.state, 0.0, Costs())  # of the last phase that ran rounds
        self.memories: Memories | None = None
        self.data_before_leaving: dict[ClientId, FederatedData] = {}
        self._log = log
        self._reporter = reporter or Silent()
        self._rounds_asked_for = 0  # of ordinary training in the phase at hand
        self._has_memories = False  # whether the phase at hand has a layer of its own to write to

    @property
    def method_name(self) -> str:
        """Under which the method's part of the server's memory lies."""
        return self.setup.recipe.method_name

    def adopt(self, federated: Federated) -> None:
        """Begin with a federation that has been trained already, for example one from the cache."""
        if self.memories is not None:
            raise TransitionError("this federation has begun its life already: take a new one.")
        self.memories = federated.memories
        self.progress = federated.progress
        self.state = federated.progress.state
        self._rounds_asked_for = self.state.round

    # Ordinary training.

    def train(self, rounds: int, title: str = "Training goes on") -> Progress:
        """Train all members for so many rounds more; a phase that goes on goes on in its own files."""
        if self.life.phase.kind not in ("train", "join"):
            raise TransitionError(f"a federation in phase {self.life.phase.name!r} cannot train: end that phase first.")
        if self.life.phase.kind == "join":  # the memories of that phase fit its own state file, and no other
            return self._train(StateFile(self._event_folder / "joined.safetensors"), rounds, title)
        folder = self.folder / f"training-{self.life.phase.number}"
        if not self._has_memories:
            self.memories = Memories.open(folder, self.memories, self.setup.device)
            self._has_memories = True
        return self._train(StateFile(folder / "state.safetensors"), rounds, title)

    def join(self, clients: Sequence[ClientId], *, anew: bool, rounds: int) -> Progress:
        """Let clients in that were here before, with the data that they had, and train with them.

        Args:
            clients: who joins.
            anew: whether they were forgotten, and have consented again.
            rounds: of training, in a phase of its own.
        """
        data = joined(self.data, clients, self.data_before_leaving)
        self._enter(self.life.join(clients, anew=anew, rounds=self.state.round))
        self.data = data
        folder = self._event_folder
        self.memories = Memories.open(folder / "joining", self.memories, self.setup.device)
        return self._train(StateFile(folder / "joined.safetensors"), rounds, "Training with the clients that joined")

    def enrol(self, client: ClientId, data: FederatedData) -> None:
        """Let in a client that never was here, with its part of `data`: it takes part from the next round on."""
        self.life = self.life.enrol([client])
        self.data = self.data.join(client, data)

    def _train(self, file: StateFile, rounds: int, title: str) -> Progress:
        assert self.memories is not None
        self._rounds_asked_for += rounds
        session, meter = self._federation(self.data, self.memories)
        hooks = Hooks.of(self.method_name, self.setup.method, self.memories.of)

        def step(state: State) -> State:
            return hooks.round(meter, state, self.setup.training, session.present)

        phase = advance(session, self.life.phase.name, self.state, step, file, self._rounds_asked_for, meter)
        self.progress = driven(phase, self._reporter, title, self._rounds_asked_for)
        self.state = self.progress.state
        return self.progress

    # A request: unlearn, recover, erase.

    def unlearn(
        self, request: Request, marked: FederatedData, after_round: Callable[[Progress], None] | None = None
    ) -> UnlearnedRequest:
        """Serve a request up to the end of its unlearning.

        Args:
            request: who is to be forgotten, of the members.
            marked: the data, with the examples of the request marked.
            after_round: is given where the unlearning stands at first, and each further round.

        Raises:
            FedquitError: the method cannot serve the request, and there is no fallback that could.
        """
        self._enter(self.life.begin_unlearning(request, rounds=self.state.round))
        try:
            self.setup.method.check(request)
            unlearned = self._unlearn(self.setup.method, request, marked, after_round)
        except FedquitError as error:
            if self.fallback is None or not lifecycle.is_reason_to_fall_back(error):
                raise
            self.life = self.life.fall_back()
            unlearned = self._unlearn(self.fallback, request, marked, after_round)
        self._enter(self.life.begin_recovery(), unlearned.progress.state)
        self.data_before_leaving |= dict.fromkeys(request.clients, self.data)
        self.data = unlearned.retained
        return unlearned

    def _unlearn(
        self,
        method: Method,
        request: Request,
        marked: FederatedData,
        after_round: Callable[[Progress], None] | None,
    ) -> UnlearnedRequest:
        folder = self._event_folder / "fallback" if self.life.phase.fallback else self._event_folder
        memories = Memories.open(folder / "unlearning", self.memories, self.setup.device)
        examples = {c: len(self.data.view(c, "all")) for c in self.data.clients}
        trained = self.life.trained(
            self.state, self.setup.initial, self.setup.training, examples, memories.of(self.method_name)
        )
        journal = Journal(folder / "journal") if self.journal else None
        session, meter = self._federation(marked, memories, journal, leavers=_leavers(request))
        rounds = method.rounds(trained, request)

        def step(state: State) -> State:
            return lifecycle.unlearning_round(method, meter, state, trained, request)

        file = StateFile(folder / "unlearned.safetensors")
        phase = advance(session, self.life.phase.name, self.state, step, file, rounds, meter)
        seen = phase if after_round is None else _reported(phase, after_round)
        progress = driven(seen, self._reporter, f"Unlearning: {self.method_name}", rounds)
        return UnlearnedRequest(request, folder, marked.after(request), trained, memories, method, progress)

    def recovery(
        self, unlearned: UnlearnedRequest, files: str = "recovery-0", states: str = "recovered-0", run: int = 0
    ) -> RecoveryRun:
        """Ordinary training without the forgotten data, round by round, for as long as the caller wants.

        Args:
            unlearned: the request.
            files: the folder, within the request's, for what is remembered.
            states: the name of the file, within the request's folder, for the model.
            run: number of the recovery, where several go on with other random numbers; 0 for the first.
        """
        if self.life.phase.kind != "recover":
            raise TransitionError(f"a federation in phase {self.life.phase.name!r} has nothing to recover from.")
        memories = Memories.open(unlearned.folder / files, unlearned.memories)
        trained = dataclasses.replace(unlearned.trained, memory=memories.of(self.method_name))
        session, meter = self._federation(unlearned.retained, memories, leavers=_leavers(unlearned.request))
        hooks = Hooks.of(self.method_name, self.setup.method, memories.of)

        def step(state: State) -> State:
            return lifecycle.recovery_round(unlearned.method, hooks, meter, state, trained, unlearned.request)

        name = self.life.phase.name + (f"-run{run}" if run else "")
        file = StateFile(unlearned.folder / f"{states}.safetensors")
        return RecoveryRun(advance(session, name, self.state, step, file, meter=meter), memories)

    def natural(self, unlearned: UnlearnedRequest, original: Progress) -> Iterator[Progress]:
        """Natural from the model that the request found: no unlearning, ordinary training without the forgotten data.

        It draws the random numbers that a run of Natural would draw, and leaves this federation as it is.

        Args:
            unlearned: the request.
            original: the model that it found.
        """
        return self._go_on(unlearned, original, "natural")

    def retrain_longer(self, unlearned: UnlearnedRequest, retrained: Progress) -> Iterator[Progress]:
        """Retrain's training goes on from its end, on the same data and by the same schedule as Natural's.

        Args:
            unlearned: the request.
            retrained: Retrain at the end of its training.
        """
        return self._go_on(unlearned, retrained, "retrained-longer")

    def _go_on(self, unlearned: UnlearnedRequest, start: Progress, name: str) -> Iterator[Progress]:
        """Ordinary training from a model that no method touched, in files of this name in the request's folder."""
        if self.life.phase.kind != "recover":
            raise TransitionError(f"a federation in phase {self.life.phase.name!r} serves no request: unlearn first.")
        leavers = _leavers(unlearned.request)
        homes = {home_key(client): layers for client, layers in start.layers.items() if client not in leavers}
        memories = Memories.open(unlearned.folder / name, device=self.setup.device, homes=homes)
        entered = lifecycle.entered("recover", start.state).settled()
        return self._ordinary(unlearned, memories, entered, StateFile(unlearned.folder / f"{name}.safetensors"))

    def follow(self, unlearned: UnlearnedRequest, recovered: Progress, memories: Memories) -> Iterator[Progress]:
        """Ordinary training from the end of a recovery, to see what lasts; it leaves this federation as it is.

        The rounds and costs go on counting from the recovery's.

        Args:
            unlearned: the request.
            recovered: where its recovery ended.
            memories: as the recovery left them.
        """
        if self.life.phase.kind != "recover":
            raise TransitionError(f"a federation in phase {self.life.phase.name!r} has no recovery to follow.")
        above = Memories.open(unlearned.folder / "followed", memories)
        file = StateFile(unlearned.folder / "followed.safetensors")
        if not file.path.exists():
            file.save(recovered.state.settled(), recovered.seconds, asdict(recovered.costs))
        return self._ordinary(unlearned, above, recovered.state.settled(), file)

    def _ordinary(
        self, unlearned: UnlearnedRequest, memories: Memories, start: State, file: StateFile
    ) -> Iterator[Progress]:
        """Ordinary training of the retained clients, which no method watches, under the recovery's addresses."""
        session, meter = self._federation(unlearned.retained, memories, leavers=_leavers(unlearned.request))
        session.log = _ignore  # the log is that of the recovery
        hooks = Hooks({}, memories.of, None)

        def step(state: State) -> State:
            return lifecycle.recovery_round(Natural(), hooks, meter, state, unlearned.trained, unlearned.request)

        return advance(session, self.life.phase.name, start, step, file, meter=meter)

    def erase(self, unlearned: UnlearnedRequest, progress: Progress, memories: Memories) -> None:
        """End a recovery: nothing lies under the names of the request's clients any more, and training may go on.

        What the run's folder and the cache hold of earlier phases stays on disk, out of the methods' reach: an
        experiment can be looked at, and the cache is not this federation's alone.

        Args:
            unlearned: the request.
            progress: where its recovery ended.
            memories: as the recovery left them.
        """
        self._enter(self.life.begin_erasing(), progress.state)
        erased = Memories.open(unlearned.folder / "erased", memories)
        for memory in erased.own:
            memory.move(0)
        shelf = erased.of(self.method_name)
        lifecycle.erase(
            self.life, self.setup.method, shelf, partial(_hide, erased.server), partial(_hide, erased.clients)
        )
        erased.close()
        self.memories = erased
        layers = layers_by_client(erased.clients)
        self.progress = dataclasses.replace(progress, state=progress.state.settled(), layers=layers)
        self._enter(self.life.resume_training())

    def leave_untrained(self, request: Request, marked: FederatedData) -> None:
        """Serve a request before the first round: there is nothing to unlearn."""
        if lifecycle.has_been_trained(self.state):
            raise TransitionError("the model has been trained: unlearn the request.")
        self.life = self.life.leave_untrained(request)
        self.data_before_leaving |= dict.fromkeys(request.clients, self.data)
        self.data = marked.after(request)

    # What the phases have in common.

    def _enter(self, life: Life, state: State | None = None) -> None:
        self.life = life
        self.state = lifecycle.entered(life.phase.kind, state or self.state)
        self._rounds_asked_for = 0
        self._has_memories = False

    @property
    def _event_folder(self) -> Path:
        return self.folder / f"request-{self.life.phase.served - 1}"

    def _federation(
        self,
        data: FederatedData,
        memories: Memories,
        journal: Journal | None = None,
        *,
        leavers: Sequence[ClientId] = (),
    ) -> tuple[Session, Metered]:
        """The clients of a phase, and the meter through which they are asked.

        Args:
            data: of the phase.
            memories: of server and clients.
            journal: of the replies.
            leavers: whole clients that leave: their own layers are no part of the model that is judged.
        """
        present = self.life.askable(c for c in data.clients if c in self.life.membership.active)
        engine = self.setup.engine(data, memories.clients)
        session = Session(engine, self.setup.recipe.seed, present, journal, memories.own, self._log)
        session.layers = partial(layers_by_client, memories.clients, leavers)
        at_home = self.setup.method.at_home
        return session, Metered(session, lambda: memories.stored(self.method_name, at_home), self.setup.flops)


def _leavers(request: Request) -> tuple[ClientId, ...]:
    """The whole clients that leave, and take their own layers with them; who gives up samples stays and keeps them."""
    return () if request.samples else request.clients


def _reported(rounds: Rounds, after_round: Callable[[Progress], None]) -> Rounds:
    with closing(rounds):
        for progress in rounds:
            after_round(progress)
            yield progress


def _hide(memory: Memory, wanted: Callable[[str], bool]) -> None:
    """Delete entries in the uppermost layer of a memory: what lies below is hidden, and stays as it is."""
    for key in [key for key in memory if wanted(key)]:
        del memory[key]


def joined(
    data: FederatedData, clients: Sequence[ClientId], before_leaving: Mapping[ClientId, FederatedData]
) -> FederatedData:
    """The data with clients in again, each with what it had when it left: samples forgotten before stay forgotten.

    Args:
        data: without them.
        clients: who joins.
        before_leaving: for each client that left, the data of the federation just before.
    """
    for client in clients:
        if client not in before_leaving:
            raise RequestError(f"client {client} cannot join: it never was in this federation, and has no data here.")
        data = data.join(client, before_leaving[client])
    return data
