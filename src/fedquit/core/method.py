# SPDX-License-Identifier: Apache-2.0
"""What an unlearning method is: rounds of the server, and hooks into the training that came before."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from fedquit.core.fedavg import fedavg
from fedquit.core.types import ClientId, Federation, Memory, Params, Reply, Request, State, Task, Trained, Training
from fedquit.errors import RequestError


@dataclass(frozen=True)
class Method(ABC):
    """An unlearning method: hyper-parameters, never state."""

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}  # other readings of the method, as changes of the defaults
    at_home: ClassVar[tuple[str, ...]] = ()  # what its clients keep in their own memory
    needs_public_data: ClassVar[bool] = False
    recovers: ClassVar[bool] = True  # whether ordinary training follows; retraining needs none

    def check(self, request: Request) -> None:
        """Refuse, with a reason, a kind of request that the method does not define."""

    def training_task(self, task: Task, client: ClientId, request: Request) -> Task:
        """What this client does in ordinary training; methods that must prepare for a request replace it."""
        return task

    def watch(self, memory: Memory, round: int, start: Params, reply: Reply) -> None:
        """See a reply of ordinary training pass by, and keep in the server's memory what the method will need."""

    def after_round(self, memory: Memory, round: int, examples: Mapping[ClientId, int]) -> None:
        """A round of ordinary training is over: who took part, with how many examples."""

    def forget(self, memory: Memory, clients: Iterable[ClientId]) -> None:
        """The request of these clients has been served: what lies under their numbers is deleted; mind the rest."""

    def history_bytes(self, training: Training, clients: int, model_bytes: int) -> int:
        """How much disk the watcher will need, so that a run can be refused before it begins."""
        return 0

    @property
    def knows_request(self) -> bool:
        """Whether training must know the request in advance."""
        return False

    def rounds(self, trained: Trained, request: Request) -> int:
        """How many rounds the unlearning takes."""
        return 1

    @abstractmethod
    def unlearn(self, fed: Federation, state: State, trained: Trained, request: Request) -> State:
        """One round of the unlearning: number `state.round`, from 0."""

    def recover(self, fed: Federation, state: State, trained: Trained, request: Request) -> State:
        """One round of the recovery: ordinary training without the forgotten data."""
        return fedavg(fed, state, trained.training, request.stay(fed.clients), split="retain")

    @property
    def shapes_training(self) -> bool:
        """Whether ordinary training must run with this method attached (it watches, or replaces a task)."""
        hooks = ("watch", "after_round", "training_task")
        return any(getattr(type(self), hook) is not getattr(Method, hook) for hook in hooks)


def is_of(key: str, clients: Iterable[ClientId]) -> bool:
    """Whether what lies under a key is of one of these clients: its last part is the client's number."""
    return key.rpartition("/")[2] in {str(c) for c in clients}


def require_whole_clients(request: Request, method: str, why: str) -> None:
    """For methods that are not defined for a part of a client's samples."""
    if request.samples:
        raise RequestError(
            f"{method} forgets whole clients: {why}; for samples use fedquit, fedau, mode, fedosd or not."
        )
