# SPDX-License-Identifier: Apache-2.0
"""A federation that gives prescribed replies and writes down what it was asked, and models of a few numbers.

With it the server's part of a method is checked against numbers that were worked out by hand; `work` shows what one
client does with a few examples.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from fedquit.core import (
    SERVER,
    Batch,
    ClientId,
    Local,
    Memory,
    Model,
    Params,
    Program,
    Reply,
    Request,
    Sent,
    Split,
    State,
    Task,
    Trained,
    Training,
)
from fedquit.core.fedavg import Learn
from fedquit.data.federated import FederatedData
from fedquit.engine import Examples, sequential
from fedquit.running.session import Session
from fedquit.running.setup import Setup
from fedquit.running.store import Memories
from fedquit.running.training_cache import Silent, train


def numbers(*values: float) -> Tensor:
    """A vector in float64."""
    return torch.tensor(values, dtype=torch.float64)


def vec(*values: float) -> Params:
    """Parameters of one tensor, `w`."""
    return {"w": numbers(*values)}


def close(found: Params, expected: Params, *, atol: float = 1e-12) -> None:
    """Equal names, and numbers up to rounding."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=atol)


def same(found: Params, expected: Params) -> None:
    """Equal names, and numbers bit for bit."""
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@dataclass(frozen=True)
class Line:
    """Logits w * x for one input number: one weight for each class, no bias."""

    classes: int = 2
    draw: Callable[[int], Params] = lambda seed: vec(float(seed), 0.0)

    def init(self, seed: int) -> Params:
        return self.draw(seed)

    def __call__(self, params: Params, x: Tensor) -> Tensor:
        return x * params["w"]


@dataclass(frozen=True)
class BodyAndHead:
    """Two units, then two classes: logits = head.weight @ (body * x) + head.bias."""

    def init(self, seed: int) -> Params:
        return {"body": numbers(1, 1), "head.weight": torch.zeros(2, 2).double(), "head.bias": numbers(0, 0)}

    def __call__(self, params: Params, x: Tensor) -> Tensor:
        return (params["body"] * x) @ params["head.weight"].T + params["head.bias"]


@dataclass(frozen=True)
class Question:
    """What a federation was asked."""

    task: Task  # or a program
    clients: tuple[ClientId, ...]
    split: Split
    sent: Sent


@dataclass
class Scripted:
    """A federation whose clients answer as prescribed."""

    answer: Callable[[Question, ClientId], Params] = lambda question, client: question.sent["start"]
    examples: Mapping[ClientId, int] = field(default_factory=lambda: {0: 1, 1: 1, 2: 1})
    model: Model = Line()
    seed: int = 0
    asked: list[Question] = field(default_factory=list)

    @property
    def clients(self) -> tuple[ClientId, ...]:
        return tuple(self.examples)

    def run(
        self, task: Task | Program, clients: Sequence[ClientId], *, split: Split = "all", **sent: Params
    ) -> Iterator[Reply]:
        question = Question(cast(Task, task), tuple(clients), split, sent)
        self.asked.append(question)
        return (Reply(c, self.answer(question, c), self.examples[c]) for c in question.clients)

    def run_at_server(self, task: Task, **sent: Params) -> Params:
        question = Question(task, (SERVER,), "all", sent)
        self.asked.append(question)
        return self.answer(question, SERVER)


def moves(*by_question: Mapping[ClientId, Params]) -> Callable[[Question, ClientId], Params]:
    """Answers `start` plus the move of that client; for each question the next of the given, the last for ever."""
    seen: list[Question] = []

    def answer(question: Question, client: ClientId) -> Params:
        if not any(question is q for q in seen):
            seen.append(question)
        at = next(i for i, q in enumerate(seen) if q is question)
        move = by_question[min(at, len(by_question) - 1)][client]
        return {n: p + move[n] for n, p in question.sent["start"].items()}

    return answer


LOCAL = Local(epochs=2.0, batch_size=8, lr=0.5)


def trained(
    params: Params,
    *,
    initial: Params | None = None,
    rounds: int = 4,
    examples: Mapping[ClientId, int] | None = None,
    memory: Memory | None = None,
    local: Local = LOCAL,
    per_round: int = 0,
    lr_decay: float = 0.5,
) -> Trained:
    """What a request finds; the learning rate of round t is lr / 2**t unless told otherwise."""
    training = Training(Learn(local), rounds, per_round, lr_decay)
    return Trained(
        params, initial or params, training, examples or {0: 1, 1: 1, 2: 1}, {} if memory is None else memory
    )


def batch(
    x: Tensor, y: Sequence[int], *, u: Sequence[float] = (), fixed: Sequence[float] = (), forget: Sequence[bool] = ()
) -> Batch:
    """Some examples; random numbers are zero and nothing is marked unless given."""
    n = len(y)
    return Batch(
        x,
        torch.tensor(y),
        torch.tensor(u or [0.0] * n),
        torch.tensor(fixed or [0.0] * n),
        torch.tensor(forget or [False] * n),
    )


def work(model: Model, task: Task, x: Tensor, y: Sequence[int], seed: int = 0, **sent: Params) -> Params:
    """The answer of a client that has these examples, none of them marked."""
    return sequential.run_client(model, task, Examples.unmarked(x, torch.tensor(y)), sent, seed).answer


def column(*values: float) -> Tensor:
    """Examples of one number each."""
    return numbers(*values).unsqueeze(-1)


def marked_data(setup: Setup, request: Request) -> FederatedData:
    """The data with what the request names marked; of samples, the first seven of each client."""
    samples = {c: setup.data.train[c][:7] for c in request.clients} if request.samples else None
    return setup.data.mark(request, samples)


def served(setup: Setup, where: Path, request: Request) -> tuple[Session, State, Trained]:
    """Train a recipe's federation and stand at the beginning of the unlearning phase."""
    name, method = setup.recipe.method_name, setup.method
    marked = marked_data(setup, request)
    data = marked if method.knows_request else setup.data
    original = train(setup, data, where / "cache", reporter=Silent(), attached={name: method}, request=request)
    kept = Memories.open(where / "unlearning", original.memories)
    session = Session(setup.engine(marked, kept.clients), setup.recipe.seed, marked.clients, memories=kept.own)
    session.enter("unlearn-0", 0)
    return session, original.progress.state.fresh(), dataclasses.replace(original.trained, memory=kept.of(name))
