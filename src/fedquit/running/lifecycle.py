# SPDX-License-Identifier: Apache-2.0
"""The life of a federation that can forget, as a state machine: the simulator and the Flower server both drive it.

A federation is always in one phase. From each, only these steps lead on; any other is refused:

    phase      step                 next      what changes
    train      join                 join      the new clients are members; nothing lies under their names
    train      begin_unlearning     unlearn   the request is fixed; `trained` is what the method finds
    train      withdraw             erase     too few would be left: the request is met by dropping the model
    join       join                 join      as from `train`
    join       begin_unlearning     unlearn   as from `train`
    unlearn    fall_back            unlearn   the fallback serves the request, from the model before it
    unlearn    narrow               unlearn   one client of the request is served first, the others wait
    unlearn    postpone             train     who leaves is silent: training goes on from the model before the request
    unlearn    withdraw             erase     as from `train`
    unlearn    begin_recovery       recover   whole clients that leave are no members any more
    unlearn    give_up              erase     nothing could serve it: whole clients are left out all the same
    recover    begin_erasing        erase     the method's own server state is dropped
    recover    withdraw             erase     as from `train`
    erase      resume_training      train     nothing lies under the forgotten clients' names any more

This module decides; it opens no file and asks no client. Who drives it stores the phase, runs the rounds with
`Hooks.round`, `unlearning_round` and `recovery_round`, and deletes what `names_to_erase` and `homes_to_erase` name.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fedquit.core import (
    ClientId,
    Federation,
    Memory,
    Params,
    Part,
    Program,
    Reply,
    Request,
    Split,
    State,
    Task,
    Trained,
    Training,
)
from fedquit.core.fedavg import cohort, fedavg
from fedquit.core.local_layers import BeginAnew, is_layers_key, local_names
from fedquit.core.method import Method, is_of
from fedquit.core.params import require_finite, require_same_shapes, statistics_of
from fedquit.core.recalibration import recalibrated
from fedquit.core.wrapper import FederationWrapper
from fedquit.errors import (
    AbsentClientError,
    FedquitError,
    InputError,
    NoExamplesError,
    NonFiniteError,
    RepliesDifferError,
    RequestError,
    UnreachableError,
)
from fedquit.running.membership import Membership

PhaseKind = Literal["train", "join", "unlearn", "recover", "erase"]
Attached = Mapping[str, Method]  # by name
NOBODY = Request(())  # for training that prepares for no request in particular, as in every real federation

STEPS: Mapping[tuple[PhaseKind, str], PhaseKind] = {
    ("train", "join"): "join",
    ("train", "begin_unlearning"): "unlearn",
    ("train", "withdraw"): "erase",
    ("join", "join"): "join",
    ("join", "begin_unlearning"): "unlearn",
    ("unlearn", "fall_back"): "unlearn",
    ("unlearn", "narrow"): "unlearn",
    ("unlearn", "postpone"): "train",
    ("unlearn", "withdraw"): "erase",
    ("unlearn", "begin_recovery"): "recover",
    ("unlearn", "give_up"): "erase",
    ("recover", "begin_erasing"): "erase",
    ("recover", "withdraw"): "erase",
    ("erase", "resume_training"): "train",
}


class TransitionError(FedquitError):
    """A step that does not lead on from the phase at hand: a fault of whoever drives the federation."""


class UnusableModelError(FedquitError):
    """A round whose result is no model of this federation: other parameters, or other shapes."""


FALLBACK_REASONS: tuple[type[FedquitError], ...] = (
    UnreachableError,  # a client that leaves did not answer by its deadline, or gave no answer that can be used
    RequestError,  # the method refuses the request
    NoExamplesError,  # the clients that leave have no example to unlearn with
    RepliesDifferError,  # clients that leave together sent what cannot be averaged
    NonFiniteError,  # the model after a round of unlearning holds NaN or infinity
    UnusableModelError,  # or is not a whole one: a client may send what it likes
)


def is_reason_to_fall_back(error: Exception) -> bool:
    """Whether an error during the unlearning means that this method cannot serve this request.

    Only the conditions in `FALLBACK_REASONS` do. Everything else (`TypeError`, `AssertionError`, `InputError`, a client
    asked that takes no part, a disk that cannot be written, …) is an error in the code, the configuration or the
    machine, and must reach the operator.
    """
    return isinstance(error, FALLBACK_REASONS) and not isinstance(error, AbsentClientError)


@dataclass(frozen=True)
class Phase:
    """What a federation is doing. The Flower server's ledger stores it, so fields may be added and never renamed."""

    number: int = 0  # counts phases that have a model of their own
    kind: PhaseKind = "train"
    trained: int = 0  # rounds of ordinary training before this phase, recoveries not counted
    served: int = 0  # events (requests, or joins with a phase of their own) that were begun so far
    serving: tuple[str, ...] = ()  # names of the requests in the ledger
    fallback: bool = False  # whether the fallback serves them
    began: float = 0.0  # seconds of the Unix clock: deadlines count from here
    anew: int = (
        0  # the phase in which the model last began with its first parameters: older local layers are of another
    )

    @property
    def name(self) -> str:
        """The phase's part of the address under which its random numbers are drawn."""
        if self.kind == "train":
            return f"train-{self.served}" if self.served else "train"
        return f"{self.kind}-{self.served - 1}" + ("-fallback" if self.fallback else "")


