# SPDX-License-Identifier: Apache-2.0
"""A federated data set: one data set in memory, and the positions of every client's examples.

A client's examples are training data or holdout (never trained on: forgotten data is compared with
it). A request marks some of the training data as *forget*; the rest is *retain*. Once the request
is served, the marked ones are removed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedquit.core import ClientId, Request, Split
from fedquit.data.preprocessing import AS_STORED, AsStored, Preprocessing
from fedquit.errors import InputError, RequestError

NOTHING = torch.zeros(0, dtype=torch.long)


@dataclass(frozen=True)
class Dataset:
    """A data set as tensors: examples, labels, and a test set.

    Attributes:
        x: the training examples, `(N, …)`: floats, tokens, or bytes that `look` preprocesses batch
            by batch.
        y: their labels, int64 of shape `(N,)`, or `(N, T)` for sequences.
        test_x: the test examples, of the same shape and type as `x` but for their number.
        test_y: their labels.
        classes: the number of classes, C; labels run from 0 to C - 1.
        look: how stored examples are preprocessed and augmented, such as `Pixels` for images of
            bytes.
        owner: whose each training example is, `(N,)`, for the partition `owner`; None where nobody
            knows.

    Raises:
        InputError: for shapes, types, labels or numbers that do not fit together.
    """

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor
    classes: int
    look: Preprocessing = AS_STORED
    owner: Tensor | None = None

    def __post_init__(self) -> None:
        if self.owner is not None and self.owner.shape != (len(self.y),):
            raise InputError(
                f"owners have shape {tuple(self.owner.shape)}: give one for each of {len(self.y)} examples."
            )
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
            raise InputError(
                f"a preprocessing (look) reads bytes, and the examples are {self.x.dtype}: store them as uint8."
            )
        if self.x.shape[1:] != self.test_x.shape[1:]:
            raise InputError(
                f"training examples have shape {tuple(self.x.shape[1:])} and test examples "
                f"{tuple(self.test_x.shape[1:])}: they must be alike."
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one example as a network reads it."""
        return self.look.shape(tuple(self.x.shape[1:]))

    def to(self, device: torch.device) -> Dataset:
        """Return the data set with its tensors in that device's memory."""
        if self.x.device == device:
            return self
        x, y, test_x, test_y = (t.to(device) for t in (self.x, self.y, self.test_x, self.test_y))
        return replace(self, x=x, y=y, test_x=test_x, test_y=test_y)


@dataclass(frozen=True)
class FederatedData:
    """A data set that is divided among clients. Positions are indices into the data set, int64.

    Attributes:
        dataset: all examples.
        train: the positions of what each client trains on.
        forget: the part of it that the present request marks.
        holdout: the positions of each client's hold-out examples, never trained on.
        public: the positions of the server's own examples.
    """

    dataset: Dataset
    train: Mapping[ClientId, Tensor]
    forget: Mapping[ClientId, Tensor] = field(default_factory=dict)
    holdout: Mapping[ClientId, Tensor] = field(default_factory=dict)
    public: Tensor = NOTHING

    @property
    def x(self) -> Tensor:
        """All training examples of the data set."""
        return self.dataset.x

    @property
    def y(self) -> Tensor:
        """The labels of `x`."""
        return self.dataset.y

    @property
    def clients(self) -> tuple[ClientId, ...]:
        """All clients."""
        return tuple(self.train)

    def view(self, client: ClientId, split: Split) -> Tensor:
        """Return the positions of a client's training examples in a split.

        Args:
            client: whose examples.
            split: "all", "forget" (what the present request marks) or "retain" (the rest).
        """
        mine = self.train[client]
        marked = self.forget.get(client, NOTHING)
        if split == "all":
            return mine
        return marked if split == "forget" else mine[~torch.isin(mine, marked)]

    def pooled(self, split: Split, clients: tuple[ClientId, ...] | None = None) -> Tensor:
        """Return the positions of a split over several clients, one client after the other.

        Args:
            split: as in `view`.
            clients: whose examples; None means all clients.
        """
        chosen = self.clients if clients is None else clients
        return torch.cat([NOTHING, *(self.view(c, split) for c in chosen)])

    def label_counts(self) -> dict[str, list[int]]:
        """Return each client's examples of each class; {} where an example has several labels."""
        if self.y.dim() > 1:
            return {}
        return {str(c): self.y[at].bincount(minlength=self.dataset.classes).tolist() for c, at in self.train.items()}

    def mark(self, request: Request, samples: Mapping[ClientId, Tensor] | None = None) -> FederatedData:
        """Return the data with the examples of a request marked as forget.

        Args:
            request: who asks.
            samples: for a request for samples, the positions that each of its clients marks;
                otherwise None, and all examples of its clients are marked.

        Raises:
            RequestError: if the request cannot be served, or `samples` do not fit it.
        """
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
        """Return the data without the marked examples and the clients that left."""
        train = {c: self.view(c, "retain") for c in request.stay(self.clients)}
        holdout = {c: positions for c, positions in self.holdout.items() if c in train}
        return replace(self, train=train, forget={}, holdout=holdout)

    def join(self, client: ClientId, before: FederatedData) -> FederatedData:
        """Return the data with one more client.

        Args:
            client: who joins, or joins again.
            before: the data from which it takes its examples.
        """
        train = {**self.train, client: before.train[client]}
        holdout = {**self.holdout, client: before.holdout.get(client, NOTHING)}
        return replace(self, train=dict(sorted(train.items())), holdout=holdout)

    def fingerprint(self) -> str:
        """Return a hash of all that training can depend on."""
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
