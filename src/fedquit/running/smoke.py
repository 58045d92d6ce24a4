# SPDX-License-Identifier: Apache-2.0
"""The smallest run of a recipe: seconds on a CPU, and nothing to download.

The network, the method and the kind of request stay. There are a few clients with a few examples,
one round, and in place of published data random data with the same shapes, classes and
preprocessing. The results mean nothing; that the run ends shows that the recipe works.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedquit.core import ClientId
from fedquit.data import load_dataset
from fedquit.data.cifar import CIFAR10, CIFAR100, SIDE
from fedquit.data.cub import IMAGENET_MEAN, IMAGENET_STD, Birds
from fedquit.data.federated import Dataset
from fedquit.data.preprocessing import Pixels
from fedquit.running.recipe import AuditRecipe, DataRecipe, EventRecipe, ModelRecipe, Recipe, RecoverRecipe
from fedquit.utils.names import lookup

STAYING = 2  # clients beside those that a request names
EXAMPLES, TEST_EXAMPLES = 5, 4  # of each client, and of the test set
BATCH = 3  # so that a client takes more than one step
PART = 0.35  # of so few examples, where a recipe sets some apart
LARGEST = 64  # pixels a side that a network reads: a step at 224 takes ResNet-18 many seconds
LETTERS = 65  # of Tiny Shakespeare
CIFARS = {"cifar10": CIFAR10, "cifar100": CIFAR100}


def smoke(recipe: Recipe) -> Recipe:
    """Return the recipe in its smallest size."""
    named = sorted({client for event in recipe.request for client in event.clients})
    number = {client: k for k, client in enumerate(named)}
    clients = len(named) + STAYING
    some = 0 < recipe.train.clients_per_round < recipe.data.clients
    train = replace(
        recipe.train,
        rounds=1,
        epochs=min(recipe.train.epochs, 2.0),
        batch_size=min(recipe.train.batch_size, BATCH),
        clients_per_round=min(recipe.train.clients_per_round, STAYING) if some else 0,
    )
    return replace(
        recipe,
        title=f"{recipe.title} (smoke)".strip(),
        data=_data(recipe.data, clients),
        model=_model(recipe.model),
        train=train,
        request=tuple(_event(event, number) for event in recipe.request),
        recover=_recover(recipe.recover),
        evaluate=replace(recipe.evaluate, relearn=min(recipe.evaluate.relearn, 1)),
        audit=AuditRecipe(),  # so few examples have no room for canaries
    )


def _recover(spec: RecoverRecipe) -> RecoverRecipe:
    """Return a recovery of one round: chance accuracy would end it at once."""
    return replace(spec, until="rounds", max_rounds=1, follow=min(spec.follow, 1))


def _event(event: EventRecipe, number: dict[ClientId, ClientId]) -> EventRecipe:
    return replace(event, clients=tuple(number[c] for c in event.clients), rounds=1)


def _model(spec: ModelRecipe) -> ModelRecipe:
    """Return the network without pretrained weights, which would have to be fetched."""
    return replace(spec, options={**spec.options, "weights": "none"}) if "weights" in spec.options else spec


def _data(spec: DataRecipe, clients: int) -> DataRecipe:
    options: dict[str, Any] = {"examples": clients * EXAMPLES}
    if spec.name in CIFARS or spec.name == "cub200":
        name, options = "images", {**options, "like": spec.name, **spec.options}
    elif spec.name in ("shakespeare", "shakespeare_speakers", "sotu"):
        name, options = "text", {**options, **spec.options, "clients": clients}
    else:
        name, options = "few", {**options, "of": spec.name, "options": dict(spec.options)}
    return replace(
        spec,
        name=f"{__name__}:{name}",
        options=options,
        clients=clients,
        partition="iid" if spec.partition == "file" else spec.partition,  # a file's positions are of the whole set
        partition_file="",
        holdout=max(spec.holdout, PART) if spec.holdout else 0.0,
        public=max(spec.public, PART) if spec.public else 0.0,
    )


def images(
    *, like: str, examples: int, size: int | None = None, augment: bool = True, test_crop: str = "resized"
) -> Dataset:
    """Random pixels, stored and preprocessed as those of a published data set.

    Args:
        like: cifar10, cifar100 or cub200.
        examples: training images.
        size: the side in pixels that the network would read; at most 64 is read.
        augment: whether ordinary training augments the images.
        test_crop: accepted as an option of cub200, without effect.
    """
    if like == "cub200":
        side = min(size or LARGEST, LARGEST)
        classes = Birds().classes
        preprocessing = Pixels(IMAGENET_MEAN, IMAGENET_STD, vary="resized-crop-flip" if augment else "none")
    else:
        kind = lookup(CIFARS, like, "kind of images")
        side = SIDE
        classes = kind.classes
        preprocessing = Pixels(kind.mean, kind.std, vary="rotate-pad-crop-flip" if augment else "none")
        if size not in (None, SIDE):
            read = min(size or SIDE, LARGEST)
            preprocessing = Pixels(kind.mean, kind.std, size=read, vary="enlarge-crop-flip" if augment else "none")
    generator = torch.Generator().manual_seed(0)

    def drawn(count: int) -> tuple[Tensor, Tensor]:
        x = torch.randint(256, (count, 3, side, side), dtype=torch.uint8, generator=generator)
        return x, torch.arange(count) % classes

    return Dataset(*drawn(examples), *drawn(TEST_EXAMPLES), classes, preprocessing)


def text(
    *,
    examples: int,
    window: int = 80,
    clients: int = 1,
    vocabulary: int = LETTERS,
    tokens: str = "characters",
    skip: int = 0,
) -> Dataset:
    """Windows of random tokens; the label of each token is the next one.

    Args:
        examples: training windows.
        window: tokens of one example.
        clients: who own as many windows each.
        vocabulary: how many different tokens.
        tokens: accepted as an option of texts, without effect.
        skip: accepted as an option of texts, without effect.
    """
    generator = torch.Generator().manual_seed(0)
    owner = torch.arange(examples) * clients // examples

    def drawn(count: int) -> tuple[Tensor, Tensor]:
        letters = torch.randint(vocabulary, (count, window + 1), generator=generator)
        return letters[:, :-1].contiguous(), letters[:, 1:].contiguous()

    return Dataset(*drawn(examples), *drawn(TEST_EXAMPLES), vocabulary, owner=owner)


def few(*, of: str, options: dict[str, object], examples: int, folder: str | Path | None = None) -> Dataset:
    """A few examples of another data set, spread evenly over it.

    Args:
        of: the name of the data set.
        options: its options.
        examples: training examples to take.
        folder: the data folder, passed on to the data set.
    """
    whole = load_dataset(of, folder=folder, **options)
    at = _spread(len(whole.y), examples)
    test_at = _spread(len(whole.test_y), TEST_EXAMPLES)
    return Dataset(whole.x[at], whole.y[at], whole.test_x[test_at], whole.test_y[test_at], whole.classes, whole.look)


def _spread(whole: int, count: int) -> Tensor:
    return torch.linspace(0, whole - 1, min(count, whole)).long()
