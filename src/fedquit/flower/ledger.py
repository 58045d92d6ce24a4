# SPDX-License-Identifier: Apache-2.0
"""The server's ledger: every erasure request and what became of it, who has been forgotten, and where the run stands.

One file, replaced whole: a request's state and the phase that the server is in change together or not at all. A request
is written here before anything is done about it. It needs no Flower, so that anybody can read it.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fedquit.core import ClientId, Request
from fedquit.errors import StoreError
from fedquit.flower.outbox import WITHDRAWN, Kind, Receipt, now
from fedquit.flower.roster import FILE as CLIENTS
from fedquit.flower.roster import mend_irreplaceable, read_irreplaceable
from fedquit.flower.twice import RESTORE_STATE, kept, read_json_either, write_json_twice
from fedquit.running.lifecycle import Life, Phase
from fedquit.running.membership import Membership

Status = Literal["received", "started", "unlearned", "recovered", "done", "failed", "withdrawn"]
SCHEMA = 1
FILE = "ledger.json"
PROJECT = "project.json"  # the fingerprint of the project that serves, which the server app notes in the ledger
MODEL_WITHDRAWN = "withdrawal"  # in the place of a method: the model was dropped


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
    audit: Mapping[str, Any] = field(default_factory=dict)  # the one-run audit by the client's own canaries
    since: float = 0.0  # when it was received, on the server's clock (Unix time): its deadline counts from here
    attempts: tuple[float, ...] = ()  # when it was started, each time (Unix time)

    @property
    def open(self) -> bool:
        """Whether anything remains to be done about it."""
        return self.status not in ("done", "failed", "withdrawn")

    @property
    def verdict(self) -> str:
        """What the client is told: `served`, `withdrawn`, or why not."""
        if self.status == "withdrawn":
            return WITHDRAWN
        return "served" if self.status == "done" else self.reason

    @property
    def receipt(self) -> str:
        """When it was received (ISO 8601)."""
        return self.history[0][1] if self.history else ""

    def now(self, status: Status, **changes: Any) -> Erasure:  # noqa: ANN401 - fields of all kinds
        """The entry with a new status, which its history notes."""
        return dataclasses.replace(self, status=status, history=(*self.history, (status, now())), **changes)


class Ledger:
    """The ledger of one federation.

    Args:
        state: the server's state folder.
        claim: what must be the same whenever the folder is used again.
        say: takes a sentence where a damaged ledger was read from its copy.

    Attributes:
        closed: whether the federation has, or ever had, a list of sites.
        project: the fingerprint of the project that it belongs to; "" where that is not known.
    """

    def __init__(self, state: Path, claim: Mapping[str, Any], say: Callable[[str], None] = lambda _: None) -> None:
        self.path = state / FILE
        self.entries: dict[str, Erasure] = {}
        self.phase = Phase()
        self.erased: frozenset[ClientId] = frozenset()
        self.federation = secrets.token_hex(8)
        self.closed = False
        self.project = ""
        if kept(self.path):
            self._load(claim, say)
        self._claim = dict(claim)

    def _load(self, claim: Mapping[str, Any], say: Callable[[str], None]) -> None:
        content = mend_irreplaceable(self.path, dict, say)
        if content.get("schema") != SCHEMA:
            raise StoreError(f"{self.path} is of another version of fedquit: go on with that version.")
        differing = sorted(k for k in claim if content["claim"].get(k) != claim[k])
        if differing:
            raise StoreError(
                f"{self.path.parent} holds a federation with another {' and '.join(differing)}: set them as they were, "
                "or take another state folder."
            )
        self.closed = bool(content["claim"].get("closed"))
        self.project = str(content["claim"].get("project", ""))
        self.federation = content["federation"]
        self.erased = frozenset(content["erased"])
        for entry in content["entries"]:
            self.entries[entry["id"]] = _erasure(entry)
        self.phase = self._with_erasing(_phase(content))

    def _with_erasing(self, phase: Phase) -> Phase:
        """Ledgers without a phase `erase` say that it is due by requests that are recovered while training goes on."""
        due = tuple(e.id for e in self.entries.values() if e.status == "recovered")
        return dataclasses.replace(phase, kind="erase", serving=due) if due and phase.kind == "train" else phase

    def save(self) -> None:
        """Replace what is on disk."""
        bound = {"project": self.project} if self.project else {}
        content = {
            "schema": SCHEMA,
            "federation": self.federation,
            "claim": {**self._claim, "closed": self.closed, **bound},
            "phase": dataclasses.asdict(self.phase),
            "erased": sorted(self.erased),
            "entries": [dataclasses.asdict(e) for e in self.entries.values()],
        }
        write_json_twice(self.path, content)

    def receive(
        self,
        client: ClientId,
        kind: Kind,
        request: str,
        source: Literal["client", "operator"],
        authenticated: bool,
        since: float = 0.0,
    ) -> Erasure | None:
        """Write a request down.

        Args:
            client: who is to be forgotten, or some of whose samples are.
            kind: which of the two.
            request: its number in the client's outbox, or of the operator's file.
            source: who asks.
            authenticated: whether the node has a registered key.
            since: now, on the server's clock (Unix time).

        Returns:
            The entry, or None where the request is known already.
        """
        if self.find(client, request):
            return None
        number = f"r{len(self.entries) + 1:04d}"
        entry = Erasure(number, client, kind, request, source, authenticated, since=since).now("received")
        self.entries[number] = entry
        self.save()
        return entry

    def change(self, entries: Sequence[str], how: Callable[[Erasure], Erasure]) -> None:
        """Change some entries, in memory: `save` follows."""
        self.entries |= {i: how(self.entries[i]) for i in entries}

    @property
    def knows_clients(self) -> bool:
        """Whether it speaks of clients, by numbers that only the roster explains."""
        return bool(self.entries or self.erased or self.phase.trained)

    @property
    def clients(self) -> frozenset[ClientId]:
        """All numbers that it names."""
        return clients_of(self.entries.values(), self.erased)

    @property
    def waiting(self) -> list[Erasure]:
        """Received, and not begun."""
        return [e for e in self.entries.values() if e.status == "received"]

    @property
    def serving(self) -> list[Erasure]:
        """What the present phase is about."""
        return [self.entries[i] for i in self.phase.serving]

    def life(self, clients: Sequence[ClientId]) -> Life:
        """Where the federation of all clients that ever were stands."""
        members = Membership(tuple(c for c in clients if c not in self.erased), self.erased)
        serving = self.serving
        gave_up = self.phase.kind == "erase" and all(e.status == "failed" for e in serving)
        return Life(members, self.phase, request_of(serving) if serving else None, gave_up)

    def follow(self, life: Life) -> None:
        """Write down, in memory, where the federation has got to: `save` follows."""
        self.phase = life.phase
        self.erased = life.membership.erased

    def verdicts(self, client: ClientId) -> dict[str, str]:
        """What became of a client's requests, by their own numbers, as far as it has not been told."""
        own = [e for e in self.entries.values() if e.client == client and e.source == "client"]
        return {e.request: e.verdict for e in own if not e.open and not e.told}

    def receipts(self, client: ClientId) -> dict[str, Receipt]:
        """What a client is told of its requests that are received and not over, by their own numbers."""
        own = [e for e in self.entries.values() if e.client == client and e.source == "client" and e.open]
        return {e.request: Receipt(e.id, e.receipt, self.federation) for e in own}

    def find(self, client: ClientId, request: str) -> Erasure | None:
        """A client's request, by its own number."""
        return next((e for e in self.entries.values() if (e.client, e.request) == (client, request)), None)

    def note_told(self, client: ClientId, requests: Sequence[str]) -> None:
        """Write down that a client has heard what became of these of its requests."""
        own = [e for e in self.entries.values() if e.client == client and e.request in requests]
        newly_told = [e.id for e in own if not e.told and not e.open]
        if newly_told:
            self.change(newly_told, lambda e: dataclasses.replace(e, told=True))
            self.save()


