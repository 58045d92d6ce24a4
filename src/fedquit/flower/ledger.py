# SPDX-License-Identifier: Apache-2.0
"""The server's books: every erasure request and what became of it, who has been forgotten, and where the run stands.

One file, replaced whole: a request's state and the phase that the server is in change together or not at all. A request
is written here before anything is done about it. It needs no Flower, so that anybody can read it.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fedquit.core import ClientId, Request
from fedquit.errors import StoreError
from fedquit.flower.outbox import Kind, now
from fedquit.flower.roster import read_books
from fedquit.running.membership import Membership
from fedquit.utils.files import write_json

Status = Literal["received", "started", "unlearned", "recovered", "done", "failed"]
SCHEMA = 1


@dataclass(frozen=True)
class Erasure:
    """A request in the ledger."""

    id: str
    client: ClientId
    kind: Kind
    request: str  # the number in the client's outbox, or of the operator's file
    source: Literal["client", "operator"]
    authenticated: bool
    status: Status = "received"
    history: tuple[tuple[str, str], ...] = ()  # (status, when)
    method: str = ""  # that served it
    fallback: bool = False  # whether that was not the configured one
    reason: str = ""  # why it failed, or why the fallback was taken
    told: bool = False  # whether the client knows what became of it
    accuracy: Mapping[str, float] = field(default_factory=dict)  # before, unlearned, recovered; where it was measured
    costs: Mapping[str, Any] = field(default_factory=dict)  # of unlearning and recovery

    @property
    def open(self) -> bool:
        """Whether anything remains to be done."""
        return self.status not in ("done", "failed")

    @property
    def verdict(self) -> str:
        """For the client: `served`, or why not."""
        return "served" if self.status == "done" else self.reason

    def now(self, status: Status, **changes: Any) -> Erasure:  # noqa: ANN401 - fields of all kinds
        """In a new state."""
        return dataclasses.replace(self, status=status, history=(*self.history, (status, now())), **changes)


@dataclass(frozen=True)
class Phase:
    """What the server is doing: the model lies in the folder with its number."""

    number: int = 0
    kind: Literal["train", "unlearn", "recover"] = "train"
    trained: int = 0  # rounds of ordinary training before this phase
    served: int = 0  # requests, or groups of them, that were begun before
    serving: tuple[str, ...] = ()  # entries of the ledger
    fallback: bool = False
    began: float = 0.0  # when, in seconds of the Unix clock: deadlines count from here

    @property
    def name(self) -> str:
        """Under which its random numbers are drawn: as in the simulator."""
        if self.kind == "train":
            return f"train-{self.served}" if self.served else "train"
        return f"{self.kind}-{self.served - 1}" + ("-fallback" if self.fallback else "")


class Ledger:
    """The books of one federation."""

    def __init__(self, state: Path, claim: Mapping[str, Any]) -> None:
        self.path = state / "ledger.json"
        self.entries: dict[str, Erasure] = {}
        self.phase = Phase()
        self.erased: frozenset[ClientId] = frozenset()
        self.federation = secrets.token_hex(8)
        if self.path.exists():
            self._load(claim)
        self._claim = dict(claim)

    def _load(self, claim: Mapping[str, Any]) -> None:
        content = read_books(self.path)
        if content.get("schema") != SCHEMA:
            raise StoreError(
                f"{self.path} is of another version of fedquit: go on with that one, or take a new folder."
            )
        differing = sorted(k for k in claim if content["claim"].get(k) != claim[k])
        if differing:
            raise StoreError(
                f"{self.path.parent} holds a federation with another {' and '.join(differing)}: set them as they were, "
                "or take another state folder."
            )
        self.federation, self.erased = content["federation"], frozenset(content["erased"])
        self.phase = Phase(**{**content["phase"], "serving": tuple(content["phase"]["serving"])})
        for entry in content["entries"]:
            history = tuple((s, t) for s, t in entry["history"])
            self.entries[entry["id"]] = Erasure(**{**entry, "history": history})

    def save(self) -> None:
        """Replace what is on disk."""
        content = {
            "schema": SCHEMA,
            "federation": self.federation,
            "claim": self._claim,
            "phase": dataclasses.asdict(self.phase),
            "erased": sorted(self.erased),
            "entries": [dataclasses.asdict(e) for e in self.entries.values()],
        }
        write_json(self.path, content)

    def receive(
        self, client: ClientId, kind: Kind, request: str, source: Literal["client", "operator"], authenticated: bool
    ) -> Erasure | None:
        """Write a request down; None where it is known already."""
        if any((e.client, e.request) == (client, request) for e in self.entries.values()):
            return None
        number = f"r{len(self.entries) + 1:04d}"
        entry = Erasure(number, client, kind, request, source, authenticated).now("received")
        self.entries[number] = entry
        self.save()
        return entry

    def change(self, entries: Sequence[str], how: Callable[[Erasure], Erasure]) -> None:
        """Change some entries, in memory: `save` follows."""
        self.entries |= {i: how(self.entries[i]) for i in entries}

    @property
    def waiting(self) -> list[Erasure]:
        """Received, and not begun."""
        return [e for e in self.entries.values() if e.status == "received"]

    @property
    def serving(self) -> list[Erasure]:
        """What the present phase is about."""
        return [self.entries[i] for i in self.phase.serving]

    def membership(self, clients: Sequence[ClientId]) -> Membership:
        """Who of these takes part, and who never will again."""
        return Membership(tuple(c for c in clients if c not in self.erased), self.erased)

    def verdicts(self, client: ClientId) -> dict[str, str]:
        """What a client has not been told."""
        own = [e for e in self.entries.values() if e.client == client and e.source == "client"]
        return {e.request: e.verdict for e in own if not e.open and not e.told}

    def told(self, client: ClientId, requests: Sequence[str]) -> None:
        """The client has heard."""
        own = [e for e in self.entries.values() if e.client == client and e.request in requests]
        news = [e.id for e in own if not e.told and not e.open]
        if news:
            self.change(news, lambda e: dataclasses.replace(e, told=True))
            self.save()


def request_of(entries: Sequence[Erasure]) -> Request:
    """Several entries as one request."""
    return Request(tuple(sorted({e.client for e in entries})), samples=entries[0].kind == "samples")
