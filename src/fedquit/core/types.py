# SPDX-License-Identifier: Apache-2.0
"""The vocabulary: what a federation, a client's work and an unlearning method are.

A *method* says what the server does in one round: a function from `State` to `State`. What a client does is a value,
a `Task`. Between them stands a `Federation`: the method asks (`fed.run(task, clients, start=w)`) and gets replies.
Whoever drives the rounds evaluates, stores, counts and stops; a method has no files, devices or clocks. Because the
state is all that a method carries from round to round, a run that was killed goes on in the round where it stopped.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, Protocol

from torch import Tensor

from fedquit.errors import InputError, RequestError

Params = dict[str, Tensor]  # flat, by parameter name; never changed in place
Sent = Mapping[str, Params]  # named sets of parameters that a client works with: "start", "degraded", …
ClientId = int
Memory = MutableMapping[str, Params]  # what a server or a client keeps between rounds
Split = Literal["all", "forget", "retain"]

SERVER: ClientId = -1  # the server's own public data, where a method needs such


@dataclass(frozen=True)
class Batch:
    """Some examples, and for each label two uniform random numbers: the only randomness a task ever sees."""

    x: Tensor
    y: Tensor
    u: Tensor  # drawn anew in every step
    fixed: Tensor  # the same whenever this client sees this example in this run
    forget: Tensor  # for each example, whether the present request marks it


class Model(Protocol):
    """A network as a function of its parameters."""

    def init(self, seed: int) -> Params:
        """Fresh parameters; the same seed gives the same ones."""

    def __call__(self, params: Params, x: Tensor) -> Tensor:
        """The logits."""


@dataclass(frozen=True)
class Local:
    """How a client steps through its data. Scalars only: it travels."""

    epochs: float = 1.0  # a fraction takes that part of the batches
    batch_size: int = 32
    optimizer: str = "sgd"
    lr: float = 0.1
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float = 0.0  # largest norm of the whole gradient; 0 means none
    clip_tensor: float = 0.0  # largest norm of the gradient of each tensor; 0 means none

    def __post_init__(self) -> None:
        if not (math.isfinite(self.epochs) and self.epochs >= 0):
            raise InputError(f"epochs is {self.epochs}: give a number from 0 on.")
        if self.batch_size < 1:
            raise InputError(f"batch_size is {self.batch_size}: give a whole number from 1 on.")
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise InputError(f"lr is {self.lr}: give a finite number above 0.")


@dataclass(frozen=True)
class Task(ABC):
    """What a client is asked to do with its data.

    The fields are scalars, so that a task can travel. The hooks are pure and branch-free in tensor values, so that an
    engine may stack many clients into one computation; a loss is given for each example, so that it may pad.
    """

    local: Local = Local()
    remember: str = ""  # the name under which the client keeps its answer in its own memory; "" for not at all
    needs: ClassVar[tuple[str, ...]] = ()  # names from the client's own memory that join `sent`, where they exist
    augments: ClassVar[bool] = False  # whether it sees augmented examples: ordinary training does, unlearning does not

    def prepare(self, model: Model, sent: Sent) -> Sent:
        """What the client works out once, before the first step, and adds to `sent`."""
        return sent

    def begin(self, sent: Sent) -> Params:
        """The parameters that will be trained: all, or some that `loss` joins with `sent`."""
        return sent["start"]

    @abstractmethod
    def loss(self, model: Model, params: Params, sent: Sent, batch: Batch) -> Tensor:
        """One number for each example."""

    def after_step(self, new: Params, old: Params, sent: Sent) -> Params:
        """Room to project or to halt after an optimizer step."""
        return new

    def answer(self, params: Params, sent: Sent) -> Params:
        """What goes back to the server: all of it, or a part."""
        return params

    def keep(self, params: Params, sent: Sent) -> Mapping[str, Params]:
        """What stays in the client's own memory, by name."""
        return {self.remember: self.answer(params, sent)} if self.remember else {}


@dataclass(frozen=True)
class Reply:
    """A client's answer."""

    client: ClientId
    params: Params
    examples: int
    loss: float = float("nan")  # the mean over the steps taken


class Federation(Protocol):
    """The only way from a method to the clients."""

    @property
    def model(self) -> Model:
        """The network that everybody trains."""

    @property
    def clients(self) -> tuple[ClientId, ...]:
        """Who can be asked now."""

    @property
    def seed(self) -> int:
        """For what the server itself draws: fixed by the run's seed, the phase, the round and the question."""

    def run(self, task: Task, clients: Sequence[ClientId], *, split: Split = "all", **sent: Params) -> Iterator[Reply]:
        """Ask these clients; their replies stream in the order of `clients`. Take a list to read them twice."""

    def run_at_server(self, task: Task, **sent: Params) -> Params:
        """Do a task on the server's own public data."""


@dataclass(frozen=True)
class Request:
    """Who asks to be forgotten: one client, several, or a part of their samples.

    Which samples is the client's own knowledge: the server only ever says "forget" or "retain".
    """

    clients: tuple[ClientId, ...]
    samples: bool = False

    def stay(self, clients: Sequence[ClientId]) -> list[ClientId]:
        """Who goes on after the request; all of them where only samples leave."""
        return [c for c in clients if self.samples or c not in self.clients]

    def check(self, clients: Sequence[ClientId]) -> None:
        """Refuse what cannot be served."""
        if not self.clients:
            raise RequestError("the request names no client: name at least one.")
        if len(set(self.clients)) < len(self.clients):
            raise RequestError(f"the request names a client twice: {list(self.clients)}.")
        missing = [c for c in self.clients if c not in clients]
        if missing:
            raise RequestError(f"client {missing[0]} is not in the federation: its clients are {_listed(clients)}.")
        if not self.stay(clients):
            raise RequestError("the request names every client: nobody would be left to train; drop the model instead.")


def _listed(clients: Sequence[ClientId]) -> str:
    few = ", ".join(map(str, clients[:12]))
    return few if len(clients) <= 12 else f"{few}, … ({len(clients)} in all)"


@dataclass(frozen=True)
class State:
    """Where a phase stands after a round: all that is needed to go on from here."""

    params: Params
    clock: int = 0  # rounds of ordinary training behind these parameters; the learning-rate schedule reads it
    round: int = 0  # rounds of this phase
    kept: Mapping[str, Params] = field(default_factory=dict)  # the method's own server state

    def next(self, params: Params, **kept: Params) -> State:
        """After one more round of this phase."""
        return replace(self, params=params, round=self.round + 1, kept=kept)

    def tick(self) -> State:
        """After one more round of ordinary training."""
        return replace(self, clock=self.clock + 1)

    def fresh(self) -> State:
        """The beginning of the next phase."""
        return replace(self, round=0)

    def settled(self) -> State:
        """Once a request has been served: the method's own state is no longer needed."""
        return replace(self, kept={})


@dataclass(frozen=True)
class Training:
    """How ordinary training goes: for Original, for Retrain, and on through recovery."""

    task: Task
    rounds: int
    clients_per_round: int = 0  # 0: everybody
    lr_decay: float = 1.0  # the learning rate of round t is lr * lr_decay**t

    def task_at(self, clock: int, task: Task | None = None) -> Task:
        """The task with the learning rate of that round."""
        task = task or self.task
        return replace(task, local=replace(task.local, lr=task.local.lr * self.lr_decay**clock))


@dataclass(frozen=True)
class Trained:
    """What a request finds: a model, how it was trained, and what the method's watcher kept."""

    params: Params
    initial: Params
    training: Training
    examples: Mapping[ClientId, int]  # n_k, as the clients reported it
    memory: Memory
