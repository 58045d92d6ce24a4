# SPDX-License-Identifier: Apache-2.0
"""Data sets by name, and how they are divided among clients.

Your own data set is a function that returns a `Dataset`, named as `package.module:function`
(docs/your-data.md).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
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
from fedquit.data.preprocessing import Pixels
from fedquit.data.shakespeare import shakespeare
from fedquit.data.speakers import shakespeare_speakers, sotu
from fedquit.errors import InputError
from fedquit.utils.names import imported, lookup, refuse_unknown_options

__all__ = ["DATASETS", "PARTITIONS", "Dataset", "FederatedData", "Pixels", "federate", "load_dataset"]

FASHION_MEAN, FASHION_STD = 0.2860, 0.3530  # of the pixels of all 60,000 training images
DIGITS_MEAN = 0.3053  # of the pixels, scaled to 0..1
DIGITS_TEST = 360  # of 1,797


def fashion_mnist_mini(*, noise: float = 0.0) -> Dataset:
    """A balanced part of Fashion-MNIST: 5,000 + 1,000 images of 28x28, 10 classes.

    Args:
        noise: the share of training labels that are wrong, drawn once and for all: a network can only learn them by
            heart. Test labels are never changed.
    """
    if not 0.0 <= noise < 1.0:
        raise InputError(f"fashion_mnist_mini has noise={noise}: it must be at least 0 and below 1.")
    packed = resources.files(__name__) / "fashion_mnist_mini.npz"
    with packed.open("rb") as file, np.load(file, allow_pickle=False) as z:
        x, y, test_x, test_y = (z[name] for name in ("x_train", "y_train", "x_test", "y_test"))
    labels = _with_noise(_labels(y), 10, noise) if noise else _labels(y)
    return Dataset(_fashion(x), labels, _fashion(test_x), _labels(test_y), classes=10)


def _with_noise(y: Tensor, classes: int, share: float) -> Tensor:
    """Labels of which a share is replaced by one of the other classes, all equally likely."""
    draws = stream(0, "label noise")
    wrong = torch.from_numpy(draws.random(len(y)) < share)
    shift = torch.from_numpy(draws.integers(1, classes, len(y)))
    return torch.where(wrong, (y + shift) % classes, y)


def digits() -> Dataset:
    """The digits of scikit-learn: 1,797 images of 8x8; a fixed fifth is the test set."""
    from sklearn.datasets import load_digits

    bundle = load_digits()
    x = torch.from_numpy(bundle.images).float().unsqueeze(1) / 16 - DIGITS_MEAN
    y = _labels(bundle.target)
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
    """Gaussian prototypes, one for each class, plus Gaussian noise; classes are equally frequent.

    Args:
        examples: training images.
        test_examples: test images.
        classes: number of classes.
        channels: of an image.
        size: height and width of an image, in pixels.
        noise: standard deviation of the noise; that of the prototypes is 1.
        seed: fixes all draws.

    Returns:
        Images `(N, channels, size, size)` of float32.

    Raises:
        InputError: for a number below 1, or noise below 0.
    """
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

    x, y = draw(examples)
    test_x, test_y = draw(test_examples)
    return Dataset(x, y, test_x, test_y, classes)


DATASETS: dict[str, Callable[..., Dataset]] = {
    "fashion_mnist_mini": fashion_mnist_mini,
    "digits": digits,
    "synthetic": synthetic,
    "cifar10": cifar10,
    "cifar100": cifar100,
    "cub200": cub200,
    "shakespeare": shakespeare,
    "shakespeare_speakers": shakespeare_speakers,
    "sotu": sotu,
}


def load_dataset(name: str, /, *, folder: str | Path | None = None, **options: object) -> Dataset:
    """Load a data set.

    Args:
        name: a name from `DATASETS`, or `package.module:function` for a function that returns a
            `Dataset`.
        folder: where published data lies; passed on to data sets that take it.
        options: keyword arguments of the data set's function.

    Returns:
        The data set, in the CPU's memory.

    Raises:
        UnknownNameError: for a data set or an option that does not exist.
        InputError: if the data is absent or damaged, or the function returns something else.
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
    holdout_by_class: bool = False,
    parts: Mapping[ClientId, Tensor] | None = None,
) -> FederatedData:
    """Divide a data set among clients.

    The server's public examples are drawn first, then the clients' parts, then the hold-out
    examples of each part.

    Args:
        dataset: the data set.
        partition: a name from `PARTITIONS`: iid, lda (label skew), chunks or file.
        clients: how many clients.
        alpha: of the Dirichlet distribution of the partition `lda`; 0.1 is very uneven, 100 nearly
            even.
        seed: fixes all draws.
        holdout: the fraction of each client's examples that is never trained on, rounded down.
        public: the fraction of all examples that the server keeps for itself, rounded down.
        partition_file: for the partition `file`, a JSON file
            `{"0": [positions], "1": [positions], …}`.
        holdout_by_class: whether the hold-out has the same share of each class of its client, up to
            one example, rather than a random one. Sequences, which have no class, are drawn at
            random.
        parts: the positions of each client's examples, where it is known who has which; in place of
            `partition`.

    Returns:
        The positions of every client's training and hold-out examples, and of the server's.

    Raises:
        UnknownNameError: for a partition that does not exist.
        InputError: for numbers or a file that cannot be used.
    """
    divide = lookup(PARTITIONS, partition, "partition")
    for name, fraction in (("holdout", holdout), ("public", public)):
        if not 0 <= fraction < 1:
            raise InputError(f"{name} is {fraction}: give the fraction as a number from 0 to below 1.")
    if seed < 0:
        raise InputError(f"the seed is {seed}: give a whole number from 0 on.")
    if partition_file and partition != "file":
        raise InputError(f"partition {partition!r} reads no partition_file: set partition to 'file', or drop it.")
    everything = torch.arange(len(dataset.y))
    at_server, at_clients = _drawn(everything, public, stream(seed, "public"))
    # A file's positions are those of the whole data set; the other partitions divide what the
    # server has left.
    source = at_clients
    if parts is not None or partition == "file":
        source = everything
    if parts is None:
        owner = None if dataset.owner is None else dataset.owner[source]
        rng = np.random.default_rng(seed)
        parts = divide(dataset.y[source], clients, rng, alpha=alpha, file=partition_file, owner=owner)
    at_each = {c: source[p][~torch.isin(source[p], at_server)] for c, p in parts.items()}
    stratified = holdout_by_class and dataset.y.dim() == 1
    held_out, train = _split_off(at_each, holdout, seed, dataset.y if stratified else None)
    return FederatedData(dataset, train=train, holdout=held_out, public=at_server)


