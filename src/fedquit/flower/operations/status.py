# SPDX-License-Identifier: Apache-2.0
"""Where a federation stands, read from the files of its project and its state directory.

A file that is damaged is left out and named in `damaged`: the rest is shown all the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from fedquit.errors import FedquitError, InputError
from fedquit.flower.closed.notice_board import read_site_notices
from fedquit.flower.closed.project import Project
from fedquit.flower.closed.seen import Seen, read_seen
from fedquit.flower.closed.service import read_served
from fedquit.flower.closed.sites import Site
from fedquit.flower.config import needed_nodes
from fedquit.flower.ledger import MODEL_WITHDRAWN
from fedquit.flower.operations.observed import Disk, disks, listeners, lock_holder
from fedquit.flower.outbox import Inbox
from fedquit.flower.roster import read_irreplaceable
from fedquit.flower.roster import read_seen as read_seen_clients
from fedquit.flower.state_folder import PUBLISHED, SERVE_LOCK, SETTINGS
from fedquit.flower.twice import copy_of, kept
from fedquit.running.params_file import read_meta
from fedquit.utils.files import read_json

HERE_WITHIN = 120.0  # seconds: a SuperNode sends a heartbeat every 30
DAY = 86_400.0
TWICE = {"ledger.json": dict, "clients.json": list}  # what is kept twice, and of which kind it is
TAIL = 2_000_000  # bytes of a log that are looked at


@dataclass(frozen=True)
class MemberStatus:
    """A site, or a client of a federation that is not closed."""

    name: str
    state: str  # here, away, never seen, revoked, forgotten
    client: int | None = None  # its number, once it took part
    examples: int = 0
    last_seen: float | None = None  # Unix time
    certificate_days: float | None = None  # that its newest certificate is valid for; negative once it expired
    fedquit: str = ""
    flower: str = ""
    skew: float = 0.0  # seconds that its clock was ahead
    unreceived: int = 0  # requests of which it gave notice, and which the server has not received


@dataclass(frozen=True)
class RequestStatus:
    """An erasure request."""

    id: str
    client: str
    kind: str
    status: str
    source: str
    since: str  # of its status (ISO 8601)
    received: str  # (ISO 8601)
    method: str = ""
    reason: str = ""
    deadline: float | None = None  # Unix time after which the fallback is used, until it is unlearned

    @property
    def open(self) -> bool:
        """Whether anything remains to be done about it."""
        return self.status not in ("done", "failed", "withdrawn")


@dataclass(frozen=True)
class Status:
    """Where a federation stands."""

    time: float  # Unix time
    state: str  # the state directory
    project: str = ""  # the project's folder, of a closed federation
    serving: bool | None = (
        None  # whether `serve` runs, which starts the app when there is something to do; None: unknown
    )
    running: bool | None = None  # whether a run of the app is in progress: between two runs none is, and all is well
    paused: str = ""  # why training pauses
    withdrawn: bool = False  # whether the model was dropped, since too few stay to recover it
    next: float | None = None  # Unix time at which the next of the requests that wait can be started
    front: bool | None = None  # whether something listens on the front's port
    superlink: bool | None = None  # and on the SuperLink's
    phase: str = ""  # train, unlearn, recover, erase
    round: int = 0  # rounds of this phase that are done
    trained: int = 0  # rounds of ordinary training that are done
    rounds: int | None = None  # of ordinary training in all
    progress: float | None = None  # Unix time of the last round that was stored
    needed: int | None = None  # members that a round needs
    here: int = 0  # members that were seen in the last two minutes and take part
    members: tuple[MemberStatus, ...] = ()
    requests: tuple[RequestStatus, ...] = ()
    refusals: Mapping[str, int] = field(default_factory=dict)  # of the last day at the front, by reason
    disks: tuple[Disk, ...] = ()
    damaged: tuple[str, ...] = ()  # what could not be read, a sentence each

    @property
    def open_requests(self) -> list[RequestStatus]:
        """Those of which anything remains to be done."""
        return [request for request in self.requests if request.open]

    def as_json(self) -> dict[str, Any]:
        """All of it, for `--json`."""
        return dataclasses.asdict(self)


@dataclass
class Source:
    """The files of a federation, each read once; what cannot be read is noted and left out."""

    state: Path
    project: Project | None = None
    damaged: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Note what could not be read, and go on."""
        try:
            yield
        except (FedquitError, OSError) as error:
            self.damaged.append(str(error))
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            self.damaged.append(f"a file of {self.state} is not what fedquit writes ({error!r}): see the doctor.")

    def json(self, name: str) -> Any:  # noqa: ANN401 - JSON is anything
        """The content of a file of the state directory; None where there is none or it is damaged."""
        path = self.state / name
        content = None
        with self.noting():
            if name in TWICE:
                content = read_irreplaceable(path, TWICE[name]) if kept(path) else None
            else:
                content = read_json(path) if path.exists() else None
        return content

    def sites(self) -> dict[str, Site]:
        """The sites of a closed federation."""
        sites: dict[str, Site] = {}
        with self.noting():
            sites.update(self.project.sites if self.project else {})
        return sites


