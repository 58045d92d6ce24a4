# SPDX-License-Identifier: Apache-2.0
"""All clients that ever were: every identity has a number, fedquit's `ClientId`.

Numbers are given in the order of first appearance, are on disk before anybody is asked, and are never given twice.
The list has a history: when each client joined, left, or was revoked. `seen.json` says when each was last here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedquit.core import ClientId
from fedquit.errors import RequestError, StoreError
from fedquit.flower.outbox import now
from fedquit.flower.twice import kept, read_json_either, read_json_mended, write_json_twice
from fedquit.utils.files import read_json, write_json

FILE = "clients.json"
SEEN = "seen.json"
HOLDS = "who is who, and who must never take part again"  # the files that are kept twice


JOINED, FORGOTTEN, REVOKED, RETURNED = "joined", "forgotten", "revoked", "returned"
SAVE_SEEN = 60.0  # seconds between two times that `seen.json` is written


@dataclass(frozen=True)
class Identity:
    """Who a node is."""

    key: str  # "key:<fingerprint>" or "partition:<number>"
    name: str  # as the operator registered it
    authenticated: bool


@dataclass(frozen=True)
class Member:
    """A client, as the server remembers it."""

    number: ClientId
    key: str
    name: str
    authenticated: bool
    examples: int
    said: int = 0  # how many examples it last said that it has: a site counts for those that were agreed
    before_erasure: int = 0  # what it said when a request for samples began whose count has not been heard yet
    erased_samples: int = 0  # of the examples that its site was enrolled with
    enrolled: int = 0  # how many these were: once the operator agrees on another number, that one holds
    history: tuple[tuple[str, str], ...] = ()  # (joined, forgotten, revoked or returned; when)

    @property
    def standing(self) -> str:
        """The last word of its history: why it takes part, or no more."""
        return self.history[-1][0] if self.history else JOINED

    @property
    def title(self) -> str:
        """As messages name it."""
        return f"client {self.number} ({self.name or self.key})"


def _in_order(identity: Identity) -> tuple[str, int, str]:
    """The sort key of identities that appear together: by partition, else by name and key."""
    kind, _, rest = identity.key.partition(":")
    return (identity.name, int(rest) if kind == "partition" and rest.isdigit() else 0, identity.key)


def read_irreplaceable(path: Path, kind: type = dict) -> Any:  # noqa: ANN401 - JSON is anything
    """The content of a file that must never be begun anew: it says who takes part no more."""
    return read_json_either(path, HOLDS, kind)


def mend_irreplaceable(path: Path, kind: type, say: Callable[[str], None]) -> Any:  # noqa: ANN401 - JSON is anything
    """The same for the server itself: a copy that is damaged is told of and written anew."""
    return read_json_mended(path, HOLDS, kind, say)


class Roster:
    """All clients that ever were, on disk: for the one process that holds the state folder, see `read_members`.

    Args:
        state: the server's state folder.
        say: takes a sentence where a damaged list was read from its copy.
    """

    def __init__(self, state: Path, say: Callable[[str], None] = lambda _: None) -> None:
        self.path = state / FILE
        listed = mend_irreplaceable(self.path, list, say) if kept(self.path) else []
        self.members: dict[ClientId, Member] = {m["number"]: _member(m) for m in listed}
        self.seen = read_seen(state)
        self._seen_path = state / SEEN
        self._seen_saved = -math.inf

    def by_key(self, key: str) -> Member | None:
        """The client of that identity."""
        return next((m for m in self.members.values() if m.key == key), None)

    def __getitem__(self, number: ClientId) -> Member:
        return self.members[number]

    @property
    def examples(self) -> Mapping[ClientId, int]:
        """How many examples each counts for: as it last said, or in a closed federation as was agreed."""
        return {number: m.examples for number, m in self.members.items()}

    def enrol(self, nodes: Iterable[tuple[Identity, int]], said: Mapping[str, int] | None = None) -> None:
        """Give a number to everybody new, and note how many examples each has; on disk before anybody is asked.

        Args:
            nodes: identities, and how many examples each counts for.
            said: how many it says that it has, by the key of its identity; those that count if not given.
        """
        told = said or {}
        before = dict(self.members)
        for identity, examples in sorted(nodes, key=lambda pair: _in_order(pair[0])):
            known = self.by_key(identity.key)
            if known:
                self.members[known.number] = dataclasses.replace(known, **dataclasses.asdict(identity))
                self._count(known.number, examples, told.get(identity.key, examples))
            else:
                number = len(self.members)
                self.members[number] = Member(
                    number,
                    examples=examples,
                    said=told.get(identity.key, examples),
                    history=((JOINED, now()),),
                    **dataclasses.asdict(identity),
                )
        if self.members != before:
            self._save()

    def note(self, examples: Mapping[ClientId, int], said: Mapping[ClientId, int] | None = None) -> None:
        """Clients have said how many examples they have.

        Args:
            examples: how many each counts for.
            said: how many each says; those that count if not given.
        """
        before = dict(self.members)
        for client, count in examples.items():
            self._count(client, count, (said or examples).get(client, count))
        if self.members != before:
            self._save()

    def _count(self, client: ClientId, examples: int, said: int) -> None:
        """A client's number of examples; where it gave up samples, the first lower one that it says tells how many."""
        member = dataclasses.replace(self.members[client], examples=examples, said=said)
        if said < member.before_erasure:
            erased = member.erased_samples + member.before_erasure - said
            member = dataclasses.replace(member, erased_samples=erased, before_erasure=0)
        self.members[client] = member

    def begin_erasing_samples(self, clients: Iterable[ClientId], enrolled: Callable[[ClientId], int | None]) -> None:
        """Clients give up samples: from now on they count for fewer.

        Args:
            clients: who.
            enrolled: how many examples the operator agreed with each; None where the federation is not closed.
        """
        for client in clients:
            member = self.members[client]
            agreed = enrolled(client) or 0
            erased = member.erased_samples if member.enrolled == agreed else 0
            self.members[client] = dataclasses.replace(
                member, before_erasure=member.said or member.examples, erased_samples=erased, enrolled=agreed
            )
        self._save()

    def agree_examples(self, examples: Mapping[ClientId, int]) -> None:
        """The federation becomes closed: what was erased until now is in the numbers that are agreed.

        Only what a client gives up from now on is taken off, also for a request that has begun.

        Args:
            examples: how many examples the operator agrees with each client.
        """
        for client, agreed in examples.items():
            self.members[client] = dataclasses.replace(self.members[client], enrolled=agreed, erased_samples=0)
        self._save()

    def note_standing(self, forgotten: Collection[ClientId], revoked: Collection[ClientId]) -> None:
        """Write down who left or came back since the last time.

        Args:
            forgotten: all that were forgotten.
            revoked: all whose site the operator has revoked.
        """
        before = dict(self.members)
        for number, member in before.items():
            standing = FORGOTTEN if number in forgotten else REVOKED if number in revoked else JOINED
            if standing == JOINED and member.standing in (FORGOTTEN, REVOKED):
                standing = RETURNED
            elif standing == JOINED:
                continue
            if standing != member.standing:
                history = (*member.history, (standing, now()))
                self.members[number] = dataclasses.replace(member, history=history)
        if self.members != before:
            self._save()

    def note_seen(self, clients: Iterable[ClientId], when: float) -> None:
        """Write down, now and then, who is here.

        Args:
            clients: who is here.
            when: Unix time.
        """
        before = self.seen.keys()
        self.seen = {**self.seen, **dict.fromkeys(clients, when)}
        if when - self._seen_saved >= SAVE_SEEN or self.seen.keys() != before:
            self._seen_saved = when
            write_json(self._seen_path, {str(client): at for client, at in sorted(self.seen.items())})

    def _save(self) -> None:
        write_json_twice(self.path, [dataclasses.asdict(m) for _, m in sorted(self.members.items())])

    def find(self, words: str) -> Member:
        """The client that an operator means: by number, name, key, or the beginning of its fingerprint."""
        return find_member(list(self.members.values()), words)


