# SPDX-License-Identifier: Apache-2.0
"""What stands between a method and its federation: they pass everything on, and tell an `Observer` what they see."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fedquit.check.rules import Fault, public_functions
from fedquit.core import ClientId, Federation, Memory, Model, Params, Reply, Sent, Split, Task
from fedquit.engine import Ask, Engine

if TYPE_CHECKING:
    from fedquit.check.observation import Observer


@dataclass
class Frame:
    """A hook that is being called: what it was lent, and the questions that it asked.

    Attributes:
        hook: its name.
        lent: values that it may read and must not change: in words, the value, and its digest.
        questions: the place of each in words, how many clients were asked, and whose replies were read.
    """

    hook: str
    lent: list[tuple[str, object, str]] = field(default_factory=list)
    questions: list[tuple[str, int, list[ClientId]]] = field(default_factory=list)


class GuardedFederation:
    """A federation that tells whom a method asks, for what, and whether it goes around."""

    def __init__(self, fed: Federation, observer: Observer, frame: Frame) -> None:
        self.__fed = fed
        self.__observer = observer
        self.__frame = frame

    @property
    def model(self) -> Model:
        """The network that everybody trains."""
        return GuardedModel(self.__fed.model, self.__observer)

    @property
    def clients(self) -> tuple[ClientId, ...]:
        """The clients that can be asked now."""
        return self.__fed.clients

    @property
    def seed(self) -> int:
        """Of the server's own draws."""
        return self.__fed.seed

    def run(self, task: Any, clients: Sequence[ClientId], *, split: Split = "all", **sent: Params) -> Iterator[Reply]:  # noqa: ANN401 - whatever a question may hold
        """Ask clients to do a task."""
        return self.__ask("run", task, clients, split=split, **sent)  # type: ignore[no-any-return]

    def run_at_server(self, task: Task, **sent: Params) -> Params:
        """Do a task on the server's own public data."""
        return self.__ask("run_at_server", task, **sent)  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever else a federation has
        if name in public_functions(Federation):

            def ask(*given: Any, **named: Any) -> Any:  # noqa: ANN401
                return self.__ask(name, *given, **named)

            return ask
        if not name.startswith("__"):
            seen = f"reaches for `fed.{name}`, which is no part of a Federation: what it does is not charged"
            advice = "ask clients through `fed.run` and `fed.run_at_server` alone"
            self.__observer.note("costs", Fault("inside", seen, advice, stops=True))
        raise AttributeError(f"a Federation has no attribute {name!r}")

    def __ask(self, name: str, *given: Any, **named: Any) -> Any:  # noqa: ANN401 - as the question wants it
        bound = inspect.signature(getattr(Federation, name)).bind(None, *given, **named)
        bound.apply_defaults()
        asked = bound.arguments
        if "clients" in asked:
            asked["clients"] = list(asked["clients"])
        place = self.__observer.judge_question(name, asked, self.__fed.clients, self.__frame)
        answer = getattr(self.__fed, name)(*bound.args[1:], **bound.kwargs)
        if "clients" not in asked or not isinstance(answer, Iterator):
            return answer
        return self.__read(answer, place, len(asked["clients"]))

    def __read(self, replies: Iterator[Reply], place: str, asked: int) -> Iterator[Reply]:
        read: list[ClientId] = []
        self.__frame.questions.append((place, asked, read))
        for reply in replies:
            read.append(reply.client)
            self.__observer.lend(f"the reply of client {reply.client}", getattr(reply, "params", None), self.__frame)
            yield reply


class GuardedModel:
    """A network that tells when the server runs it itself."""

    def __init__(self, model: Model, observer: Observer) -> None:
        self.__model = model
        self.__observer = observer

    def init(self, seed: int) -> Params:
        """Fresh parameters."""
        return self.__model.init(seed)

    def __call__(self, params: Params, x: Tensor) -> Tensor:
        """The logits."""
        seen = "the server runs the network itself, which nobody charges"
        advice = "let clients do it in a task, or the server on its public data with `fed.run_at_server`"
        self.__observer.note("costs", Fault("network", seen, advice))
        return self.__model(params, x)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever else a network has
        return getattr(self.__model, name)


class GuardedMemory(MutableMapping[str, Params]):
    """The server's memory; what is read from it must not change, and what is written has rules."""

    def __init__(self, memory: Memory, observer: Observer, frame: Frame) -> None:
        self._memory = memory
        self._observer = observer
        self._frame = frame

    def __getitem__(self, key: str) -> Params:
        value = self._memory[key]
        self._observer.lend(f"what lies in the server's memory under {key!r}", value, self._frame)
        return value

    def __setitem__(self, key: str, params: Params) -> None:
        self._observer.judge_entry(self._frame.hook, key, params)
        self._memory[key] = params

    def __delitem__(self, key: str) -> None:
        del self._memory[key]

    def __contains__(self, key: object) -> bool:
        return key in self._memory

    def __iter__(self) -> Iterator[str]:
        return iter(self._memory)

    def __len__(self) -> int:
        return len(self._memory)


@dataclass(frozen=True)
class ObservedEngine:
    """An engine whose clients answer one by one, each counted."""

    inner: Engine
    observer: Observer

    @property
    def model(self) -> Model:
        """The network that everybody trains."""
        return self.inner.model

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever else an engine has
        return getattr(self.inner, name)

    def run(self, ask: Ask) -> Iterator[Reply]:
        """The replies, in the order of `ask.clients`."""
        task = self.observer.observe_task(ask.task)
        for client in ask.clients:
            alone = dataclasses.replace(ask, task=task, clients=(client,))
            yield self.observer.answer(ask, client, self.inner.run(alone))


@dataclass(frozen=True)
class Answered:
    """A federation with one answer, for a meter."""

    reply: Reply

    @property
    def model(self) -> Model:
        """There is none."""
        raise NotImplementedError

    @property
    def clients(self) -> tuple[ClientId, ...]:
        """Who has answered."""
        return (self.reply.client,)

    @property
    def seed(self) -> int:
        """Nobody draws."""
        return 0

    def run(self, task: Any, clients: Sequence[ClientId], *, split: Split = "all", **sent: Params) -> Iterator[Reply]:  # noqa: ANN401 - whatever a question may hold
        """The answer."""
        return iter([self.reply])

    def run_at_server(self, task: Task, **sent: Params) -> Params:
        """The answer."""
        return self.reply.params

    def reply_at_server(self, task: Task, sent: Sent) -> Reply:
        """The answer, with all that it says of the work."""
        return self.reply
