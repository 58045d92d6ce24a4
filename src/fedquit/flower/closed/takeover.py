# SPDX-License-Identifier: Apache-2.0
"""Takes a deployment from before the closed federation over: each node key that it knows becomes a site.

The state directory stays where it is and stays whole. A copy of it would keep a model that later erasures do not
reach. Four things are written, in this order: in the ledger which project it belongs to; the sites, in the project; in
the list of clients from which number of examples those that erase samples do so; and in the ledger the word `closed`,
after which nobody serves the state directory without a list of sites. A takeover that was killed in between is done
again, by the same project.
"""

from __future__ import annotations

import base64
import contextlib
import json
import sqlite3
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key

from fedquit.core import ClientId
from fedquit.errors import InputError, StoreError
from fedquit.flower.closed.binding import GO_BACK, require_own_ledger
from fedquit.flower.closed.project import MAX_EXAMPLES, Project, require_examples
from fedquit.flower.closed.sites import Site, Sites, change_sites, check_name
from fedquit.flower.config import CLOSED_FLOOR
from fedquit.flower.identity import fingerprint
from fedquit.flower.ledger import (
    bind_ledger,
    clients_of,
    close_ledger,
    is_closed,
    read_entries,
    read_phase,
    require_listed,
)
from fedquit.flower.outbox import Inbox
from fedquit.flower.roster import FILE as CLIENTS
from fedquit.flower.roster import Member, Roster, read_members
from fedquit.flower.sqlite_wipe import DATABASE, FOLDER
from fedquit.flower.state_folder import StateFolder
from fedquit.flower.twice import RESTORE_STATE, kept
from fedquit.running.store import locked

TAKEN_OVER = "taken over"
STATE_SETTING = "fedquit.state"
FLOOR_SETTING = "fedquit.floor"
FAR_MORE = 10  # times the median of the others: a number of examples that the operator must confirm
UNREGISTERED = "unregistered"  # in Flower's database: the operator has removed the node


@dataclass(frozen=True)
class Key:
    """A node key that the old deployment knew."""

    pem: bytes
    name: str = ""  # as it was registered
    removed: bool = False  # whether the operator has unregistered it

    @property
    def identity(self) -> str:
        """As the list of clients has it."""
        return f"key:{fingerprint(self.pem)}"


@dataclass(frozen=True)
class Takeover:
    """What was taken over."""

    sites: tuple[Site, ...]  # that are new in the project
    members: Mapping[str, Member]  # the client that each of them is, by the site's name
    forgotten: tuple[Member, ...] = ()  # who were forgotten before and have no site, because their key is not known
    never_here: tuple[str, ...] = ()  # keys that were registered and never took part, by name
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the last run, where it is known
    staying: int = CLOSED_FLOOR  # sites that take part once the requests that wait are served

    @property
    def floor(self) -> int:
        """With which the last settings would serve it: a closed federation has one of its own."""
        floor = self.settings.get(FLOOR_SETTING, 0)
        return floor if isinstance(floor, int) and floor > 0 else CLOSED_FLOOR

    @property
    def settings_to_serve(self) -> Mapping[str, Any]:
        """Those of the last run; with a lower floor where none was set, or a request that waits drops the model."""
        chosen = self.settings.get(FLOOR_SETTING)
        if chosen or not 0 < self.staying < self.floor:
            return self.settings
        return {**self.settings, FLOOR_SETTING: self.staying}

    @property
    def warning(self) -> str:
        """What the operator must know of the floor; "" where enough sites stay."""
        if self.staying >= self.floor:
            return ""
        begin = f"warning: {self.staying} of the sites stay once the requests that wait are served, and the floor is "
        end = "training pauses, and a request to be forgotten drops the model with all that it has learned"
        if self.staying == 0:
            return f"{begin}{self.floor}: {end}. Enrol more sites before you serve it."
        setting = f"{FLOOR_SETTING}={self.staying}"
        if self.settings_to_serve is self.settings:
            return f"{begin}{self.floor}, as it was set: {end}, unless you set {setting} or enrol more sites first."
        return f"{begin}{self.floor} in a closed federation: without {setting} {end}."


