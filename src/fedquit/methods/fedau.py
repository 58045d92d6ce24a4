# SPDX-License-Identifier: Apache-2.0
"""FedAU: Unlearning during Learning: An Efficient Federated Machine Unlearning Method. Gu et al. IJCAI 2024.

An auxiliary head is trained on the leaving client's data with random labels, and mixed into the
model's own head: W <- (1 - a) W + a W_aux. The authors train it during ordinary training (preset
`authors`); the comparison in FedQUIT's paper trains it afterwards, on the frozen body of the final
model, with the optimizer that trained the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedquit.core import Batch, ClientId, Federation, Local, Model, Params, Request, Sent, State, Task, Trained
from fedquit.core.fedavg import cross_entropy
from fedquit.core.method import Knob, Method
from fedquit.core.params import weights_of
from fedquit.errors import RequestError
from fedquit.utils.names import unknown


def head_names(params: Params, head: str) -> list[str]:
    """Return the names of the head's tensors: those that begin with `head`, or those of the last layer."""
    prefix = head or next(reversed(weights_of(params))).rpartition(".")[0] + "."
    names = [n for n in weights_of(params) if n.startswith(prefix)]
    if not names:
        raise unknown("head", prefix, sorted({n.rpartition(".")[0] + "." for n in params}))
    return names


def random_labels(uniforms: Tensor, logits: Tensor) -> Tensor:
    """Turn uniform numbers into labels, each of all classes with the same chance."""
    return (uniforms * logits.shape[-1]).long().clamp(max=logits.shape[-1] - 1)


def _where_marked(batch: Batch, drawn: Tensor) -> Tensor:
    """Return the drawn labels for the examples to forget, and the true labels for the others."""
    marked = batch.forget.reshape(-1, *[1] * (batch.y.dim() - 1))
    return torch.where(marked, drawn, batch.y)


@dataclass(frozen=True)
class TrainHead(Task):
    """Afterwards: train a fresh head on the frozen body, with labels drawn anew in every step."""

    def begin(self, sent: Sent) -> Params:
        return sent["head"]  # the body stays as it is

    def loss(self, model: Model, params: Params, sent: Sent, batch: Batch) -> Tensor:
        """Cross-entropy to random labels for the examples to forget, to the true labels for the rest."""
        logits = model({**sent["start"], **params}, batch.x)
        return cross_entropy(logits, _where_marked(batch, random_labels(batch.u, logits)))


@dataclass(frozen=True)
class LearnBoth(Task):
    """During training: learn as ever, and a second head with a fixed random label for each example to forget."""

    head: str = ""
    carry: float = 0.5  # how much of last round's auxiliary head goes into this round's
    needs: ClassVar[tuple[str, ...]] = ("auxiliary",)
    augments: ClassVar[bool] = True

    def begin(self, sent: Sent) -> Params:
        """The model, and the auxiliary head under names of its own."""
        own = {n: sent["start"][n] for n in head_names(sent["start"], self.head)}
        last = sent.get("auxiliary", own)
        return {
            **sent["start"],
            **{f"auxiliary:{n}": (1 - self.carry) * p + self.carry * last[n] for n, p in own.items()},
        }

    def loss(self, model: Model, params: Params, sent: Sent, batch: Batch) -> Tensor:
        """The sum of both heads' losses; the body they share learns from both."""
        logits = model(self.answer(params, sent), batch.x)
        auxiliary = model({**self.answer(params, sent), **self._auxiliary(params)}, batch.x)
        labels = _where_marked(batch, random_labels(batch.fixed, logits))
        return cross_entropy(logits, batch.y) + cross_entropy(auxiliary, labels)

    def _auxiliary(self, params: Params) -> Params:
        return {n.removeprefix("auxiliary:"): p for n, p in params.items() if n.startswith("auxiliary:")}

    def answer(self, params: Params, sent: Sent) -> Params:
        """Send all but the auxiliary head, which stays at the client."""
        return {n: p for n, p in params.items() if not n.startswith("auxiliary:")}

    def keep(self, params: Params, sent: Sent) -> Mapping[str, Params]:
        """Keep the auxiliary head for the next round, and for the request."""
        return {**super().keep(params, sent), "auxiliary": self._auxiliary(params)}