def read_entries(state: Path) -> list[Erasure]:
    """All requests of the ledger in a state directory, for whoever only looks."""
    content = _read(state)
    try:
        return [_erasure(entry) for entry in content["entries"]]
    except (KeyError, TypeError, ValueError) as error:
        raise _no_ledger(state) from error


def read_phase(state: Path) -> tuple[Phase, frozenset[ClientId]]:
    """The phase that a state directory is in, and who has been forgotten, for whoever only looks."""
    content = _read(state)
    try:
        if content["schema"] != SCHEMA:
            raise ValueError(content["schema"])
        return _phase(content), frozenset(content["erased"])
    except (KeyError, TypeError, ValueError) as error:
        raise _no_ledger(state) from error


def clients_of(entries: Iterable[Erasure], erased: Iterable[ClientId]) -> frozenset[ClientId]:
    """All numbers of clients that requests and the list of the forgotten name."""
    return frozenset({*erased, *(entry.client for entry in entries)})


def require_listed(state: Path, named: Collection[ClientId], listed: Collection[ClientId]) -> None:
    """Refuse a list of clients that is older than the ledger: the next client would get another one's number.

    Args:
        state: the server's state folder.
        named: the numbers that the ledger names.
        listed: the numbers in the list of clients.

    Raises:
        StoreError: if the list lacks one.
    """
    missing = sorted(set(named) - set(listed))
    if missing:
        raise StoreError(
            f"{FILE} in {state} speaks of client {missing[0]}, whom {CLIENTS} does not list, as in a folder that was "
            f"copied in part: {RESTORE_STATE}."
        )


