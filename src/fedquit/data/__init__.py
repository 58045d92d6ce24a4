# SPDX-License-Identifier: Apache-2.0
"""Data sets by name, and how they are dealt out to clients.

One's own data set is a function that returns a `Dataset`, named as `package.module:function`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedquit.core import ClientId
from fedquit.data.cifar import cifar10, cifar100
from fedquit.data.cub import cub200
from fedquit.data.federated import Dataset, FederatedData
from fedquit.data.partition import PARTITIONS, stream
from fedquit.data.shakespeare import shakespeare
from fedquit.errors import InputError
from fedquit.utils.names import imported, lookup, refuse_unknown_options

__all__ = ["DATASETS", "PARTITIONS", "Dataset", "FederatedData", "federate", "load_dataset"]

FASHION_MEAN, FASHION_STD = 0.2860, 0.3530  # of the pixels of all 60,000 training images
DIGITS_MEAN = 0.3053  # of the pixels, scaled to 0..1
DIGITS_TEST = 360  # of 1,797


def fashion_mnist_mini() -> Dataset:
    """A balanced part of Fashion-MNIST that comes with the package: 5,000 + 1,000 images of 28x28, 10 classes."""
    packed = resources.files(__name__) / "fashion_mnist_mini.npz"
    with packed.open("rb") as file, np.load(file, allow_pickle=False) as z:
        x, y, test_x, test_y = (z[name] for name in ("x_train", "y_train", "x_test", "y_test"))
    return Dataset(_fashion(x), _labels(y), _fashion(test_x), _labels(test_y), classes=10)


def digits() -> Dataset:
    """The handwritten digits that come with scikit-learn: 1,797 images of 8x8; a fixed fifth is the test set."""
    from sklearn.datasets import load_digits

    found = load_digits()
    x = torch.from_numpy(found.images).float().unsqueeze(1) / 16 - DIGITS_MEAN
    y = _labels(found.target)
    order = torch.from_numpy(stream(0, "digits").permutation(len(y)))
    train, test = order[:-DIGITS_TEST], order[-DIGITS_TEST:]
    return Dataset(x[train], y[train], x[test], y[test], classes=10)


def synthetic(
    *,
    examples: int = 1000,
    test_examples: int = 500,
    classes: int = 10,
    channels: int = 1,
    size: int = 8,
    noise: float = 1.0,
    seed: int = 0,
) -> Dataset:
    """Images that are a Gaussian prototype of their class plus Gaussian noise; the classes are equally frequent."""
    if min(examples, test_examples, classes, channels, size) < 1:
        raise InputError(
            f"synthetic data has examples={examples}, test_examples={test_examples}, classes={classes}, "
            f"channels={channels} and size={size}: each must be 1 or more."
        )
    if not (math.isfinite(noise) and noise >= 0):
        raise InputError(f"synthetic data has noise={noise}: it must be 0 or more.")
    generator = torch.Generator().manual_seed(seed)
    prototypes = torch.randn(classes, channels, size, size, generator=generator)

    def draw(n: int) -> tuple[Tensor, Tensor]:
        y = torch.randperm(n, generator=generator) % classes
        return prototypes[y] + noise * torch.randn(n, channels, size, size, generator=generator), y

    (x, y), (test_x, test_y) = draw(examples), draw(test_examples)
    return Dataset(x, y, test_x, test_y, classes)


DATASETS: dict[str, Callable[..., Dataset]] = {
    "fashion_mnist_mini": fashion_mnist_mini,
    "digits": digits,
    "synthetic": synthetic,
    "cifar10": cifar10,
    "cifar100": cifar100,
    "cub200": cub200,
    "shakespeare": shakespeare,
}


def load_dataset(name: str, /, *, folder: str | Path | None = None, **options: object) -> Dataset:
    """The data set of that name in `DATASETS`, or the one that `package.module:function` returns.

    `folder` is where published data lies; it goes to those that take one.
    """
    make = imported(name, "data set") if ":" in name else lookup(DATASETS, name, "data set")
    if not callable(make):
        raise InputError(f"data set {name!r} is not a function: name one that returns a fedquit.data.Dataset.")
    if folder is not None and "folder" in inspect.signature(make).parameters:
        options = {**options, "folder": folder}
    refuse_unknown_options(f"data set {name!r}", make, options)
    dataset = make(**options)
    if not isinstance(dataset, Dataset):
        raise InputError(f"data set {name!r} returned {type(dataset).__name__}: it must return a fedquit.data.Dataset.")
    return dataset


def federate(
    dataset: Dataset,
    *,
    partition: str = "iid",
    clients: int = 10,
    alpha: float = 0.1,
    seed: int = 0,
    holdout: float = 0.0,
    public: float = 0.0,
    partition_file: str | Path | None = None,
) -> FederatedData:
    """Deal a data set out: first the server's `public` part, then the clients' parts, then their `holdout` of that.

    Both are fractions, rounded down. `alpha` is for the partition `lda`, and `partition_file` for `file`.
    """
    deal = lookup(PARTITIONS, partition, "partition")
    for name, fraction in (("holdout", holdout), ("public", public)):
        if not 0 <= fraction < 1:
            raise InputError(f"{name} is {fraction}: give the fraction as a number from 0 to below 1.")
    if seed < 0:
        raise InputError(f"the seed is {seed}: give a whole number from 0 on.")
    if partition_file and partition != "file":
        raise InputError(f"partition {partition!r} reads no partition_file: set partition to 'file', or drop it.")
    ours, rest = _taken(torch.arange(len(dataset.y)), public, stream(seed, "public"))
    # A file's positions are those of the whole data set; the others deal out what the server has left.
    deck = torch.arange(len(dataset.y)) if partition == "file" else rest
    dealt = deal(dataset.y[deck], clients, np.random.default_rng(seed), alpha=alpha, file=partition_file)
    parts = {c: deck[p][~torch.isin(deck[p], ours)] for c, p in dealt.items()}
    held, train = _split_off(parts, holdout, seed)
    return FederatedData(dataset, train=train, holdout=held, public=ours)


def _split_off(
    parts: dict[ClientId, Tensor], fraction: float, seed: int
) -> tuple[dict[ClientId, Tensor], dict[ClientId, Tensor]]:
    both = {c: _taken(part, fraction, stream(seed, "holdout", c)) for c, part in parts.items()}
    return {c: taken for c, (taken, _) in both.items()}, {c: left for c, (_, left) in both.items()}


def _taken(positions: Tensor, fraction: float, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """That fraction of the positions, rounded down, at random; and the others, at least one. Both keep the order."""
    n = len(positions)
    taken = torch.zeros(n, dtype=torch.bool)
    count = min(math.floor(fraction * n + 1e-9), max(n - 1, 0))  # 0.29 of 100 are 29
    taken[rng.permutation(n)[:count]] = True
    return positions[taken], positions[~taken]


def _fashion(pixels: NDArray[np.uint8]) -> Tensor:
    return (torch.from_numpy(pixels).float().unsqueeze(1) / 255 - FASHION_MEAN) / FASHION_STD


def _labels(y: NDArray[np.integer]) -> Tensor:
    return torch.from_numpy(y.astype(np.int64))
