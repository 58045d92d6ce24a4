# SPDX-License-Identifier: Apache-2.0
"""What a client does, in plain torch: a module, one of torch's optimizers, and the batches that the plan gives.

Methods are transcribed from their papers with it; only the draws (batches, uniform numbers) are the package's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedquit.core import ClientId, Local, Params, Request, Split, State, Trained
from fedquit.data.federated import FederatedData
from fedquit.engine import Address
from fedquit.engine.plan import make_plan
from fedquit.running.session import Session
from fedquit.running.setup import Setup, build_setup
from methods.method_world import marked_data, served
from seam_methods import small_net
from worlds import tiny

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]  # from the network, examples and labels to a number


@dataclass(frozen=True)
class World:
    """A trained federation that stands at the beginning of the unlearning, and its data."""

    setup: Setup
    request: Request
    session: Session
    state: State
    trained: Trained
    data: FederatedData

    @classmethod
    def of(cls, where: Path, method: dict[str, Any], request: Request, **changes: Any) -> World:
        """The tiny world, trained with a method attached; of samples, the first seven of each client leave."""
        setup = build_setup(tiny(method=method, **changes))
        session, state, trained = served(setup, where, request)
        return cls(setup, request, session, state, trained, marked_data(setup, request))

    def unlearned(self) -> list[State]:
        """The states after each round of the method."""
        states: list[State] = []
        state = self.state
        for number in range(self.setup.method.rounds(self.trained, self.request)):
            self.session.enter("unlearn-0", number)
            state = self.setup.method.unlearn(self.session, state, self.trained, self.request)
            states.append(state)
        return states

    @property
    def stay(self) -> list[ClientId]:
        return self.request.stay(self.data.clients)

    def counts(self, split: Split) -> dict[ClientId, int]:
        return {c: len(self.data.view(c, split)) for c in self.data.clients}

    def examples(self, client: ClientId, split: Split) -> tuple[Tensor, Tensor]:
        at = self.data.view(client, split)
        return self.data.x[at], self.data.y[at]

    def seed(self, client: ClientId, number: int, question: int, part: int = 0) -> int:
        return Address(self.setup.recipe.seed, "unlearn-0", number, question).seed_for(client, part)

    def network(self, params: Params) -> nn.Module:
        """The tiny world's network with these weights."""
        module = small_net((1, 4, 4), 3).double()
        module.load_state_dict(params)
        return module

    def train(self, start: Params, data: tuple[Tensor, Tensor], local: Local, seed: int, loss: Loss) -> Params:
        """Take all steps of a client."""
        module = self.network(start)
        optimizer = optimizer_of(module, local)
        x, y = data
        for step in make_plan(len(y), local, seed).steps:
            optimizer.zero_grad()
            loss(module, x[step], y[step]).backward()
            optimizer.step()
        return weights(module)


def optimizer_of(module: nn.Module, local: Local) -> torch.optim.Optimizer:
    if local.optimizer == "adam":
        return torch.optim.Adam(module.parameters(), local.lr, eps=1e-7, weight_decay=local.weight_decay)
    assert local.optimizer == "sgd"
    return torch.optim.SGD(module.parameters(), local.lr, momentum=local.momentum, weight_decay=local.weight_decay)


def weights(module: nn.Module) -> Params:
    return {n: p.detach().clone() for n, p in module.named_parameters()}


def average(models: Mapping[ClientId, Params], examples: Mapping[ClientId, int]) -> Params:
    """FedAvg's mean."""
    total = sum(examples[c] for c in models)
    names = next(iter(models.values()))
    return {n: sum(examples[c] / total * models[c][n] for c in models) for n in names}  # type: ignore[misc]
