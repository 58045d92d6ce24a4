# SPDX-License-Identifier: Apache-2.0
"""What lies on disk, so that a run survives `kill -9` at any moment.

Every file is whole or not there (`utils.files`). Parameters are safetensors with a checksum; nothing is ever pickled.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from fedquit.core import Memory, Params, Reply, State
from fedquit.core.params import fingerprint, nbytes, placed
from fedquit.errors import StoreError
from fedquit.utils import files

Meta = Mapping[str, Any]
CPU = torch.device("cpu")
END = 10**15 - 1  # a place after all others


def save_params(path: Path, params: Params, meta: Meta | None = None) -> None:
    """Write parameters as safetensors, with a checksum and some JSON beside them."""
    whole: Params = {}
    seen: set[int] = set()
    for n, p in params.items():
        whole[n] = p.detach().cpu().contiguous()
        if whole[n].data_ptr() in seen:  # safetensors wants every tensor to have memory of its own
            whole[n] = whole[n].clone()
        seen.add(whole[n].data_ptr())
    # Safetensors sorts the names; methods that speak of the first or the last layer need them in their own order.
    described = json.dumps({"names": list(whole), "meta": dict(meta or {})})
    files.write_atomic(path, save(whole, metadata={"checksum": _checksum(whole, described), "described": described}))


def _checksum(params: Params, described: str) -> str:
    return hashlib.blake2b(f"{fingerprint(params)}{described}".encode(), digest_size=16).hexdigest()


def load_params(path: Path) -> tuple[Params, Meta]:
    """Read what `save_params` wrote; a damaged file is refused."""
    try:
        with safe_open(path, framework="pt") as file:
            head = file.metadata() or {}
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except (OSError, SafetensorError, ValueError) as error:
        raise _damaged(path, str(error)) from error
    described = head.get("described", "")
    if head.get("checksum") != _checksum(found, described):
        raise _damaged(path, "its checksum does not fit")
    head = json.loads(described)
    return {name: found[name] for name in head["names"]}, head["meta"]


def _damaged(path: Path, why: str) -> StoreError:
    return StoreError(f"the checkpoint {path} is damaged ({why}): delete it and run the same command again.")


@dataclass(frozen=True)
class StateFile:
    """Where a phase stands, on disk."""

    path: Path

    def save(self, state: State, seconds: float, costs: Meta | None = None) -> None:
        """Replace what is there."""
        flat = {f"params:{n}": p for n, p in state.params.items()}
        meta = {"clock": state.clock, "round": state.round, "seconds": seconds, "costs": dict(costs or {})}
        flat |= {f"kept:{name}:{n}": p for name, part in state.kept.items() for n, p in part.items()}
        save_params(self.path, flat, meta)

    def load(self) -> tuple[State, float, Meta] | None:
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
        return State(params, meta["clock"], meta["round"], kept), meta["seconds"], meta["costs"]


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
    is visible at later places, and at that place only to the attempt that wrote it. Below it may lie another memory,
    that of an earlier phase: it is read through, and never changed.
    """

    def __init__(self, folder: Path, below: Memory | None = None, device: torch.device = CPU) -> None:
        self.folder, self.below, self.device = folder, below if below is not None else {}, device
        self.place = END
        self._fresh: set[str] = set()  # written at this place by this attempt
        self._versions: dict[str, list[int]] = {}
        self._gone: set[tuple[str, int]] = set()  # versions that say: deleted here
        for path in sorted(p for p in folder.glob("*@*") if p.suffix in (".safetensors", ".gone")):
            name, _, version = path.stem.rpartition("@")
            versions = self._versions.setdefault(unquote(name), [])
            if int(version) not in versions:
                versions.append(int(version))
            if path.suffix == ".gone":
                self._gone.add((unquote(name), int(version)))

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
                self._gone.discard((key, old))
                versions.remove(old)

    def purge(self, wanted: Callable[[str], bool]) -> None:
        """Delete every version of some entries for good, also one that a kill left beside its mark."""
        for key in [k for k in self._versions if wanted(k)]:
            del self._versions[key]
            self._gone = {(k, v) for k, v in self._gone if k != key}
            self._fresh.discard(key)
        for path in self.folder.glob("*") if self.folder.exists() else ():
            name = unquote(path.name.rpartition("@")[0])
            if name and wanted(name):
                path.unlink(missing_ok=True)

    def _path(self, key: str, version: int) -> Path:
        suffix = "gone" if (key, version) in self._gone else "safetensors"
        return self.folder / f"{quote(key, safe='')}@{version:015d}.{suffix}"

    def _seen(self, key: str) -> int | None:
        versions = self._versions.get(key, [])
        return max((v for v in versions if v < self.place or (v == self.place and key in self._fresh)), default=None)

    def __contains__(self, key: object) -> bool:
        if not isinstance(key, str):
            return False
        seen = self._seen(key)
        return key in self.below if seen is None else (key, seen) not in self._gone

    def __getitem__(self, key: str) -> Params:
        if key not in self:
            raise KeyError(key)
        seen = self._seen(key)
        return self.below[key] if seen is None else placed(load_params(self._path(key, seen))[0], self.device)

    def size_of(self, key: str) -> int:
        """The bytes of an entry's numbers, from the file's head alone."""
        seen = self._seen(key)
        if seen is None:
            return self.below.size_of(key) if isinstance(self.below, DiskMemory) else nbytes(self.below[key])
        path = self._path(key, seen)
        with path.open("rb") as file:
            head = int.from_bytes(file.read(8), "little")
        return path.stat().st_size - 8 - head

    def _wrote(self, key: str) -> None:
        versions = self._versions.setdefault(key, [])
        if self.place not in versions:
            versions.append(self.place)
            versions.sort()
        self._fresh.add(key)

    def __setitem__(self, key: str, params: Params) -> None:
        if (key, self.place) in self._gone:
            self._path(key, self.place).unlink(missing_ok=True)
            self._gone.discard((key, self.place))
        save_params(self._path(key, self.place), params)
        self._wrote(key)

    def __delitem__(self, key: str) -> None:
        if key not in self:
            raise KeyError(key)
        whole = self._path(key, self.place)
        self._gone.add((key, self.place))
        files.write_atomic(self._path(key, self.place), b"")
        whole.unlink(missing_ok=True)
        self._wrote(key)

    def __iter__(self) -> Iterator[str]:
        return (key for key in sorted(self._versions.keys() | set(self.below)) if key in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class PrefixedMemory(MutableMapping[str, Params]):
    """The entries of a memory whose keys begin with a prefix."""

    def __init__(self, memory: Memory, prefix: str) -> None:
        self._memory, self._prefix = memory, prefix

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

    server: DiskMemory
    clients: DiskMemory  # by "client/name"

    @property
    def own(self) -> tuple[DiskMemory, DiskMemory]:
        """Both."""
        return self.server, self.clients

    def of(self, method: str) -> Memory:
        """The server's shelf of one method: methods that watch the same training do not see each other's."""
        return PrefixedMemory(self.server, f"{method}/")

    def stored(self, method: str, at_home: Sequence[str]) -> tuple[int, int]:
        """The bytes that a method keeps at the server, and at all clients together under the names `at_home`."""
        server = sum(self.server.size_of(key) for key in self.server if key.startswith(f"{method}/"))
        clients = sum(self.clients.size_of(key) for key in self.clients if key.partition("/")[2] in at_home)
        return server, clients

    @classmethod
    def open(cls, folder: Path, before: Memories | None = None, device: torch.device = CPU) -> Memories:
        """For a phase whose files lie in that folder; what is read goes to the device, or where it went before."""
        for earlier in before.own if before else ():
            earlier.close()
        below: tuple[Memory | None, Memory | None] = before.own if before else (None, None)
        device = before.server.device if before else device
        server, clients = (DiskMemory(folder / n, b, device) for n, b in zip(("server", "clients"), below, strict=True))
        return cls(server, clients)


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