@dataclass(frozen=True)
class Life:
    """Where a federation stands: its phase, its members, and the request that is being served."""

    membership: Membership
    phase: Phase = Phase()
    request: Request | None = None
    gave_up: bool = False  # in `erase`: the request could not be served

    # The steps of the table above.

    def join(self, clients: Sequence[ClientId], *, anew: bool, rounds: int) -> Life:
        """Let clients in, in a phase of its own.

        Args:
            clients: who joins.
            anew: whether they were forgotten before and have consented again.
            rounds: of ordinary training that the phase at hand has taken.
        """
        phase = self._step("join", trained=self.phase.trained + rounds, served=self.phase.served + 1)
        return dataclasses.replace(self, phase=phase, membership=self.membership.join(clients, anew=anew))

    def begin_unlearning(
        self,
        request: Request,
        *,
        rounds: int,
        serving: Sequence[str] = (),
        fallback: bool = False,
        began: float = 0.0,
    ) -> Life:
        """Serve a request of members.

        Args:
            request: who is to be forgotten.
            rounds: of ordinary training that the phase at hand has taken.
            serving: the request's names in the ledger.
            fallback: whether the fallback serves it from the beginning.
            began: now, in seconds of the Unix clock.
        """
        phase = self._step(
            "begin_unlearning",
            trained=self.phase.trained + rounds,
            served=self.phase.served + 1,
            serving=tuple(serving),
            fallback=fallback,
            began=began,
        )
        self.membership.check(request)
        return dataclasses.replace(self, phase=phase, request=request)

    def fall_back(self, request: Request | None = None, serving: Sequence[str] | None = None) -> Life:
        """Serve the request, or the part of it that is given, with the fallback."""
        if self.phase.fallback:
            raise TransitionError(f"phase {self.phase.name!r} is the fallback already: give the request up instead.")
        names = self.phase.serving if serving is None else tuple(serving)
        phase = self._step("fall_back", fallback=True, serving=names)
        return dataclasses.replace(self, phase=phase, request=request or self.request)

    def narrow(self, request: Request, serving: Sequence[str]) -> Life:
        """Serve a part of the request first, by the same method and from the model before it; the rest waits.

        Args:
            request: the part.
            serving: its names in the ledger.
        """
        phase = self._step("narrow", serving=tuple(serving))
        if not set(request.clients) < set(self.requested.clients):
            raise TransitionError(f"{request.clients} is no part of the request of {self.requested.clients}.")
        return dataclasses.replace(self, phase=phase, request=request)

    def postpone(self) -> Life:
        """The clients that leave do not answer: training goes on from the model before the request, which waits."""
        phase = self._step("postpone", serving=(), fallback=False, began=0.0)
        return dataclasses.replace(self, phase=phase, request=None)

    def withdraw(self, request: Request | None = None, serving: Sequence[str] | None = None) -> Life:
        """Meet a request by dropping the model, and with it everything that was learned.

        Args:
            request: who is to be forgotten; None for the request that is being served.
            serving: the request's names in the ledger; None for those that are being served.
        """
        meant = self.requested if request is None else request
        begun = 0 if request is None else 1
        phase = self._step(
            "withdraw",
            trained=0,
            served=self.phase.served + begun,
            serving=self.phase.serving if serving is None else tuple(serving),
            anew=self.phase.number + 1,
        )
        left = () if meant.samples else meant.clients
        return dataclasses.replace(self, phase=phase, request=meant, membership=self.membership.leave_out(left))

    def begin_recovery(self, *, anew: bool = False) -> Life:
        """The unlearning is over: whole clients that leave take no part from here on.

        Args:
            anew: whether its method has rebuilt the model from the first parameters.
        """
        phase = self._step("begin_recovery", anew=self.phase.number if anew else self.phase.anew)
        return dataclasses.replace(self, phase=phase, membership=self.membership.serve(self.requested))

    def give_up(self) -> Life:
        """No method could serve the request: its whole clients are left out all the same, and the ledger says why."""
        phase = self._step("give_up")
        left = () if self.requested.samples else self.requested.clients
        return dataclasses.replace(self, phase=phase, membership=self.membership.leave_out(left), gave_up=True)

    def begin_erasing(self) -> Life:
        """The recovery is over."""
        return dataclasses.replace(self, phase=self._step("begin_erasing"))

    def resume_training(self) -> Life:
        """Nothing lies under the forgotten clients' names any more."""
        # The model of `erase` is that of the training that follows: it keeps its number.
        phase = self._step("resume_training", number=self.phase.number, serving=(), fallback=False, began=0.0)
        return dataclasses.replace(self, phase=phase, request=None, gave_up=False)

    def _step(self, step: str, **changes: Any) -> Phase:  # noqa: ANN401 - fields of all kinds
        kind = STEPS.get((self.phase.kind, step))
        if kind is None:
            possible = [name for phase, name in STEPS if phase == self.phase.kind]
            raise TransitionError(
                f"a federation in phase {self.phase.name!r} cannot {step}: from here it can {' or '.join(possible)}."
            )
        return dataclasses.replace(self.phase, **{"number": self.phase.number + 1, "kind": kind, **changes})

    # Membership that changes without a phase of its own.

    def enrol(self, clients: Sequence[ClientId]) -> Life:
        """Clients that never were here take part from the next round on."""
        return dataclasses.replace(self, membership=self.membership.join(clients))

    def readmit(self, client: ClientId) -> Life:
        """Let a client ask again that was left out because nothing could serve its request."""
        return dataclasses.replace(self, membership=self.membership.join([client], anew=True))

    def leave_untrained(self, request: Request) -> Life:
        """Before the first round no model has seen anybody's data: whole clients need only be left out."""
        if self.phase.kind != "train":
            raise TransitionError(f"a federation in phase {self.phase.name!r} has been trained: serve the request.")
        left = () if request.samples else request.clients
        return dataclasses.replace(self, membership=self.membership.leave_out(left))

    # Who takes part, and what they find.

    @property
    def requested(self) -> Request:
        """The request that is being served."""
        if self.request is None:
            raise TransitionError(f"a federation in phase {self.phase.name!r} serves no request.")
        return self.request

    @property
    def required(self) -> frozenset[ClientId]:
        """Who must answer: in the unlearning the clients of the request, unless the fallback does without them."""
        if self.phase.kind == "unlearn" and not self.phase.fallback:
            return frozenset(self.requested.clients)
        return frozenset()

    @property
    def left_out(self) -> frozenset[ClientId]:
        """Whom a round does not wait for: the forgotten, and whole clients that are leaving."""
        if self.phase.kind == "unlearn" and not self.requested.samples:
            return self.membership.erased | set(self.requested.clients)
        return self.membership.erased

    def askable(self, reachable: Iterable[ClientId]) -> tuple[ClientId, ...]:
        """Of the clients that can be reached, those that may be asked in this phase; required ones in any case."""
        staying = {c for c in reachable if c not in self.left_out}
        return tuple(sorted(staying | self.required))

    def trained(
        self, state: State, initial: Params, training: Training, examples: Mapping[ClientId, int], memory: Memory
    ) -> Trained:
        """What the request finds.

        Args:
            state: the model that the request found. Its clock says how many rounds of training lie behind it,
                whatever was planned: methods that train again, or replay, take as many.
            initial: the parameters before the first round.
            training: the federation's ordinary training.
            examples: how many each client has; of others than members and clients that leave they are dropped.
            memory: what the method keeps at the server.
        """
        concerned = {*self.membership.active, *self.requested.clients}
        counts = {c: examples[c] for c in sorted(concerned) if c in examples}
        rounds = max(1, state.clock)
        return Trained(state.params, initial, dataclasses.replace(training, rounds=rounds), counts, memory)


