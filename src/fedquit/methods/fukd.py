# SPDX-License-Identifier: Apache-2.0
"""FUKD: Federated Unlearning with Knowledge Distillation. Wu, Zhu, Mitra. 2022.

The server keeps, for every client, the sum of what it has contributed to the model. To forget one
it subtracts that sum, which wrecks the model, and repairs it by distilling the old model on data of
its own. No client takes part.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

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
    Training,
)
from fedquit.core.method import Knob, Method, require_whole_clients
from fedquit.core.params import foreach_add, foreach_mul, foreach_sub, sub
from fedquit.errors import RequestError

INCOMPLETE = "incomplete"  # marks clients of whose contributions some were deleted


@dataclass(frozen=True)
class Imitate(Task):
    """Follow the old model's softened answers on data without labels."""

    temperature: float = 3.0

    def loss(self, model: Model, params: Params, sent: Sent, batch: Batch) -> Tensor:
        """KL(old || new) at the temperature, times its square, as is usual in distillation."""
        old = (model(sent["teacher"], batch.x) / self.temperature).log_softmax(-1)
        new = (model(params, batch.x) / self.temperature).log_softmax(-1)
        losses = self.temperature**2 * (old.exp() * (old - new)).sum(-1)
        return losses.flatten(1).mean(1) if losses.dim() > 1 else losses


@dataclass(frozen=True)
class FUKD(Method):
    """Subtract the contribution, then distil."""

    temperature: float = 3.0
    epochs: float = 20.0
    batch_size: int = 32
    lr: float = 1e-3

    needs_public_data = True
    training_fields = ()
    knobs = (Knob("lr", 1e-5, 1e-2), Knob("epochs", 1.0, 100.0))

    def check(self, request: Request) -> None:
        """Contributions are kept for clients, not for samples."""
        require_whole_clients(
            request,
            "FUKD",
            "it subtracts what a client has contributed, and contributions of single samples are not kept",
        )

    def history_bytes(self, training: Training, clients: int, model_bytes: int) -> int:
        """The sums of all clients, and the updates of a round until it is over."""
        return 2 * clients * model_bytes

    def watch(self, memory: Memory, round: int, start: Params, reply: Reply) -> None:
        """Keep this round's update, weighted by its examples, until the round's total is known."""
        memory[f"round/{reply.client}"] = foreach_mul(foreach_sub(reply.params, start), reply.examples)

    def after_round(self, memory: Memory, round: int, examples: Mapping[ClientId, int]) -> None:
        """Add each client's share of the round to its sum."""
        total = sum(examples.values())
        for client in examples:
            share = {n: p / total for n, p in memory[f"round/{client}"].items()}
            known = f"sum/{client}" in memory
            memory[f"sum/{client}"] = foreach_add(memory[f"sum/{client}"], share) if known else share
            del memory[f"round/{client}"]

    def forget(self, memory: Memory, clients: Iterable[ClientId]) -> None:
        """Mark the clients: what was deleted can no longer be subtracted for a later request of theirs."""
        for client in clients:
            memory[f"{INCOMPLETE}/{client}/"] = {}

    def unlearn(self, fed: Federation, state: State, trained: Trained, request: Request) -> State:
        """Subtract the clients' sums, then distil the old model into what is left."""
        w = state.params
        for u in request.clients:
            if f"{INCOMPLETE}/{u}/" in trained.memory:
                raise RequestError(
                    f"what client {u} contributed was deleted with an earlier request of it, so that FUKD cannot "
                    "subtract it: serve the request with another method."
                )
            if f"sum/{u}" in trained.memory:
                w = {**w, **sub(w, trained.memory[f"sum/{u}"])}
        task = Imitate(Local(self.epochs, self.batch_size, "adam", self.lr), temperature=self.temperature)
        return state.next(fed.run_at_server(task, start=w, teacher=state.params))
