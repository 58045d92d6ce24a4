# SPDX-License-Identifier: Apache-2.0
"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009), from the files that their author publishes.

Those files are pickles, and unpickling can run any code. So nothing is unpickled here: a reader of
our own knows the one layout that these files have (a dictionary of texts, lists and one array of
bytes) and cannot call a function.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedquit.data.catalog import (
    CIFAR10_SOURCE,
    CIFAR100_SOURCE,
    Damaged,
    Progress,
    Source,
    data_folder,
    no_progress,
    require_checksum,
)
from fedquit.data.federated import Dataset
from fedquit.data.preprocessing import Pixels
from fedquit.errors import InputError

SIDE = 32
ROW = 3 * SIDE * SIDE  # bytes of an image: all red, all green, all blue


@dataclass(frozen=True)
class Cifar:
    """The files, sizes and statistics of one of the two sets."""

    source: Source
    train: tuple[str, ...]  # files, in the official order
    test: tuple[str, ...]
    images: int  # in each of the training files
    test_images: int
    labels: str  # the key of the labels
    classes: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    md5: Mapping[str, str]


CIFAR10 = Cifar(
    source=CIFAR10_SOURCE,
    train=tuple(f"data_batch_{k}" for k in range(1, 6)),
    test=("test_batch",),
    images=10_000,
    test_images=10_000,
    labels="labels",
    classes=10,
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2470, 0.2435, 0.2616),
    md5={
        "data_batch_1": "c99cafc152244af753f735de768cd75f",
        "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
        "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
        "data_batch_4": "634d18415352ddfa80567beed471001a",
        "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
        "test_batch": "40351d587109b95175f43aff81a1287e",
        "batches.meta": "5ff9c542aee3614f3951f8cda6e48888",
    },
)
CIFAR100 = Cifar(
    source=CIFAR100_SOURCE,
    train=("train",),
    test=("test",),
    images=50_000,
    test_images=10_000,
    labels="fine_labels",
    classes=100,
    mean=(0.5071, 0.4865, 0.4409),
    std=(0.2673, 0.2564, 0.2762),
    md5={
        "train": "16019d7e3df5f24257cddd939b257f8d",
        "test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
        "meta": "7973b15100ade9c7d40fb424638fde48",
    },
)


def cifar10(*, folder: str | Path | None = None, size: int = SIDE, augment: bool = True) -> Dataset:
    """CIFAR-10: 50,000 + 10,000 colour images of 32x32, 10 classes.

    Args:
        folder: the data folder; see `fedquit.data.catalog.data_folder`.
        size: the side in pixels of what the network reads.
        augment: whether ordinary training augments the images.
    """
    return read_cifar(CIFAR10, data_folder(folder), size=size, augment=augment)


def cifar100(*, folder: str | Path | None = None, size: int = SIDE, augment: bool = True) -> Dataset:
    """CIFAR-100 with its fine labels: 50,000 + 10,000 colour images of 32x32, 100 classes.

    Args:
        folder: the data folder; see `fedquit.data.catalog.data_folder`.
        size: the side in pixels of what the network reads.
        augment: whether ordinary training augments the images.
    """
    return read_cifar(CIFAR100, data_folder(folder), size=size, augment=augment)


def read_cifar(kind: Cifar, folder: Path, *, size: int = SIDE, augment: bool = True) -> Dataset:
    """Read one of the two sets from a data folder; the images stay bytes.

    Args:
        kind: `CIFAR10` or `CIFAR100`.
        folder: the data folder.
        size: the side in pixels of what the network reads.
        augment: whether ordinary training augments the images.
    """
    preprocessing = _preprocessing(kind, size, augment)
    with kind.source.opened(folder) as place:
        for name in (*kind.train, *kind.test):
            require_checksum(place / name, f"md5:{kind.md5[name]}")
        x, y = _part(kind, [place / name for name in kind.train], kind.images)
        test_x, test_y = _part(kind, [place / name for name in kind.test], kind.test_images)
    return Dataset(x, y, test_x, test_y, kind.classes, preprocessing)


def check_cifar(kind: Cifar, folder: Path, *, fast: bool = False, progress: Progress = no_progress) -> str:
    """Check all files of one of the two sets; see `fedquit.data.published.Check`."""
    with kind.source.opened(folder) as place:
        for done, (name, md5) in enumerate(kind.md5.items(), start=1):
            require_checksum(place / name, f"md5:{md5}")
            progress("checksums", done, len(kind.md5))
    train = kind.images * len(kind.train)
    test = kind.test_images * len(kind.test)
    return f"{train:,} + {test:,} images, {kind.classes} classes; {len(kind.md5)} files with the published md5"


def _preprocessing(kind: Cifar, size: int, augment: bool) -> Pixels:
    if size < 1:
        raise InputError(f"size is {size}: give the side that the network reads, 32 as stored or for example 224.")
    if size == SIDE:
        return Pixels(kind.mean, kind.std, vary="rotate-pad-crop-flip" if augment else "none")
    return Pixels(kind.mean, kind.std, size=size, vary="enlarge-crop-flip" if augment else "none")


def _part(kind: Cifar, paths: list[Path], images: int) -> tuple[Tensor, Tensor]:
    """Read files, one after the other, into images `(N, 3, 32, 32)` and labels `(N,)`."""
    x = np.empty((images * len(paths), ROW), dtype=np.uint8)
    y = np.empty(images * len(paths), dtype=np.int64)
    for k, path in enumerate(paths):
        rows = slice(k * images, (k + 1) * images)
        read_batch(path, kind.labels, kind.classes, x[rows], y[rows])
    return torch.from_numpy(x).view(-1, 3, SIDE, SIDE), torch.from_numpy(y)


