# SPDX-License-Identifier: Apache-2.0
"""The published data sets in one table: how to load, fetch and check each of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, Protocol

from fedquit.data.catalog import (
    CIFAR10_SOURCE,
    CIFAR100_SOURCE,
    CUB200_SOURCE,
    SHAKESPEARE_SOURCE,
    Progress,
    Source,
    unseen,
)
from fedquit.data.cifar import CIFAR10, CIFAR100, check_cifar, cifar10, cifar100
from fedquit.data.cub import Birds, check_birds, cub200
from fedquit.data.federated import Dataset
from fedquit.data.fetch import fetch
from fedquit.data.shakespeare import check_text, shakespeare
from fedquit.errors import InputError
from fedquit.utils.names import lookup

State = Literal["complete", "absent", "damaged"]


class Check(Protocol):
    """Looks at what lies in a data folder: what there is, in words, or an InputError that says what is wrong."""

    def __call__(self, folder: Path, /, *, fast: bool = False, progress: Progress = unseen) -> str:
        """Checksums, numbers and, unless it should be fast, that every image can be decoded."""


@dataclass(frozen=True)
class Published:
    """A data set that others publish."""

    source: Source
    load: Callable[..., Dataset]
    check: Check


@dataclass(frozen=True)
class Finding:
    """What a check found."""

    name: str
    path: Path
    state: State
    details: str


PUBLISHED: dict[str, Published] = {
    "cifar10": Published(CIFAR10_SOURCE, cifar10, partial(check_cifar, CIFAR10)),
    "cifar100": Published(CIFAR100_SOURCE, cifar100, partial(check_cifar, CIFAR100)),
    "cub200": Published(CUB200_SOURCE, cub200, partial(check_birds, Birds())),
    "shakespeare": Published(SHAKESPEARE_SOURCE, shakespeare, partial(check_text, SHAKESPEARE_SOURCE)),
}


def find(name: str) -> Published:
    """The published data set of that name."""
    return lookup(PUBLISHED, name, "published data set")


def check(name: str, folder: Path, *, fast: bool = False, progress: Progress = unseen) -> Finding:
    """Whether a data set lies in the data folder, and whole. That it is not there is no error."""
    published = find(name)
    place = published.source.place(folder)
    if not place.exists():
        return Finding(name, place, "absent", f"get it with `{published.source.command(folder)}`")
    try:
        return Finding(name, place, "complete", published.check(folder, fast=fast, progress=progress))
    except InputError as error:
        return Finding(name, place, "damaged", str(error))


def get(name: str, folder: Path, *, url: str = "", progress: Progress = unseen) -> bool:
    """Fetch a data set; False where it is there already. One that is there and damaged is not touched, but told of."""
    fetched = fetch(find(name).source, folder, url=url, progress=progress)
    found = check(name, folder, fast=True, progress=progress)
    if found.state != "complete":
        raise InputError(f"{found.path} is there but damaged: {found.details}")
    return fetched