def entered(kind: PhaseKind, state: State) -> State:
    """The state with which a phase begins. A method's own server state lasts through its recovery, and no further."""
    return state.fresh() if kind == "recover" else state.settled().fresh()


def has_been_trained(state: State) -> bool:
    """Whether there is anything to unlearn."""
    return state.clock > 0


@dataclass(frozen=True)
class Turn:
    """The request that is served next."""

    request: Request
    fallback: bool = False
    reason: str = ""  # why the fallback serves it


def next_turn(waiting: Request, membership: Membership, method: Method, *, together: bool) -> Turn:
    """Choose which of the clients that ask for the same thing are served next, and by which method.

    All of them together where that is wanted and the method allows it; else the first alone, by the method; else, where
    the method defines neither, the fallback serves as many as the method would have been asked to.

    Args:
        waiting: all clients that ask, the first one first: as a whole, or for samples.
        membership: who may ask.
        method: the federation's own.
        together: whether several may be served as one request.

    Raises:
        RequestError: nothing can serve the first of them.
    """
    alone = dataclasses.replace(waiting, clients=waiting.clients[:1])
    all_of_them = dataclasses.replace(waiting, clients=tuple(sorted(waiting.clients)))
    choices = [all_of_them, alone] if together else [alone]
    allowed = [request for request in choices if membership.allows(request)]
    if not allowed:
        membership.check(alone)
    reason = ""
    for request in allowed:
        try:
            method.check(request)
        except RequestError as error:
            reason = str(error)
        else:
            return Turn(request)
    return Turn(allowed[0], fallback=True, reason=reason)


