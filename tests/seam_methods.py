# SPDX-License-Identifier: Apache-2.0
"""Small methods, each of which needs one thing of the seam that the methods of the field need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from fedquit.core import (
    Batch,
    ClientId,
    Federation,
    Local,
    Memory,
    Model,
    Params,
    Reply,
    Request,
    Sent,
    State,
    Task,
    Trained,
)
from fedquit.core.fedavg import cross_entropy
from fedquit.core.method import Method
from fedquit.core.params import add, mean, mix, sub
from fedquit.data import Dataset


@dataclass(frozen=True)
class Guide(Task):
    """Learn the labels that another model gives."""

    def loss(self, model: Model, params: Params, sent: Sent, batch: Batch) -> Tensor:
        return cross_entropy(model(params, batch.x), model(sent["degraded"], batch.x).argmax(-1))


@dataclass(frozen=True)
class Degrade(Method):
    """Several rounds with two models of the server's own: a degraded one, and the one before unlearning."""

    def rounds(self, trained: Trained, request: Request) -> int:
        return 3

    def unlearn(self, fed: Federation, state: State, trained: Trained, request: Request) -> State:
        degraded = state.kept.get("degraded") or fed.model.init(fed.seed)
        before = state.kept.get("before") or state.params
        task = trained.training.task
        degraded = mean(fed.run(task, request.stay(fed.clients), split="retain", start=degraded))
        w = mix(state.params, degraded, 0.9)
        replies = [*fed.run(Guide(task.local), request.clients, split="forget", start=w, degraded=degraded)]
        replies += fed.run(task, request.stay(fed.clients), split="retain", start=w)
        return state.next(mix(mean(replies), before, 0.95), degraded=degraded, before=before)


@dataclass(frozen=True)
class Imitate(Task):
    """Distil another model, without labels."""

    def loss(self, model: Model, params: Params, sent: Sent, batch: Batch) -> Tensor:
        teacher = functional.log_softmax(model(sent["teacher"], batch.x), -1)
        student = functional.log_softmax(model(params, batch.x), -1)
        return (teacher.exp() * (teacher - student)).sum(-1)


@dataclass(frozen=True)
class SubtractAndDistil(Method):
    """The server keeps the sum of the target's updates during training, subtracts it, and distils on public data."""

    target: int = 0

    def watch(self, memory: Memory, round: int, start: Params, reply: Reply) -> None:
        if reply.client == self.target:
            update = sub(reply.params, start)
            memory["sum"] = add(memory["sum"], update) if "sum" in memory else update

    def unlearn(self, fed: Federation, state: State, trained: Trained, request: Request) -> State:
        w = add(state.params, trained.memory["sum"], -1 / len(fed.clients))
        return state.next(fed.run_at_server(Imitate(Local(lr=0.05)), start=w, teacher=state.params))


@dataclass(frozen=True)
class LearnTwice(Task):
    """Ordinary training with a second head, which is kept at home and never sent."""

    needs = ("second",)

    def begin(self, sent: Sent) -> Params:
        head = sent.get("second") or {"second.weight": torch.zeros_like(sent["start"]["head.weight"])}
        return {**sent["start"], **head}

    def loss(self, model: Model, params: Params, sent: Sent, batch: Batch) -> Tensor:
        first = {n: p for n, p in params.items() if n != "second.weight"}
        other = {**first, "head.weight": params["second.weight"]}
        wrong = (batch.u * 3).long().clamp(max=2)
        return cross_entropy(model(first, batch.x), batch.y) + cross_entropy(model(other, batch.x), wrong)

    def answer(self, params: Params, sent: Sent) -> Params:
        return {n: p for n, p in params.items() if n != "second.weight"}

    def keep(self, params: Params, sent: Sent) -> Mapping[str, Params]:
        return {"second": {"second.weight": params["second.weight"]}}


@dataclass(frozen=True)
class SendHead(Task):
    """Send home's second head to the server: a reply with one tensor."""

    needs = ("second",)

    def loss(self, model: Model, params: Params, sent: Sent, batch: Batch) -> Tensor:
        return cross_entropy(model(params, batch.x), batch.y)

    def answer(self, params: Params, sent: Sent) -> Params:
        return {"head.weight": sent["second"]["second.weight"]}


@dataclass(frozen=True)
class SecondHead(Method):
    """The leaving client trains a second head during ordinary training, and sends it when it leaves."""

    knows_request = True

    def training_task(self, task: Task, client: ClientId, request: Request) -> Task:
        return LearnTwice(task.local) if client in request.clients else task

    def unlearn(self, fed: Federation, state: State, trained: Trained, request: Request) -> State:
        head = mean(fed.run(SendHead(Local(epochs=0.0)), request.clients, split="forget", start=state.params))
        return state.next({**state.params, **mix({"head.weight": state.params["head.weight"]}, head, 0.5)})