def take_over(
    project: Project,
    state: Path,
    keys: Mapping[str, Path] | None = None,
    names: Mapping[ClientId, str] | None = None,
    examples: Mapping[ClientId, int] | None = None,
) -> Takeover:
    """Make every client of a state directory a site of a project.

    Args:
        project: that gets the sites.
        state: of a deployment with registered node keys, which nobody serves now.
        keys: files of public keys by name, as `serve --member` took them; the SuperLink's database has the others.
        names: of sites by the client's number, where the name that it has cannot be used.
        examples: of sites by the client's number, where what it said last is not to count.

    Returns:
        The sites that are new; none where everybody is a site already.

    Raises:
        InputError: if somebody cannot become a site.
        StoreError: if the state directory is not whole, or somebody serves it.
    """
    read_phase(state)  # or there is no state directory, and the lock would make one
    with locked(state), locked(state / FOLDER):  # the second is held between two runs, too
        forgotten = require_whole(state)
        require_own_ledger(project, state)
        members = read_members(state)
        given = [_read_key(name, path) for name, path in (keys or {}).items()]
        by_identity = {key.identity: key for key in [*given, *_registered(state)]}  # it knows who was removed
        missing = [member for member in members if _site_of(project.sites, member) is None]
        lost = tuple(m for m in missing if m.number in forgotten and m.key not in by_identity)
        missing = [member for member in missing if member not in lost]
        if missing and is_closed(state):
            raise StoreError(
                f"{state} is of a closed federation, and {missing[0].title} is no site of this project: {GO_BACK}."
            )
        _require_keys(missing, by_identity)
        chosen = _chosen_examples(project.sites, missing, members, examples or {})
        missing = _with_examples(missing, [m for m in members if m.number not in forgotten], chosen)
        new = _new_sites(missing, by_identity, names or {})
        _require_unused_names(project.sites, list(new.values()))
        bind_ledger(state, project.fingerprint)
        if new:
            change_sites(project.folder, lambda sites: _add(sites, list(new.values())))
        if not is_closed(state):
            _agree_examples(state, project.sites)
        close_ledger(state)
        return Takeover(
            sites=tuple(new.values()),
            members={site.name: member for member, site in new.items()},
            forgotten=lost,
            never_here=_never_here(list(by_identity.values()), members, project.sites),
            settings=_last_settings(state),
            staying=_staying(project.sites, members, forgotten | _leaving(state, members)),
        )


def require_whole(state: Path) -> frozenset[ClientId]:
    """Who was forgotten; raises `StoreError` for a state directory that was copied in part, or that is none.

    A checkpoint that has only its copy is written anew, so nobody else may use the state directory.
    """
    phase, forgotten = read_phase(state)
    folder = StateFolder(state)
    missing = ""
    if not kept(state / CLIENTS):
        missing = f"{CLIENTS}, which says who is who"
    elif folder.model(phase).load() is None:
        missing = f"model of phase {phase.number}"
    elif phase.kind in ("unlearn", "recover") and not folder.before.exists:
        missing = "before.safetensors, which the request at hand needs"
    if missing:
        raise StoreError(f"{state} has no {missing}, as a folder that was copied in part: {RESTORE_STATE}.")
    listed = {member.number for member in read_members(state)}
    require_listed(state, clients_of(read_entries(state), forgotten), listed)
    return forgotten


def _leaving(state: Path, members: Sequence[Member]) -> frozenset[ClientId]:
    """The clients whose request to be forgotten waits or is being served, in the ledger or as the operator's file."""
    filed = list(Inbox(state).waiting())
    taken_back = {request.withdraws for request in filed}
    numbers = {member.key: member.number for member in members}
    leaving = {numbers[request.client] for request in filed if request.client in numbers}
    for entry in read_entries(state):
        is_taken_back = entry.status == "received" and entry.id in taken_back
        if entry.open and entry.kind == "client" and not is_taken_back:
            leaving.add(entry.client)
    return frozenset(leaving)


def _staying(sites: Sites, members: Sequence[Member], gone: frozenset[ClientId]) -> int:
    """How many sites are neither revoked nor one of the clients that are gone."""
    keys = {member.key for member in members if member.number in gone}
    return sum(site.revoked is None and f"key:{site.fingerprints[0]}" not in keys for site in sites.values())


def _registered(state: Path) -> list[Key]:
    """The keys that the operator has registered at the SuperLink; none where its database is elsewhere."""
    rows = _query(state, "SELECT public_key, name, status FROM node WHERE name IS NOT NULL AND public_key IS NOT NULL")
    return [Key(bytes(pem), str(name), status == UNREGISTERED) for pem, name, status in rows]


def _last_settings(state: Path) -> dict[str, Any]:
    """The settings of the last run, without the place of the state directory."""
    rows = _query(state, "SELECT override_config FROM run ORDER BY rowid DESC LIMIT 1")
    for (text,) in rows:
        with contextlib.suppress(TypeError, ValueError, AttributeError):
            return {name: value for name, value in json.loads(text).items() if name != STATE_SETTING}
    return {}


def _query(state: Path, sql: str) -> list[tuple[Any, ...]]:
    """Rows of the SuperLink's database, which is only read."""
    path = state / FOLDER / DATABASE
    if not path.is_file():
        return []
    place = f"{path.resolve().as_uri()}?mode=ro"
    try:
        with contextlib.closing(sqlite3.connect(place, uri=True)) as database:
            return list(database.execute(sql))
    except sqlite3.Error:  # damaged: then the operator gives the keys, which are asked for
        return []


def _read_key(name: str, path: Path) -> Key:
    try:
        public = load_ssh_public_key(path.read_bytes())
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise InputError(f"{path} is no public key of {name}: give the file that `serve --member` took.") from error
    if not isinstance(public, ec.EllipticCurvePublicKey):
        raise InputError(f"{path} is no key on the curve P-384: give the file that `serve --member` took.")
    return Key(public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo), name)