# The rounds of each phase.


@dataclass(frozen=True)
class Hooks:
    """Methods that prepare for requests while a federation trains: they watch replies, or replace a client's task."""

    attached: Attached
    memory: Callable[[str], Memory]  # the shelf of each method
    request: Request | None  # which they may have to know in advance

    @classmethod
    def of(cls, name: str, method: Method, memory: Callable[[str], Memory]) -> Hooks:
        """A federation's own method, attached to all ordinary training: after a join and after a recovery too."""
        return cls({name: method} if method.shapes_training else {}, memory, NOBODY)

    def replace_task(self, task: Task, client: ClientId) -> Task:
        """The task of this client, once every attached method has had a chance to replace it."""
        for method in self.attached.values():
            assert self.request is not None
            task = method.training_task(task, client, self.request)
        return task

    def watch(self, clock: int, start: Params, reply: Reply) -> None:
        """Pass one client's reply of training round `clock` to every attached method."""
        for name, method in self.attached.items():
            method.watch(self.memory(name), clock, start, reply)

    def after_round(self, clock: int, examples: Mapping[ClientId, int]) -> None:
        """Tell every attached method that training round `clock` is over, and who took part with how many examples."""
        for name, method in self.attached.items():
            method.after_round(self.memory(name), clock, examples)

    def round(
        self,
        fed: Federation,
        state: State,
        training: Training,
        clients: Sequence[ClientId],
        split: Split = "all",
    ) -> State:
        """One round of ordinary training with all of them attached.

        Args:
            fed: the way to the clients.
            state: the model before the round.
            training: how ordinary training goes.
            clients: of whom the cohort is drawn.
            split: of their examples that they train on.
        """
        callbacks: dict[str, Any] = {"watch": self.watch, "after_round": self.after_round}
        return fedavg(fed, state, training, clients, split=split, replace_task=self.replace_task, **callbacks)


