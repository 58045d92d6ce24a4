# SPDX-License-Identifier: Apache-2.0
"""The source of all randomness: which example goes into which step, and the uniform numbers that tasks may use.

Every number follows from (seed, phase, round, number of the question within the round, client), so that runs repeat
exactly, a resumed run equals an uninterrupted one, and no engine can differ from another.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedquit.core import ClientId, Local


@dataclass(frozen=True)
class Address:
    """The place of a question in a run."""

    seed: int
    phase: str
    round: int = 0
    question: int = 0

    def seed_for(self, client: ClientId | str, part: int = 0) -> int:
        """Return the seed of one client, or of the server by a word, at this place.

        Args:
            client: whose seed it is.
            part: of a program, from 0; the first part has the seed of a task at the same place.
        """
        place = (self.seed, self.phase, self.round, self.question, client)
        key = repr((*place, part) if part else place)
        return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") >> 1


def fixed_uniforms(positions: Tensor, seed: int, label_shape: Sequence[int] = ()) -> Tensor:
    """Uniform numbers in [0, 1) that belong to examples: a hash of position and seed, the same in whatever order."""
    labels = math.prod(label_shape)
    keys = positions.unsqueeze(-1) * labels + torch.arange(labels, device=positions.device)
    return _uniform(_mixed(keys * _SPREAD + seed)).reshape(len(positions), *label_shape)


def step_key(seed: Tensor, step: int | Tensor) -> Tensor:
    """The key of one step of a client, from which the random numbers inside its network follow.

    Args:
        seed: of the client's task (`Address.seed_for`), int64, (...,).
        step: from 0; as a tensor, whatever it holds when a captured graph runs.
    """
    number = torch.as_tensor(step, device=seed.device) + 1
    return _mixed(_mixed(seed) + number * _SPREAD)


def places_in(numbers: int, device: torch.device) -> Tensor:
    """The place of each of so many numbers, from 0."""
    return torch.arange(numbers, device=device)


def network_uniforms(
    key: Tensor, call: int, shape: Sequence[int], places: Callable[[int, torch.device], Tensor] = places_in
) -> Tensor:
    """Uniform numbers in [0, 1) for one random operation inside a network, such as a dropout.

    A number depends on its place in the flattened tensor. Where the batch comes first, a padded batch gets for its
    examples the numbers that it would get without padding.

    Args:
        key: of the client's step, ().
        call: the number of the operation within the step.
        shape: of the tensor.
        places: what tells the places.
    """
    at = places(math.prod(shape), key.device).reshape(tuple(shape))
    return _uniform(_mixed(at * _SPREAD + _mixed(key + call)))


_SPREAD = 0x1E3779B97F4A7C15


def _mixed(mixed: Tensor) -> Tensor:
    """Multiply and fold, until every bit depends on every bit; products wrap around."""
    for _ in range(3):
        mixed = (mixed ^ ((mixed >> 31) & 0x1FFFFFFFF)) * 0x3F58476D1CE4E5B9
    return mixed


def _uniform(mixed: Tensor) -> Tensor:
    bits = (mixed >> 11) & 0xFFFFFF  # as many as a float32 holds
    return bits / float(1 << 24)


def _parts(whole: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    parts: tuple[Tensor, ...] = whole.split(list(sizes))
    return parts


@dataclass(frozen=True)
class Plan:
    """One client's steps: for each, the positions of its examples and a uniform number for each label."""

    order: Tensor  # positions, those of all steps one after the other
    sizes: tuple[int, ...]  # of the steps, each at most batch_size
    uniforms: Tensor  # for each position, shaped like its label
    curvature_seed: int  # for optimizers that probe the curvature along random signs
    draws: Tensor  # for each position, the uniform numbers that augment its example

    @property
    def steps(self) -> tuple[Tensor, ...]:
        """The positions of each step."""
        return _parts(self.order, self.sizes)

    @property
    def noise(self) -> tuple[Tensor, ...]:
        """The uniform numbers of each step."""
        return _parts(self.uniforms, self.sizes)

    @property
    def variation(self) -> tuple[Tensor, ...]:
        """What augments each step."""
        return _parts(self.draws, self.sizes)


def _batch_sizes(examples: int, local: Local) -> list[int]:
    starts = range(0, examples, local.batch_size)
    return [min(local.batch_size, examples - start) for start in starts]


def make_plan(examples: int, local: Local, seed: int, label_shape: Sequence[int] = (), draws: int = 0) -> Plan:
    """Shuffle anew for every epoch; the last batch of an epoch may be smaller; half an epoch takes half the batches.

    A client with any data takes at least one step, unless it is asked for 0 epochs. An augmentation takes `draws`
    numbers for each example; they are drawn last, so that a run with and one without it take the same steps.
    """
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(examples, generator=generator) for _ in range(math.ceil(local.epochs))]
    sizes = _batch_sizes(examples, local) * len(orders)
    sizes = sizes[: local.steps(examples)]
    order = torch.cat([torch.zeros(0, dtype=torch.long), *orders])[: sum(sizes)]
    uniforms = torch.rand((len(order), *label_shape), generator=generator)
    curvature_seed = int(torch.randint(2**62, (), generator=generator))
    return Plan(order, tuple(sizes), uniforms, curvature_seed, torch.rand((len(order), draws), generator=generator))


def measuring_plan(examples: int, local: Local, seed: int, label_shape: Sequence[int] = ()) -> Plan:
    """Plan one pass in the order of the examples; an example's uniform numbers do not depend on the batch size."""
    generator = torch.Generator().manual_seed(seed)
    uniforms = torch.rand((examples, *label_shape), generator=generator)
    sizes = tuple(_batch_sizes(examples, local))
    return Plan(torch.arange(examples), sizes, uniforms, curvature_seed=0, draws=torch.zeros(examples, 0))