def _split_off(
    parts: dict[ClientId, Tensor], fraction: float, seed: int, labels: Tensor | None
) -> tuple[dict[ClientId, Tensor], dict[ClientId, Tensor]]:
    held_out: dict[ClientId, Tensor] = {}
    train: dict[ClientId, Tensor] = {}
    for c, part in parts.items():
        classes = None if labels is None else labels[part]
        held_out[c], train[c] = _drawn(part, fraction, stream(seed, "holdout", c), classes)
    return held_out, train


def _drawn(
    positions: Tensor, fraction: float, rng: np.random.Generator, classes: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Draw a fraction of the positions, rounded down; return it and the rest, both in order.

    With `classes`, the class of each position, every class gives its share, up to one.
    """
    n = len(positions)
    drawn = torch.zeros(n, dtype=torch.bool)
    count = min(math.floor(fraction * n + 1e-9), max(n - 1, 0))  # 0.29 of 100 are 29
    order = rng.permutation(n)
    if classes is None or not count:
        drawn[order[:count]] = True
    else:  # class after class, at random within a class, at equal distances from a random start
        order = order[np.argsort(classes.numpy()[order], kind="stable")]
        drawn[order[np.floor((np.arange(count) + rng.random()) * n / count).astype(np.int64)]] = True
    return positions[drawn], positions[~drawn]


def _fashion(pixels: NDArray[np.uint8]) -> Tensor:
    return (torch.from_numpy(pixels).float().unsqueeze(1) / 255 - FASHION_MEAN) / FASHION_STD


def _labels(y: NDArray[np.integer]) -> Tensor:
    return torch.from_numpy(y.astype(np.int64))