def read_members(state: Path) -> list[Member]:
    """All clients that ever were, by number, for whoever only looks; nothing is written. None where nobody was."""
    listed = read_irreplaceable(state / FILE, list) if kept(state / FILE) else []
    return sorted(map(_member, listed), key=lambda member: member.number)


def _member(content: Mapping[str, Any]) -> Member:
    history = tuple((str(what), str(when)) for what, when in content.get("history", ()))
    return Member(**{**content, "history": history})


def read_seen(state: Path) -> dict[ClientId, float]:
    """When each client was last here (Unix time); nobody where that cannot be read, since it is only told."""
    try:
        content = read_json(state / SEEN) if (state / SEEN).exists() else {}
        return {int(client): float(when) for client, when in content.items()}
    except (StoreError, AttributeError, TypeError, ValueError):
        return {}


def find_member(members: list[Member], words: str) -> Member:
    """One client by number, name, key, or the beginning (8 characters or more) of its fingerprint."""
    exact = [m for m in members if words and words in (str(m.number), m.name, m.key)]
    keys = [(m, m.key.removeprefix("key:")) for m in members if m.authenticated]
    fingerprint = words.removeprefix("key:")
    matches = exact or [m for m, key in keys if len(words) >= 8 and key.startswith(fingerprint)]
    if len(matches) != 1:
        known = ", ".join(f"{m.number}: {m.name or m.key}" for m in members[:12]) or "none yet"
        raise RequestError(f"{words!r} names {len(matches)} clients, and must name one: known are {known}.")
    return matches[0]
