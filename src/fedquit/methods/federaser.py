# SPDX-License-Identifier: Apache-2.0
"""FedEraser: Enabling Efficient Client-Level Data Removal from Federated Learning Models. Liu et al. IWQoS 2021.

During training the server keeps every client's update of every `interval`-th round. To forget a
client it replays them without it, from the initial model on: the remaining clients train a little
from the rebuilt model, and the direction of their fresh update gets the length of the stored one.
The first stored round is replayed as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from fedquit.core import ClientId, Federation, Memory, Params, Reply, Request, State, Trained, Training
from fedquit.core.method import Knob, Method, require_whole_clients
from fedquit.core.params import add, foreach_sub, mean, norm, sub


def _key(round: int, client: ClientId) -> str:
    return f"{round:06d}/{client}"


def calibrated(fresh: Params, stored: Params) -> Params:
    """The direction of the fresh update with the length of the stored one, over all parameters together."""
    factor = norm(stored) / norm(fresh).clamp_min(1e-12)
    return {n: p * factor for n, p in fresh.items()}


def calibrated_by_tensor(fresh: Params, stored: Params) -> Params:
    """Do the same for each tensor by itself."""
    return {n: p * (stored[n].norm() / p.norm().clamp_min(1e-12)) for n, p in fresh.items()}


@dataclass(frozen=True)
class FedEraser(Method):
    """The defaults are those behind the table of FedQUIT's paper: every round kept, half an epoch to calibrate."""

    interval: int = 1
    calibration: float = 0.5  # local epochs, as a part of those of training
    calibrate: Literal["clients", "mean"] = "clients"  # each client's whole update, or the mean's tensors one by one
    store: Literal["full", "bfloat16"] = "full"  # as it came, or in half the space

    presets = {"authors": {"interval": 2, "calibrate": "mean"}}  # noqa: RUF012 - a ClassVar of the base
    recovers = False
    begins_anew = True
    training_fields = ("interval", "store")
    knobs = (Knob("calibration", 0.1, 1.0), Knob("interval", 1, 10))

    def check(self, request: Request) -> None:
        """What is stored was computed with all samples of a client."""
        require_whole_clients(
            request,
            "FedEraser",
            "the updates it stored were computed with the samples to forget, and cannot be replayed without",
        )

    def history_bytes(self, training: Training, clients: int, model_bytes: int) -> int:
        """One model for each client of each stored round."""
        updates = len(range(0, training.rounds, self.interval)) * (training.clients_per_round or clients)
        return updates * model_bytes // (2 if self.store == "bfloat16" else 1)

    def watch(self, memory: Memory, round: int, start: Params, reply: Reply) -> None:
        """Store the update of every `interval`-th round."""
        if round % self.interval == 0:
            update = foreach_sub(reply.params, start)
            half = self.store == "bfloat16"
            memory[_key(round, reply.client)] = {n: p.bfloat16() for n, p in update.items()} if half else update

    def rounds(self, trained: Trained, request: Request) -> int:
        """One for each stored round."""
        return len(range(0, trained.training.rounds, self.interval))

    def unlearn(self, fed: Federation, state: State, trained: Trained, request: Request) -> State:
        """Replay one stored round, one update at a time."""
        memory = trained.memory
        at = state.round * self.interval
        took_part = [c for c in request.stay(fed.clients) if _key(at, c) in memory]
        if not took_part:  # the cohort of that round was the leaving clients alone
            return state.next(state.params if state.round else trained.initial)
        if state.round == 0:
            stored = (Reply(c, self._stored(memory, at, c, trained.initial), trained.examples[c]) for c in took_part)
            return state.next(add(trained.initial, mean(stored)))
        w = state.params
        task = trained.training.task_at(state.round)
        task = replace(task, local=replace(task.local, epochs=task.local.epochs * self.calibration))
        replies = fed.run(task, took_part, split="retain", start=w)
        if self.calibrate == "clients":
            return state.next(add(w, mean(self._each(replies, memory, at, w))))
        fresh = mean(replace(r, params=sub(r.params, w)) for r in replies)
        stored = (Reply(c, self._stored(memory, at, c, w), trained.examples[c]) for c in took_part)
        return state.next(add(w, calibrated_by_tensor(fresh, mean(stored))))

    def _each(self, replies: Iterator[Reply], memory: Memory, at: int, w: Params) -> Iterator[Reply]:
        for r in replies:
            yield replace(r, params=calibrated(sub(r.params, w), self._stored(memory, at, r.client, w)))

    def _stored(self, memory: Memory, round: int, client: ClientId, like: Params) -> Params:
        return {n: p.to(like[n].dtype) for n, p in memory[_key(round, client)].items()}
