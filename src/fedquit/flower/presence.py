# SPDX-License-Identifier: Apache-2.0
"""Which clients are online, and behind which node id each of them is.

A node that appears is asked once for its number of examples and its pending erasure requests. Its identity comes from
the key that the operator registered (`fedquit.flower.identity`); the roster maps the identity to a client number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from flwr.proto.node_pb2 import NodeInfo

from fedquit.core import ClientId
from fedquit.errors import FedquitError
from fedquit.flower import wire
from fedquit.flower.identity import Sites, identity_of, is_registered, takes_part
from fedquit.flower.judgement import counted_examples
from fedquit.flower.outbox import Receipt
from fedquit.flower.roster import Identity, Member, Roster
from fedquit.flower.transport import LONGEST_POLL, PATIENCE, OutgoingMessage, Transport

MAX_NAMED = 12  # clients that are announced one by one
MAX_BACKOFF = 4  # doublings of the time for which a silent node is left alone

OnRequests = Callable[[ClientId, Sequence[wire.Pending], Sequence[str]], None]
"""Called with a client, the requests in its outbox, and the ids of requests whose outcome it has received."""

Verdicts = Callable[[ClientId], Mapping[str, str]]
"""The outcomes that a client has not received yet: "served" or a reason, by request id."""


Receipts = Callable[[ClientId], Mapping[str, Receipt]]
"""The receipts of a client's requests that are not over, by request id."""


class NodesMissing(FedquitError):
    """Too few nodes are online for a round to begin."""


@dataclass(frozen=True)
class _Introduction:
    """What a node that appeared says about itself."""

    node: int
    identity: Identity
    examples: int  # that count
    said: int  # that it says it has
    pending: tuple[wire.Pending, ...]
    settled: tuple[str, ...]


@dataclass(frozen=True)
class _Backoff:
    """How often a node did not say who it is, and when it is asked again (Unix time)."""

    failures: int = 0
    until: float = 0.0


