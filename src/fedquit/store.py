# SPDX-License-Identifier: Apache-2.0
"""What lies on disk, so that a run survives `kill -9` at any moment.

A file is either whole or not there: it is written beside its place, flushed to the disk, and renamed. Parameters are
safetensors with a checksum; nothing is ever pickled.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
from collections import ChainMap
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from fedquit.core import Memory, Params, Reply, State
from fedquit.errors import StoreError
from fedquit.params import fingerprint

Meta = Mapping[str, Any]
END = 10**15 - 1  # a place after all others


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    """Turn what the system says about a failed write into a sentence."""
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"cannot write {path} ({error.strerror or error}): nothing was changed; free space or take another folder, "
            "then run the same command again to go on."
        ) from error


def write_atomic(path: Path, content: bytes) -> None:
    """Write a file whole or not at all; what was there before stays until the new content is safe on the disk."""
    with _told(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".{path.name[:80]}.{secrets.token_hex(8)}")
        try:
            with beside.open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(path)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise
        _flush_folder(path.parent)


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def append_line(path: Path, line: str) -> None:
    """Add a line to a log, in one write: a kill leaves all of it or nothing."""
    with _told(path):
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, f"{line}\n".encode())
        finally:
            os.close(descriptor)


def write_json(path: Path, value: object) -> None:
    """Write JSON that people can read, atomically."""
    write_atomic(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())


def read_json(path: Path) -> Any:  # noqa: ANN401 - JSON is anything
    """Read JSON, or say that the file is damaged."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise StoreError(f"cannot read {path} ({error}): delete it and run the same command again.") from error


def save_params(path: Path, params: Params, meta: Meta | None = None) -> None:
    """Write parameters as safetensors, with a checksum and some JSON beside them."""
    whole = {n: p.detach().cpu().contiguous() for n, p in params.items()}
    head = {"checksum": fingerprint(whole), "meta": json.dumps(dict(meta or {}))}
    write_atomic(path, save(whole, metadata=head))


def load_params(path: Path) -> tuple[Params, Meta]:
    """Read what `save_params` wrote; a damaged file is refused."""
    try:
        with safe_open(path, framework="pt") as file:
            head = file.metadata() or {}
            params = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except (OSError, SafetensorError, ValueError) as error:
        raise _damaged(path, str(error)) from error
    if head.get("checksum") != fingerprint(params):
        raise _damaged(path, "its checksum does not fit")
    meta: Meta = json.loads(head["meta"])
    return params, meta


def _damaged(path: Path, why: str) -> StoreError:
    return StoreError(f"the checkpoint {path} is damaged ({why}): delete it and run the same command again.")


@dataclass(frozen=True)
class StateFile:
    """Where a phase stands, on disk."""

    path: Path

    def save(self, state: State, seconds: float) -> None:
        """Replace what is there."""
        flat = {f"params:{n}": p for n, p in state.params.items()}
        flat |= {f"kept:{name}:{n}": p for name, part in state.kept.items() for n, p in part.items()}
        save_params(self.path, flat, {"clock": state.clock, "round": state.round, "seconds": seconds})

    def load(self) -> tuple[State, float] | None:
        """What was saved last, or None."""
        if not self.path.exists():
            return None
        flat, meta = load_params(self.path)
        params: Params = {}
        kept: dict[str, Params] = {}
        for name, tensor in flat.items():
            kind, _, rest = name.partition(":")
            if kind == "params":
                params[rest] = tensor
            else:
                part, _, inner = rest.partition(":")
                kept.setdefault(part, {})[inner] = tensor
        return State(params, meta["clock"], meta["round"], kept), meta["seconds"]


