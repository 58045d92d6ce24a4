# SPDX-License-Identifier: Apache-2.0
"""A client's data and its splits: which examples are left, and which of them an erasure request names.

The requests are those in the client's outbox. They name samples by their position in the client's data, counted from 0.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from fedquit.audit.canaries import NATURAL, CanarySet, without_excluded
from fedquit.core import Split
from fedquit.data.preprocessing import AS_STORED, Look
from fedquit.engine import Address, Examples
from fedquit.engine.plan import fixed_uniforms
from fedquit.errors import InputError, RequestError
from fedquit.flower import wire
from fedquit.flower.outbox import Entry, Outbox


@dataclass(frozen=True)
class ClientData:
    """What a client trains on. A request for samples names them by their position in `x`, counted from 0."""

    x: Tensor  # (n, ...)
    y: Tensor  # (n, ...)
    look: Look = AS_STORED  # the preprocessing of examples that are stored as bytes
    positions: Tensor | None = None  # (n,) ids of the examples, where they have any, for random numbers drawn once each

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y):
            raise InputError(f"there are {len(self.x)} examples and {len(self.y)} labels: give one label for each.")

    @property
    def numbers(self) -> Tensor:
        """The ids of the examples, (n,): `positions`, or 0 to n - 1."""
        return torch.arange(len(self.y)) if self.positions is None else self.positions


@dataclass(frozen=True)
class ClientSplits:
    """The forget and the retain split of a client's data, as the requests in its outbox define them."""

    data: ClientData
    outbox: Outbox
    canaries: CanarySet | None = None  # those that the coins left out are never trained on

    def present(self) -> Tensor:
        """Which examples may be trained on, (n,) bool: not those forgotten, nor canaries that were left out."""
        count = len(self.data.y)
        mask = without_excluded(count, {NATURAL: self.canaries} if self.canaries else {})
        for entry in self.outbox.entries():
            if entry.status == "served" and entry.kind == "samples":
                mask[self._positions(entry)] = False
        return mask

    def examples(self, question: wire.Question, split: Split) -> Examples:
        """The examples of one split that a question uses, with those that are to be forgotten marked."""
        if any(e.kind == "client" and e.status == "served" for e in self.outbox.entries()):
            raise RequestError("this client has been forgotten at its owner's request, and works no more.")
        ask = question.ask
        data = self.data
        present = self.present()
        forget = self._forget_mask(question.serving) & present
        splits = {"all": present, "forget": forget, "retain": present & ~forget}
        rows = splits[split].nonzero().squeeze(1)
        own_seed = Address(ask.address.seed, "fixed").seed_for(question.client)
        fixed = fixed_uniforms(data.numbers[rows.cpu()], own_seed, data.y.shape[1:])
        device = data.y.device
        return Examples(
            data.x[rows.to(device)], data.y[rows.to(device)], fixed.to(device), forget[rows].to(device), data.look
        )

    def pending(self) -> tuple[wire.Pending, ...]:
        """The requests that the server should know of, at most `MOST_PENDING`; those it could not serve are refused."""
        pending = []
        for entry in self.outbox.pending():
            if entry.kind == "samples":
                reason = _why_not_served(self._with_positions(entry).positions, self.present())
                if reason:
                    self.outbox.settle(entry.id, reason)
                    continue
            pending.append(wire.Pending(entry.id, entry.kind))
        pending.sort(key=lambda p: p.kind)  # whole clients first: they make requests for samples needless
        withdrawn = [wire.Pending(e.id, e.kind, withdrawn=True) for e in self.outbox.withdrawing()]
        return tuple([*withdrawn, *pending][: wire.MOST_PENDING])

    def _forget_mask(self, serving: wire.Serving) -> Tensor:
        """Which examples the request that is being served names, (n,) bool."""
        mask = torch.full((len(self.data.y),), serving.kind == "client")
        if serving.kind == "samples":
            for request in (serving.request, *serving.others):
                mask[self._positions(self._with_positions(self.outbox.get(request)))] = True
        return mask

    def _positions(self, entry: Entry) -> list[int]:
        """The positions that a request names; one beyond the data shows that the data has changed."""
        count = len(self.data.y)
        last = max(entry.positions, default=-1)
        if last >= count:
            raise InputError(
                f"{self.outbox.folder / entry.id}.json names sample {last}, and this client has only {count} samples "
                "now: give it its data as it was, in the same order; what was forgotten is left out by itself."
            )
        return list(entry.positions)

    def _with_positions(self, entry: Entry) -> Entry:
        """The request with its positions; those of a fraction are drawn once and written to the outbox."""
        if entry.positions:
            return entry
        left = self.present().nonzero().squeeze(1)
        count = max(1, round(entry.fraction * len(left)))
        seed = int.from_bytes(hashlib.blake2b(entry.id.encode(), digest_size=7).digest(), "big")
        drawn = torch.randperm(len(left), generator=torch.Generator().manual_seed(seed))[:count]
        return self.outbox.choose(entry.id, left[drawn].tolist())


def _why_not_served(positions: tuple[int, ...], present: Tensor) -> str:
    """Why these samples cannot be forgotten; "" if they can."""
    if not positions or positions[-1] >= len(present):
        return f"it names sample {positions[-1] if positions else '-'}, and this client has {len(present)}."
    left = present[list(positions)]
    if not bool(left.any()):
        return "all samples that it names have been forgotten already."
    if int(left.sum()) >= int(present.sum()):
        return "it names every sample that is left: ask for the whole client to be forgotten."
    return ""
