# SPDX-License-Identifier: Apache-2.0
"""FUSED: Unlearning through Knowledge Overwriting: Reversible Federated Unlearning via Selective Sparse Adapter.

Zhong et al. CVPR 2025. The layers that training moved most are *critical*: they get sparse
adapters, numbers added to a few of their weights. The model itself is frozen; the remaining clients
train the adapters alone and overwrite what the leaving client taught. Without the adapters, the old
model is back: the unlearning is reversible.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedquit.core import Batch, Federation, Memory, Model, Params, Reply, Request, Sent, State, Task, Trained
from fedquit.core.fedavg import cohort, cross_entropy
from fedquit.core.method import Knob, Method
from fedquit.core.params import foreach_add, foreach_sub, mean
from fedquit.errors import RequestError

ADAPTER = "adapter:"  # before the name of the tensor that it is added to


def places(shape: torch.Size, density: float, seed: int) -> Tensor:
    """Return the positions of a tensor's adapter: a fixed draw, known to all clients without being sent."""
    size = math.prod(shape)
    drawn = torch.randperm(size, generator=torch.Generator().manual_seed(seed))
    return drawn[: max(1, round(density * size))].sort().values


def adapted(base: Params, adapters: Params, density: float, seed: int) -> Params:
    """Return the model with its adapters added."""
    return joined(base, adapters, where(base, adapters, density, seed))


def where(base: Params, adapters: Params, density: float, seed: int) -> Params:
    """Return the positions of each adapter."""
    return {a: places(base[a.removeprefix(ADAPTER)].shape, density, seed).to(v.device) for a, v in adapters.items()}


def joined(base: Params, adapters: Params, at: Params) -> Params:
    """Return the model with adapters added at these positions."""
    out = dict(base)
    for adapter, values in adapters.items():
        name = adapter.removeprefix(ADAPTER)
        out[name] = base[name].reshape(-1).index_add(0, at[adapter], values).view_as(base[name])
    return out


@dataclass(frozen=True)
class TrainAdapters(Task):
    """Ordinary learning in which only the adapters move."""

    density: float = 0.1
    seed: int = 0
    augments: ClassVar[bool] = True  # it is the training of those who stay

    def prepare(self, model: Model, sent: Sent) -> Sent:
        """Draw the positions once, before the first step."""
        return {**sent, "places": where(sent["start"], sent["adapters"], self.density, self.seed)}

    def begin(self, sent: Sent) -> Params:
        return sent["adapters"]  # the model itself is frozen

    def loss(self, model: Model, params: Params, sent: Sent, batch: Batch) -> Tensor:
        """Cross-entropy of the adapted model."""
        at = sent.get("places") or where(sent["start"], params, self.density, self.seed)
        return cross_entropy(model(joined(sent["start"], params, at), batch.x), batch.y)


@dataclass(frozen=True)
class FUSED(Method):
    """Sparse adapters on the critical layers."""

    overwriting_rounds: int = 10
    layers: int = 2  # how many weight tensors are critical
    density: float = 0.1  # of their weights that get an adapter
    lr: float = 0.0  # 0: the rate that training has arrived at
    seed: int = 0

    refuses_statistics = "its adapters are added to a frozen model, whose statistics they would not move"
    training_fields = ()
    knobs = (
        Knob("overwriting_rounds", 1, 100),
        Knob("layers", 1, 8),
        Knob("density", 0.01, 1.0),
        Knob("lr", 1e-4, 1.0),
    )

    def watch(self, memory: Memory, round: int, start: Params, reply: Reply) -> None:
        """How far each tensor moved in all rounds: the mean absolute change, a number for each."""
        moved = {n: p.abs().mean().reshape(1) for n, p in foreach_sub(reply.params, start).items()}
        memory["moved"] = foreach_add(moved, memory["moved"]) if "moved" in memory else moved

    def rounds(self, trained: Trained, request: Request) -> int:
        """As many as given; recovery continues in the same way."""
        return self.overwriting_rounds

    def critical(self, trained: Trained) -> list[str]:
        """Return the weight tensors that moved most during training."""
        if "moved" not in trained.memory:
            raise RequestError("FUSED has not seen the training, and cannot tell which layers moved: attach it before.")
        moved = trained.memory["moved"]
        weights = [n for n, p in trained.params.items() if p.dim() >= 2]
        return sorted(weights, key=lambda n: -float(moved[n]))[: self.layers]

    def unlearn(self, fed: Federation, state: State, trained: Trained, request: Request) -> State:
        """Do a round of FedAvg on the adapters alone; the state holds the adapted model."""
        base = state.kept.get("base", state.params)
        adapters = state.kept.get("adapters") or self._zeros(base, trained)
        learn = trained.training.task_at(state.clock)
        local = replace(learn.local, lr=self.lr or learn.local.lr, weight_decay=0.0)
        task = TrainAdapters(local, density=self.density, seed=self.seed)
        asked = cohort(request.stay(fed.clients), trained.training.clients_per_round, fed.seed)
        adapters = mean(fed.run(task, asked, split="retain", start=base, adapters=adapters))
        return state.next(adapted(base, adapters, self.density, self.seed), base=base, adapters=adapters)

    def _zeros(self, base: Params, trained: Trained) -> Params:
        sizes = {n: len(places(base[n].shape, self.density, self.seed)) for n in self.critical(trained)}
        return {ADAPTER + n: base[n].new_zeros(size) for n, size in sizes.items()}

    def recover(self, fed: Federation, state: State, trained: Trained, request: Request) -> State:
        """Train the adapters for another round."""
        return self.unlearn(fed, state, trained, request).tick()

    def reversed(self, state: State) -> Params:
        """Return the model as it was before the unlearning."""
        return dict(state.kept["base"])