def unlearning_round(method: Method, fed: Federation, state: State, trained: Trained, request: Request) -> State:
    """One round of the unlearning by the method that serves the request.

    After the last one, clients that stay measure BatchNorm's statistics anew on retained data, where the model has any.
    Where BatchNorm is local, all of them do, and before the first round of a method that begins anew they give up the
    layers of their own that belong to the old model.

    Raises:
        NonFiniteError: the round's result holds NaN or infinity.
        UnusableModelError: the round's result has other parameters than the model, or other shapes.
    """
    local = bool(local_names(fed.model))
    if method.begins_anew and state.round == 0:
        give_up_layers(fed, request.stay(fed.clients), "retain")
    after = method.unlearn(fed, state, trained, request)
    require_usable(after, state, "unlearning")
    has_statistics = local or statistics_of(after.params)
    if method.recalibrates and has_statistics and after.round == method.rounds(trained, request):
        training = trained.training
        stay = request.stay(fed.clients)
        stay = stay if local else cohort(stay, training.clients_per_round, fed.seed)
        new = recalibrated(RetainedData(fed), after.params, stay, training.task.local.batch_size)
        after = dataclasses.replace(after, params=new)
        require_usable(after, state, "unlearning")
    return after


def give_up_layers(fed: Federation, clients: Sequence[ClientId], split: Split = "all") -> None:
    """Let clients whose BatchNorm is local begin with the first layers again: those that they have are of an old model.

    Args:
        fed: the way to the clients.
        clients: who is asked; nobody where all layers travel.
        split: of their examples, of which none is used.
    """
    if local_names(fed.model):
        deque(fed.run(BeginAnew(), clients, split=split), maxlen=0)


def recovery_round(
    method: Method, hooks: Hooks, fed: Federation, state: State, trained: Trained, request: Request
) -> State:
    """One round of the recovery, in which the forgotten data is out of reach whatever a method asks for.

    Where the method does not define a recovery of its own this is ordinary training, which attached methods see: what
    clients contribute here is part of the model that a later request finds.

    Args:
        method: which serves the request.
        hooks: the methods that are attached to ordinary training.
        fed: the way to the clients.
        state: the model before the round.
        trained: what the request found.
        request: that was served.
    """
    retained = RetainedData(fed)
    if type(method).recover is Method.recover:
        after = hooks.round(retained, state, trained.training, request.stay(fed.clients), split="retain")
    else:
        after = method.recover(retained, state, trained, request)
    require_usable(after, state, "recovery")
    return after


@dataclass
class RetainedData(FederationWrapper):
    """A federation whose clients use retained data only."""

    def run(
        self, task: Task | Program, clients: Sequence[ClientId], *, split: Split = "all", **sent: Params
    ) -> Iterator[Reply]:
        """Ask these clients; "all" is all that they retain, in each part of a program too."""
        if isinstance(task, Program):
            task.check(split, sent)
            retaining = Program(tuple(Part(part.task, _retained(part.split)) for part in task.parts))
            return self.inner.run(retaining, clients, split="all", **sent)
        return self.inner.run(task, clients, split=_retained(split), **sent)


