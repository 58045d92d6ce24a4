# SPDX-License-Identifier: Apache-2.0
"""One tiny federation for all transcriptions: its examples, its network, its requests, and the plan's batches.

A transcription may take nothing else from the package than what is here: the plan (batches, uniform numbers, draws of
the augmentation), the data set with its preprocessing, and the network. Everything is in float64.

The world is made so that faults show. A visit has at least three steps and, where the method leaves that open, two
epochs; the last batch of an epoch is smaller; clients differ in size, and so do their forget sets; training augments,
decays its learning rate from round to round and its weights in every step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedquit.core import ClientId, Local, Request
from fedquit.data.federated import Dataset, FederatedData
from fedquit.engine.plan import Address, fixed_uniforms, make_plan
from fedquit.models import FunctionalModel

Weights = dict[str, Tensor]
Part = Literal["all", "forget", "retain", "public"]
Place = tuple[str, int, int, ClientId]  # phase, round, question, client

CLASSES = 4
SIZES = {0: 7, 1: 14, 2: 8, 3: 16}  # of the clients' training sets
FORGET = {1: 7, 3: 8}  # of the forget sets in a request for samples; 7 and 8 are left
PUBLIC = 8
TEST = 5

ROUNDS, RECOVERY_ROUNDS = 4, 2
EPOCHS, BATCH = 2.0, 3
LR, LR_DECAY, WEIGHT_DECAY = 0.2, 0.9, 0.01  # the learning rate of round t of training is LR * LR_DECAY**t


@dataclass(frozen=True)
class FlipAndGain:
    """Bytes become numbers in float64; an augmented image may be mirrored, and is made brighter or darker."""

    draws: int = 2

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        return stored

    def plain(self, x: Tensor) -> Tensor:
        return x.double() / 64 - 2

    def varied(self, x: Tensor, u: Tensor) -> Tensor:
        flip, gain = u.double()[:, :, None, None, None].unbind(1)
        plain = self.plain(x)
        return torch.where(flip < 0.5, plain, plain.flip(-1)) * (0.5 + gain)


def network() -> nn.Module:
    """A convolution, a normalisation and two linear layers."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2, padding=1),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(36, 6),
        nn.Tanh(),
        nn.Linear(6, CLASSES),
    )


MODEL = FunctionalModel(network, torch.float64)
_MODULE = network().double()
HEAD = ("6.weight", "6.bias")


def net(w: Weights, x: Tensor) -> Tensor:
    """The logits, `(B, C)`."""
    logits = functional_call(_MODULE, w, (x,), strict=True)
    assert isinstance(logits, Tensor)
    return logits


def initial(seed: int) -> Weights:
    """The network's fresh parameters."""
    return MODEL.init(seed)


def _dataset() -> tuple[Dataset, dict[ClientId, Tensor], Tensor]:
    """All examples, and the sorted positions of each client's and of the server's own."""
    generator = torch.Generator().manual_seed(29)
    prototypes = torch.randn(CLASSES, 1, 6, 6, generator=generator)
    examples = sum(SIZES.values()) + PUBLIC

    def draw(n: int) -> tuple[Tensor, Tensor]:
        y = torch.randint(CLASSES, (n,), generator=generator)
        x = prototypes[y] + 0.8 * torch.randn(n, 1, 6, 6, generator=generator)
        return (40 * x + 128).clamp(0, 255).to(torch.uint8), y

    # Positions are dealt from a shuffled deck: those of a client are not contiguous.
    deck = torch.randperm(examples, generator=generator)
    *mine, public = (part.sort().values for part in deck.split([*SIZES.values(), PUBLIC]))
    return Dataset(*draw(examples), *draw(TEST), CLASSES, FlipAndGain()), dict(zip(SIZES, mine, strict=True)), public


DATASET, TRAIN, PUBLIC_POSITIONS = _dataset()
DATA = FederatedData(DATASET, TRAIN, public=PUBLIC_POSITIONS)


