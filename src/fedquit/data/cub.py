# SPDX-License-Identifier: Apache-2.0
"""CUB-200-2011 (Wah et al. 2011): photographs of 200 species of birds, with the official split.

The photographs have different sizes. They are decoded once, into files of equally large images in
the data folder. These are mapped into memory: loading takes seconds, and the system reads the
images that are used.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedquit.data.catalog import (
    CUB200_SOURCE,
    Damaged,
    Progress,
    Source,
    data_folder,
    dataset_lock,
    no_progress,
    user_cache,
)
from fedquit.data.federated import Dataset
from fedquit.data.preprocessing import Pixels
from fedquit.errors import InputError, StoreError
from fedquit.utils.names import lookup

if TYPE_CHECKING:
    from PIL.Image import Image

T = TypeVar("T")
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
DECODED = "decoded"  # the folder of the decoded images
VERSION = 1  # of how images are decoded: another number makes earlier files stale
AT_ONCE = 64  # images decoded before they are written: what bounds the memory
FORMATS = ("JPEG", "PNG")  # no other decoder may read the files


@dataclass(frozen=True)
class Birds:
    """How many images and classes there must be."""

    source: Source = CUB200_SOURCE
    train: int = 5_994
    test: int = 5_794
    classes: int = 200


@dataclass(frozen=True)
class Listing:
    """The content of the publisher's text files, in the order of images.txt."""

    paths: tuple[Path, ...]
    labels: tuple[int, ...]  # from 0
    train: tuple[bool, ...]

    def part(self, train: bool) -> Listing:
        """Return the training images, or the test images."""
        at = [k for k, t in enumerate(self.train) if t == train]
        return replace(
            self,
            paths=tuple(self.paths[k] for k in at),
            labels=tuple(self.labels[k] for k in at),
            train=tuple(train for _ in at),
        )


def cub200(
    *,
    folder: str | Path | None = None,
    size: int = 224,
    test_crop: str = "resized",
    augment: bool = True,
    progress: Progress = no_progress,
) -> Dataset:
    """CUB-200-2011: 5,994 + 5,794 photographs of birds, 200 classes, resized to `size` x `size`.

    Args:
        folder: the data folder; see `fedquit.data.catalog.data_folder`.
        size: the side of an image in pixels.
        test_crop: "resized" resizes test images like training images; "native" takes the centre of
            the photograph as it is, which is what FedQUIT's authors evaluate on.
        augment: whether ordinary training augments the images.
        progress: called while images are decoded.
    """
    return read_birds(Birds(), data_folder(folder), size=size, test_crop=test_crop, augment=augment, progress=progress)


def read_birds(
    kind: Birds,
    folder: Path,
    *,
    size: int,
    test_crop: str = "resized",
    augment: bool = True,
    progress: Progress = no_progress,
) -> Dataset:
    """Read the set from a data folder; images that were decoded before are not decoded again.

    Args:
        kind: how many images and classes there must be.
        folder: the data folder.
        size: the side of an image in pixels.
        test_crop: a name from `CROPS`.
        augment: whether ordinary training augments the images.
        progress: called while images are decoded.
    """
    if size < 1:
        raise InputError(f"size is {size}: give the side of the images in pixels, for example 224.")
    lookup(CROPS, test_crop, "test crop")
    with kind.source.opened(folder) as place:
        listing = read_listing(kind, place)
        parts = (("training", listing.part(True), "resized"), ("test", listing.part(False), test_crop))
        x, test_x = (_decoded(kind, folder, part, size, crop, title, progress) for title, part, crop in parts)
    y, test_y = (torch.tensor(part.labels) for _, part, _ in parts)
    preprocessing = Pixels(IMAGENET_MEAN, IMAGENET_STD, vary="resized-crop-flip" if augment else "none")
    return Dataset(x, y, test_x, test_y, kind.classes, preprocessing)


def check_birds(kind: Birds, folder: Path, *, fast: bool = False, progress: Progress = no_progress) -> str:
    """Check that every image is there and can be decoded; see `fedquit.data.published.Check`."""
    summary = f"{kind.train:,} + {kind.test:,} images, {kind.classes} classes"
    with kind.source.opened(folder) as place, ThreadPoolExecutor(os.cpu_count()) as pool:
        listing = read_listing(kind, place)
        for path in listing.paths:
            _stat(path)
        if fast:
            return f"{summary}; all files are there, not decoded"
        for done, _ in enumerate(_mapped(pool, _check_image, listing.paths), start=1):
            progress("decoding", done, len(listing.paths))
    return f"{summary}; every image can be decoded"


def read_listing(kind: Birds, place: Path) -> Listing:
    """Read the text files, and check them against each other and the publisher's numbers."""
    images = _table(place / "images.txt")
    labels = _numbers(place / "image_class_labels.txt")
    split = _numbers(place / "train_test_split.txt")
    classes = _table(place / "classes.txt")
    for name, table in (("image_class_labels.txt", labels), ("train_test_split.txt", split)):
        if table.keys() != images.keys():
            raise _damaged(place / name, "it does not name the images of images.txt")
    if len(classes) != kind.classes or not all(1 <= label <= kind.classes for label in labels.values()):
        raise _damaged(place / "classes.txt", f"there must be {kind.classes} classes, and labels from 1 to that")
    train = tuple(split[k] == 1 for k in images)
    if (sum(train), len(train) - sum(train)) != (kind.train, kind.test) or not set(split.values()) <= {0, 1}:
        raise _damaged(place / "train_test_split.txt", f"the official split has {kind.train} + {kind.test} images")
    paths = tuple(_inside(place / "images", name) for name in images.values())
    return Listing(paths, tuple(labels[k] - 1 for k in images), train)