def locate(project: Path | None, state: Path | None) -> Source:
    """The federation that an operator means.

    Args:
        project: of a closed federation.
        state: the state directory; the one that was served last, if only the project is given.
    """
    if project is None and state is None:
        raise InputError("say which federation: --project of a closed one, or --state with its state directory.")
    opened = Project.open(project) if project else None
    if state is None:
        assert opened is not None
        served = read_served(opened)
        if served is None:
            raise InputError(f"{opened.folder} was not served yet: give --state with the state directory, once it is.")
        state = served[1]
    if not state.is_dir():
        raise InputError(
            f"there is no state directory {state}: give the one that `fedquit flower serve --state` names."
        )
    return Source(state, opened)


def status_of(source: Source, now: float | None = None) -> Status:
    """Where a federation stands now."""
    now = time.time() if now is None else now
    ledger = source.json("ledger.json") or {}
    roster: list[dict[str, Any]] = source.json("clients.json") or []
    stored = source.json(SETTINGS)
    settings: dict[str, Any] = stored.get("config", {}) if isinstance(stored, dict) else {}
    members: tuple[MemberStatus, ...] = ()
    requests: tuple[RequestStatus, ...] = ()
    with source.noting():
        members = tuple(_members(source, roster, ledger, now))
    with source.noting():
        requests = tuple(_requests(ledger, roster, settings))
    with source.noting():
        source.damaged.extend(Inbox(source.state).problems())
    phase = ledger.get("phase", {})
    done, progress = _progress(source, phase)
    training = phase.get("kind") == "train"
    result = source.json("result.json") or {}
    running = _held(source.state / ".lock")
    port = source.project.settings if source.project else None
    server = lock_holder(source.project.server / "lock") if source.project else None
    folders = [source.state, *([source.project.folder] if source.project else [])]
    return Status(
        time=now,
        state=str(source.state),
        project=str(source.project.folder) if source.project else "",
        serving=_serving(source, running),
        running=running,
        paused=str(result.get("paused") or ""),
        withdrawn=_withdrawn(source, ledger),
        next=_next(result, requests),
        front=_listens(port.port, server) if port else None,
        superlink=_listens(port.superlink_port, server) if port else None,
        phase=str(phase.get("kind", "")),
        round=done,
        trained=int(phase.get("trained", 0)) + (done if training else 0),
        rounds=settings.get("rounds"),
        progress=progress,
        needed=needed_members(settings, len(ledger.get("erased", ())), _staying(source, members)),
        here=sum(member.state == "here" for member in members),
        members=members,
        requests=requests,
        refusals=_refusals(source, now),
        disks=tuple(disks(*folders)),
        damaged=tuple(source.damaged),
    )


def needed_members(settings: Mapping[str, Any], forgotten: int, staying: int | None) -> int | None:
    """How many members a round needs to begin; None where the server has never run.

    Args:
        settings: as the server noted them.
        forgotten: clients that take no part any more.
        staying: sites of a closed federation that may take part; None where it is not closed.
    """
    if "min_nodes" not in settings:
        return None
    floor = settings["floor"]["open" if staying is None else "closed"]
    return needed_nodes(int(settings["min_nodes"]), int(floor), float(settings["quorum"]), forgotten, staying)


def _staying(source: Source, members: Sequence[MemberStatus]) -> int | None:
    if source.project is None:
        return None
    return sum(member.state in ("here", "away", "never seen") for member in members)


def _serving(source: Source, running: bool | None) -> bool | None:
    """Whether somebody sees to the federation: `serve` holds its lock also while no run is in progress."""
    locks = [source.state / SERVE_LOCK, *([source.project.server / "lock"] if source.project else [])]
    held = [running, *map(_held, locks)]
    return True if True in held else None if None in held else False


def _withdrawn(source: Source, ledger: Mapping[str, Any]) -> bool:
    """Whether an erasure has dropped the model, and no other was published since."""
    dropped = any(entry.get("method") == MODEL_WITHDRAWN for entry in ledger.get("entries", ()))
    return dropped and not (source.state / PUBLISHED).exists()


def _next(result: Mapping[str, Any], requests: Sequence[RequestStatus]) -> float | None:
    """When the server begins with one of the requests that wait, as the last run has left word."""
    due = result.get("next")
    waits = any(request.status == "received" for request in requests)
    return float(due) if waits and isinstance(due, int | float) else None


def _held(path: Path) -> bool | None:
    holder = lock_holder(path)
    return None if holder is None else holder > 0


def _listens(port: int, beside: int | None) -> bool | None:
    addresses = listeners(port, beside)
    return None if addresses is None else bool(addresses)


