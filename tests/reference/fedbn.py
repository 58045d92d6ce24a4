# SPDX-License-Identifier: Apache-2.0
"""FedBN in plain PyTorch, and FedQUIT in a federation that trains by it.

Li, Jiang, Zhang, Kamp, Dou: FedBN: Federated Learning on Non-IID Features via Local Batch Normalization. ICLR 2021.
Algorithm 1: every client has a module of its own; the server averages all parameters but those of BatchNorm, and loads
the mean into all modules. Nothing is taken from the package but the plan's batches, the data and the first weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Adam

from fedquit.core import ClientId, Training
from reference.world import CLASSES, DATASET, SIZES, TRAIN, Erasure, Weights, planned

BATCH_NORMS = ("1.", "5.")


def network() -> nn.Sequential:
    """A convolution and two linear layers, with BatchNorm after the first two."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(4, momentum=0.3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(36, 6, bias=False),
        nn.BatchNorm1d(6, eps=0.1),  # a batch of two examples is far from singular
        nn.Tanh(),
        nn.Linear(6, CLASSES),
    )


def is_local(name: str) -> bool:
    return name.startswith(BATCH_NORMS)


class FedBN:
    """A module for each client, trained by Algorithm 1.

    Args:
        initial: the first weights, and BatchNorm's first statistics.
        erasure: the request; its seed is that of the run.
        training: batch size, learning rate and its decay, weight decay.
        distil: the learning rate of FedQUIT.
    """

    def __init__(self, initial: Weights, erasure: Erasure, training: Training, distil: float) -> None:
        self.erasure, self.training, self.distil = erasure, training, distil
        self.clock = 0
        self.modules: dict[ClientId, nn.Sequential] = {}
        for client in SIZES:
            self.modules[client] = network().double()
            self.modules[client].load_state_dict(initial, strict=False)

    def shared(self) -> Weights:
        """The model that the server knows."""
        return {n: p.clone() for n, p in self.state(0).items() if not is_local(n)}

    def state(self, client: ClientId) -> Weights:
        every = self.modules[client].state_dict().items()
        return {n: p for n, p in every if not n.endswith("num_batches_tracked")}

    def positions(self, client: ClientId) -> Tensor:
        """What the client retains."""
        mine, marked = TRAIN[client], self.erasure.marked.get(client, torch.zeros(0, dtype=torch.long))
        return mine[~torch.isin(mine, marked)]

    def aggregate(self, clients: Sequence[ClientId], examples: Sequence[int]) -> None:
        """The mean over these clients, with weights n_k, goes to every module; BatchNorm stays."""
        states = [self.state(c) for c in clients]
        names = [n for n in states[0] if not is_local(n)]
        mean = {n: sum(n_k * s[n] for n_k, s in zip(examples, states, strict=True)) / sum(examples) for n in names}
        for module in self.modules.values():
            module.load_state_dict(mean, strict=False)

    def round(self, phase: str, number: int, clients: Sequence[ClientId], *, retained: bool) -> None:
        """Lines 3 to 9: local steps with each client's BatchNorm in training mode, then the mean."""
        sizes = []
        for client in clients:
            mine = self.positions(client) if retained else TRAIN[client]
            nothing = torch.zeros(0, dtype=torch.long)
            place = (phase, number, 0, client)
            local = self.training.task.local
            visit = planned(place, mine, nothing, self.erasure.seed, batch_size=local.batch_size, augmented=True)
            module = self.modules[client].train()
            lr = local.lr * self.training.lr_decay**self.clock
            sgd = SGD(module.parameters(), lr=lr, weight_decay=local.weight_decay)
            for step in visit.steps:
                sgd.zero_grad()
                one_value = len(step.y) == 1
                if one_value:  # a batch of one has no variance: the running statistics take its place, and stay
                    module[5].eval()
                functional.cross_entropy(module(step.x), step.y).backward()
                module[5].train()
                sgd.step()
            sizes.append(len(mine))
        self.aggregate(clients, sizes)
        self.clock += 1

    def unlearn(self, phase: str) -> None:
        """FedQUIT: the leaving clients distil their own models, as they are evaluated, with the true class lowered."""
        leaving = self.erasure.request.clients
        sizes = []
        for client in leaving:
            marked = self.erasure.marked[client]
            visit = planned((phase, 0, 0, client), marked, marked, self.erasure.seed, epochs=1.0, batch_size=4)
            student = self.modules[client].eval()
            teacher = network().double().eval()
            teacher.load_state_dict(self.state(client), strict=False)
            adam = Adam(student.parameters(), lr=self.distil, eps=1e-7)
            for step in visit.steps:
                with torch.no_grad():
                    z = teacher(step.x)
                    rows = torch.arange(len(step.y))
                    z[rows, step.y] = z.min(-1).values
                    target = z.softmax(-1)
                adam.zero_grad()
                log_p = student(step.x).log_softmax(-1)
                (target * (target.log() - log_p)).sum(-1).mean().backward()
                adam.step()
            sizes.append(len(marked))
        self.aggregate(leaving, sizes)

    def recalibrate(self, batch_size: int) -> None:
        """Those who stay measure the running statistics of their own BatchNorm anew, on what they retain."""
        for client in self.erasure.staying:
            mine = self.positions(client)
            totals: dict[str, Tensor] = {}
            for x in DATASET.look.plain(DATASET.x[mine]).split(batch_size):
                for name, statistic in self._statistics(client, x).items():
                    totals[name] = totals.get(name, torch.zeros(())) + len(x) * statistic
            self.modules[client].load_state_dict({n: total / len(mine) for n, total in totals.items()}, strict=False)

    def _statistics(self, client: ClientId, x: Tensor) -> Weights:
        """What a batch alone would leave in the buffers; where it has one value a channel, they are as they were."""
        module = network().double()
        module.load_state_dict(self.state(client), strict=False)
        for layer in module:
            if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):
                layer.momentum = 1.0
        module[5].train(len(x) > 1)
        module(x)
        return {n: p for n, p in module.state_dict().items() if "running" in n}