@dataclass(frozen=True)
class LearnHead(Task):
    """Train the head alone: the reply is a part of the parameters."""

    def begin(self, sent: Sent) -> Params:
        return {n: p for n, p in sent["start"].items() if n.startswith("head.")}

    def loss(self, model: Model, params: Params, sent: Sent, batch: Batch) -> Tensor:
        wrong = (batch.u * 3).long().clamp(max=2)
        return cross_entropy(model({**sent["start"], **params}, batch.x), wrong)


@dataclass(frozen=True)
class HeadOnly(Method):
    """One round in which only the head travels back."""

    def unlearn(self, fed: Federation, state: State, trained: Trained, request: Request) -> State:
        head = mean(fed.run(LearnHead(Local(lr=0.1)), request.clients, split="forget", start=state.params))
        assert set(head) == {"head.weight", "head.bias"}
        return state.next({**state.params, **head})


@dataclass(frozen=True)
class FromOwn(Task):
    """Begin from the mean of the others, known from one's own last model; climb within a ball around it."""

    population: int = 4
    radius: float = 0.1
    needs = ("own",)

    def begin(self, sent: Sent) -> Params:
        n = self.population
        return {k: (n * w - sent["own"][k]) / (n - 1) for k, w in sent["start"].items()}

    def loss(self, model: Model, params: Params, sent: Sent, batch: Batch) -> Tensor:
        return -cross_entropy(model(params, batch.x), batch.y)

    def after_step(self, new: Params, old: Params, sent: Sent) -> Params:
        centre = self.begin(sent)
        length = torch.stack([(new[n] - centre[n]).square().sum() for n in new]).sum().sqrt()
        shrink = (self.radius / length.clamp_min(1e-12)).clamp(max=1.0)
        return {n: centre[n] + shrink * (new[n] - centre[n]) for n in new}


@dataclass(frozen=True)
class ClimbFromOwn(Method):
    """A client-side memory from an earlier round, and a projection after each step."""

    def training_task(self, task: Task, client: ClientId, request: Request) -> Task:
        return replace(task, remember="own")

    def unlearn(self, fed: Federation, state: State, trained: Trained, request: Request) -> State:
        return state.next(mean(fed.run(FromOwn(Local(lr=0.5)), request.clients, split="forget", start=state.params)))


@dataclass(frozen=True)
class SecondOrder(Method):
    """Retraining with an optimizer that needs second derivatives."""

    def rounds(self, trained: Trained, request: Request) -> int:
        return 2

    def unlearn(self, fed: Federation, state: State, trained: Trained, request: Request) -> State:
        task = trained.training.task
        task = replace(task, local=replace(task.local, optimizer="adahessian", lr=0.05, weight_decay=0.0))
        start = trained.initial if state.round == 0 else state.params
        return state.next(mean(fed.run(task, request.stay(fed.clients), split="retain", start=start)))


def small_net(input_shape: tuple[int, ...], classes: int) -> torch.nn.Module:
    """A network whose head has a name."""

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = torch.nn.Linear(torch.Size(input_shape).numel(), 8)
            self.head = torch.nn.Linear(8, classes)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(torch.tanh(self.body(x.flatten(1))))
            return out

    return Net()


@dataclass(frozen=True)
class Count(Task):
    """Count, at home, how often one was asked; the answer shows the count."""

    needs = ("count",)

    def loss(self, model: Model, params: Params, sent: Sent, batch: Batch) -> Tensor:
        return cross_entropy(model(params, batch.x), batch.y)

    def _count(self, sent: Sent) -> Tensor:
        return sent["count"]["n"] + 1 if "count" in sent else torch.ones(1, dtype=torch.float64)

    def answer(self, params: Params, sent: Sent) -> Params:
        return {n: p + self._count(sent) / 1000 for n, p in params.items()}

    def keep(self, params: Params, sent: Sent) -> Mapping[str, Params]:
        return {"count": {"n": self._count(sent)}}


@dataclass(frozen=True)
class CountTwice(Method):
    """Two questions a round to the same client, which builds on what it kept in the one before."""

    def rounds(self, trained: Trained, request: Request) -> int:
        return 2

    def unlearn(self, fed: Federation, state: State, trained: Trained, request: Request) -> State:
        w = mean(fed.run(Count(Local(epochs=0.0)), request.clients, split="forget", start=state.params))
        return state.next(mean(fed.run(Count(Local(epochs=0.0)), request.clients, split="forget", start=w)))


class Sequences(torch.nn.Module):
    """A label for every position: what a language model gives."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(classes, 6)
        self.head = torch.nn.Linear(6, classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.embedding(x))
        return out


def sequence_net(input_shape: tuple[int, ...], classes: int) -> torch.nn.Module:
    return Sequences(classes)


def sequence_data() -> Dataset:
    """Each token is followed by the next one, or by a random one."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 5, (90, 7), generator=generator)
    y = torch.where(torch.rand(90, 7, generator=generator) < 0.8, (x + 1) % 5, x)
    return Dataset(x[:60], y[:60], x[60:], y[60:], classes=5)