def _progress(source: Source, phase: Mapping[str, Any]) -> tuple[int, float | None]:
    """How many rounds of the phase are stored, and when the last was."""
    path = source.state / "phases" / f"{int(phase.get('number', 0)):06d}" / "state.safetensors"
    for file in (path, copy_of(path)):
        with contextlib.suppress(FedquitError, OSError, KeyError, ValueError):
            return int(read_meta(file)["round"]), file.stat().st_mtime
    return 0, None


def _members(
    source: Source, roster: Sequence[Mapping[str, Any]], ledger: Mapping[str, Any], now: float
) -> Iterator[MemberStatus]:
    erased = set(ledger.get("erased", ()))
    replies = {**last_replies(source.state), **read_seen_clients(source.state)}
    seen = read_seen(source.project.server) if source.project else {}
    sites = source.sites()
    unreceived = unreceived_requests(source.project, ledger) if source.project else {}
    clients = {str(entry["key"]): entry for entry in roster}
    for name, site in sorted(sites.items()):
        entry = clients.pop(f"key:{site.fingerprints[0]}", None)
        member = _site(site, entry, seen.get(name), replies, erased, now)
        yield dataclasses.replace(member, unreceived=len(unreceived.get(name, ())))
    for entry in clients.values():
        last = replies.get(entry["number"])
        forgotten = entry["number"] in erased
        yield MemberStatus(
            name=str(entry["name"] or entry["key"]),
            state="forgotten" if forgotten else _presence(last, now),
            client=int(entry["number"]),
            examples=int(entry["examples"]),
            last_seen=last,
        )


def _site(
    site: Site,
    entry: Mapping[str, Any] | None,
    seen: Seen | None,
    replies: Mapping[int, float],
    erased: set[int],
    now: float,
) -> MemberStatus:
    number = None if entry is None else int(entry["number"])
    times = [seen.time if seen else None, None if number is None else replies.get(number)]
    last = max((when for when in times if when is not None), default=None)
    state = _presence(last, now)
    if number in erased:
        state = "forgotten"
    elif site.revoked is not None:
        state = "revoked"
    newest = max((c.not_after for c in site.certificates), default=None)
    return MemberStatus(
        name=site.name,
        state=state,
        client=number,
        examples=site.examples,
        last_seen=last,
        certificate_days=None if newest is None or state in ("forgotten", "revoked") else (newest - now) / DAY,
        fedquit=seen.fedquit if seen else "",
        flower=seen.flower if seen else "",
        skew=seen.skew if seen else 0.0,
    )


def unreceived_requests(project: Project, ledger: Mapping[str, Any]) -> dict[str, list[str]]:
    """The requests of which sites gave the front notice, and which the ledger does not have, by the site's name."""
    received = {entry.get("request") for entry in ledger.get("entries", ())}
    notices = read_site_notices(project.server)
    return {name: [i for i in requests if i not in received] for name, requests in notices.items()}


def _presence(last: float | None, now: float) -> str:
    if last is None:
        return "never seen"
    return "here" if now - last < HERE_WITHIN else "away"


def _requests(
    ledger: Mapping[str, Any], roster: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]
) -> Iterator[RequestStatus]:
    names = {int(entry["number"]): str(entry["name"] or entry["key"]) for entry in roster}
    for entry in ledger.get("entries", ()):
        deadline = None
        if entry["status"] in ("received", "started") and "deadline" in settings and entry.get("since"):
            deadline = float(entry["since"]) + float(settings["deadline"])
        history = entry["history"]
        yield RequestStatus(
            id=entry["id"],
            client=names.get(int(entry["client"]), str(entry["client"])),
            kind=entry["kind"],
            status=entry["status"],
            source=entry["source"],
            since=history[-1][1] if history else "",
            received=history[0][1] if history else "",
            method=entry.get("method", ""),
            reason=entry.get("reason", ""),
            deadline=deadline,
        )


def last_replies(state: Path) -> dict[int, float]:
    """When each client last replied (Unix time), as far as the end of the server's log tells."""
    replies: dict[int, float] = {}
    for event in json_lines(state / "events.jsonl"):
        if event.get("event") == "reply" and "time" in event:
            with contextlib.suppress(ValueError, TypeError):
                replies[int(event["client"])] = datetime.fromisoformat(str(event["time"])).timestamp()
    return replies


def _refusals(source: Source, now: float) -> dict[str, int]:
    """How often the front refused something in the last day, by reason."""
    if source.project is None:
        return {}
    counted: Counter[str] = Counter()
    for line in json_lines(source.project.front_log):
        if "refused" in line and now - float(line.get("time", 0.0)) < DAY:
            who = str(line.get("site", "")) or "unknown"
            counted[f"{who}: {line['refused']}"] += 1
    return dict(counted.most_common(20))


def json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects at the end of a log, one a line; lines that are none are left out."""
    content = b""
    for part in (path.with_name(f"{path.name}.1"), path):  # a new file may have been begun a moment ago
        with contextlib.suppress(OSError), part.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL))
            content += file.read()
    for line in content[-TAIL:].splitlines():
        with contextlib.suppress(ValueError):
            entry = json.loads(line)
            if isinstance(entry, dict):
                yield entry