def _retained(split: Split) -> Split:
    if split == "forget":
        raise TransitionError("a method asks for the forgotten data in its recovery: ask for it in `unlearn` only.")
    return "retain"


def require_usable(after: State, before: State, phase: str) -> None:
    """Refuse what is no model of this federation before it is stored.

    Args:
        after: the result of a round.
        before: the state that the round began with, whose parameters are of the right names and shapes.
        phase: for the message.
    """
    whose = f"the model after round {before.round + 1} of {phase}"
    require_finite(after.params, whose)
    try:
        require_same_shapes(after.params, before.params, whose)
    except InputError as error:
        raise UnusableModelError(str(error)) from error


def recovery_rounds(method: Method, most: int) -> int:
    """The most rounds that a recovery takes: none where the method's unlearning is all that it does."""
    return most if method.recovers else 0


def recovery_is_over(rounds: int, most: int, accuracy: float | None, target: float | None) -> bool:
    """Whether the recovery has taken all its rounds or reached its target.

    Args:
        rounds: that it has taken.
        most: that it may take.
        accuracy: of the model now, in percent; None where nobody measures it.
        target: the accuracy that ends it, in percent; None for all rounds.
    """
    reached = target is not None and accuracy is not None and accuracy >= target
    return reached or rounds >= most


# What is erased once a request has been served.


def names_to_erase(clients: Iterable[ClientId], *, with_marks: bool) -> Callable[[str], bool]:
    """Which keys of the server's memory lie under the names of these clients, whichever method wrote them.

    Args:
        clients: whose request is over. Of a client that gave up samples too: what was computed with them would bring
            them back.
        with_marks: whether also a method's marks, whose keys end with "/": they say that something of a client is
            missing. A whole client that was forgotten leaves nothing at all, so that it begins with nothing if it is
            enrolled anew; of one that stays, or that could not be forgotten, the marks remain.
    """
    numbers = tuple(clients)

    def is_erased(key: str) -> bool:
        return is_of(key.removesuffix("/") if with_marks else key, numbers)

    return is_erased


def homes_to_erase(clients: Iterable[ClientId], *, stay: bool = False) -> Callable[[str], bool]:
    """Which keys of the clients' own memories, "client/name", are of these clients.

    Args:
        clients: whose request is over.
        stay: whether they gave up samples only. Then they keep layers of their own, which were unlearned, measured
            anew and recovered without the samples; whole clients take theirs with them.
    """
    numbers = {str(c) for c in clients}

    def is_erased(key: str) -> bool:
        return key.partition("/")[0] in numbers and not (stay and is_layers_key(key))

    return is_erased


def clients_to_erase(life: Life) -> tuple[ClientId, ...]:
    """Under whose names things are deleted: nobody's where samples could not be forgotten, and so are still there."""
    return () if life.gave_up and life.requested.samples else life.requested.clients


def erase(
    life: Life,
    method: Method,
    shelf: Memory,
    delete: Callable[[Callable[[str], bool]], None],
    delete_at_home: Callable[[Callable[[str], bool]], None] | None = None,
) -> None:
    """Delete what lies under the names of the clients of the request; doing it twice does no harm.

    Args:
        life: of a federation in phase `erase`.
        method: the federation's own, which is told first.
        shelf: the method's part of the server's memory.
        delete: deletes the entries of the server's memory whose keys fit, whichever method wrote them.
        delete_at_home: the same in the clients' memories, where the driver can reach them; real clients delete theirs
            when they hear that their request was served.
    """
    if life.phase.kind != "erase":
        raise TransitionError(f"a federation in phase {life.phase.name!r} has nothing to erase yet.")
    clients = clients_to_erase(life)
    if not clients:
        return
    method.forget(shelf, clients)
    delete(names_to_erase(clients, with_marks=not life.requested.samples and not life.gave_up))
    if delete_at_home:
        delete_at_home(homes_to_erase(clients, stay=life.requested.samples))
