# SPDX-License-Identifier: Apache-2.0
"""PGA: Federated Unlearning: How to Efficiently Erase a Client in FL? Halimi, Kadhe, Rawat, Baracaldo. 2022.

The leaving client climbs its own loss within a ball around the *reference model*, what the others'
mean would have been: w_ref = (w - a w_u) / (1 - a), with w_u its own last local model and a its
share in the mean. It stops once it is far enough from w_u.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedquit.core import (
    Batch,
    ClientId,
    Federation,
    Local,
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
from fedquit.core.method import Knob, Method, require_whole_clients
from fedquit.core.params import mean, norm, statistics_of, sub, weights_of
from fedquit.errors import RequestError


@dataclass(frozen=True)
class Ascend(Task):
    """Climb within the ball around the reference, until far from one's own last model."""

    opposes_training: ClassVar[bool] = True

    share: float = 0.1  # a
    squared: bool = False  # measure distances squared
    halt: float = 6.0  # stop once the distance from one's own model is larger
    random_models: int = 1  # whose mean distance from the reference sets the size of the ball
    seed: int = 0
    needs: ClassVar[tuple[str, ...]] = ("own",)

    def distance(self, a: Params, b: Params) -> Tensor:
        """Return the Euclidean distance, or its square."""
        length = norm(sub(a, b))
        return length.square() if self.squared else length

    def prepare(self, model: Model, sent: Sent) -> Sent:
        """Add the reference, and the threshold: a third of its mean distance from models drawn at random."""
        if "own" not in sent:
            raise RequestError(
                "a leaving client has no last local model at home: it took part in no round, or PGA was not attached "
                "to the training; use a method that needs none, such as fedquit or not."
            )
        w, own, a = sent["start"], sent["own"], self.share
        reference = {n: (p - a * own[n]) / (1 - a) for n, p in weights_of(w).items()}
        drawn = [model.init(self.seed + i) for i in range(self.random_models)]
        apart = torch.stack([self.distance(reference, {n: r.to(w[n]) for n, r in m.items()}) for m in drawn])
        return {**sent, "reference": reference, "ball": {"threshold": apart.mean() / 3}}

    def begin(self, sent: Sent) -> Params:
        return {**sent["reference"], **statistics_of(sent["start"])}  # not from the global model

    def loss(self, model: Model, params: Params, sent: Sent, batch: Batch) -> Tensor:
        return -cross_entropy(model(params, batch.x), batch.y)

    def after_step(self, new: Params, old: Params, sent: Sent) -> Params:
        """Project onto the ball of radius sqrt(threshold) where the threshold is exceeded; stay once halted."""
        reference, threshold = sent["reference"], sent["ball"]["threshold"]
        beyond = self.distance(new, reference) > threshold
        shrink = torch.where(beyond, threshold.sqrt() / norm(sub(new, reference)).clamp_min(1e-12), 1.0)
        # The halt is tested after a step, so that the first one is always taken.
        halted = (self.distance(old, sent["own"]) > self.halt) & (self.distance(old, reference) > 0)
        return {n: torch.where(halted, old[n], r + shrink * (new[n] - r)) for n, r in reference.items()}


@dataclass(frozen=True)
class PGA(Method):
    """Projected gradient ascent; the defaults are the port behind the table of FedQUIT's paper."""

    optimizer: str = ""  # "": that of training
    lr: float = 0.0  # 0: 1e-2 with SGD, with another optimizer the rate that training has arrived at
    epochs: float = 5.0
    batch_size: int = 512
    momentum: float = 0.9  # of SGD
    clip: float = 0.0
    clip_tensor: float = 5.0
    squared: bool = False
    halt: float = 6.0
    random_models: int = 1
    weighted: bool = False  # take the client's share of the examples, as FedAvg does, rather than 1/K

    presets = {  # noqa: RUF012 - a ClassVar of the base
        "authors": {
            "optimizer": "sgd",
            "batch_size": 128,
            "clip": 5.0,
            "clip_tensor": 0.0,
            "squared": True,
            "halt": 2.2,
            "random_models": 10,
        },
    }
    at_home = ("own",)
    training_fields = ()
    knobs = (Knob("lr", 1e-4, 1e-1), Knob("epochs", 1.0, 20.0), Knob("halt", 0.6, 60.0))

    def check(self, request: Request) -> None:
        """The reference takes a whole client out of the mean."""
        require_whole_clients(request, "PGA", "its reference model takes all of a client out of the mean")

    def training_task(self, task: Task, client: ClientId, request: Request) -> Task:
        """Every client keeps its last local model at home."""
        return replace(task, remember="own")

    def _local(self, training: Local) -> Local:
        """How a leaving client steps; `training` is how it would in the next round of training."""
        optimizer = self.optimizer or training.optimizer
        sgd = optimizer == "sgd"
        lr = self.lr or (1e-2 if sgd else training.lr)
        local = Local(self.epochs, self.batch_size, optimizer, lr, self.momentum if sgd else 0.0)
        return replace(local, clip=self.clip, clip_tensor=self.clip_tensor)

    def unlearn(self, fed: Federation, state: State, trained: Trained, request: Request) -> State:
        """Each leaving client ascends from its own reference; their mean becomes the global model."""
        total = sum(trained.examples.values())
        local = self._local(trained.training.task_at(state.clock).local)
        shape: dict[str, Any] = {"squared": self.squared, "halt": self.halt, "random_models": self.random_models}
        replies: list[Reply] = []
        for u in request.clients:
            share = trained.examples[u] / total if self.weighted else 1 / len(fed.clients)
            task = Ascend(local, share=share, seed=fed.seed, **shape)
            replies += fed.run(task, [u], split="forget", start=state.params)
        return state.next(mean(replies))
