# SPDX-License-Identifier: Apache-2.0
"""What the server and the clients keep between rounds: mappings whose entries are versioned by their place in the run.

A question that is asked again after a kill must find what it found the first time. So an entry written at a place is
visible at later places, and at that place only to the attempt that wrote it.

Most of what methods keep is overwritten in the next round, and only the last version is ever read. So entries stay in
RAM, where they were computed, and go to disk with the state that would restore them:

| step of `session.advance` | what the memory does |
|---|---|
| a round begins | versions that were superseded in RAM vanish without ever having been written |
| entries are written | they stay on the GPU up to `Bounds.device`, in RAM up to `Bounds.host`, else on disk |
| a state is to be stored | `flush`: the newest version of every entry is on disk before the state is |
| the state is stored | `settle`: versions that only an earlier state could need are deleted |
| a killed run begins again | `discard`: versions that were written after the stored state are deleted |

A history (FedEraser's) is written once and read much later. An entry that outlives a whole round, and whose key was
never written before, is history: a `BackgroundWriter` puts it on disk while training goes on.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote

import torch

from fedquit.core import Memory, Params
from fedquit.core.params import device_of, nbytes, placed
from fedquit.errors import InputError, StoreError
from fedquit.running.params_file import load_params, numbers_in, save_params
from fedquit.running.writer import BackgroundWriter, on_host
from fedquit.utils import files

CPU = torch.device("cpu")
END = 10**15 - 1  # a place after all others
PART = 16  # a memory may take this part of a device's memory, and of the host's
DEVICE_VARIABLE, HOST_VARIABLE = "FEDQUIT_DEVICE_MEMORY", "FEDQUIT_HOST_MEMORY"


@dataclass(frozen=True)
class Bounds:
    """How many bytes of one memory may lie where; a run has two, the server's and the clients'.

    Args:
        device: on a GPU. What is beyond it moves to the host, the oldest first.
        host: in the host's RAM. What is beyond it moves to disk, the oldest first.
        waiting: in the host's RAM, handed to the background writer. Whoever writes more waits for the disk.
        small: entries up to this size are written by the thread that flushes, one after the other.
    """

    device: int = 2**30
    host: int = 2**30
    waiting: int = 2**30
    small: int = 2**20

    @classmethod
    def of(cls, device: torch.device) -> Bounds:
        """A sixteenth of the GPU's memory and of the host's, unless the environment gives the bytes.

        `FEDQUIT_DEVICE_MEMORY` and `FEDQUIT_HOST_MEMORY` are whole numbers of bytes.
        """
        total = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
        host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return cls(_bytes_of(DEVICE_VARIABLE, total // PART), _bytes_of(HOST_VARIABLE, host // PART))


def _bytes_of(variable: str, default: int) -> int:
    text = os.environ.get(variable, "")
    if not text:
        return default
    if not text.isdecimal():
        raise InputError(f"{variable} is {text!r}: give a whole number of bytes, or leave it out.")
    return int(text)


@dataclass(eq=False)
class _Version:
    """An entry as it was written at one place, or that it was deleted there."""

    place: int
    params: Params | None = None  # in RAM; None: on disk alone, or deleted
    deleted: bool = False
    suffix: str = ""  # of the file that lies at this place: "safetensors", "gone" for deleted, or "" for none
    dirty: bool = False  # whether the file does not say yet what this version does
    size: int = -1  # bytes of the numbers; -1: to be read from the file
    pending: Future[None] | None = None  # the background writer has it


class DiskMemory(MutableMapping[str, Params]):
    """A versioned mapping over a folder; below it may lie another memory, which is read through and never changed.

    Args:
        folder: where the versions lie.
        below: the memory of an earlier phase.
        device: where what is read goes.
        bounds: how much stays in RAM until `flush`. None: every write is on disk before it returns. So is one at the
            place `END`, where no phase drives the memory and nobody would flush it.
    """

    def __init__(
        self,
        folder: Path,
        below: Memory | None = None,
        device: torch.device = CPU,
        bounds: Bounds | None = None,
    ) -> None:
        self.folder = folder
        self.below = below if below is not None else {}
        self.device = device
        self.bounds = bounds
        self.place = END
        self._round = -1  # the place where the round began
        self._settled = -1  # the place of the state that is on disk; -1: unknown
        self._fresh: set[str] = set()  # written at this place by this attempt
        self._overwritten: set[str] = set()  # keys that were written more than once: no history
        self._dirty: dict[tuple[str, int], _Version] = {}
        self._held: dict[str, dict[tuple[str, int], _Version]] = {"device": {}, "host": {}}  # in RAM, the oldest first
        self._bytes = {"device": 0, "host": 0}
        self._writer = BackgroundWriter(bounds.waiting if bounds else 0)
        self._versions: dict[str, list[_Version]] = {}  # of each key, by place
        self._read_folder()

    def _read_folder(self) -> None:
        by_place: dict[tuple[str, int], str] = {}
        for path in self.folder.glob("*@*"):
            name, _, place = path.stem.rpartition("@")
            if path.suffix not in (".safetensors", ".gone"):
                continue
            key = unquote(name), int(place)
            if path.suffix == ".gone":  # beside it a kill may have left what was deleted
                by_place[key] = "gone"
            else:
                by_place.setdefault(key, "safetensors")
        for (name, at), suffix in sorted(by_place.items()):
            self._versions.setdefault(name, []).append(_Version(at, deleted=suffix == "gone", suffix=suffix))

    # Where in the run the memory stands.

    def move(self, place: int) -> None:
        """Go to a place of the run."""
        if place != self.place:
            self.place = place
            self._fresh = set()

    def begin_round(self) -> None:
        """Forget what was superseded in RAM, hand history to the background writer, and raise what went wrong there."""
        self._collect()
        if self.place == self._round:
            return
        last_round, self._round = self._round, self.place
        for key in [key for key, versions in self._versions.items() if len(versions) > 1]:
            for version in self._superseded(key):
                is_later = 0 <= self._settled <= version.place  # than the state on disk: a resumed run would discard it
                if version.dirty or not version.suffix or is_later:
                    self._remove(key, version)
                else:  # the state on disk may need it
                    self._release(key, version)
        if self.bounds is None:
            return
        for (key, place), version in list(self._dirty.items()):
            is_history = place < last_round and key not in self._overwritten and not version.deleted
            if is_history and version.size > self.bounds.small and version.pending is None:
                self._hand_over(key, version)

    def flush(self) -> None:
        """Have the newest version of every entry on disk, so that a run can go on from a state that is stored now."""
        self._collect()
        newest: dict[str, _Version] = {}
        for key, place in self._dirty:
            if key not in newest or newest[key].place < place:
                newest[key] = self._dirty[key, place]
        for key, version in newest.items():
            if version.pending is None:
                self._store(key, version)
        self._writer.finish()
        self._collect()

    def settle(self) -> None:
        """Delete versions that no place from here on can see. The state of this place must be on disk."""
        self._settled = self.place
        for key in list(self._versions):
            for version in self._superseded(key):
                self._remove(key, version)
            (first, *_) = self._versions[key]
            if first.deleted and not first.dirty and first.place < self.place and key not in self.below:
                self._remove(key, first)  # nothing is left that it would hide

    def discard(self) -> None:
        """Delete versions from this place on: a run that was killed wrote them after it had stored its state."""
        for key in list(self._versions):
            for version in [v for v in self._versions[key] if self.place <= v.place < END]:
                self._remove(key, version)

    def close(self) -> None:
        """The phase is over: all is on disk, nothing stays in RAM, and all can be seen."""
        self.flush()
        self._writer.stop()
        for tier in self._held.values():
            for key, place in list(tier):
                self._release(key, tier[key, place])
        self.move(END)

    def stop(self) -> None:
        """The phase was cut off: write nothing more in the background."""
        self._writer.stop()
        for key, place in list(self._dirty):
            version = self._dirty[key, place]
            if version.pending is not None:
                self._finish_quietly(key, version)

    def purge(self, wanted: Callable[[str], bool]) -> None:
        """Delete every version of some entries for good, in RAM and on disk.

        Args:
            wanted: whether an entry, by its key, is to be deleted.
        """
        for key in [k for k in self._versions if wanted(k)]:
            for version in list(self._versions[key]):
                self._remove(key, version)
            self._fresh.discard(key)
        for path in self.folder.glob("*") if self.folder.exists() else ():
            name = unquote(path.name.rpartition("@")[0])
            if name and wanted(name):  # also what a kill left beside its mark
                path.unlink(missing_ok=True)

    # The mapping.

    def written_at(self, key: str) -> int:
        """The place at which the version of an entry that is seen now was written; -1 where there is none here."""
        version = self._visible(key)
        return -1 if version is None else version.place

    def __contains__(self, key: object) -> bool:
        if not isinstance(key, str):
            return False
        version = self._visible(key)
        return key in self.below if version is None else not version.deleted

    def __getitem__(self, key: str) -> Params:
        if key not in self:
            raise KeyError(key)
        version = self._visible(key)
        if version is None:
            return self.below[key]
        params = version.params if version.params is not None else load_params(self._path(key, version))[0]
        return placed(params, self.device)

    def __setitem__(self, key: str, params: Params) -> None:
        self._write(key, _Version(self.place, _own(params), size=nbytes(params)))

    def __delitem__(self, key: str) -> None:
        if key not in self:
            raise KeyError(key)
        self._write(key, _Version(self.place, deleted=True, size=0))

    def __iter__(self) -> Iterator[str]:
        return (key for key in sorted(self._versions.keys() | set(self.below)) if key in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def size_of(self, key: str) -> int:
        """The bytes of an entry's numbers."""
        version = self._visible(key)
        if version is None:
            return self.below.size_of(key) if isinstance(self.below, DiskMemory) else nbytes(self.below[key])
        if version.size < 0:
            version.size = numbers_in(self._path(key, version))
        return version.size

    @property
    def unwritten(self) -> int:
        """The bytes that `flush` would have to write, at most."""
        return sum(version.size for version in self._dirty.values())

    # Versions: which one is seen, and where each lies.

    def _visible(self, key: str) -> _Version | None:
        for version in reversed(self._versions.get(key, ())):
            is_own = version.place == self.place and (key in self._fresh or self.place == END)
            if version.place < self.place or is_own:
                return version
        return None

    def _superseded(self, key: str) -> list[_Version]:
        """Versions that no place from here on can see."""
        return [v for v in self._versions.get(key, ()) if v.place < self.place][:-1]

    def _path(self, key: str, version: _Version, suffix: str = "safetensors") -> Path:
        return self.folder / f"{quote(key, safe='')}@{version.place:015d}.{suffix}"

    def _write(self, key: str, version: _Version) -> None:
        versions = self._versions.get(key, [])
        version.dirty = True
        replaced = next((v for v in versions if v.place == version.place), None)
        if replaced is not None:
            self._finish(key, replaced)
            version.suffix = replaced.suffix
        if self.bounds is None or self.place == END:
            self._store_now(key, version)
            version.params = None
        if versions:
            self._overwritten.add(key)
        if replaced is not None:
            self._forget(key, replaced)
        self._versions[key] = sorted([*self._versions.get(key, ()), version], key=lambda v: v.place)
        self._fresh.add(key)
        if version.dirty:
            self._dirty[key, version.place] = version
            self._hold(key, version)
            self._make_room()

    def _store(self, key: str, version: _Version) -> None:
        """Bring a version to disk, by the background writer where it is large."""
        assert self.bounds is not None
        if version.deleted and not self._hides_something(key, version):
            for older in [v for v in self._versions[key] if v.place < version.place]:
                self._remove(key, older)  # or the next flush would take it for the newest
            self._stored(key, version)
        elif version.deleted or version.size <= self.bounds.small:
            self._store_now(key, version)
            self._stored(key, version)
        else:
            self._hand_over(key, version)

    def _hides_something(self, key: str, version: _Version) -> bool:
        """Whether an entry would come back if it were not written down that it was deleted."""
        older = [v for v in self._versions[key] if v.place < version.place]
        return bool(version.suffix) or key in self.below or any(v.suffix or v.pending for v in older)

    def _store_now(self, key: str, version: _Version) -> None:
        """Write a version's file; what another attempt left at its place is replaced."""
        if version.deleted:
            files.write_atomic(self._path(key, version, "gone"), b"")
            self._path(key, version).unlink(missing_ok=True)
            version.suffix = "gone"
        else:
            assert version.params is not None
            self._path(key, version, "gone").unlink(missing_ok=True)
            save_params(self._path(key, version), version.params)
            version.suffix = "safetensors"
        version.dirty = False

    def _hand_over(self, key: str, version: _Version) -> None:
        """Give a version to the background writer; it is read from the host's memory until it is on disk."""
        assert version.params is not None
        self._unhold(key, version)
        version.params = on_host(version.params)
        self._path(key, version, "gone").unlink(missing_ok=True)
        version.pending = self._writer.submit(self._path(key, version), version.params, version.size)
        self._release_written()

    def _release_written(self) -> None:
        """Let go of what the background writer has brought to disk; errors wait for `_collect`."""
        for (key, _), version in list(self._dirty.items()):
            pending = version.pending
            if pending is not None and pending.done() and not pending.cancelled() and pending.exception() is None:
                self._finish(key, version)

    def _collect(self) -> None:
        """Take note of what the background writer has done; raise what went wrong."""
        errors: list[StoreError] = []
        for (key, _), version in list(self._dirty.items()):
            if version.pending is not None and version.pending.done():
                try:
                    self._finish(key, version)
                except StoreError as error:
                    errors.append(error)
        if errors:
            raise errors[0]

    def _finish(self, key: str, version: _Version) -> None:
        """Wait for the background writer's word on a version; what it has not begun stays in RAM."""
        pending, version.pending = version.pending, None
        if pending is None:
            return
        if pending.cancel() or pending.exception() is not None:
            self._hold(key, version)
            if not pending.cancelled():
                pending.result()
            return
        version.suffix = "safetensors"
        self._stored(key, version)
        version.params = None

    def _stored(self, key: str, version: _Version) -> None:
        version.dirty = False
        self._dirty.pop((key, version.place), None)

    def _remove(self, key: str, version: _Version) -> None:
        """Delete a version, in RAM and on disk."""
        if version.pending is not None:
            self._finish_quietly(key, version)
        self._forget(key, version)
        if version.suffix:
            self._path(key, version).unlink(missing_ok=True)  # before the mark that hides it
            self._path(key, version, "gone").unlink(missing_ok=True)

    def _finish_quietly(self, key: str, version: _Version) -> None:
        """The same, where it does not matter whether the version was written."""
        with contextlib.suppress(StoreError):
            self._finish(key, version)

    def _forget(self, key: str, version: _Version) -> None:
        """Take a version out of the books, but not off the disk."""
        self._unhold(key, version)
        self._dirty.pop((key, version.place), None)
        left = [v for v in self._versions[key] if v is not version]
        if left:
            self._versions[key] = left
        else:
            del self._versions[key]

    # RAM: on the device, then on the host, then not at all.

    def _hold(self, key: str, version: _Version) -> None:
        if version.params is None:
            return
        tier = _tier_of(version.params)
        self._held[tier][key, version.place] = version
        self._bytes[tier] += version.size

    def _unhold(self, key: str, version: _Version) -> None:
        for tier, held in self._held.items():
            if held.get((key, version.place)) is version:
                del held[key, version.place]
                self._bytes[tier] -= version.size

    def _release(self, key: str, version: _Version) -> None:
        """Let go of what lies on disk as well."""
        if not version.dirty:
            self._unhold(key, version)
            version.params = None

    def _make_room(self) -> None:
        """Move the oldest entries from the device to the host, and from the host to disk, until the bounds hold."""
        assert self.bounds is not None
        while self._bytes["device"] > self.bounds.device:
            key, version = self._oldest("device")
            self._release(key, version)
            if version.params is not None:
                self._unhold(key, version)
                version.params = on_host(version.params)
                self._hold(key, version)
        while self._bytes["host"] > self.bounds.host:
            key, version = self._oldest("host")
            if version.dirty:
                self._store(key, version)
            self._release(key, version)

    def _oldest(self, tier: str) -> tuple[str, _Version]:
        (key, _), version = next(iter(self._held[tier].items()))
        return key, version


