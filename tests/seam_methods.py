# SPDX-License-Identifier: Apache-2.0
"""Small methods, each of which needs one thing of the seam that the methods of the field need."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from fedquit.core import (
    Batch,
    ClientId,
    EarlyStopping,
    Federation,
    Local,
    Measurement,
    Memory,
    Model,
    Params,
    Part,
    Program,
    Reply,
    Request,
    Sent,
    Split,
    State,
    Step,
    Task,
    Trained,
    per_example_gradients,
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


@dataclass(frozen=True)
class Fisher(Measurement):
    """The mean of the squared gradients of the single examples."""

    def statistic(self, model: Model, params: Params, sent: Sent, batch: Batch) -> Params:
        def loss(at: Params, some: Batch) -> Tensor:
            return cross_entropy(model(at, some.x), some.y)

        return {n: g.square() for n, g in per_example_gradients(loss, params, batch).items()}


@dataclass(frozen=True)
class Outputs(Measurement):
    """The mean of the logits of three classes: a statistic that needs no gradient, and has its own shape."""

    def statistic(self, model: Model, params: Params, sent: Sent, batch: Batch) -> Params:
        return {"logits": model(params, batch.x).double()}

    def zeros(self, sent: Sent) -> Params:
        return {"logits": torch.zeros(3, dtype=torch.float64)}


@dataclass(frozen=True)
class Dampen(Method):
    """A measurement at the leaving clients and at those who stay; the server scales what matters more to the former."""

    def unlearn(self, fed: Federation, state: State, trained: Trained, request: Request) -> State:
        measure = Fisher(Local(batch_size=4))
        theirs = mean(fed.run(measure, request.clients, split="forget", start=state.params))
        others = mean(fed.run(measure, request.stay(fed.clients), split="retain", start=state.params))
        return state.next({n: torch.where(theirs[n] > others[n], 0.5 * p, p) for n, p in state.params.items()})


@dataclass(frozen=True)
class Climb(Task):
    """Go up the loss."""

    def loss(self, model: Model, params: Params, sent: Sent, batch: Batch) -> Tensor:
        return -cross_entropy(model(params, batch.x), batch.y)


@dataclass(frozen=True)
class Return(Task):
    """Learn, and stay near the model as it was received; weigh each weight by what was measured on the way."""

    needs = ("fisher",)

    def loss(self, model: Model, params: Params, sent: Sent, batch: Batch) -> Tensor:
        near = [(f * (params[n] - sent["received"][n]).square()).sum() for n, f in sent["fisher"].items()]
        return cross_entropy(model(params, batch.x), batch.y) + torch.stack(near).sum()


@dataclass(frozen=True)
class ClimbAndReturn(Method):
    """A program of three parts in one visit: measure, forget, repair."""

    def unlearn(self, fed: Federation, state: State, trained: Trained, request: Request) -> State:
        repaired_with: Split = "retain" if request.samples else "forget"
        local = Local(epochs=2.0, batch_size=4, lr=0.05)
        parts = (
            Part(Fisher(Local(batch_size=4), remember="fisher"), repaired_with),
            Part(Climb(local), "forget"),
            Part(Return(local), repaired_with),
        )
        return state.next(mean(fed.run(Program(parts), request.clients, start=state.params)))


@dataclass(frozen=True)
class Patiently(Task):
    """Learn random labels, and stop once the loss of an epoch has not fallen."""

    patience: int = 1

    def loss(self, model: Model, params: Params, sent: Sent, batch: Batch) -> Tensor:
        return cross_entropy(model(params, batch.x), (batch.u * 3).long().clamp(max=2))

    def monitor_start(self, params: Params) -> Params:
        return EarlyStopping(self.patience, restore_best=True).start(params)

    def monitor(self, state: Params, step: Step, params: Params) -> Params:
        return EarlyStopping(self.patience, restore_best=True).observe(state, step, params)

    def monitor_end(self, state: Params, params: Params) -> Params:
        return EarlyStopping(self.patience, restore_best=True).end(state, params)


@dataclass(frozen=True)
class StopEarly(Method):
    """Random labels for up to twenty epochs."""

    def unlearn(self, fed: Federation, state: State, trained: Trained, request: Request) -> State:
        task = Patiently(Local(epochs=20.0, batch_size=4, lr=0.05))
        return state.next(mean(fed.run(task, request.clients, split="forget", start=state.params)))


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


@dataclass(frozen=True)
class AtHome(Method):
    """Asks the leaving clients to train, and throws away what they answer: only what they keep at home changes."""

    strength: float = 1.0

    def rounds(self, trained: Trained, request: Request) -> int:
        return 1

    def unlearn(self, fed: Federation, state: State, trained: Trained, request: Request) -> State:
        task = trained.training.task
        harsh = replace(task, local=replace(task.local, lr=self.strength * task.local.lr))
        deque(fed.run(harsh, request.clients, split="forget", start=state.params), maxlen=0)
        return state.next(state.params)


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