def _site_of(sites: Sites, member: Member) -> Site | None:
    """The site that a client is."""
    return next((site for site in sites.values() if f"key:{site.fingerprints[0]}" == member.key), None)


def _agree_examples(state: Path, sites: Sites) -> None:
    """Let the numbers of examples that sites have now be those from which clients erase samples."""
    by_key = {f"key:{site.fingerprints[0]}": site.examples for site in sites.values()}
    erasing = [m for m in read_members(state) if m.key in by_key and (m.before_erasure or m.erased_samples)]
    if erasing:
        Roster(state).agree_examples({member.number: by_key[member.key] for member in erasing})


def _never_here(keys: Sequence[Key], members: Sequence[Member], sites: Sites) -> tuple[str, ...]:
    seen = {member.key for member in members}
    seen |= {f"key:{key}" for site in sites.values() for key in site.fingerprints}
    return tuple(sorted({key.name for key in keys if key.identity not in seen and not key.removed}))


def _require_keys(members: Sequence[Member], keys: Mapping[str, Key]) -> None:
    for member in members:
        if not member.authenticated:
            raise InputError(
                f"{member.title} had no key, so nobody can show to be this client: let it be forgotten first "
                f"(`fedquit request --server STATE --client {member.number}`), or keep the federation as it is."
            )
        if member.key not in keys:
            name = member.name or "NAME"
            raise InputError(
                f"the public key of {member.title} is not in the SuperLink's database: give it with --member "
                f"{name}=FILE, as `serve` got it."
            )


def _chosen_examples(
    sites: Sites, new: Sequence[Member], members: Sequence[Member], given: Mapping[ClientId, int]
) -> dict[ClientId, int]:
    """The numbers of examples that the operator gave, of clients that become sites."""
    becoming = {member.number for member in new}
    agreed = {member.number: site.examples for member in members if (site := _site_of(sites, member))}
    for number, count in given.items():
        require_examples(f"client {number}", count)
        if number not in becoming and agreed.get(number) != count:  # the same where the last takeover was killed
            raise InputError(
                f"--examples {number}={count}: no client {number} becomes a site now; the number of one that is a site "
                "already is changed with `fedquit flower examples`."
            )
    return {number: count for number, count in given.items() if number in becoming}


def _with_examples(new: Sequence[Member], staying: Sequence[Member], chosen: Mapping[ClientId, int]) -> list[Member]:
    """The clients that become sites, with the numbers of examples that the operator gave.

    What a client said is its weight from now on, and nobody has agreed to it. One that said far more than the others is
    taken at its word only if the operator gives the number.
    """
    for member in new:
        others = [max(1, other.examples) for other in staying if other is not member]
        most = min(MAX_EXAMPLES, FAR_MORE * statistics.median(others)) if others else MAX_EXAMPLES
        if member in staying and member.number not in chosen and member.examples > most:
            raise InputError(
                f"{member.title} said that it has {member.examples} examples, and nobody here is believed to have more "
                f"than {most:.0f} ({FAR_MORE} times the median of the others, at most {MAX_EXAMPLES:,}): the number is "
                f"its weight, so ask the site and give --examples {member.number}=N."
            )
    return [replace(member, examples=chosen.get(member.number, min(member.examples, MAX_EXAMPLES))) for member in new]


def _new_sites(members: Sequence[Member], keys: Mapping[str, Key], names: Mapping[ClientId, str]) -> dict[Member, Site]:
    chosen = {member: names.get(member.number, member.name) for member in members}
    for member, name in chosen.items():
        try:
            check_name(name)
        except InputError as error:
            raise InputError(f"{member.title}: {error} Give --name {member.number}=NAME.") from error
    twice = next((name for name, count in Counter(chosen.values()).items() if count > 1), "")
    if twice:
        numbers = [member.number for member, name in chosen.items() if name == twice]
        raise InputError(
            f"clients {' and '.join(map(str, numbers))} have the name {twice}, and a site has one of its own: give "
            f"--name {numbers[-1]}=NAME."
        )
    now = time.time()
    return {member: _site(name, member, keys[member.key], now) for member, name in chosen.items()}


def _site(name: str, member: Member, key: Key, now: float) -> Site:
    history = [(TAKEN_OVER, now)]
    if key.removed:
        history.append(("revoked", now))
    return Site(
        name=name,
        examples=max(1, member.examples),
        keys=(base64.b64encode(key.pem).decode(),),
        certificates=(),
        enrolled=now,
        revoked=now if key.removed else None,
        history=tuple(history),
    )


def _require_unused_names(sites: Sites, new: Sequence[Site]) -> None:
    for site in new:
        if site.name in sites:
            raise InputError(f"the project has another site {site.name}: give --name with another name for the client.")


def _add(sites: dict[str, Site], new: Sequence[Site]) -> None:
    _require_unused_names(sites, new)
    sites |= {site.name: site for site in new}
