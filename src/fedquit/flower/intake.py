# SPDX-License-Identifier: Apache-2.0
"""Erasure requests on their way into the ledger, and whose turn it is.

A request comes with a client's reply or in an operator's file. It is in the ledger before anything else happens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from fedquit.core import ClientId, Request
from fedquit.core.method import Method
from fedquit.errors import RequestError
from fedquit.flower.config import ServerConfig
from fedquit.flower.ledger import Erasure, Ledger
from fedquit.flower.outbox import Inbox
from fedquit.flower.roster import Roster
from fedquit.flower.wire import MOST_PENDING, Pending
from fedquit.running.lifecycle import Turn, next_turn
from fedquit.running.membership import Membership

MOST_REQUESTS = 64  # of a client that takes no part, of each kind
MOST_BETWEEN_ROUNDS = MOST_PENDING  # requests of a client, of each kind, between two rounds of training


class Intake:
    """Takes requests into the ledger.

    Args:
        state: the server's state folder, where operators file requests.
        ledger: which they are written to.
        roster: of all clients that ever were.
        config: of the server.
        say: tells the operator.
    """

    def __init__(
        self, state: Path, ledger: Ledger, roster: Roster, config: ServerConfig, say: Callable[[str], None]
    ) -> None:
        self._inbox = Inbox(state)
        self._ledger = ledger
        self._roster = roster
        self._config = config
        self._say = say
        self._taken: Counter[tuple[ClientId, str]] = Counter()  # requests since the last round of training began

    def hear(self, client: ClientId, pending: Sequence[Pending], settled: Sequence[str]) -> None:
        """Take what a client says beside a reply.

        Args:
            client: who speaks.
            pending: the requests in its outbox.
            settled: the requests whose verdict it has heard.
        """
        self._ledger.note_told(client, settled)
        for request in pending:
            kind = "samples" if request.kind == "samples" else "client"
            self._receive(client, kind, request.request, "client")

    def begin_round(self) -> None:
        """A round of training begins: clients may ask anew."""
        self._taken.clear()

    def take(self) -> bool:
        """Take what the operator filed, and answer clients that take no part; whether any request waits."""
        for filed in self._inbox.waiting():
            try:
                self._receive(self._roster.find(filed.client).number, "client", filed.id, "operator")
            except RequestError as error:
                self._say(f"the operator's request {filed.id} cannot be taken: {error}")
            self._inbox.remove(filed)
        whole_clients_first = sorted(self._ledger.waiting, key=lambda e: e.kind)  # they may bring one back
        for entry in whole_clients_first:
            if entry.client in self._ledger.erased:
                self._take_of_excluded(entry)
        return bool(self._ledger.waiting)

    def next_turn(self, membership: Membership, method: Method) -> tuple[Turn, tuple[str, ...]] | None:
        """Choose what is served next, of each client one request; whole clients come first.

        Args:
            membership: who may ask.
            method: the federation's own.

        Returns:
            The turn and the names of its requests, or None where the first cannot be served at all and has failed.
        """
        whole = [e for e in self._ledger.waiting if e.kind == "client"]
        first_of_each: dict[ClientId, Erasure] = {}
        for entry in whole or self._ledger.waiting:
            first_of_each.setdefault(entry.client, entry)
        waiting = Request(tuple(first_of_each), samples=not whole)
        try:
            turn = next_turn(waiting, membership, method, together=self._config.together)
        except RequestError as error:
            self.fail([first_of_each[waiting.clients[0]]], str(error))
            return None
        chosen = [entry.id for client, entry in first_of_each.items() if client in turn.request.clients]
        return turn, tuple(chosen)

    def fail(self, entries: Sequence[Erasure], reason: str) -> None:
        """Write down that requests cannot be served."""
        self._ledger.change([e.id for e in entries], lambda e: e.now("failed", reason=reason))
        self._ledger.save()
        self._say(f"{', '.join(e.id for e in entries)} failed: {reason}")

    def _receive(self, client: ClientId, kind: str, request: str, source: str) -> None:
        member = self._roster[client]
        if self._asks_without_end(client, kind, source):
            return
        entry = self._ledger.receive(client, kind, request, source, member.authenticated)  # type: ignore[arg-type]
        if entry is None:
            return
        self._taken[client, kind] += 1
        what = "to be forgotten" if kind == "client" else "for some of its samples to be forgotten"
        self._say(f"{entry.id}: {member.title} asks {what} (filed by the {source})")
        if not member.authenticated and not self._config.allow_unauthenticated:
            self.fail(
                [entry],
                "the node has no registered key, so nobody knows who asks; register keys and use TLS, or set "
                "fedquit.allow-unauthenticated = true",
            )

    def _asks_without_end(self, client: ClientId, kind: str, source: str) -> bool:
        """Whether taking one more would keep the server from ending; what is not taken waits in the client's outbox."""
        if client in self._ledger.erased:
            of_this_kind = [e for e in self._ledger.entries.values() if (e.client, e.kind) == (client, kind)]
            return len(of_this_kind) >= MOST_REQUESTS
        return source == "client" and self._taken[client, kind] >= MOST_BETWEEN_ROUNDS

    def _take_of_excluded(self, entry: Erasure) -> None:
        """A client that takes no part asks: it was forgotten, or only left out because no method could serve it."""
        own = [e for e in self._ledger.entries.values() if e.client == entry.client and e.kind == "client"]
        if any(e.status == "done" for e in own):
            reason = "the client had been forgotten already"
            self._ledger.change([entry.id], lambda e: e.now("done", reason=reason))
            self._ledger.save()
        elif entry.kind == "client":
            life = self._ledger.life(sorted(self._roster.members))
            self._ledger.follow(life.readmit(entry.client))  # it is tried again
            self._ledger.save()
        else:
            self.fail(
                [entry],
                "the client takes no part since it could not be forgotten as a whole: ask for that again, which "
                "includes its samples",
            )