def is_closed(state: Path) -> bool:
    """Whether the federation of a state directory has, or ever had, a list of sites."""
    return bool(_read(state)["claim"].get("closed"))


def write_project(state: Path, project: str) -> None:
    """Write for the server app which project serves a state directory: the fingerprint of its authority."""
    write_json_twice(state / PROJECT, {"project": project})


def read_project(state: Path) -> str:
    """The fingerprint that `write_project` wrote; "" where it was never called."""
    if not kept(state / PROJECT):
        return ""
    return str(read_json_either(state / PROJECT, "which project serves")["project"])


def project_of(state: Path) -> str:
    """The fingerprint of the project that a state directory belongs to; "" where its ledger does not say so."""
    return str(_read(state)["claim"].get("project", ""))


def bind_ledger(state: Path, project: str) -> None:
    """Note which project a federation belongs to, while no server runs.

    Args:
        state: the server's state folder.
        project: the fingerprint of its authority.
    """
    content = _read(state)
    if project_of(state) != project:
        write_json_twice(state / FILE, {**content, "claim": {**content["claim"], "project": project}})


def close_ledger(state: Path) -> None:
    """Note that a federation is closed, while no server runs: without its list of sites none starts any more."""
    content = _read(state)
    if not is_closed(state):
        write_json_twice(state / FILE, {**content, "claim": {**content["claim"], "closed": True}})


def _read(state: Path) -> Any:  # noqa: ANN401 - JSON is anything
    path = state / FILE
    if not kept(path):
        raise StoreError(f"there is no ledger in {state}: give the state directory of a server.")
    return read_irreplaceable(path)


def _no_ledger(state: Path) -> StoreError:
    return StoreError(f"{state / FILE} is no ledger of this version of fedquit: restore it from a backup.")


def _phase(content: Mapping[str, Any]) -> Phase:
    return Phase(**{**content["phase"], "serving": tuple(content["phase"]["serving"])})


def _erasure(entry: Mapping[str, Any]) -> Erasure:
    history = tuple((status, when) for status, when in entry["history"])
    attempts = tuple(float(when) for when in entry.get("attempts", ()))
    return Erasure(**{**entry, "history": history, "attempts": attempts})


def request_of(entries: Sequence[Erasure]) -> Request:
    """Several entries as one request."""
    return Request(tuple(sorted({e.client for e in entries})), samples=entries[0].kind == "samples")
