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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from fedquit.errors import InputError, RequestError, StoreError
from fedquit.utils.files import read_json, with_checksum, without_checksum, write_json

Kind = Literal["client", "samples"]
_ID = re.compile(r"[0-9a-f]{1,64}")
WITHDRAWN = "withdrawn"  # the verdict on a request that its owner took back before it was served
OPEN = ("pending", "withdrawing")  # statuses of requests that the server has not answered yet
NODE_FILE = "node.json"  # in a home: the node that uses it
CONTACT_FILE = "contact.json"  # in a home: when the server last spoke to its client


def now(timespec: Literal["seconds", "milliseconds"] = "seconds") -> str:
    """The time in UTC, as the ledger and the outbox write it (ISO 8601)."""
    return datetime.now(UTC).isoformat(timespec=timespec)


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
class Receipt:
    """The server's word that it has a request in its ledger."""

    number: str  # in the ledger
    at: str  # when it was received (ISO 8601)
    by: str  # the id of the federation whose server received it


@dataclass(frozen=True)
class Entry:
    """A request in a client's outbox."""

    id: str
    kind: Kind
    filed: str  # when (ISO 8601)
    fraction: float = 0.0  # of the samples, which the client draws at random
    positions: tuple[int, ...] = ()  # of the samples in the client's data; for a fraction, once they are drawn
    status: str = "pending"  # pending, served, refused, withdrawing (until the server knows), withdrawn
    reason: str = ""  # why it was refused
    audit: Mapping[str, Any] = field(default_factory=dict)  # the one-run audit of the model without this client
    receipt: Receipt | None = None  # None: nobody has received it yet, as far as this client knows

    @property
    def received(self) -> str:
        """Who received it and when, or that nobody has, as part of a sentence."""
        if self.receipt is None and self.status not in OPEN:
            return "the server has answered it"  # one without a ledger gives no receipts
        if self.receipt is None:
            return "nobody has received it yet"
        return f"received {self.receipt.at} as {self.receipt.number} by the server of federation {self.receipt.by}"


class Outbox:
    """The requests of one client, as files in its home."""

    def __init__(self, home: Path) -> None:
        self.home = home
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
        whole = [e for e in self.entries() if e.status in ("pending", "served") and e.kind == "client"]
        if whole:
            raise RequestError(f"this client has asked to be forgotten already (request {whole[0].id}).")
        filed = now("milliseconds")  # requests of one second have an order
        entry = Entry(secrets.token_hex(8), kind, filed, fraction, tuple(sorted(positions)))
        self._write(entry)
        return entry

    def entries(self) -> list[Entry]:
        """All requests, in the order in which they were filed."""
        entries = [self._read(path) for path in self.folder.glob("*.json")]
        return sorted(entries, key=lambda e: (e.filed, e.id))

    def pending(self) -> list[Entry]:
        """The requests whose outcome the server has not reported yet."""
        return [e for e in self.entries() if e.status == "pending"]

    def withdrawing(self) -> list[Entry]:
        """The requests that their owner took back, and of which the server has not said yet that it knows."""
        return [e for e in self.entries() if e.status == "withdrawing"]

    def withdraw(self, request: str) -> Entry:
        """Take a request back, which the server may be serving already: then it is served all the same."""
        entry = self.get(request)
        if entry.status not in OPEN:
            raise RequestError(f"request {request} is {entry.status} already: it cannot be taken back any more.")
        entry = dataclasses.replace(entry, status="withdrawing")
        self._write(entry)
        return entry

    def note_receipt(self, request: str, receipt: Receipt) -> None:
        """Write down that the server has received a request; the first receipt stays."""
        entry = self.get(request)
        if entry.receipt is None:
            self._write(dataclasses.replace(entry, receipt=receipt))

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
        elif verdict == WITHDRAWN and entry.status == "withdrawing":
            self._write(dataclasses.replace(entry, status=WITHDRAWN))
        elif verdict not in ("served", WITHDRAWN) and entry.status in OPEN:
            self._write(dataclasses.replace(entry, status="refused", reason=verdict))

    def note_audit(self, request: str, audit: Mapping[str, Any]) -> None:
        """Write what the one-run audit says, with the fields of a row of `results.json`."""
        self._write(dataclasses.replace(self.get(request), audit=dict(audit)))

    def _write(self, entry: Entry) -> None:
        write_json(self.folder / f"{entry.id}.json", dataclasses.asdict(entry))

    def _read(self, path: Path) -> Entry:
        content = _read_request(path)
        given = content.get("receipt")
        receipt = Receipt(**given) if given else None
        return Entry(**{**content, "positions": tuple(content["positions"]), "receipt": receipt})


def _read_request(path: Path) -> Any:  # noqa: ANN401 - JSON is anything
    """The content of a request's file, which must not get lost."""
    try:
        return dict(read_json(path))
    except (StoreError, TypeError, ValueError) as error:
        raise StoreError(
            f"{path} cannot be read: restore it from a backup, or file the request again; keep this file."
        ) from error


