# SPDX-License-Identifier: Apache-2.0
"""What an unlearning method is: rounds of the server, and hooks into the training that came before."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from fedquit.core.fedavg import fedavg
from fedquit.core.local_layers import local_names
from fedquit.core.params import statistics_of
from fedquit.core.types import (
    ClientId,
    Federation,
    Memory,
    Model,
    Params,
    Reply,
    Request,
    State,
    Task,
    Trained,
    Training,
)
from fedquit.errors import InputError, RequestError
from fedquit.utils.names import unknown

Scale = Literal["log", "linear"]


@dataclass(frozen=True)
class Knob:
    """A hyper-parameter that sets how strongly a method unlearns, with the range that a study sweeps.

    Ends that are whole numbers (`int`) say that the field takes whole numbers alone, such as rounds.

    Attributes:
        field: the name of the method's field.
        low: the smallest value to try; a scale of "log" needs one above 0.
        high: the largest value to try.
        scale: "log" for steps of equal ratio between values, "linear" for steps of equal length.
    """

    field: str
    low: float
    high: float
    scale: Scale = "log"

    def __post_init__(self) -> None:
        if self.scale not in get_args(Scale):
            raise unknown("scale of a knob", self.scale, get_args(Scale))
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise InputError(f"the knob {self.field!r} goes from {self.low} to {self.high}: give low below high.")
        if self.scale == "log" and self.low <= 0:
            raise InputError(f"the knob {self.field!r} begins at {self.low} on a log scale: begin above 0.")

    def values(self, n: int) -> list[float]:
        """Return `n` values from `low` to `high`, both included, evenly spaced on the scale.

        For a field of whole numbers they are rounded, and each is named once: there may be fewer.

        Raises:
            InputError: if `n` is below 2.
        """
        if n < 2:
            raise InputError(f"{n} values cannot reach from one end of {self.field!r} to the other: ask for 2 or more.")
        inner = [self._at(i / (n - 1)) for i in range(1, n - 1)]
        if isinstance(self.low, int) and isinstance(self.high, int):
            return sorted({self.low, *map(round, inner), self.high})
        return [self.low, *inner, self.high]

    def _at(self, share: float) -> float:
        """The value at a share of the way from low to high."""
        if self.scale == "linear":
            value = self.low + share * (self.high - self.low)
        else:
            value = math.exp((1 - share) * math.log(self.low) + share * math.log(self.high))
        return float(f"{value:.10g}")  # 1e-4, not 9.99…e-05: it will stand in recipes


@dataclass(frozen=True)
class Method(ABC):
    """An unlearning method: hyper-parameters, never state."""

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}  # other readings of the method, as changes of the defaults
    at_home: ClassVar[tuple[str, ...]] = ()  # what its clients keep in their own memory
    recovers: ClassVar[bool] = True  # whether ordinary training follows; retraining needs none
    knobs: ClassVar[tuple[Knob, ...]] = ()  # which fields set how strongly it unlearns: what a study sweeps
    recalibrates: ClassVar[bool] = True  # whether BatchNorm's statistics are measured anew after its last round
    refuses_statistics: ClassVar[str] = ""  # why it cannot serve a model with BatchNorm, as a half-sentence
    refuses_local_layers: ClassVar[str] = ""  # why it cannot serve clients with BatchNorm of their own, likewise
    begins_anew: ClassVar[bool] = False  # whether it rebuilds the model from its first parameters, local layers too
    training_fields: ClassVar[tuple[str, ...] | None] = None  # which fields its hooks into training read; None: all

    def check(self, request: Request) -> None:
        """Refuse, with a reason, a kind of request that the method does not define."""

    def training_task(self, task: Task, client: ClientId, request: Request) -> Task:
        """The task of a client in ordinary training; methods that must prepare for a request replace it.

        Args:
            task: the task without this method.
            client: who will do it.
            request: that is known in advance; without clients where none is.
        """
        return task

    def watch(self, memory: Memory, round: int, start: Params, reply: Reply) -> None:
        """Keep in the server's memory what the method will need of a reply of ordinary training.

        Args:
            memory: the method's part of the server's memory. What belongs to one client lies under a key whose last
                part, after "/", is the client's number.
            round: of ordinary training, from 0: the model's clock.
            start: the global model that the client began with.
            reply: its answer.
        """

    def after_round(self, memory: Memory, round: int, examples: Mapping[ClientId, int]) -> None:
        """End a round of ordinary training in the method's memory.

        Args:
            memory: the method's part of the server's memory.
            round: of ordinary training, from 0.
            examples: of each client that took part, how many it trained on.
        """

    def forget(self, memory: Memory, clients: Iterable[ClientId]) -> None:
        """Prepare for the deletion of what lies under the numbers of these clients: their request is over.

        What a method must know later about clients that stay, for example that something of them is missing, it can
        keep under a key that ends with "/": it lasts until the client as a whole has been forgotten.

        Args:
            memory: the method's part of the server's memory.
            clients: whose request it was.
        """

    def history_bytes(self, training: Training, clients: int, model_bytes: int) -> int:
        """How many bytes the method will keep at the server, so that a run can be refused before it begins.

        Args:
            training: the ordinary training that it watches.
            clients: of the federation.
            model_bytes: of one set of parameters.
        """
        return 0

    @property
    def needs_public_data(self) -> bool:
        """Whether the server needs data of its own."""
        return False

    @property
    def knows_request(self) -> bool:
        """Whether training must know the request in advance."""
        return False

    def rounds(self, trained: Trained, request: Request) -> int:
        """How many rounds the unlearning of `request` takes, given what it finds in `trained`."""
        return 1

    @abstractmethod
    def unlearn(self, fed: Federation, state: State, trained: Trained, request: Request) -> State:
        """One round of the unlearning.

        Args:
            fed: the way to the clients.
            state: the model before the round, whose number is `state.round`, from 0.
            trained: what the request found.
            request: who is to be forgotten.
        """

    def recover(self, fed: Federation, state: State, trained: Trained, request: Request) -> State:
        """One round of the recovery: ordinary training without the forgotten data, unless a method overrides it.

        Args:
            fed: the way to the clients; it gives out retained data only.
            state: the model before the round.
            trained: what the request found.
            request: who has been forgotten.
        """
        return fedavg(fed, state, trained.training, request.stay(fed.clients), split="retain")

    @property
    def shapes_training(self) -> bool:
        """Whether ordinary training must run with this method attached (it watches, or replaces a task)."""
        hooks = ("watch", "after_round", "training_task")
        return any(getattr(type(self), hook) is not getattr(Method, hook) for hook in hooks)


def is_of(key: str, clients: Iterable[ClientId]) -> bool:
    """Whether what lies under a key is of one of these clients: its last part is the client's number."""
    return key.rpartition("/")[2] in {str(c) for c in clients}


def require_covered(method: Method, model: Model, params: Params) -> None:
    """Refuse a model with BatchNorm where the method cannot treat it.

    Args:
        method: that will serve requests.
        model: the network.
        params: all its parameters.
    """
    if method.refuses_statistics and statistics_of(params):
        raise InputError(
            f"{type(method).__name__} cannot serve a model with BatchNorm: {method.refuses_statistics}; use GroupNorm, "
            "or another method, such as fedquit."
        )
    reason = method.refuses_local_layers
    if method.needs_public_data:
        reason = "it computes at the server, which has no BatchNorm where each client keeps its own"
    if reason and local_names(model):
        raise InputError(
            f"{type(method).__name__} cannot serve clients with local BatchNorm: {reason}; set model.batchnorm = "
            "'averaged', or use another method, such as fedquit."
        )


def require_whole_clients(request: Request, method: str, why: str) -> None:
    """Refuse a request for samples.

    Args:
        request: to be checked.
        method: the name of the method that refuses it.
        why: the reason, as a half-sentence.
    """
    if request.samples:
        raise RequestError(
            f"{method} forgets whole clients: {why}; for samples use fedquit, fedau, mode, fedosd or not."
        )