@dataclass(frozen=True)
class Journal:
    """The replies of the round at hand, each on disk before it is acted on.

    A client that leaves may be gone when a killed run goes on: what it answered is not asked again.
    """

    folder: Path

    def _path(self, place: str, client: int) -> Path:
        return self.folder / f"{place}-client{client}.safetensors"

    def get(self, place: str, client: int) -> Reply | None:
        """The stored reply, or None."""
        path = self._path(place, client)
        if not path.exists():
            return None
        params, meta = load_params(path)
        return Reply(client, params, meta["examples"], meta["loss"] if meta["loss"] is not None else float("nan"))

    def put(self, place: str, reply: Reply) -> None:
        """Store a reply."""
        loss = reply.loss if reply.loss == reply.loss else None  # JSON has no NaN
        save_params(self._path(place, reply.client), reply.params, {"examples": reply.examples, "loss": loss})

    def clear(self) -> None:
        """Forget the replies of rounds that are over."""
        for path in self.folder.glob("*.safetensors"):
            path.unlink()


class DiskMemory(MutableMapping[str, Params]):
    """A mapping on disk whose entries are versioned by their place in the run, and read one at a time.

    A question that is asked again after a kill must find what it found the first time. So an entry written at a place
    is visible at later places, and at that place only to the attempt that wrote it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.place = END
        self._fresh: set[str] = set()  # written at this place by this attempt
        self._versions: dict[str, list[int]] = {}
        for path in sorted(folder.glob("*@*.safetensors")):
            name, _, version = path.name.removesuffix(".safetensors").rpartition("@")
            self._versions.setdefault(unquote(name), []).append(int(version))

    def move(self, place: int) -> None:
        """Go to a place of the run."""
        if place != self.place:
            self.place, self._fresh = place, set()

    def close(self) -> None:
        """From here on, all that was written can be seen."""
        self.move(END)

    def settle(self) -> None:
        """Drop versions that no place from here on can see."""
        for key, versions in self._versions.items():
            for old in [v for v in versions if v < self.place][:-1]:
                self._path(key, old).unlink(missing_ok=True)
                versions.remove(old)

    def _path(self, key: str, version: int) -> Path:
        return self.folder / f"{quote(key, safe='')}@{version:015d}.safetensors"

    def _visible(self, key: str) -> int | None:
        versions = self._versions.get(key, [])
        return max((v for v in versions if v < self.place or (v == self.place and key in self._fresh)), default=None)

    def __getitem__(self, key: str) -> Params:
        version = self._visible(key)
        if version is None:
            raise KeyError(key)
        params, meta = load_params(self._path(key, version))
        if meta.get("deleted"):
            raise KeyError(key)
        return params

    def __contains__(self, key: object) -> bool:
        with contextlib.suppress(KeyError):
            return isinstance(key, str) and self[key] is not None
        return False

    def _write(self, key: str, params: Params, meta: Meta) -> None:
        save_params(self._path(key, self.place), params, meta)
        versions = self._versions.setdefault(key, [])
        if self.place not in versions:
            versions.append(self.place)
            versions.sort()
        self._fresh.add(key)

    def __setitem__(self, key: str, params: Params) -> None:
        self._write(key, params, {})

    def __delitem__(self, key: str) -> None:
        _ = self[key]
        self._write(key, {}, {"deleted": True})

    def __iter__(self) -> Iterator[str]:
        return (key for key in sorted(self._versions) if key in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


@dataclass(frozen=True)
class Kept:
    """What the server and the clients keep between rounds: what a phase writes lies over all that came before it."""

    server: Memory
    clients: Memory  # by "client/name"
    own: tuple[DiskMemory, ...] = ()  # this phase's

    @classmethod
    def open(cls, folder: Path, before: Kept | None = None) -> Kept:
        """For a phase whose files lie in that folder."""
        for earlier in before.own if before else ():
            earlier.close()
        server, clients = DiskMemory(folder / "server"), DiskMemory(folder / "clients")
        if before is None:
            return cls(server, clients, (server, clients))
        return cls(ChainMap(server, before.server), ChainMap(clients, before.clients), (server, clients))


@contextlib.contextmanager
def locked(folder: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold a folder for one process; the lock goes with the process, however it ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / ".lock").open("w")
    except OSError as error:
        raise StoreError(f"cannot write to {folder} ({error.strerror}): choose another folder.") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError as error:
            raise StoreError(
                f"another process is running in {folder}: wait for it or choose another folder."
            ) from error
        yield
