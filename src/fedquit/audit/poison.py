# SPDX-License-Identifier: Apache-2.0
"""A backdoor in the data of clients that will leave: what they alone planted must be gone when they are.

Gu, Dolan-Gavitt, Garg: BadNets (2017). A part of their training images gets a bright square in the lower right corner
and the label of the target class. Nothing else changes, so that a run with a backdoor is an ordinary run on other data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from fedquit.audit.metrics.backdoor import Trigger
from fedquit.core import ClientId
from fedquit.data.federated import Dataset, FederatedData
from fedquit.data.partition import stream
from fedquit.errors import InputError, RequestError

BRIGHTEST = 255.0  # of images that are stored as bytes


def trigger_for(dataset: Dataset, target: int, size: int) -> Trigger:
    """A square as bright as these images can be: 255 for bytes, the largest value of the training images for floats."""
    x, y = dataset.x, dataset.y
    if x.dim() != 4 or y.dim() != 1 or not (x.dtype == torch.uint8 or x.is_floating_point()):
        raise InputError(
            f"a backdoor is a stamp on images, and the examples are {x.dtype} of shape {tuple(x.shape[1:])}: "
            "set evaluate.backdoor = 0 for this data."
        )
    if not 0 <= target < dataset.classes:
        raise InputError(
            f"evaluate.backdoor_target is {target}, and the classes run from 0 to {dataset.classes - 1}: choose one."
        )
    if not 0 < size <= min(x.shape[-2:]):
        raise InputError(f"evaluate.backdoor_size is {size}, and the images are {tuple(x.shape[-2:])}: make it fit.")
    return Trigger(target, size, BRIGHTEST if x.dtype == torch.uint8 else float(x.max()))


def plant(
    data: FederatedData, clients: Sequence[ClientId], fraction: float, trigger: Trigger, seed: int
) -> FederatedData:
    """The same data, with the trigger on round(fraction * n), at least one, of each of these clients' training images.

    Which ones depends on the seed and the client alone. Their hold-outs, all others' data and the test set stay clean.
    """
    if not 0 < fraction <= 1:
        raise InputError(f"the fraction of poisoned images is {fraction}: give a number above 0 and at most 1.")
    x, y = data.x.clone(), data.y.clone()
    for client in clients:
        if client not in data.train:
            raise RequestError(f"client {client} is not in the federation: its clients are {list(data.clients)}.")
        mine = data.train[client]
        count = max(1, round(fraction * len(mine)))
        at = mine[torch.from_numpy(stream(seed, "backdoor", client).permutation(len(mine))[:count])]
        x[at], y[at] = trigger.poisoned(x[at], y[at])
    return replace(data, dataset=replace(data.dataset, x=x, y=y))