def _tier_of(params: Params) -> str:
    return "host" if device_of(params).type == "cpu" else "device"


def _own(params: Params) -> Params:
    """The tensors as they are; a view into something much larger is copied, so as not to keep all of it."""
    owned: Params = {}
    for name, tensor in params.items():
        plain = tensor.detach().contiguous()
        is_part = plain.untyped_storage().nbytes() > 2 * plain.nbytes + 1024
        owned[name] = plain.clone() if is_part else plain
    return owned


class PrefixedMemory(MutableMapping[str, Params]):
    """The entries of a memory whose keys begin with a prefix."""

    def __init__(self, memory: Memory, prefix: str) -> None:
        self._memory = memory
        self._prefix = prefix

    def __getitem__(self, key: str) -> Params:
        return self._memory[self._prefix + key]

    def __setitem__(self, key: str, params: Params) -> None:
        self._memory[self._prefix + key] = params

    def __delitem__(self, key: str) -> None:
        del self._memory[self._prefix + key]

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self._prefix + key in self._memory

    def __iter__(self) -> Iterator[str]:
        return (key.removeprefix(self._prefix) for key in self._memory if key.startswith(self._prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)


@dataclass(frozen=True)
class Memories:
    """What the server and the clients keep between rounds: what a phase writes lies over all that came before it."""

    server: DiskMemory  # by "method/name"
    clients: DiskMemory  # by "client/name"

    @property
    def own(self) -> tuple[DiskMemory, DiskMemory]:
        """The server's memory and the clients'."""
        return self.server, self.clients

    def close(self) -> None:
        """The phase is over: both are on disk, and hold nothing in RAM."""
        for memory in self.own:
            memory.close()

    def of(self, method: str) -> Memory:
        """What the server keeps for one method: methods that watch the same training do not see each other's."""
        return PrefixedMemory(self.server, f"{method}/")

    def stored(self, method: str, at_home: Sequence[str]) -> tuple[int, int]:
        """The bytes that a method keeps.

        Args:
            method: its name.
            at_home: the names under which its clients keep something.

        Returns:
            The bytes at the server, and those at all clients together.
        """
        server = sum(self.server.size_of(key) for key in self.server if key.startswith(f"{method}/"))
        clients = sum(self.clients.size_of(key) for key in self.clients if key.partition("/")[2] in at_home)
        return server, clients

    @classmethod
    def open(
        cls,
        folder: Path,
        before: Memories | None = None,
        device: torch.device = CPU,
        bounds: Bounds | None = None,
        homes: Memory | None = None,
    ) -> Memories:
        """The memories of a phase.

        Args:
            folder: where they go to disk.
            before: the memories of the phase before, which is over; the new ones lie over them.
            device: where what is read goes; that of `before`, where it is given.
            bounds: how much of each may stay in RAM; `Bounds.of(device)` unless given.
            homes: what the clients have at home, where there is no phase before.
        """
        if before:
            before.close()
        device = before.server.device if before else device
        bounds = bounds or (before.server.bounds if before else None) or Bounds.of(device)
        return cls(
            DiskMemory(folder / "server", before.server if before else None, device, bounds),
            DiskMemory(folder / "clients", before.clients if before else homes, device, bounds),
        )