@dataclass(frozen=True)
class Erasure:
    """An erasure request in this world.

    Attributes:
        name: for the names of tests.
        request: who asks.
        marked: the positions that each of them asks to forget.
        seed: of the run; every kind of request has another.
    """

    name: str
    request: Request
    marked: dict[ClientId, Tensor] = field(compare=False)
    seed: int

    @property
    def staying(self) -> tuple[ClientId, ...]:
        """The clients that go on training."""
        return tuple(c for c in SIZES if self.request.samples or c not in self.request.clients)

    def data(self) -> FederatedData:
        """The package's data with this request marked."""
        samples = {c: p.clone() for c, p in self.marked.items()}
        return DATA.mark(self.request, samples if self.request.samples else None)


def _some(client: ClientId) -> Tensor:
    """Every other example of a client, as many as it asks to forget."""
    return TRAIN[client][::2][: FORGET[client]]


ONE = Erasure("one client", Request((1,)), {1: TRAIN[1]}, seed=0)
SEVERAL = Erasure("two clients", Request((1, 3)), {1: TRAIN[1], 3: TRAIN[3]}, seed=1)
SAMPLES = Erasure("samples", Request((1, 3), samples=True), {c: _some(c) for c in (1, 3)}, seed=2)
SAMPLES_OF_ONE = Erasure("samples of one", Request((3,), samples=True), {3: _some(3)}, seed=2)


def nobody(seed: int) -> Erasure:
    """No request: a federation that only trains."""
    return Erasure("nobody", Request(()), {}, seed)


@dataclass(frozen=True)
class Step:
    """One batch of the plan.

    Attributes:
        x: the examples as the network reads them, `(B, 1, 6, 6)`.
        y: their labels, `(B,)`.
        u: uniform numbers of this step, `(B,)`.
        fixed: uniform numbers that belong to the examples for the whole run, `(B,)`.
        forget: whether the request marks the examples, `(B,)`.
    """

    x: Tensor
    y: Tensor
    u: Tensor
    fixed: Tensor
    forget: Tensor


@dataclass(frozen=True)
class Visit:
    """What the plan gives to one client at one place of the run."""

    place: Place
    examples: int
    steps: tuple[Step, ...]
    curvature_seed: int


def planned(
    place: Place,
    positions: Tensor,
    marked: Tensor,
    seed: int,
    *,
    epochs: float = EPOCHS,
    batch_size: int = BATCH,
    augmented: bool = False,
) -> Visit:
    """Lay out a client's examples in the batches of the plan.

    Args:
        place: phase, round, question and client: all random numbers are drawn from it and the seed.
        positions: of the client's examples in the data set.
        marked: the positions that the request marks.
        seed: of the run.
        epochs: passes over the examples.
        batch_size: examples in a step; the last of an epoch may have fewer.
        augmented: whether the examples are augmented.
    """
    phase, number, question, client = place
    here = Address(seed, phase, number, question).seed_for(client)
    look = DATASET.look
    plan = make_plan(
        len(positions), Local(epochs=epochs, batch_size=batch_size), here, (), look.draws if augmented else 0
    )
    fixed = fixed_uniforms(positions, Address(seed, "fixed").seed_for(client))
    steps = []
    for order, u, draws in zip(plan.steps, plan.noise, plan.variation, strict=True):
        stored = DATASET.x[positions[order]]
        x = look.varied(stored, draws) if augmented else look.plain(stored)
        forget = torch.isin(positions[order], marked)
        steps.append(Step(x, DATASET.y[positions[order]], u, fixed[order], forget))
    return Visit(place, len(positions), tuple(steps), plan.curvature_seed)


@dataclass(frozen=True)
class Visited:
    """What a client sent back.

    Attributes:
        place: phase, round, question and client.
        examples: how many it worked on.
        sent: the tensors that it sent.
        loss: the mean over its steps; None where that says nothing.
    """

    place: Place
    examples: int
    sent: Weights
    loss: float | None


@dataclass
class Log:
    """A trajectory: every visit, and the global model after every round."""

    visits: list[Visited] = field(default_factory=list)
    models: list[tuple[str, int, Weights]] = field(default_factory=list)  # phase, round, model
