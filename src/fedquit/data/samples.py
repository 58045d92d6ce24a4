# SPDX-License-Identifier: Apache-2.0
"""Which samples a request marks, where a client asks for a part of its data to be forgotten."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor

from fedquit.core import ClientId
from fedquit.data.federated import FederatedData
from fedquit.data.partition import stream
from fedquit.errors import InputError, RequestError
from fedquit.utils.names import lookup

Selection = Callable[[Tensor, int, np.random.Generator], Tensor]  # (labels, how many, generator) -> indices into labels


def at_random(labels: Tensor, count: int, rng: np.random.Generator) -> Tensor:
    """Choose any samples, each with the same chance."""
    return torch.from_numpy(rng.permutation(len(labels))[:count])


def rarest(labels: Tensor, count: int, rng: np.random.Generator) -> Tensor:
    """Choose class by class, the client's rarest first; of equally rare ones the lower number."""
    if labels.dim() != 1:
        raise InputError(f"labels of shape {tuple(labels.shape)} have no single class for each example: use 'random'.")
    have = labels.bincount()[labels]  # of each example's class
    by_class = labels.argsort(stable=True)
    return by_class[have[by_class].argsort(stable=True)][:count]


SELECTIONS: dict[str, Selection] = {"random": at_random, "rare": rarest}


def choose_samples(
    data: FederatedData, clients: Iterable[ClientId], fraction: float, how: str, seed: int
) -> dict[ClientId, Tensor]:
    """Choose the samples that clients ask to be forgotten.

    Args:
        data: the clients' data.
        clients: who asks.
        fraction: the part of each client's n training samples: round(fraction * n), at least one.
        how: a name from `SELECTIONS`: random or rare.
        seed: fixes the draws.

    Returns:
        For each client, the sorted positions of its chosen samples.

    Raises:
        RequestError: if the fraction is not between 0 and 1, covers all of a client, or a client
            does not exist.
    """
    select = lookup(SELECTIONS, how, "selection of samples")
    if not 0 < fraction < 1:
        raise RequestError(
            f"the fraction of samples to forget is {fraction}: give a number between 0 and 1, "
            "or request the whole client where everything should go."
        )
    chosen = {}
    for client in clients:
        if client not in data.train:
            raise RequestError(f"client {client} is not in the federation: its clients are {list(data.clients)}.")
        mine = data.train[client]
        count = max(1, round(fraction * len(mine)))
        if count >= len(mine):
            raise RequestError(
                f"{fraction} of the {len(mine)} samples of client {client} is everything it has: "
                "request the whole client instead, or a smaller fraction."
            )
        chosen[client] = mine[select(data.y[mine].cpu(), count, stream(seed, "samples", client))].sort().values
    return chosen
