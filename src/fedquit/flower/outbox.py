# SPDX-License-Identifier: Apache-2.0
"""Erasure requests before they reach the ledger: a client's outbox, and the operator's inbox at the server.

A request is one JSON file. The owner of a client's data writes it to the outbox; the client's replies carry it to the
server until the server reports the outcome. This module needs no Flower, and no process need run when a request is
filed.
"""

from __future__ import annotations

import dataclasses
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from fedquit.errors import InputError, RequestError, StoreError
from fedquit.utils.files import read_json, write_json

Kind = Literal["client", "samples"]
_ID = re.compile(r"[0-9a-f]{1,64}")


def now() -> str:
    """The time in UTC, as the ledger and the outbox write it (ISO 8601)."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def require_id(text: str, what: str) -> str:
    """Refuse an id from outside that is not hexadecimal, because ids become names of files.

    Args:
        text: the id.
        what: what it is the id of, for the error.

    Returns:
        The same id.
    """
    if not _ID.fullmatch(text):
        raise InputError(f"{text[:80]!r} is not the name of a {what}: it must be of the digits 0-9 and a-f.")
    return text


@dataclass(frozen=True)
class Entry:
    """A request in a client's outbox."""

    id: str
    kind: Kind
    filed: str  # when (ISO 8601)
    fraction: float = 0.0  # of the samples, which the client draws at random
    positions: tuple[int, ...] = ()  # of the samples in the client's data; for a fraction, once they are drawn
    status: str = "pending"  # pending, served, refused
    reason: str = ""  # why it was refused
    audit: Mapping[str, Any] = field(default_factory=dict)  # the one-run audit of the model without this client


class Outbox:
    """The requests of one client, as files in its home."""

    def __init__(self, home: Path) -> None:
        self.folder = home / "outbox"

    def file(self, *, positions: Sequence[int] = (), fraction: float = 0.0) -> Entry:
        """File a request: for the whole client, or for some of its samples.

        Args:
            positions: the samples to forget, by position in the client's data, counted from 0.
            fraction: or the fraction of the samples to forget, between 0 and 1.

        Returns:
            The request as it was written.
        """
        if positions and fraction:
            raise RequestError("give the samples to forget or a fraction of them, not both.")
        if fraction and not 0 < fraction < 1:
            raise RequestError(f"the fraction is {fraction}: give a number between 0 and 1, or leave it out for all.")
        if len(set(positions)) < len(positions) or min(positions, default=0) < 0:
            raise RequestError("the samples to forget must be whole numbers from 0 on, each named once.")
        kind: Kind = "samples" if positions or fraction else "client"
        whole = [e for e in self.entries() if e.status != "refused" and e.kind == "client"]
        if whole:
            raise RequestError(f"this client has asked to be forgotten already (request {whole[0].id}).")
        entry = Entry(secrets.token_hex(8), kind, now(), fraction, tuple(sorted(positions)))
        self._write(entry)
        return entry

    def entries(self) -> list[Entry]:
        """All requests, in the order in which they were filed."""
        entries = [self._read(path) for path in self.folder.glob("*.json")]
        return sorted(entries, key=lambda e: (e.filed, e.id))

    def pending(self) -> list[Entry]:
        """The requests whose outcome the server has not reported yet."""
        return [e for e in self.entries() if e.status == "pending"]

    def get(self, request: str) -> Entry:
        """The request with this id."""
        path = self.folder / f"{require_id(request, 'request')}.json"
        if not path.exists():
            raise RequestError(f"request {request} is not in this client's outbox: was its home replaced?")
        return self._read(path)

    def choose(self, request: str, positions: Sequence[int]) -> Entry:
        """Write the samples that were drawn for a fraction, before they are used; the request with them."""
        entry = dataclasses.replace(self.get(request), positions=tuple(sorted(positions)))
        self._write(entry)
        return entry

    def settle(self, request: str, verdict: str) -> None:
        """Write the outcome of a request: `served`, or why it was refused. What was served stays served."""
        entry = self.get(request)
        if verdict == "served" and entry.status != "served":
            self._write(dataclasses.replace(entry, status="served"))
        elif verdict != "served" and entry.status == "pending":
            self._write(dataclasses.replace(entry, status="refused", reason=verdict))

    def note_audit(self, request: str, audit: Mapping[str, Any]) -> None:
        """Write what the one-run audit says, with the fields of a row of `results.json`."""
        self._write(dataclasses.replace(self.get(request), audit=dict(audit)))

    def _write(self, entry: Entry) -> None:
        write_json(self.folder / f"{entry.id}.json", dataclasses.asdict(entry))

    def _read(self, path: Path) -> Entry:
        content = _read_request(path)
        return Entry(**{**content, "positions": tuple(content["positions"])})


def _read_request(path: Path) -> Any:  # noqa: ANN401 - JSON is anything
    """The content of a request's file, which must not get lost."""
    try:
        return dict(read_json(path))
    except (StoreError, TypeError, ValueError) as error:
        raise StoreError(
            f"{path} cannot be read: restore it from a backup, or file the request again; keep this file."
        ) from error


@dataclass(frozen=True)
class Filed:
    """A request of the operator, for a whole client."""

    id: str
    client: str  # its identity in the roster, its name, or its number
    filed: str  # when (ISO 8601)


class Inbox:
    """The operator's requests, as files in the server's state directory, until the server enters them in its ledger."""

    def __init__(self, state: Path) -> None:
        self.folder = state / "requests"

    def file(self, client: str) -> Filed:
        """File a request for a client to be forgotten."""
        filed = Filed(secrets.token_hex(8), client, now())
        write_json(self.folder / f"{filed.id}.json", dataclasses.asdict(filed))
        return filed

    def waiting(self) -> Iterator[Filed]:
        """The requests that are not in the ledger yet, oldest first."""
        requests = [Filed(**_read_request(path)) for path in self.folder.glob("*.json")]
        yield from sorted(requests, key=lambda f: (f.filed, f.id))

    def remove(self, filed: Filed) -> None:
        """Delete the file of a request that is in the ledger."""
        (self.folder / f"{require_id(filed.id, 'request')}.json").unlink(missing_ok=True)


def read_positions(path: Path) -> list[int]:
    """The positions of samples that a text file lists, counted from 0, separated by white space or commas."""
    try:
        words = path.read_text(encoding="utf-8").replace(",", " ").split()
        positions = [int(word) for word in words]
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read samples from {path} ({error}): write whole numbers, counted from 0.") from error
    if not positions:
        raise InputError(f"{path} names no sample: write their numbers, counted from 0.")
    return positions
