# SPDX-License-Identifier: Apache-2.0
"""Whose examples are whose: one data set in memory, and for every client the positions of its own.

A client's examples are training data or holdout (never trained on: the null that forgotten data is compared with). A
request marks some of the training data as *forget*; the rest is *retain*. Once served, the marked ones are gone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedquit.core import ClientId, Request, Split
from fedquit.data.preprocessing import AS_STORED, AsStored, Look
from fedquit.errors import InputError, RequestError

NOTHING = torch.zeros(0, dtype=torch.long)


@dataclass(frozen=True)
class Dataset:
    """A data set as tensors: examples, labels, and a test set.

    Examples may be stored as bytes; `look` then makes them ready for a network, batch by batch.
    """

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor
    classes: int
    look: Look = AS_STORED

    def __post_init__(self) -> None:
        for part, x, y in (("training", self.x, self.y), ("test", self.test_x, self.test_y)):
            if len(x) != len(y):
                raise InputError(f"the {part} set has {len(x)} examples but {len(y)} labels: give one label for each.")
            if len(y) == 0:
                raise InputError(f"the {part} set is empty: give at least one example.")
            if y.dtype != torch.long:
                raise InputError(f"the {part} labels are {y.dtype}: convert them with y.long().")
            if int(y.min()) < 0 or int(y.max()) >= self.classes:
                raise InputError(
                    f"the {part} labels run from {int(y.min())} to {int(y.max())}, outside 0 to {self.classes - 1}: "
                    "number the classes from 0, or give the right number of classes."
                )
            if x.is_floating_point() and not bool(torch.isfinite(x).all()):
                raise InputError(f"the {part} examples hold NaN or infinity: clean them first.")
        if not isinstance(self.look, AsStored) and self.x.dtype != torch.uint8:
            raise InputError(f"a look makes bytes ready, and the examples are {self.x.dtype}: store them as uint8.")
        if self.x.shape[1:] != self.test_x.shape[1:]:
            raise InputError(
                f"training examples have shape {tuple(self.x.shape[1:])} and test examples "
                f"{tuple(self.test_x.shape[1:])}: they must be alike."
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one example as a network reads it."""
        return self.look.shape(tuple(self.x.shape[1:]))

    def to(self, device: torch.device) -> Dataset:
        """The same, in that device's memory."""
        if self.x.device == device:
            return self
        x, y, test_x, test_y = (t.to(device) for t in (self.x, self.y, self.test_x, self.test_y))
        return replace(self, x=x, y=y, test_x=test_x, test_y=test_y)


@dataclass(frozen=True)
class FederatedData:
    """A data set, dealt out to clients."""

    dataset: Dataset
    train: Mapping[ClientId, Tensor]  # positions of what each client trains on
    forget: Mapping[ClientId, Tensor] = field(default_factory=dict)  # the part that the present request marks
    holdout: Mapping[ClientId, Tensor] = field(default_factory=dict)
    public: Tensor = NOTHING  # the server's own

    @property
    def x(self) -> Tensor:
        """All examples."""
        return self.dataset.x

    @property
    def y(self) -> Tensor:
        """All labels."""
        return self.dataset.y

    @property
    def clients(self) -> tuple[ClientId, ...]:
        """Everybody."""
        return tuple(self.train)

    def view(self, client: ClientId, split: Split) -> Tensor:
        """The positions of a client's examples in that split."""
        mine, marked = self.train[client], self.forget.get(client, NOTHING)
        if split == "all":
            return mine
        return marked if split == "forget" else mine[~torch.isin(mine, marked)]

    def pooled(self, split: Split, clients: tuple[ClientId, ...] | None = None) -> Tensor:
        """The positions of that split over these clients, or over all."""
        return torch.cat([NOTHING, *(self.view(c, split) for c in (self.clients if clients is None else clients))])

    def label_counts(self) -> dict[str, list[int]]:
        """How many examples of each class every client trains on; nothing where examples have several labels."""
        if self.y.dim() > 1:
            return {}
        return {str(c): self.y[at].bincount(minlength=self.dataset.classes).tolist() for c, at in self.train.items()}

    def mark(self, request: Request, samples: Mapping[ClientId, Tensor] | None = None) -> FederatedData:
        """With the examples of a request marked as forget: `samples` of its clients, or all that they have."""
        request.check(self.clients)
        if request.samples != (samples is not None):
            raise RequestError("a request for samples must say which; a request for whole clients must not.")
        if samples is not None and samples.keys() != set(request.clients):
            raise RequestError(f"the request is of clients {list(request.clients)}: give samples of exactly these.")
        marked = {c: self.train[c] if samples is None else samples[c].unique() for c in request.clients}
        for client, positions in marked.items():
            if len(positions) == 0:
                raise RequestError(f"the forget set of client {client} is empty: there is nothing to forget.")
            if not bool(torch.isin(positions, self.train[client]).all()):
                raise RequestError(f"the request names samples that client {client} does not train on.")
        return replace(self, forget=marked)

    def after(self, request: Request) -> FederatedData:
        """The data once the present request has been served: the marked examples are gone, and clients that left."""
        left = {c: self.view(c, "retain") for c in request.stay(self.clients)}
        return replace(self, train=left, forget={}, holdout={c: h for c, h in self.holdout.items() if c in left})

    def join(self, client: ClientId, before: FederatedData) -> FederatedData:
        """With a client in (again), with the data that it had before."""
        train = {**self.train, client: before.train[client]}
        holdout = {**self.holdout, client: before.holdout.get(client, NOTHING)}
        return replace(self, train=dict(sorted(train.items())), holdout=holdout)

    def fingerprint(self) -> str:
        """A hash of all that training can depend on."""
        digest = hashlib.blake2b(digest_size=16)
        for tensor in (self.x, self.y, self.public):
            digest.update(f"{tuple(tensor.shape)}{tensor.dtype}".encode())
            digest.update(tensor.contiguous().cpu().numpy().data)
        if not isinstance(self.dataset.look, AsStored):
            digest.update(repr(self.dataset.look).encode())
        for name, parts in (("client", self.train), ("forget", self.forget)):
            for client, positions in sorted(parts.items()):
                digest.update(f"{name} {client}: {len(positions)}".encode())
                digest.update(positions.contiguous().numpy().data)
        return digest.hexdigest()
