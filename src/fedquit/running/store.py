# SPDX-License-Identifier: Apache-2.0
"""What a run leaves on disk, so that it survives `kill -9` at any moment: states, journals, folders held by a process.

Every file is whole or not there (`utils.files`). What methods keep between rounds is in `running.memory`.
"""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fedquit.core import Effort, Params, Reply, State
from fedquit.errors import StoreError
from fedquit.running.memory import END, Bounds, DiskMemory, Memories, PrefixedMemory
from fedquit.running.params_file import Meta, load_params, save_params

__all__ = [
    "END",
    "Bounds",
    "DiskMemory",
    "Journal",
    "Memories",
    "PrefixedMemory",
    "StateFile",
    "load_params",
    "locked",
    "save_params",
]


@dataclass(frozen=True)
class StateFile:
    """The state of a phase after its last stored round, on disk."""

    path: Path

    def save(self, state: State, seconds: float, costs: Meta | None = None) -> None:
        """Replace the stored state.

        Args:
            state: the model, its clock and round, and what the method carries from round to round.
            seconds: what the phase has taken so far.
            costs: the fields of `Costs` so far.
        """
        flat = {f"params:{name}": tensor for name, tensor in state.params.items()}
        for part, tensors in state.kept.items():
            flat |= {f"kept:{part}:{name}": tensor for name, tensor in tensors.items()}
        meta = {"clock": state.clock, "round": state.round, "seconds": seconds, "costs": dict(costs or {})}
        save_params(self.path, flat, meta)

    def load(self) -> tuple[State, float, Meta] | None:
        """The state, the seconds and the costs that were saved last, or None."""
        if not self.path.exists():
            return None
        flat, meta = load_params(self.path)
        params: Params = {}
        own: dict[str, Params] = {}  # what the method carries
        for name, tensor in flat.items():
            kind, _, rest = name.partition(":")
            if kind == "params":
                params[rest] = tensor
            else:
                part, _, inner = rest.partition(":")
                own.setdefault(part, {})[inner] = tensor
        return State(params, meta["clock"], meta["round"], own), meta["seconds"], meta["costs"]


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
        loss = meta["loss"] if meta["loss"] is not None else float("nan")
        efforts = tuple(Effort(*effort) for effort in meta.get("efforts", ()))
        return Reply(client, params, meta["examples"], loss, efforts)

    def put(self, place: str, reply: Reply) -> None:
        """Store a reply."""
        loss = reply.loss if reply.loss == reply.loss else None  # JSON has no NaN
        meta: dict[str, object] = {"examples": reply.examples, "loss": loss}
        if reply.efforts:
            meta["efforts"] = [[effort.examples, effort.steps] for effort in reply.efforts]
        save_params(self._path(place, reply.client), reply.params, meta)

    def clear(self) -> None:
        """Forget the replies of rounds that are over."""
        for path in self.folder.glob("*.safetensors"):
            path.unlink()


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
