# SPDX-License-Identifier: Apache-2.0
"""The published data sets in small, from the folder `samples`, and the real ones where they can be had."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fedquit.data.catalog import SHAKESPEARE_SOURCE, Source
from fedquit.data.cifar import CIFAR10, CIFAR100, Cifar
from fedquit.data.cub import Birds

SAMPLES = Path(__file__).parent / "samples"
SHARED = Path(__file__).parents[3] / "shared" / "data"
PARTITIONS = SHARED / "partitions"


def md5(path: Path) -> str:
    return hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()


def in_small(kind: Cifar, folder: Path, images: int, test_images: int) -> Cifar:
    """The same layout with fewer images, and the checksums of what lies in that folder now."""
    checksums = {name: md5(folder / kind.source.entry / name) for name in kind.md5}
    return replace(kind, images=images, test_images=test_images, md5=checksums)


def small_cifar100(folder: Path = SAMPLES) -> Cifar:
    return in_small(CIFAR100, folder, 3, 2)


def small_cifar10(folder: Path = SAMPLES) -> Cifar:
    return in_small(CIFAR10, folder, 1, 1)


SMALL_BIRDS = Birds(train=3, test=2, classes=3)


def small_text(path: Path = SAMPLES / SHAKESPEARE_SOURCE.entry) -> Source:
    return replace(SHAKESPEARE_SOURCE, checksum=f"md5:{md5(path)}")


def copied(entry: str, folder: Path) -> Path:
    """A copy of a sample that a test may change."""
    if (SAMPLES / entry).is_dir():
        shutil.copytree(SAMPLES / entry, folder / entry)
    else:
        shutil.copy2(SAMPLES / entry, folder / entry)
    return folder / entry


def unpacked(name: str, folder: Path) -> Path:
    """A real data set, in the publisher's layout."""
    if not (SHARED / "unpack.py").exists():
        pytest.skip(f"{SHARED} is not here: the real data sets are tried where it is")
    command = [sys.executable, str(SHARED / "unpack.py"), name, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "not here yet" in done.stderr:
        own = Path(os.environ.get("FEDQUIT_DATA", folder))
        if (own / CIFAR10.source.entry).exists():
            return own
        pytest.skip(f"{done.stderr.strip()}, nor in $FEDQUIT_DATA")
    assert done.returncode == 0, done.stderr
    return folder
