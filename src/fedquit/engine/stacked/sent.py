# SPDX-License-Identifier: Apache-2.0
"""What the clients of a round were sent: parameters that all share, and parameters of each client, stacked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from fedquit.core import Params, Sent
from fedquit.core.params import placed
from fedquit.engine.stacked.schedule import Job


class SentParams:
    """Parameters by name: `shared` by all clients, or `per_client`, stacked to (K, *shape).

    A captured CUDA graph reads fixed addresses, so with `static` a round's parameters are copied into the tensors of
    the round before.
    """

    def __init__(self, device: torch.device, *, static: bool, bf16: bool) -> None:
        """Begin without any.

        Args:
            device: Where they are computed with.
            static: Whether tensors stay where they are from round to round.
            bf16: Whether shared parameters get a copy in bfloat16.
        """
        self.shared: dict[str, Params] = {}
        self.per_client: dict[str, Params] = {}
        self.shared_low: dict[str, Params] = {}  # the copies in bfloat16
        self._device = device
        self._static = static
        self._bf16 = bf16

    def load(self, jobs: Sequence[Job]) -> None:
        """Take what the clients of a round were sent."""
        first = jobs[0].sent
        same = {name for name in first if all(job.sent[name] is first[name] for job in jobs)}
        shared = {name: placed(first[name], self._device) for name in first if name in same}
        per_client = {name: self._stacked(name, jobs) for name in first if name not in same}
        if self._static and self.shared.keys() == shared.keys() and self.per_client.keys() == per_client.keys():
            _copy(self.shared, shared)
            _copy(self.per_client, per_client)
        else:
            self._replace(shared, per_client)
        for name, copies in self.shared_low.items():
            for n, copy in copies.items():
                copy.copy_(self.shared[name][n])

    def _stacked(self, name: str, jobs: Sequence[Job]) -> Params:
        return stacked([placed(job.sent[name], self._device) for job in jobs])

    def _replace(self, shared: Mapping[str, Params], per_client: dict[str, Params]) -> None:
        self.shared = {name: _cloned(params) if self._static else params for name, params in shared.items()}
        self.per_client = per_client
        self.shared_low = {name: _empty_bf16(params) for name, params in self.shared.items()} if self._bf16 else {}

    def of_clients(self, width: int) -> Sent:
        """Return `per_client` of the first clients, (width, *shape)."""
        return {name: {n: p[:width] for n, p in params.items()} for name, params in self.per_client.items()}


def stacked(clients: Sequence[Params]) -> Params:
    """Stack the parameters of K clients to (K, *shape)."""
    return {n: torch.stack([params[n] for params in clients]) for n in clients[0]}


def _cloned(params: Params) -> Params:
    return {n: p.clone() for n, p in params.items()}


def _empty_bf16(params: Params) -> Params:
    return {n: torch.empty_like(p, dtype=torch.bfloat16) for n, p in params.items()}


def _copy(into: Mapping[str, Params], source: Mapping[str, Params]) -> None:
    for name, params in source.items():
        for n, p in params.items():
            into[name][n].copy_(p)
