# SPDX-License-Identifier: Apache-2.0
"""What the transcriptions are written in: FedAvg in plain PyTorch, loops and formulas, with torch.optim for the steps.

A transcription is a class with three acts: `train`, `unlearn` and `recover`. The first and the last are FedAvg unless
a method says otherwise. It takes the plan's batches, the data and the network from `world`, and nothing else from the
package: no task, no loss, no virtual teacher, no optimizer, no averaging.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, Optimizer

from fedquit.core import ClientId
from fedquit.engine.plan import Address
from reference.world import (
    CLASSES,
    LR,
    LR_DECAY,
    PUBLIC_POSITIONS,
    RECOVERY_ROUNDS,
    ROUNDS,
    SIZES,
    TRAIN,
    WEIGHT_DECAY,
    Erasure,
    Log,
    Part,
    Step,
    Visit,
    Visited,
    Weights,
    initial,
    net,
    nobody,
    planned,
)

EVERYBODY = tuple(SIZES)
ADAM_EPS = 1e-7  # that of the authors of FedQUIT

Loss = Callable[[Weights, Step], Tensor]  # of the weights that are trained and a batch: the mean over the batch
NewOptimizer = Callable[[list[Tensor]], Optimizer]
Replies = list[tuple[Weights, int]]  # what each client sent, and on how many examples it worked
History = list[
    tuple[Weights, dict[ClientId, Weights]]
]  # of each round: the model sent, and what every client sent back


def rate(t: int) -> float:
    """The learning rate of round t of ordinary training."""
    return LR * LR_DECAY**t


def sgd(lr: float, *, decay: float = 0.0, momentum: float = 0.0) -> NewOptimizer:
    return lambda weights: SGD(weights, lr=lr, weight_decay=decay, momentum=momentum)


def adam(lr: float) -> NewOptimizer:
    return lambda weights: Adam(weights, lr=lr, eps=ADAM_EPS)


def cross_entropy(z: Tensor, y: Tensor) -> Tensor:
    """Minus the log-probability of the label, averaged over the batch."""
    log_p = z - z.exp().sum(-1, keepdim=True).log()
    return -log_p[torch.arange(len(y)), y].mean()


def average(replies: Replies) -> Weights:
    """The mean of the models with weights n_k / n."""
    n = sum(examples for _, examples in replies)
    return {name: sum((n_k / n) * w_k[name] for w_k, n_k in replies) for name in replies[0][0]}  # type: ignore[misc]


def minus(a: Weights, b: Weights) -> Weights:
    return {n: a[n] - b[n] for n in a}


def length(a: Weights) -> float:
    """The Euclidean norm over all tensors together."""
    return math.sqrt(sum(float((p * p).sum()) for p in a.values()))


def vector(a: Weights) -> Tensor:
    return torch.cat([p.reshape(-1) for p in a.values()])


def from_vector(v: Tensor, like: Weights) -> Weights:
    parts = v.split([p.numel() for p in like.values()])
    return {n: part.reshape(p.shape) for (n, p), part in zip(like.items(), parts, strict=True)}


def random_label(u: Tensor) -> Tensor:
    """Each of all classes with the same chance, the true one too."""
    return torch.tensor([math.floor(float(number) * CLASSES) for number in u])


def learning(w: Weights, step: Step) -> Tensor:
    return cross_entropy(net(w, step.x), step.y)


class Transcription:
    """A federation that trains with FedAvg, forgets somebody, and recovers with FedAvg.

    Args:
        erasure: the request.
        options: what the test changes in the method's own settings, under the package's names.
    """

    def __init__(self, erasure: Erasure, options: dict[str, Any]) -> None:
        self.seed = erasure.seed
        self.leaving = erasure.request.clients
        self.staying = erasure.staying
        self.samples = erasure.request.samples
        self.marked = erasure.marked
        self.options = options
        self.w0 = initial(0)
        self.w = self.w0  # the global model
        self.clock = 0  # rounds of ordinary training behind it
        self.history: History = []  # of ordinary training
        self.log = Log()
        self.phase, self.round, self.question = "", 0, -1

    def follow(self) -> Log:
        """All three acts."""
        self.train()
        self.unlearn()
        self.recover()
        return self.log

    # The three acts.

    def train(self) -> None:
        """All clients, for as many rounds as there are; what they sent is kept."""
        self.w, self.history, log = ordinary_training(self.seed)
        self.log = Log(list(log.visits), list(log.models))
        self.clock = ROUNDS

    def unlearn(self) -> None:
        raise NotImplementedError

    def recover(self) -> None:
        """Those who stay train on, with what they retain, at the rate that training has arrived at."""
        for r in range(RECOVERY_ROUNDS):
            self.enter("recover-0", r)
            self.ask()
            self.w = average([self.learn(k, "retain", self.w, rate(self.clock)) for k in self.staying])
            self.clock += 1
            self.end_round()

    # Where the run stands: the plan's addresses.

    def enter(self, phase: str, round: int) -> None:
        self.phase, self.round, self.question = phase, round, -1

    def ask(self) -> None:
        """The server's next question of this round."""
        self.question += 1

    def server_seed(self) -> int:
        """Of what the server draws before its next question."""
        return Address(self.seed, self.phase, self.round, self.question + 1).seed_for("server")

    def end_round(self) -> None:
        self.log.models.append((self.phase, self.round, self.w))

    # What a client does.

    def visit(self, client: ClientId, part: Part, **plan: Any) -> Visit:
        """The plan's batches of a client's data: all of it, its forget set, or the rest; or the server's own data."""
        marked = self.marked.get(client, torch.zeros(0, dtype=torch.long))
        if part == "public":
            positions = PUBLIC_POSITIONS
        elif part == "all":
            positions = TRAIN[client]
        elif part == "forget":
            positions = marked
        else:
            positions = torch.tensor([p for p in TRAIN[client].tolist() if p not in marked.tolist()])
        return planned((self.phase, self.round, self.question, client), positions, marked, self.seed, **plan)

    def descend(
        self,
        visit: Visit,
        start: Weights,
        loss: Loss,
        new_optimizer: NewOptimizer,
        *,
        clip: float = 0.0,
        sent: Callable[[Weights], Weights] = lambda w: w,
    ) -> Weights:
        """Take one step for each batch.

        Args:
            visit: the batches.
            start: the weights to begin with; all of them are trained.
            loss: of the weights and a batch.
            new_optimizer: makes the optimizer, which begins anew with every visit.
            clip: the length to which the whole gradient is shortened before a step; 0 for none.
            sent: what of the trained weights the client sends to the server.

        Returns:
            All trained weights.
        """
        w = {n: p.clone().requires_grad_() for n, p in start.items()}
        optimizer = new_optimizer(list(w.values()))
        losses = []
        for step in visit.steps:
            optimizer.zero_grad()
            value = loss(w, step)
            value.backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(w.values(), clip)
            optimizer.step()
            losses.append(float(value.detach()))
        trained = {n: p.detach() for n, p in w.items()}
        self.send(visit, sent(trained), sum(losses) / len(losses))
        return trained

    def learn(
        self, client: ClientId, part: Part, start: Weights, lr: float, *, decay: float = WEIGHT_DECAY, **plan: Any
    ) -> tuple[Weights, int]:
        """ClientUpdate of FedAvg: SGD on the cross-entropy of augmented examples."""
        visit = self.visit(client, part, augmented=True, **plan)
        return self.descend(visit, start, learning, sgd(lr, decay=decay)), visit.examples

    def send(self, visit: Visit, sent: Weights, loss: float | None) -> None:
        self.log.visits.append(Visited(visit.place, visit.examples, sent, loss))


class _Training(Transcription):
    def train(self) -> None:
        for t in range(ROUNDS):
            self.enter("train", t)
            self.ask()
            replies = {k: self.learn(k, "all", self.w, rate(t)) for k in EVERYBODY}
            self.history.append((self.w, {k: w_k for k, (w_k, _) in replies.items()}))
            self.w = average(list(replies.values()))
            self.end_round()


@cache
def ordinary_training(seed: int) -> tuple[Weights, History, Log]:
    """FedAvg (McMahan et al. 2017) with all clients: the model, the history, and the trajectory."""
    training = _Training(nobody(seed), {})
    training.train()
    return training.w, training.history, training.log