def read_batch(path: Path, key: str, classes: int, x: NDArray[np.uint8], y: NDArray[np.int64]) -> None:
    """Read one published file.

    Args:
        path: the file.
        key: the key of the labels in it.
        classes: the number of classes.
        x: receives the images, `(N, 3072)`.
        y: receives the labels, `(N,)`.

    Raises:
        Damaged: if the file is not in the published layout.
    """
    try:
        with path.open("rb") as file:
            content = _Reader(file, x).dictionary()
    except OSError as error:
        raise Damaged(f"{path} cannot be read ({error.strerror})") from error
    except _Unexpected as error:
        raise Damaged(f"{path} is not in the published layout ({error})") from error
    labels = content.get(key)
    if "data" not in content or not isinstance(labels, list) or len(labels) != len(y):
        count = len(labels) if isinstance(labels, list) else "no"
        raise Damaged(f"{path} holds {count} {key} for {len(y)} images")
    if not all(isinstance(label, int) and label < classes for label in labels):
        raise Damaged(f"{path} holds {key} that are not numbers below {classes}")
    y[:] = labels


class _Unexpected(Exception):
    """The file is not in the published layout."""


# How the files write an array: numpy's own names as fixed text between fixed signs, never looked up
# and never called. What varies is the shape, the length, and the numbers under which a pickle would
# remember its parts.
_PUT = rb"(?:q.|r.{4})"
_ARRAY = re.compile(
    b"".join(
        [
            rb"cnumpy\.core\.multiarray\n_reconstruct\n" + _PUT + rb"cnumpy\nndarray\n" + _PUT,
            rb"K\x00\x85U\x01b\x87R" + _PUT,
            rb"\(K\x01(?:M(?P<rows2>..)|K(?P<rows1>.))M(?P<columns>..)\x86",  # version 1, and the shape
            rb"cnumpy\ndtype\n" + _PUT + rb"U\x02u1K\x00K\x01\x87R" + _PUT,  # bytes without a sign
            rb"\(K\x03U\x01\|NNN" + rb"J\xff\xff\xff\xff" * 2 + rb"K\x00tb",
            rb"\x89T(?P<length>.{4})",  # row by row, and how many bytes follow
        ]
    ),
    re.DOTALL,
)
_LONGEST_HEADER = 256
Value = str | int | list[str | int]


class _Reader:
    """Reads one published file: a dictionary of texts, numbers, flat lists of these, and one array."""

    def __init__(self, file: BufferedReader, pixels: NDArray[np.uint8]) -> None:
        self._file, self._pixels = file, pixels

    def dictionary(self) -> dict[str, Value]:
        """Read the whole file; the array goes straight into `pixels`, and only its key is returned."""
        self._expect(b"\x80\x02}")
        self._put()
        self._expect(b"(")
        content: dict[str, Value] = {}
        while (sign := self._take(1)) != b"u":
            key = self._scalar(sign)
            if not isinstance(key, str) or key in content:
                raise _Unexpected("a key is no text, or comes twice")
            content[key] = self._array() if key == "data" else self._value()
        self._expect(b".")
        if self._file.read(1):
            raise _Unexpected("something follows its end")
        return content

    def _value(self) -> Value:
        sign = self._take(1)
        return self._list() if sign == b"]" else self._scalar(sign)

    def _list(self) -> list[str | int]:
        self._put()
        items: list[str | int] = []
        while self._file.peek(1)[:1] == b"(":
            self._take(1)
            while (sign := self._take(1)) != b"e":
                items.append(self._scalar(sign))
        return items

    def _scalar(self, sign: bytes) -> str | int:
        if sign == b"K":
            return self._take(1)[0]
        if sign == b"M":
            return int.from_bytes(self._take(2), "little")
        if sign == b"U":
            text = self._take(self._take(1)[0]).decode("latin-1")
            self._put()
            return text
        raise _Unexpected(f"the sign {sign!r} has no place in it")

    def _array(self) -> str:
        header = _ARRAY.match(self._ahead(_LONGEST_HEADER))
        if header is None:
            raise _Unexpected("its images are no array of bytes")
        number = {name: int.from_bytes(sign, "little") for name, sign in header.groupdict().items() if sign}
        rows = number.get("rows2", number.get("rows1", 0))
        if (rows, number["columns"]) != self._pixels.shape or number["length"] != self._pixels.size:
            raise _Unexpected(f"its images have the shape {rows} x {number['columns']}, not {self._pixels.shape}")
        self._take(header.end())
        if self._file.readinto(self._pixels.data.cast("B")) < self._pixels.size:
            raise _Unexpected("it ends in the middle of the images")
        self._expect(b"tb")
        return "read"

    def _ahead(self, count: int) -> bytes:
        at = self._file.tell()
        ahead = self._file.read(count)
        self._file.seek(at)
        return ahead

    def _put(self) -> None:
        """Skip the memo entry that a pickle writes after each object."""
        sign = self._take(1)
        if sign not in (b"q", b"r"):
            raise _Unexpected(f"the sign {sign!r} has no place in it")
        self._take(1 if sign == b"q" else 4)

    def _expect(self, signs: bytes) -> None:
        if (actual := self._take(len(signs))) != signs:
            raise _Unexpected(f"it has {actual!r} where {signs!r} belongs")

    def _take(self, count: int) -> bytes:
        taken = self._file.read(count)
        if len(taken) < count:
            raise _Unexpected("it ends too early")
        return taken