@dataclass(frozen=True)
class SendHead(Task):
    """Send the auxiliary head that was kept at home; no training."""

    needs: ClassVar[tuple[str, ...]] = ("auxiliary",)

    def loss(self, model: Model, params: Params, sent: Sent, batch: Batch) -> Tensor:
        """Never called, as the task takes no step."""
        return cross_entropy(model(params, batch.x), batch.y)

    def answer(self, params: Params, sent: Sent) -> Params:
        if "auxiliary" not in sent:
            raise RequestError(
                "a leaving client has no auxiliary head at home: FedAU's preset 'authors' must be attached to the "
                "training before the request, with the request known in advance."
            )
        return sent["auxiliary"]


@dataclass(frozen=True)
class FedAU(Method):
    """The defaults are the port behind the table of FedQUIT's paper."""

    when: Literal["afterwards", "during"] = "afterwards"
    weight: float = 0.96  # a: of the auxiliary head in the mix
    epochs: float = 10.0  # afterwards
    batch_size: int = 32
    optimizer: str = ""  # afterwards; "": that of training
    lr: float = 0.0  # afterwards; 0: the rate of the last round of training
    head: str = ""  # the beginning of the head's names; the last layer unless given
    carry: float = 0.5  # during

    presets = {"authors": {"when": "during", "weight": 0.9}}  # noqa: RUF012 - a ClassVar of the base
    at_home = ("auxiliary",)
    knobs = (Knob("weight", 0.5, 1.0, "linear"), Knob("lr", 1e-4, 1.0), Knob("epochs", 1.0, 30.0))

    @property
    def knows_request(self) -> bool:
        """An auxiliary head that is trained during learning must know who will leave."""
        return self.when == "during"

    @property
    def shapes_training(self) -> bool:
        """An auxiliary head that is trained afterwards needs nothing of the training."""
        return self.when == "during"

    def training_task(self, task: Task, client: ClientId, request: Request) -> Task:
        """The clients that will leave train two heads."""
        if self.when == "afterwards" or client not in request.clients:
            return task
        carry = 1.0 if request.samples else self.carry  # the authors mix the heads for whole clients only
        return LearnBoth(task.local, remember=task.remember, head=self.head, carry=carry)

    def _local(self, last: Local) -> Local:
        """How the head is trained afterwards; `last` is how clients stepped in the last round of training."""
        local = replace(last, epochs=self.epochs, batch_size=self.batch_size)
        return replace(local, optimizer=self.optimizer or last.optimizer, lr=self.lr or last.lr)

    def unlearn(self, fed: Federation, state: State, trained: Trained, request: Request) -> State:
        """Mix the mean of the auxiliary heads into the model's own; the body stays."""
        names = head_names(state.params, self.head)
        if self.when == "during":
            task: Task = SendHead(Local(epochs=0.0))
            replies = list(fed.run(task, request.clients, split="forget", start=state.params))
        else:
            local = self._local(trained.training.task_at(state.clock - 1).local)
            fresh = _drawn({n: state.params[n] for n in names}, fed.seed)
            split: Literal["all", "forget"] = "all" if request.samples else "forget"
            replies = list(fed.run(TrainHead(local), request.clients, split=split, start=state.params, head=fresh))
        auxiliary = {n: torch.stack([r.params[n] for r in replies]).mean(0) for n in names}
        a = self.weight
        return state.next({n: (1 - a) * p + a * auxiliary[n] if n in names else p for n, p in state.params.items()})


def _drawn(like: Params, seed: int) -> Params:
    """Draw a fresh head from N(0, 0.01²)."""
    generator = torch.Generator().manual_seed(seed)
    return {n: 0.01 * torch.randn(p.shape, generator=generator).to(p) for n, p in like.items()}