AGAIN = "file the request again, and only then move this file away."
REFUSED = ".refused"  # the ending of an operator's file that could not be taken


@dataclass(frozen=True)
class Filed:
    """A request of the operator, for a whole client."""

    id: str
    client: str  # its identity in the roster, its name, or its number
    filed: str  # when (ISO 8601)
    withdraws: str = ""  # instead of a client: the request in the ledger that is taken back


class Inbox:
    """The operator's requests, as files in the server's state directory, until the server enters them in its ledger.

    Args:
        state: the state directory, to whose owner the files belong.
        say: takes a sentence about a file that cannot be read.
    """

    def __init__(self, state: Path, say: Callable[[str], None] = lambda _: None) -> None:
        self.folder = state / "requests"
        self._say = say
        self._named: set[Path] = set()  # files that cannot be read, of which `say` knows

    def file(self, client: str) -> Filed:
        """File a request for a client to be forgotten."""
        filed = Filed(secrets.token_hex(8), client, now())
        self._write(filed)
        return filed

    def withdraw(self, request: str) -> bool:
        """Take a request of the operator back, by its number here or in the ledger; whether that was at once.

        Args:
            request: `r0001` of the ledger, which the server then takes back unless it serves it already, or the id of
                a file that the server has not read yet.
        """
        if _ID.fullmatch(request) and (self.folder / f"{request}.json").exists():
            (self.folder / f"{request}.json").unlink(missing_ok=True)
            return True
        self._write(Filed(secrets.token_hex(8), "", now(), withdraws=request))
        return False

    def _write(self, filed: Filed) -> None:
        write_json(self._path(filed), with_checksum(dataclasses.asdict(filed)))

    def _path(self, filed: Filed) -> Path:
        return self.folder / f"{require_id(filed.id, 'request')}.json"

    @staticmethod
    def _read(path: Path) -> Filed:
        try:
            filed = Filed(**without_checksum(_read_request(path)))
        except (StoreError, TypeError) as error:
            raise StoreError(f"{path} is damaged, or no request: {AGAIN}") from error
        if filed.id != path.stem:
            raise StoreError(f"{path} holds request {filed.id!r}: {AGAIN}")
        return filed

    def waiting(self) -> Iterator[Filed]:
        """The requests that are not in the ledger yet, oldest first; without those that cannot be read."""
        requests = []
        for path in sorted(self.folder.glob("*.json")):
            try:
                requests.append(self._read(path))
            except StoreError as error:
                self._complain(path, error)
        yield from sorted(requests, key=lambda f: (f.filed, f.id))

    def _complain(self, path: Path, error: Exception) -> None:
        """Name a file that cannot be read, once."""
        if path not in self._named:
            self._named.add(path)
            self._say(f"warning: {error}")

    def remove(self, filed: Filed) -> None:
        """Delete the file of a request that is in the ledger."""
        self._path(filed).unlink(missing_ok=True)

    def refuse(self, filed: Filed) -> Path:
        """Put the file of a request that cannot be taken aside, under another name; the file."""
        return self._path(filed).rename(self._path(filed).with_suffix(REFUSED))

    def problems(self) -> list[str]:
        """A sentence for each request that is not taken: it cannot be read, or the server has refused it."""
        sentences: list[str] = []
        for _ in Inbox(self.folder.parent, sentences.append).waiting():
            pass
        refused = sorted(self.folder.glob(f"*{REFUSED}"))
        plain = [sentence.removeprefix("warning: ") for sentence in sentences]
        return plain + [f"the server could not take {path}, its log says why: {AGAIN}" for path in refused]


@dataclass(frozen=True)
class Contact:
    """When the server last spoke to a client."""

    at: str  # ISO 8601
    federation: str = ""

    @property
    def days(self) -> float:
        """Days since then."""
        return (datetime.now(UTC) - datetime.fromisoformat(self.at)).total_seconds() / 86_400


def note_contact(home: Path, federation: str) -> None:
    """Write down in a home that the server has just spoken to its client."""
    write_json(home / CONTACT_FILE, dataclasses.asdict(Contact(now(), federation)))


def last_contact(home: Path) -> Contact | None:
    """When the server last spoke to the client of a home; None if it never did."""
    path = home / CONTACT_FILE
    if not path.exists():
        return None
    try:
        contact = Contact(**read_json(path))
        datetime.fromisoformat(contact.at)
    except (StoreError, TypeError, ValueError) as error:
        raise StoreError(
            f"{path} cannot be read: start the node, which writes it again when the server next speaks to it."
        ) from error
    return contact


def require_used_home(home: Path) -> None:
    """Raise `InputError` for a folder that no node has used: a request filed there would reach nobody."""
    signs = (NODE_FILE, CONTACT_FILE, "memory", "flower")  # the last two: nodes of earlier versions
    if not any((home / sign).exists() for sign in signs):
        raise InputError(
            f"{home} is not the home of a node that was ever started, so nobody would receive the request: give the "
            "folder that the node has as --home."
        )


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