def _table(path: Path) -> dict[str, str]:
    """Read lines of a number and a text, in their order."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise _damaged(path, f"it cannot be read: {error}") from error
    pairs = [line.split(maxsplit=1) for line in lines if line.strip()]
    table = {pair[0]: pair[1].strip() for pair in pairs if len(pair) == 2}
    if len(table) < len(pairs):
        raise _damaged(path, "a line is not a number and a text, or a number comes twice")
    return table


def _numbers(path: Path) -> dict[str, int]:
    table = _table(path)
    if not all(value.isascii() and value.isdigit() for value in table.values()):
        raise _damaged(path, "a line does not end in a number")
    return {key: int(value) for key, value in table.items()}


def _inside(folder: Path, name: str) -> Path:
    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        raise _damaged(folder.parent / "images.txt", f"{name!r} lies outside the folder of images")
    return folder / name


def _damaged(path: Path, why: str) -> Damaged:
    return Damaged(f"{path}: {why}")


def _stat(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        raise _damaged(path, f"it cannot be read: {error.strerror}") from error


# ---- images


def _resized(image: Image, size: int) -> Image:
    """Resize the whole image, whatever its proportions."""
    from PIL import Image as Pillow

    return image.resize((size, size), Pillow.Resampling.BILINEAR)


def _native(image: Image, size: int) -> Image:
    """Crop the centre; of an image that is smaller than `size`, resize its largest central square.

    The layer CenterCrop of Keras, which FedQUIT's authors use, does the same.
    """
    width, height = image.size
    side = size if min(width, height) >= size else min(width, height)
    left = (width - side) // 2
    top = (height - side) // 2
    cut = image.crop((left, top, left + side, top + side))
    return cut if side == size else _resized(cut, size)


CROPS: dict[str, Callable[[Image, int], Image]] = {"resized": _resized, "native": _native}


def _open(path: Path) -> Image:
    """Read an image as RGB."""
    from PIL import Image as Pillow

    try:
        with Pillow.open(path, formats=FORMATS) as image:
            return image.convert("RGB")  # some are grey
    except (OSError, SyntaxError, ValueError, Pillow.DecompressionBombError) as error:
        raise _damaged(path, f"the image cannot be decoded: {error}") from error


def _check_image(path: Path) -> None:
    _open(path)


def _decode(path: Path, size: int, crop: str) -> NDArray[np.uint8]:
    pixels = np.asarray(CROPS[crop](_open(path), size), dtype=np.uint8)
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))


def _decoded(kind: Birds, folder: Path, part: Listing, size: int, crop: str, title: str, progress: Progress) -> Tensor:
    """Return the images `(N, 3, size, size)`, mapped from a file that is made if it is not there."""
    home = (folder if os.access(folder, os.W_OK) else user_cache() / "fedquit" / "data") / DECODED
    path = home / f"{kind.source.name}-{size}-{crop}-{_key(part, folder, size, crop)}.npy"
    if not path.exists():
        with dataset_lock(home, kind.source.name):
            if not path.exists():  # nobody else made it meanwhile
                _make(path, part, size, crop, title, progress)
    try:
        # Copy on write: the file cannot be changed through the tensor, and torch needs memory that
        # is writable.
        images = np.load(path, mmap_mode="c", allow_pickle=False)
        if images.shape != (len(part.paths), 3, size, size) or images.dtype != np.uint8:
            raise ValueError("it has another shape")
    except (OSError, ValueError) as error:
        raise StoreError(f"{path} is damaged ({error}): delete it, and it will be made anew.") from error
    return torch.from_numpy(images)


def _key(part: Listing, folder: Path, size: int, crop: str) -> str:
    """Return a hash of all that the decoded images depend on: size, crop, files and their times."""
    digest = hashlib.blake2b(f"{VERSION} {size} {crop}".encode(), digest_size=8)
    for path in part.paths:
        stat = _stat(path)
        digest.update(f"{path.relative_to(folder)} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _make(path: Path, part: Listing, size: int, crop: str, title: str, progress: Progress) -> None:
    for left_over in path.parent.glob(".*.making"):  # of a process that was killed: the lock is ours
        left_over.unlink(missing_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.making")
    shape = (len(part.paths), 3, size, size)
    try:
        with temporary.open("xb") as file:
            # Written rather than mapped: a full disk is then an error, not the end of the process.
            np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": shape})
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                images = _mapped(pool, lambda p: _decode(p, size, crop), part.paths)
                for done, image in enumerate(images, start=1):
                    file.write(image.data)
                    progress(f"decoding {title} images", done, len(part.paths))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise StoreError(
            f"cannot write the decoded images to {path} ({error.strerror or error}): make room for "
            f"{np.prod(shape) / 1e6:,.0f} MB, or take another data folder."
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def _mapped(pool: ThreadPoolExecutor, work: Callable[[Path], T], paths: tuple[Path, ...]) -> Iterator[T]:
    """Yield the results in order, computing at most `AT_ONCE` ahead."""
    for at in range(0, len(paths), AT_ONCE):
        yield from pool.map(work, paths[at : at + AT_ONCE])