@dataclass
class Presence:
    """The clients that are online."""

    transport: Transport
    roster: Roster
    on_requests: OnRequests
    verdicts: Verdicts
    timeout: float  # seconds for a node's answer about itself
    sites: Callable[[], Sites | None] = lambda: None  # who takes part now, in a closed federation
    receipts: Receipts = lambda _: {}
    federation: str = ""  # its id, which clients note beside the time of the last contact
    here: dict[ClientId, int] = field(default_factory=dict)  # the node id of every client that is online
    _clients: dict[int, ClientId] = field(default_factory=dict)  # the client behind each node id
    _backoffs: dict[int, _Backoff] = field(default_factory=dict)  # of nodes that did not say who they are

    def refresh(self) -> None:
        """Update `here`; nodes that are new are asked for their examples and pending requests."""
        sites = self.sites()
        nodes = {n.node_id: n for n in self.transport.grid.get_nodes() if takes_part(n, sites)}
        now = self.transport.clock.now()
        # A node that left and came back is asked at once.
        self._backoffs = {node: backoff for node, backoff in self._backoffs.items() if node in nodes}
        new_nodes = []
        for node, info in nodes.items():
            if node not in self._clients and self._backoffs.get(node, _Backoff()).until <= now:
                new_nodes.append(info)
        if new_nodes:
            self._meet(new_nodes)
        self.here = {self._clients[node]: node for node in sorted(nodes) if node in self._clients}
        self.roster.note_seen(self.here, now)

    def is_mute(self, client: ClientId) -> bool:
        """Whether a client is online, did not answer a moment ago, and is left alone for a while."""
        backoff = self._backoffs.get(self.here[client]) if client in self.here else None
        return backoff is not None and backoff.until > self.transport.clock.now()

    def sweep(self, clients: Sequence[ClientId], *, also_mute: bool = False) -> None:
        """Ask these clients, as far as they are online, for pending requests, and send them their verdicts.

        Args:
            clients: whom to ask.
            also_mute: whether those as well that did not answer a moment ago: everybody waits for them.
        """
        self.refresh()
        asked = {self.here[c]: c for c in clients if c in self.here and (also_mute or not self.is_mute(c))}
        for node, body in self._query(list(asked), dict(asked)):
            client = asked[node]
            try:
                pending, settled = wire.requests_from_body(body)
                examples = wire.examples_from_body(body)
            except wire.InvalidMessage as error:
                self.transport.say(f"{self.roster[client].title}: {error}")
            else:
                self.roster.note({client: self.counted(client, examples)}, {client: examples})
                self.on_requests(client, pending, settled)

    def revoked(self) -> set[ClientId]:
        """The clients whose site takes no part any more, in a closed federation."""
        sites = self.sites()
        if sites is None:
            return set()
        keys = {f"key:{site.identity}" for site in sites.values()}
        return {number for number, member in self.roster.members.items() if member.key not in keys}

    def enrolled(self, client: ClientId) -> int | None:
        """How many examples the operator agreed with a client's site; None where the federation is not closed."""
        return _enrolled(self.roster[client].key, self.sites())

    def counted(self, client: ClientId, said: int, *, leaving: bool = False) -> int:
        """How many examples a client counts for that says it has so many, see `counted_examples`."""
        return _counted(said, self.enrolled(client), self.roster[client], leaving=leaving)

    def fewest(self, client: ClientId) -> int:
        """How many examples a client must have used when it leaves: those it was enrolled with and has not erased.

        0 where the federation is not closed, or the client has not said yet how many it has erased.
        """
        member = self.roster[client]
        enrolled = self.enrolled(client)
        return 0 if enrolled is None or member.before_erasure else _counted(enrolled, enrolled, member)

    def wait(self, enough: Callable[[], bool], what: str, missing: Callable[[], str], timeout: float) -> None:
        """Wait until enough nodes are online.

        Args:
            enough: whether the wait is over, evaluated after each `refresh`.
            what: what is waited for, as the beginning of a sentence to the operator.
            missing: who is still missing.
            timeout: seconds to wait at most.

        Raises:
            NodesMissing: when the time is up.
        """
        clock = self.transport.clock
        began = clock.now()
        last_report = -math.inf
        self.refresh()
        while not enough():
            waited = clock.now() - began
            sentence = f"{what}; after {waited:.0f} s still missing: {missing()}"
            if waited >= timeout:
                raise NodesMissing(f"{sentence}. Start the missing SuperNodes, or ask for fewer, and run again.")
            if clock.now() - last_report >= PATIENCE:
                last_report = clock.now()
                self.transport.say(f"waiting up to {timeout:.0f} s: {sentence}")
            clock.sleep(min(LONGEST_POLL, max(0.1, timeout - waited)))
            self.refresh()

    def _meet(self, new_nodes: Sequence[NodeInfo]) -> None:
        """Enrol the clients behind nodes that appeared, and pass their pending requests on."""
        introductions = list(self._introductions(new_nodes))
        said = {i.identity.key: i.said for i in introductions}
        self.roster.enrol([(i.identity, i.examples) for i in introductions], said)
        by_client: dict[ClientId, _Introduction] = {}
        for introduction in introductions:
            member = self.roster.by_key(introduction.identity.key)
            assert member is not None
            by_client[member.number] = introduction
        # A client that comes back behind a new node id must not be asked behind its old one.
        self._clients = {node: client for node, client in self._clients.items() if client not in by_client}
        self._clients |= {introduction.node: client for client, introduction in by_client.items()}
        self._announce(sorted(by_client))
        for client, introduction in sorted(by_client.items()):
            self.on_requests(client, introduction.pending, introduction.settled)

    def _introductions(self, new_nodes: Sequence[NodeInfo]) -> Iterator[_Introduction]:
        sites = self.sites()
        infos = {n.node_id: n for n in new_nodes}
        known = {node: self._known_client(info) for node, info in infos.items()}
        for node, body in self._query(list(infos), known):
            identity = identity_of(infos[node], body.get("partition"), sites)
            if identity is None:
                self._back_off(node, "it has neither a registered key nor a partition-id")
                continue
            try:
                examples = wire.examples_from_body(body)
                pending, settled = wire.requests_from_body(body)
            except wire.InvalidMessage as error:
                self._back_off(node, str(error))
            else:
                counted = _counted(examples, _enrolled(identity.key, sites), self.roster.by_key(identity.key))
                if counted != examples:
                    self.transport.say(
                        f"{identity.name} says that it has {examples} examples and counts for the {counted} that it "
                        "was enrolled with"
                    )
                yield _Introduction(node, identity, counted, examples, pending, settled)

    def _known_client(self, info: NodeInfo) -> ClientId | None:
        """The client whose registered key this node has; None for one that is new or not registered."""
        identity = identity_of(info, None, self.sites()) if is_registered(info) else None
        member = self.roster.by_key(identity.key) if identity else None
        return member.number if member else None

    def _query(
        self, nodes: Sequence[int], clients: Mapping[int, ClientId | None]
    ) -> Iterator[tuple[int, dict[str, object]]]:
        """Ask nodes about themselves; the bodies of the valid answers. `clients` are those known behind the nodes."""
        messages = []
        for node in nodes:
            client = clients.get(node)
            verdicts = dict(self.verdicts(client)) if client is not None else {}
            received = wire.receipts_to_body(self.receipts(client)) if client is not None else {}
            question = {"verdicts": verdicts, "received": received, "federation": self.federation}
            messages.append(OutgoingMessage(node, wire.QUERY, wire.body_to_records(question)))
        for message, reply in self.transport.exchange(messages, self.timeout):
            try:
                if isinstance(reply, str):
                    raise wire.InvalidMessage(reply)
                body = wire.body_from_records(reply.content)
            except wire.InvalidMessage as error:
                self._back_off(message.node, str(error))
            else:
                self._backoffs.pop(message.node, None)
                yield message.node, body

    def _back_off(self, node: int, reason: str) -> None:
        """Leave a node alone for a while, longer each time, because every round waits while it is asked."""
        failures = min(self._backoffs.get(node, _Backoff()).failures + 1, MAX_BACKOFF)
        self._backoffs[node] = _Backoff(failures, self.transport.clock.now() + PATIENCE * 2**failures)
        self.transport.say(f"node {node} did not say who it is: {reason}")

    def _announce(self, clients: Sequence[ClientId]) -> None:
        members = [self.roster[c] for c in clients]
        named = members[:MAX_NAMED]
        others = members[MAX_NAMED:]
        for member in named:
            self.transport.say(f"{member.title} is here, with {member.examples} examples{_suffix(member)}")
        if others:
            examples = sum(m.examples for m in others)
            self.transport.say(f"and {len(others)} more are here, with {examples} examples")


def _enrolled(key: str, sites: Sites | None) -> int | None:
    """How many examples the site with this identity was enrolled with; none for one that takes no part any more."""
    if sites is None:
        return None
    return next((site.examples for site in sites.values() if key == f"key:{site.identity}"), 0)


def _counted(said: int, enrolled: int | None, member: Member | None, *, leaving: bool = False) -> int:
    """How many examples count; what was erased of another number than is agreed now is in the new one."""
    erased = 0
    if member and member.enrolled == enrolled:
        erased = member.erased_samples + (max(0, member.before_erasure - said) if not leaving else 0)
    return counted_examples(said, enrolled, erased, leaving=leaving)


def _suffix(member: Member) -> str:
    return "" if member.authenticated else ", unauthenticated"
