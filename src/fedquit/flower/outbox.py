# SPDX-License-Identifier: Apache-2.0
"""Requests on their way, as files: what a data owner asks of the federation, and what an operator files at the server.

A request is one file. The data owner writes it; the client's replies carry it to the server until the server says what
became of it. It needs no Flower, and no process need be running when a request is filed.
"""

from __future__ import annotations

import dataclasses
import re
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from fedquit.errors import InputError, RequestError
from fedquit.utils.files import read_json, write_json

Kind = Literal["client", "samples"]
_ID = re.compile(r"[0-9a-f]{1,64}")


def now() -> str:
    """The time, as the ledger and the outbox write it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def require_id(text: str, what: str) -> str:
    """Names that come from elsewhere become names of files: refuse all but plain hexadecimal ones."""
    if not _ID.fullmatch(text):
        raise InputError(f"{text[:80]!r} is not the name of a {what}: it must be of the digits 0-9 and a-f.")
    return text


@dataclass(frozen=True)
class Entry:
    """A request of the owner of a client's data."""

    id: str
    kind: Kind
    filed: str
    fraction: float = 0.0  # of the samples, chosen at random by the client
    positions: tuple[int, ...] = ()  # of the samples in the client's data; of a fraction, once they have been chosen
    status: str = "pending"  # pending, served, refused
    reason: str = ""  # of a refusal


class Outbox:
    """The requests of one client, in its home."""

    def __init__(self, home: Path) -> None:
        self.folder = home / "outbox"

    def file(self, *, positions: Sequence[int] = (), fraction: float = 0.0) -> Entry:
        """Ask to be forgotten: as a whole, or some samples."""
        if positions and fraction:
            raise RequestError("give the samples to forget or a fraction of them, not both.")
        if fraction and not 0 < fraction < 1:
            raise RequestError(f"the fraction is {fraction}: give a number between 0 and 1, or leave it out for all.")
        if len(set(positions)) < len(positions) or min(positions, default=0) < 0:
            raise RequestError("the samples to forget must be whole numbers from 0 on, each named once.")
        kind: Kind = "samples" if positions or fraction else "client"
        open_whole = [e for e in self.entries() if e.status != "refused" and e.kind == "client"]
        if open_whole:
            raise RequestError(f"this client has asked to be forgotten already (request {open_whole[0].id}).")
        entry = Entry(secrets.token_hex(8), kind, now(), fraction, tuple(sorted(positions)))
        self._write(entry)
        return entry

    def entries(self) -> list[Entry]:
        """All, in the order in which they were filed."""
        found = [self._read(path) for path in self.folder.glob("*.json")]
        return sorted(found, key=lambda e: (e.filed, e.id))

    def pending(self) -> list[Entry]:
        """What the server has not answered yet."""
        return [e for e in self.entries() if e.status == "pending"]

    def get(self, request: str) -> Entry:
        """One of them."""
        path = self.folder / f"{require_id(request, 'request')}.json"
        if not path.exists():
            raise RequestError(f"request {request} is not in this client's outbox: was its home replaced?")
        return self._read(path)

    def choose(self, request: str, positions: Sequence[int]) -> Entry:
        """Fix which samples a fraction stands for, before anybody acts on them."""
        entry = dataclasses.replace(self.get(request), positions=tuple(sorted(positions)))
        self._write(entry)
        return entry

    def settle(self, request: str, verdict: str) -> None:
        """Write down what became of a request: `served`, or why it was refused."""
        entry, served = self.get(request), verdict == "served"
        if entry.status == "pending" or (served and entry.status == "refused"):  # what the server has done, is done
            changes = {"status": "served"} if served else {"status": "refused", "reason": verdict}
            self._write(dataclasses.replace(entry, **changes))  # type: ignore[arg-type]

    def _write(self, entry: Entry) -> None:
        write_json(self.folder / f"{entry.id}.json", dataclasses.asdict(entry))

    def _read(self, path: Path) -> Entry:
        content = read_json(path)
        return Entry(**{**content, "positions": tuple(content["positions"])})


@dataclass(frozen=True)
class Filed:
    """A request that an operator filed: a whole client, by its key's fingerprint, its name, or its number."""

    id: str
    client: str
    filed: str


class Inbox:
    """Requests that the operator files in the server's state folder; the server takes them into its ledger."""

    def __init__(self, state: Path) -> None:
        self.folder = state / "requests"

    def file(self, client: str) -> Filed:
        """Ask for a client to be forgotten."""
        filed = Filed(secrets.token_hex(8), client, now())
        write_json(self.folder / f"{filed.id}.json", dataclasses.asdict(filed))
        return filed

    def waiting(self) -> Iterator[Filed]:
        """What lies there, oldest first."""
        found = [Filed(**read_json(path)) for path in self.folder.glob("*.json")]
        yield from sorted(found, key=lambda f: (f.filed, f.id))

    def remove(self, filed: Filed) -> None:
        """Once it is in the ledger."""
        (self.folder / f"{require_id(filed.id, 'request')}.json").unlink(missing_ok=True)


def read_positions(path: Path) -> list[int]:
    """The samples that a file names: whole numbers with white space or commas between, counted from 0."""
    try:
        words = path.read_text(encoding="utf-8").replace(",", " ").split()
        positions = [int(word) for word in words]
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read samples from {path} ({error}): write whole numbers, counted from 0.") from error
    if not positions:
        raise InputError(f"{path} names no sample: write their numbers, counted from 0.")
    return positions
