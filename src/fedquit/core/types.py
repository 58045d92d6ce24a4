# SPDX-License-Identifier: Apache-2.0
"""The vocabulary: federation, task, request, state, training. Begin reading here.

A *method* says what the server does in one round: a function from `State` to `State`. What a client
does is a value: a `Task`, which trains; a `Measurement`, which averages a statistic over the
examples; or a `Program`, several of these in one visit. Between them stands a `Federation`: the
method asks (`fed.run(task, clients, start=w)`) and gets replies. Whoever drives the rounds
evaluates, stores, counts and stops; a method has no files, devices or clocks. Because the state is
all that a method carries from round to round, a run that was killed goes on in the round where it
stopped.

Shapes: B is the number of examples in a batch, C the number of classes, T the length of a sequence.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

from fedquit.errors import InputError, RequestError

Params = dict[str, Tensor]  # a model's tensors by parameter name; never changed in place
Sent = Mapping[str, Params]  # named sets of parameters that a client works with: "start", "degraded", …
ClientId = int
Memory = MutableMapping[str, Params]  # what a server or a client keeps between rounds
Split = Literal["all", "forget", "retain"]

SERVER: ClientId = -1  # the server's own public data, for methods that need such data
STATISTICS = ("running_mean", "running_var")  # the last parts of the names of BatchNorm's statistics in `Params`
RECEIVED = "received"  # the name of the model as a client received it, in all parts of a program


@dataclass(frozen=True)
class Batch:
    """Some examples, and two uniform numbers for each label: all the randomness that a task gets.

    Attributes:
        x: the examples, `(B, …)`.
        y: the labels, `(B,)`, or `(B, T)` for sequences.
        u: uniform numbers in [0, 1) of the labels' shape, drawn anew in every step.
        fixed: uniform numbers of the labels' shape, the same whenever this client uses this example
            in this run.
        forget: whether the present request marks the example, `(B,)` of bool.
    """

    x: Tensor
    y: Tensor
    u: Tensor
    fixed: Tensor
    forget: Tensor


class Model(Protocol):
    """A network as a function of its parameters."""

    def init(self, seed: int) -> Params:
        """Return fresh parameters; the same seed gives the same ones."""

    def __call__(self, params: Params, x: Tensor) -> Tensor:
        """Return the logits.

        Args:
            params: all parameters of the network.
            x: the examples, `(B, …)`.

        Returns:
            Logits `(B, C)`, or `(B, T, C)` for sequences.
        """


@dataclass(frozen=True)
class Local:
    """How a client steps through its data. The fields are scalars, so that a task can be sent.

    Attributes:
        epochs: passes over the data; a fraction takes that part of the batches.
        batch_size: examples per step.
        optimizer: a name from `fedquit list optimizers`.
        lr: the learning rate.
        momentum: of SGD.
        weight_decay: as the optimizer defines it.
        clip: largest norm of the whole gradient; 0 means no clipping.
        clip_tensor: largest norm of the gradient of each tensor; 0 means no clipping.
    """

    epochs: float = 1.0
    batch_size: int = 32
    optimizer: str = "sgd"
    lr: float = 0.1
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float = 0.0
    clip_tensor: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.epochs) and self.epochs >= 0):
            raise InputError(f"epochs is {self.epochs}: give a number from 0 on.")
        if self.batch_size < 1:
            raise InputError(f"batch_size is {self.batch_size}: give a whole number from 1 on.")
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise InputError(f"lr is {self.lr}: give a finite number above 0.")

    def steps_per_epoch(self, examples: int) -> int:
        """Return how many batches `examples` examples make; the last one may be smaller."""
        return math.ceil(examples / self.batch_size)

    def steps(self, examples: int) -> int:
        """Return how many steps are planned for a client with `examples` examples.

        Half an epoch takes half the batches. A client with any example takes at least one step,
        unless it is asked for 0 epochs.
        """
        if examples == 0 or self.epochs == 0:
            return 0
        return max(1, math.floor(self.epochs * self.steps_per_epoch(examples) + 1e-9))  # 0.29 of 100 are 29

    def epochs_of(self, examples: int, steps: int) -> float:
        """Return the passes over the data that some steps are.

        Args:
            examples: how many the client has.
            steps: how many it took; where these are all that were planned, the answer is `epochs`.
        """
        if examples == 0:
            return 0.0
        return self.epochs if steps == self.steps(examples) else steps / self.steps_per_epoch(examples)


@dataclass(frozen=True)
class Step:
    """One step of a client's training as `Task.monitor` sees it.

    Attributes:
        number: of steps that were taken so far, this one included, `()`.
        loss: the mean over the batch, before the step, `()`.
        examples: in the batch, `()`.
        ends_epoch: whether the step is the last of a whole epoch, `()` of bool.
    """

    number: Tensor
    loss: Tensor
    examples: Tensor
    ends_epoch: Tensor


@dataclass(frozen=True)
class Task(ABC):
    """What a client is asked to do with its data.

    The fields are scalars, so that a task can be sent. The hooks are pure and branch-free in tensor
    values, so that an engine may stack many clients into one computation; a loss is given for each
    example, so that it may pad.

    The hooks share their arguments. `model` is the network, `sent` the named sets of parameters
    that the client received (`"start"` is the global model), and `params` what is being trained.

    Attributes:
        local: how the client steps through its data.
        remember: the name under which the client keeps its answer in its own memory; "" keeps
            nothing.
        needs: names from the client's own memory that are added to `sent`, where they exist.
        augments: whether the task trains as ordinary training does: on augmented examples, with
            dropout, and with BatchNorm's batch statistics. Training and recovery do, and what
            unlearns on data to forget does not: it sees the network as it is evaluated.
        opposes_training: whether the task undoes what training on the same data does, so that an
            honest answer never moves the model as the client's own training did.
    """

    local: Local = Local()
    remember: str = ""
    needs: ClassVar[tuple[str, ...]] = ()
    augments: ClassVar[bool] = False
    opposes_training: ClassVar[bool] = False

    def prepare(self, model: Model, sent: Sent) -> Sent:
        """Return `sent` with what the client computes once, before the first step."""
        return sent

    def begin(self, sent: Sent) -> Params:
        """Return the parameters to train: all, or some that `loss` joins with `sent`."""
        return sent["start"]

    @abstractmethod
    def loss(self, model: Model, params: Params, sent: Sent, batch: Batch) -> Tensor:
        """Return the loss of each example of `batch`, `(B,)`."""

    def after_step(self, new: Params, old: Params, sent: Sent) -> Params:
        """Return the parameters after an optimizer step from `old` to `new`: project, or halt."""
        return new

    def monitor_start(self, params: Params) -> Params:
        """Return what `monitor` carries from step to step, before the first step from `params`."""
        return {}

    def monitor(self, state: Params, step: Step, params: Params) -> Params:
        """Look at a step. A task that defines this hook can end its training early (`EarlyStopping`).

        Args:
            state: what the last call returned, or `monitor_start`.
            step: its number, its loss, and whether an epoch ends with it.
            params: the parameters after the step.

        Returns:
            The state from now on. Its tensor `halted`, `()` of bool, says whether this step was the
            last one: then the parameters stay as they are, and the reply says how many steps were
            taken.
        """
        return state

    def monitor_end(self, state: Params, params: Params) -> Params:
        """Return the parameters that a monitored training ends with: `params`, or better ones from `state`."""
        return params

    def answer(self, params: Params, sent: Sent) -> Params:
        """Return what the client sends back to the server: all of `params`, or a part."""
        return params

    def keep(self, params: Params, sent: Sent) -> Mapping[str, Params]:
        """Return what the client keeps in its own memory, by name."""
        return {self.remember: self.answer(params, sent)} if self.remember else {}


def is_monitored(task: Task) -> bool:
    """Return whether the task may end its training early: it defines the hook `monitor`."""
    return type(task).monitor is not Task.monitor


@dataclass(frozen=True)
class Measurement(Task):
    """The exact mean of a statistic over a client's examples: of gradients, of their squares, of activations.

    The client goes over its examples once, in a fixed order and without augmentation, and answers
    with the sum of `statistic` divided by the number of examples, whatever the size of the batches.
    A client without any example answers with zeros. Sums are in float64.

    Of the hooks of a task, `prepare`, `begin`, `answer` and `keep` mean the same; the last two get
    the mean in the place of trained parameters. There is no step, no loss and no optimizer.
    `fedquit.core.gradients.per_example_gradients` helps with gradients.
    """

    def __post_init__(self) -> None:
        if self.local.epochs != 1:
            raise InputError(
                f"a measurement goes over the data once, not {self.local.epochs} times: leave epochs at 1."
            )

    @abstractmethod
    def statistic(self, model: Model, params: Params, sent: Sent, batch: Batch) -> Params:
        """Return the statistic of each example.

        Args:
            model: the network.
            params: what `begin` returned: where the statistic is computed.
            sent: the named sets of parameters that the client received.
            batch: B examples.

        Returns:
            Tensors `(B, …)` by name, a row for each example.
        """

    def zeros(self, sent: Sent) -> Params:
        """Return zeros with the names, shapes and types of the mean: by default those of the weights."""
        return {n: torch.zeros_like(p) for n, p in self.begin(sent).items() if n.rpartition(".")[2] not in STATISTICS}

    def loss(self, model: Model, params: Params, sent: Sent, batch: Batch) -> Tensor:
        raise InputError(f"{type(self).__name__} is a measurement: it has no loss to train on.")


@dataclass(frozen=True)
class Part:
    """One part of a `Program`.

    Attributes:
        task: what the client does; a `Measurement` leaves the model as it is.
        split: which part of its training data it uses.
    """

    task: Task
    split: Split = "all"


@dataclass(frozen=True)
class Program:
    """Several tasks that a client does in one visit: forget, then repair. It is one participation.

    The client receives the model once, does the parts one after the other, and replies once. Each
    part finds in `sent["start"]` the model where the part before it ended, and in
    `sent["received"]` the model as the client received it; what else was sent is the same for all.
    What a part keeps in the client's memory is there for later parts that name it in `needs`. A
    part's optimizer starts anew.

    The reply holds what the training parts answered, later ones on top; if the last part is a
    measurement, that alone. Its number of examples, the weight in FedAvg, counts every example of
    the client that some part used once: the forget and the retain split together are all.

    Attributes:
        parts: in their order, at least one.
    """

    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        if not self.parts:
            raise InputError("a program has no part: give at least one.")

    def check(self, split: Split, sent: Sent) -> None:
        """Raise an InputError where a question cannot be asked with this program.

        Args:
            split: of the question: "all", since each part has its own.
            sent: the named sets of parameters of the question.
        """
        if split != "all":
            raise InputError(f"each part of a program has a split of its own: leave out split={split!r}.")
        if "start" not in sent:
            raise InputError("a program needs a model to start from: send it as `start`.")
        if RECEIVED in sent:
            raise InputError(
                f"{RECEIVED!r} is what a program calls the model as it was received: send yours as another."
            )


def parts_of(task: Task | Program, split: Split) -> tuple[Part, ...]:
    """Return the parts of a program; a task is a program of one part.

    Args:
        task: what a client is asked to do.
        split: of the question, for a task.
    """
    return task.parts if isinstance(task, Program) else (Part(task, split),)


def examples_used(parts: Sequence[Part], counts: Mapping[Split, int]) -> int:
    """Return how many of a client's examples some part uses, each counted once: the weight of its reply.

    Args:
        parts: what the client does.
        counts: how many examples it has in each split that the parts use.
    """
    splits = {part.split for part in parts}
    return counts["all"] if "all" in splits else sum(counts[split] for split in splits)


@dataclass(frozen=True)
class Effort:
    """What one part of a visit took.

    Attributes:
        examples: in the part's split of the client's data.
        steps: of training; of a measurement, the batches.
    """

    examples: int
    steps: int


@dataclass(frozen=True)
class Reply:
    """A client's answer to a task or a program.

    Attributes:
        client: who answers.
        params: what the task's `answer` returned; of a program, see there.
        examples: how many examples the client used, n_k.
        loss: the mean over the steps taken; of a program, over those of its last part.
        efforts: what each part of a program took, or what a monitored task took; empty for any other
            task, which takes what was planned.
    """

    client: ClientId
    params: Params
    examples: int
    loss: float = float("nan")
    efforts: tuple[Effort, ...] = ()


class Federation(Protocol):
    """The only way from a method to the clients."""

    @property
    def model(self) -> Model:
        """The network that everybody trains."""

    @property
    def clients(self) -> tuple[ClientId, ...]:
        """The clients that can be asked now."""

    @property
    def seed(self) -> int:
        """Of the server's own draws: fixed by the run's seed, phase, round and question."""

    def run(
        self, task: Task | Program, clients: Sequence[ClientId], *, split: Split = "all", **sent: Params
    ) -> Iterator[Reply]:
        """Ask clients to do a task or a program.

        Args:
            task: what each of them does.
            clients: whom to ask.
            split: which part of their training data they use; the parts of a program have their own.
            sent: named sets of parameters for the task; `start` is the model to start from.

        Returns:
            The replies, one at a time, in the order of `clients`. Make a list of them to read them
            twice.
        """

    def run_at_server(self, task: Task, **sent: Params) -> Params:
        """Do a task on the server's own public data.

        Args:
            task: what to do.
            sent: named sets of parameters for the task, as in `run`.

        Returns:
            What the task's `answer` returned.
        """


@dataclass(frozen=True)
class Request:
    """An erasure request: one client, several, or a part of their samples.

    Only the client knows which samples it marks: the server only ever says "forget" or "retain".

    Attributes:
        clients: who asks to be forgotten.
        samples: whether they ask for a part of their samples only, and stay in the federation.
    """

    clients: tuple[ClientId, ...]
    samples: bool = False

    def stay(self, clients: Sequence[ClientId]) -> list[ClientId]:
        """Return the `clients` that stay after the request; all where only samples leave."""
        return [c for c in clients if self.samples or c not in self.clients]

    def check(self, clients: Sequence[ClientId]) -> None:
        """Raise a RequestError if a federation of these clients cannot serve the request."""
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
    first = ", ".join(map(str, clients[:12]))
    return first if len(clients) <= 12 else f"{first}, … ({len(clients)} in all)"


@dataclass(frozen=True)
class State:
    """The state of a phase (training, unlearning, recovery) after a round: enough to go on from.

    Attributes:
        params: the global model.
        clock: rounds of ordinary training behind these parameters; the learning-rate schedule reads
            it.
        round: rounds of this phase.
        kept: the method's own server state, by name.
    """

    params: Params
    clock: int = 0
    round: int = 0
    kept: Mapping[str, Params] = field(default_factory=dict)

    def next(self, params: Params, **kept: Params) -> State:
        """Return the state after one more round of this phase.

        Args:
            params: the new global model.
            kept: the method's own server state from now on; what is not given again is dropped.
        """
        return replace(self, params=params, round=self.round + 1, kept=kept)

    def tick(self) -> State:
        """Return the state with one more round of ordinary training on its clock."""
        return replace(self, clock=self.clock + 1)

    def fresh(self) -> State:
        """Return the first state of the next phase: the same model, at round 0."""
        return replace(self, round=0)

    def settled(self) -> State:
        """Return the state without the method's own, once a request has been served."""
        return replace(self, kept={})


@dataclass(frozen=True)
class Training:
    """Ordinary training: of Original, of Retrain, and during recovery.

    Attributes:
        task: what a client does in a round.
        rounds: how many rounds Original and Retrain take.
        clients_per_round: the size of a round's cohort; 0 means all clients.
        lr_decay: the learning rate of round t is `lr * lr_decay**t`.
    """

    task: Task
    rounds: int
    clients_per_round: int = 0
    lr_decay: float = 1.0

    def task_at(self, clock: int, task: Task | None = None) -> Task:
        """Return a task with the learning rate of a round.

        Args:
            clock: the number of the round, from 0.
            task: the task; by default that of the training.
        """
        task = task or self.task
        return replace(task, local=replace(task.local, lr=task.local.lr * self.lr_decay**clock))


@dataclass(frozen=True)
class Trained:
    """A trained federation as a request meets it.

    Attributes:
        params: the global model.
        initial: the parameters that the training began with.
        training: how the model was trained.
        examples: how many examples each client trained on, n_k, as the clients reported it.
        memory: what the method kept at the server during training.
    """

    params: Params
    initial: Params
    training: Training
    examples: Mapping[ClientId, int]
    memory: Memory
