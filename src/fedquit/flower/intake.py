# SPDX-License-Identifier: Apache-2.0
"""Erasure requests on their way into the ledger, and whose turn it is.

A request comes with a client's reply or in an operator's file. It is in the ledger before anything else happens.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from fedquit.core import ClientId, Request
from fedquit.core.method import Method
from fedquit.errors import RequestError
from fedquit.flower.config import ServerConfig
from fedquit.flower.fairness import Queue
from fedquit.flower.ledger import Erasure, Ledger
from fedquit.flower.outbox import Inbox, Kind
from fedquit.flower.roster import Roster
from fedquit.flower.wire import MOST_PENDING, Pending
from fedquit.running.lifecycle import Turn, next_turn
from fedquit.running.membership import Membership

MOST_REQUESTS = 64  # of a client, of each kind: in all if it takes no part, and that wait if it does
MOST_BETWEEN_ROUNDS = MOST_PENDING  # requests of a client, of each kind, between two rounds of training


@dataclass(frozen=True)
class NextTurn:
    """What is served next."""

    turn: Turn
    names: tuple[str, ...]  # of its requests in the ledger


class Intake:
    """Takes requests into the ledger.

    Args:
        state: the server's state folder, where operators file requests.
        ledger: which they are written to.
        roster: of all clients that ever were.
        config: of the server.
        say: tells the operator.
        now: Unix time.
    """

    def __init__(
        self,
        state: Path,
        ledger: Ledger,
        roster: Roster,
        config: ServerConfig,
        say: Callable[[str], None],
        now: Callable[[], float] = time.time,
    ) -> None:
        self._inbox = Inbox(state, say)
        self._ledger = ledger
        self._roster = roster
        self._config = config
        self._say = say
        self._now = now
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
            kind: Kind = "samples" if request.kind == "samples" else "client"
            self._receive(client, kind, request.request, "client")
            if request.withdrawn:
                self.withdraw(self._ledger.find(client, request.request), "its owner")

    def withdraw(self, entry: Erasure | None, who: str) -> None:
        """Take a request back, unless it is being served."""
        if entry is None or entry.status != "received":
            return
        self._ledger.change([entry.id], lambda e: e.now("withdrawn", reason=f"{who} took it back"))
        self._ledger.save()
        self._say(f"{entry.id} is withdrawn: {who} took it back")

    def begin_round(self) -> None:
        """A round of training begins: clients may ask anew."""
        self._taken.clear()

    def take(self) -> bool:
        """Take what the operator filed, and answer clients that take no part; whether any request waits."""
        for filed in self._inbox.waiting():
            if filed.withdraws:
                self._withdraw_for_operator(filed.withdraws)
                self._inbox.remove(filed)
                continue
            try:
                self._receive(self._roster.find(filed.client).number, "client", filed.id, "operator")
            except RequestError as error:
                kept = self._inbox.refuse(filed)
                self._say(f"the operator's request {filed.id} cannot be taken, and is kept as {kept}: {error}")
                continue
            self._inbox.remove(filed)
        whole_clients_first = sorted(self._ledger.waiting, key=lambda e: e.kind)  # they may bring one back
        for entry in whole_clients_first:
            if entry.client in self._ledger.erased:
                self._take_of_excluded(entry)
        return bool(self._ledger.waiting)

    def _withdraw_for_operator(self, number: str) -> None:
        entry = self._ledger.entries.get(number)
        if entry is None or entry.source != "operator" or entry.status != "received":
            self._say(f"{number} is no request of the operator that still waits: nothing is taken back")
            return
        self.withdraw(entry, "the operator")

    @property
    def operator_waits(self) -> bool:
        """Whether the operator has filed something that is not in the ledger yet."""
        return any(True for _ in self._inbox.waiting())

    def next_turn(self, queue: Queue, membership: Membership, method: Method) -> NextTurn | None:
        """Choose what is served next: whole clients first, and who was served longest ago.

        Requests for samples of one client are served as one.

        Args:
            queue: the requests that wait, and which of them can be started.
            membership: who may ask.
            method: the federation's own.

        Returns:
            The turn and the names of its requests; None where none can be started now.
        """
        ready = queue.ready()
        while ready:
            of_one_kind = [e for e in ready if e.kind == ready[0].kind]
            overdue = [e for e in of_one_kind if queue.is_overdue(e)]
            clients = tuple(dict.fromkeys(e.client for e in overdue[:1] or of_one_kind))
            waiting = Request(clients, samples=ready[0].kind == "samples")
            try:
                turn = next_turn(waiting, membership, method, together=self._config.together)
            except RequestError as error:
                if set(clients) <= set(membership.active):  # nobody would be left: the model is dropped instead
                    turn = Turn(replace(waiting, clients=tuple(sorted(clients))))
                else:
                    self.fail([e for e in of_one_kind if e.client == clients[0]], str(error))
                    ready = [e for e in ready if e.client != clients[0]]
                    continue
            if overdue:
                why = "takes no part any more" if clients[0] in queue.revoked else "did not answer before the deadline"
                reason = f"{self._roster[clients[0]].title} {why}"
                turn = replace(turn, fallback=True, reason=turn.reason or reason)
            return NextTurn(turn, self._names(turn, of_one_kind))
        return None

    def _names(self, turn: Turn, ready: Sequence[Erasure]) -> tuple[str, ...]:
        """The requests of a turn: of each client all that wait for samples, or one for the whole client."""
        chosen: list[str] = []
        for client in dict.fromkeys(e.client for e in ready if e.client in turn.request.clients):
            own = [e.id for e in self._ledger.waiting if (e.client, e.kind) == (client, ready[0].kind)]
            chosen += own if turn.request.samples else own[:1]
        return tuple(chosen)

    def fail(self, entries: Sequence[Erasure], reason: str) -> None:
        """Write down that requests cannot be served."""
        self._ledger.change([e.id for e in entries], lambda e: e.now("failed", reason=reason))
        self._ledger.save()
        self._say(f"{', '.join(e.id for e in entries)} failed: {reason}")

    def _receive(self, client: ClientId, kind: Kind, request: str, source: Literal["client", "operator"]) -> None:
        member = self._roster[client]
        if self._asks_without_end(client, kind, source):
            return
        entry = self._ledger.receive(client, kind, request, source, member.authenticated, self._now())
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
        waiting = [e for e in self._ledger.waiting if (e.client, e.kind, e.source) == (client, kind, "client")]
        too_many = self._taken[client, kind] >= MOST_BETWEEN_ROUNDS or len(waiting) >= MOST_REQUESTS
        return source == "client" and too_many

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
