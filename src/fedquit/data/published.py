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
    SOTU_SOURCE,
    Progress,
    Source,
    no_progress,
)
from fedquit.data.cifar import CIFAR10, CIFAR100, check_cifar, cifar10, cifar100
from fedquit.data.cub import Birds, check_birds, cub200
from fedquit.data.federated import Dataset
from fedquit.data.fetch import fetch
from fedquit.data.shakespeare import check_text, shakespeare
from fedquit.data.speakers import ADDRESSES, check_addresses, sotu
from fedquit.errors import InputError
from fedquit.utils.names import lookup

State = Literal["complete", "absent", "damaged"]


class Check(Protocol):
    """A function that checks one data set in a data folder."""

    def __call__(self, folder: Path, /, *, fast: bool = False, progress: Progress = no_progress) -> str:
        """Check the files; return, in words, what there is, or raise an InputError that says what is wrong.

        Args:
            folder: the data folder.
            fast: check checksums and numbers, but do not decode every image.
            progress: called with each step.
        """


@dataclass(frozen=True)
class Published:
    """A published data set: where it comes from, how to load it, and how to check it."""

    source: Source
    load: Callable[..., Dataset]
    check: Check


@dataclass(frozen=True)
class Finding:
    """The result of a check."""

    name: str
    path: Path
    state: State
    details: str


PUBLISHED: dict[str, Published] = {
    "cifar10": Published(CIFAR10_SOURCE, cifar10, partial(check_cifar, CIFAR10)),
    "cifar100": Published(CIFAR100_SOURCE, cifar100, partial(check_cifar, CIFAR100)),
    "cub200": Published(CUB200_SOURCE, cub200, partial(check_birds, Birds())),
    "shakespeare": Published(SHAKESPEARE_SOURCE, shakespeare, partial(check_text, SHAKESPEARE_SOURCE)),
    "sotu": Published(SOTU_SOURCE, sotu, partial(check_addresses, SOTU_SOURCE, ADDRESSES)),
}


def find(name: str) -> Published:
    """Return the published data set of that name."""
    return lookup(PUBLISHED, name, "published data set")


def check(name: str, folder: Path, *, fast: bool = False, progress: Progress = no_progress) -> Finding:
    """Check whether a data set lies in the data folder and is complete; its absence is no error.

    Args:
        name: the data set.
        folder: the data folder.
        fast: do not decode every image.
        progress: called with each step.
    """
    published = find(name)
    place = published.source.place(folder)
    if not place.exists():
        return Finding(name, place, "absent", f"get it with `{published.source.command(folder)}`")
    try:
        return Finding(name, place, "complete", published.check(folder, fast=fast, progress=progress))
    except InputError as error:
        return Finding(name, place, "damaged", str(error))


def get(name: str, folder: Path, *, url: str = "", progress: Progress = no_progress) -> bool:
    """Fetch a data set from its publisher.

    Args:
        name: the data set.
        folder: the data folder.
        url: another address of the publisher's file.
        progress: called with each step.

    Returns:
        Whether it was fetched; False where it was there already.

    Raises:
        InputError: if it is there and damaged; it is left as it is.
    """
    fetched = fetch(find(name).source, folder, url=url, progress=progress)
    finding = check(name, folder, fast=True, progress=progress)
    if finding.state != "complete":
        raise InputError(f"{finding.path} is there but damaged: {finding.details}")
    return fetched
