# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a federation, seen from its server: each finding says what to do next.

Everything is read from files and from what the kernel tells; only the SuperLink's health is asked for, on loopback.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509

from fedquit.errors import FedquitError
from fedquit.flower.closed.apps import read_trust_file
from fedquit.flower.closed.authority import Authority
from fedquit.flower.closed.greeting import flower_version, in_words, is_skewed
from fedquit.flower.closed.project import Project
from fedquit.flower.closed.service import read_served, require_signed
from fedquit.flower.ledger import SCHEMA
from fedquit.flower.membership import read_membership
from fedquit.flower.operations.findings import Finding, error, from_sentence, low_disks, warning, wrong_modes
from fedquit.flower.operations.observed import is_loopback, listeners, lock_holder
from fedquit.flower.operations.status import DAY, MemberStatus, Source, Status, json_lines, status_of
from fedquit.flower.state_folder import SETTINGS
from fedquit.flower.twice import RESTORE_STATE, copy_of, kept
from fedquit.running.params_file import load_params
from fedquit.utils.files import read_json
from fedquit.utils.version import package_version

SOON_DAYS = 30.0  # before the end of a certificate that does not renew itself
RENEWAL_LATE = 0.4  # of a certificate's life left: a running node renews it at half
STALLED = 3600.0  # seconds without a round while a phase is under way
CLOCK_MARGIN = 300.0  # seconds


@dataclass(frozen=True)
class Examination:
    """A federation under examination."""

    source: Source
    status: Status
    app: Path | None = None  # the folder of the Flower app
    silent_days: float = 3.0  # after which a member that is not seen is told of

    @property
    def project(self) -> Project | None:
        """Of a closed federation."""
        return self.source.project

    @property
    def state(self) -> Path:
        """The state directory."""
        return self.source.state


def examine_server(source: Source, *, app: Path | None = None, silent_days: float = 3.0) -> list[Finding]:
    """Everything that is wrong with a federation, errors first.

    Args:
        source: its files.
        app: the folder of its Flower app; the one that was served last if None.
        silent_days: after how many days without a sign a member is told of.
    """
    examination = Examination(source, status_of(source), app, silent_days)
    findings: list[Finding] = []
    for check in CHECKS:
        try:
            findings.extend(check(examination))
        except FedquitError as problem:
            findings.append(from_sentence(str(problem)))
    unique = list(dict.fromkeys(findings))
    return sorted(unique, key=lambda finding: finding.level)


def _damaged_state(case: Examination) -> Iterator[Finding]:
    """The ledger, the clients, and the checkpoint of the phase at hand, with their copies."""
    state = case.state
    for name in ("ledger.json", "clients.json"):
        path = state / name
        for file in (path, copy_of(path)):
            if file.exists():
                try:
                    read_json(file)
                except FedquitError:
                    then = "the server uses the other copy and writes both anew when it starts; look after the disk."
                    yield warning(f"{file} cannot be read", then)
    ledger = case.source.json("ledger.json")
    if ledger is None:
        if kept(state / "clients.json"):
            yield error(f"{state} has clients but no ledger.json", f"{RESTORE_STATE}.")
        elif not kept(state / "ledger.json"):
            yield warning(f"{state} has no ledger", "start the server, or give the right --state.")
        return
    if ledger.get("schema") != SCHEMA:
        yield error(f"{state / 'ledger.json'} is of another version of fedquit", "go on with that version.")
        return
    speaks = ledger["entries"] or ledger["erased"]
    if speaks and not kept(state / "clients.json"):
        yield error(f"{state} has no clients.json, which says who is who", f"{RESTORE_STATE}.")
    yield from _checkpoint(state / "phases" / f"{int(ledger['phase']['number']):06d}" / "state.safetensors")


def _checkpoint(checkpoint: Path) -> Iterator[Finding]:
    """Whether both copies can be read."""
    readable = 0
    for file in (checkpoint, copy_of(checkpoint)):
        if file.exists():
            with contextlib.suppress(FedquitError):
                load_params(file)
                readable += 1
    if not readable:
        yield error(f"no checkpoint of the present phase can be read ({checkpoint})", f"{RESTORE_STATE}.")
    elif readable == 1:
        yield warning(
            f"one of the two copies of {checkpoint} is damaged or missing",
            "the server goes on with the other and writes both anew; look after the disk.",
        )


def _membership(case: Examination) -> Iterator[Finding]:
    """Who takes part, as the server app reads it; `serve` writes a damaged list again within seconds."""
    read_membership(case.state)
    yield from ()


def _unreadable(case: Examination) -> Iterator[Finding]:
    for sentence in case.status.damaged:
        yield from_sentence(sentence)


def _project_files(case: Examination) -> Iterator[Finding]:
    """The authority, the trust file, and certificates that do not renew themselves."""
    project = case.project
    if project is None:
        return
    authority = Authority.load(project.folder).certificate
    yield from _certificate_end("the project's authority", authority, "make a new project and enrol the sites anew.")
    try:
        read_trust_file(project.trust)
    except FedquitError as problem:
        yield from_sentence(f"{project.trust} trusts nobody: restore it from a backup ({problem})")
    for path in (project.loopback.authority, project.loopback.certificate, project.loopback.key, project.secret):
        if not path.is_file():
            yield error(f"{path} is missing", "restore the project's folder from a backup.")
    if project.loopback.certificate.is_file():
        loopback = x509.load_pem_x509_certificate(project.loopback.certificate.read_bytes())
        yield from _certificate_end("the SuperLink on loopback", loopback, "restore or replace `project/loopback`.")


def _certificate_end(whose: str, certificate: x509.Certificate, then: str) -> Iterator[Finding]:
    left = certificate.not_valid_after_utc.timestamp() - time.time()
    if left < 0:
        yield error(
            f"the certificate of {whose} expired {in_words(-left)} ago", f"check the clock; if it is right, {then}"
        )
    elif left < SOON_DAYS * DAY:
        yield warning(f"the certificate of {whose} expires in {in_words(left)}", then)


def _app_signed(case: Examination) -> Iterator[Finding]:
    project = case.project
    if project is None:
        return
    app = case.app
    if app is None and (served := read_served(project)):
        app = served[0]
    if app is None or not app.is_dir():
        yield warning("which app is served is not known", "give --app with its folder, to see whether it is signed.")
        return
    require_signed(app, project)


def _ports(case: Examination) -> Iterator[Finding]:
    """Who listens where: the front, the SuperLink, and whether they belong together."""
    project = case.project
    if project is None:
        return
    settings = project.settings
    holder = lock_holder(project.server / "lock")
    front = listeners(settings.port, holder)
    link = listeners(settings.superlink_port, holder)
    if front is None or link is None or holder is None:
        yield warning("this system does not tell who listens on a port", "run the doctor on the server itself.")
        return
    opened = [address for address in link if not is_loopback(address)]
    if opened:
        yield error(
            f"something listens on the SuperLink's port {settings.superlink_port} on {opened[0]}, which others reach",
            "stop it: whoever reaches a SuperLink's port can run code on this machine and on every node.",
        )
    if front and link:
        return
    start = f"start `fedquit flower serve` or the units; logs are in {project.server / 'logs'}."
    if front and not link:
        yield error(
            f"the front listens on {settings.port}, but no SuperLink on {settings.superlink_port}: sites get 503",
            start if holder == 0 else f"see {project.server / 'logs' / 'superlink.log'}, then start it again.",
        )
    elif link and not front:
        then = f"see {project.server / 'logs' / 'front.log'}; another program may have the port."
        yield error(f"a SuperLink listens, but no front on port {settings.port}: no site gets in", then)
    elif holder == 0:
        yield error(f"no server runs for {project.folder}", start)
    else:
        yield error(
            f"process {holder} serves {project.folder}, but listens on no port", "wait a minute, then see its log."
        )


def _two_servers(case: Examination) -> Iterator[Finding]:
    """A port that somebody else has, or a state directory that another server uses."""
    project = case.project
    if project is None:
        return
    settings = project.settings
    holder = lock_holder(project.server / "lock")
    if holder == 0 and listeners(settings.port):
        yield warning(
            f"port {settings.port} is in use, but no `fedquit flower serve` runs {project.folder}",
            "where units run the parts this is right; else another program, or a copy of this project, has the port.",
        )
    if holder == 0 and (app := lock_holder(case.state / ".lock")):
        yield warning(
            f"process {app} holds {case.state}, but no `fedquit flower serve` runs {project.folder}",
            "where units run the parts this is right; else stop that process before you start another server.",
        )


def _versions(case: Examination) -> Iterator[Finding]:
    settings = case.source.json(SETTINGS) or {}
    ran = str(settings.get("fedquit", package_version()))
    if ran != package_version():
        yield warning(
            f"the server app last ran with fedquit {ran}, and this is {package_version()}",
            "use one version for serve, for the app's user and for this command.",
        )
    own = (package_version(), flower_version())
    for member in case.status.members:
        if member.fedquit and (member.fedquit, member.flower) != own and member.state in ("here", "away"):
            yield warning(
                f"{member.name} runs fedquit {member.fedquit} on Flower {member.flower}, and this server fedquit "
                f"{own[0]} on Flower {own[1]}",
                "ask the site to install the server's versions: others may refuse each other's messages.",
            )


def _certificates(case: Examination) -> Iterator[Finding]:
    """Certificates of sites that have expired, or that nobody renews."""
    project = case.project
    life = project.settings.certificate_days if project else 0.0
    for member in _taking_part(case):
        days = member.certificate_days
        if days is None:
            if project:  # a client that was taken over, and has not joined yet
                yield warning(
                    f"{member.name} has no certificate yet, and is refused",
                    f"ask for its request (`fedquit flower join`), and run `fedquit flower rotate {member.name}`.",
                )
            continue
        if days < 0:
            yield error(
                f"the certificate of {member.name} expired {in_words(-days * DAY)} ago, and it is refused",
                f"ask for a new request (`fedquit flower join`), and run `fedquit flower rotate {member.name}`.",
            )
        elif days < RENEWAL_LATE * life:
            yield warning(
                f"the certificate of {member.name} expires in {in_words(days * DAY)} and was not renewed in time",
                "ask the site to start its node, or to run `fedquit flower doctor --site`.",
            )


def _taking_part(case: Examination) -> list[MemberStatus]:
    return [member for member in case.status.members if member.state in ("here", "away", "never seen")]


def _members(case: Examination) -> Iterator[Finding]:
    """Members that are not seen, or whose clock is off, and whether enough are here."""
    now = case.status.time
    for member in _taking_part(case):
        if member.last_seen is None:
            if case.project:
                yield warning(
                    f"{member.name} has never been seen",
                    "ask the site to start its node, or to run `fedquit flower doctor --site`.",
                )
        elif now - member.last_seen > case.silent_days * DAY:
            yield warning(
                f"{member.name} was last seen {in_words(now - member.last_seen)} ago",
                "ask the site to run `fedquit flower doctor --site`; its requests wait until it is back.",
            )
        if is_skewed(member.skew):
            direction = "ahead of" if member.skew > 0 else "behind"
            yield error(
                f"the clock of {member.name} was {in_words(abs(member.skew))} {direction} this machine's",
                "correct the one that is wrong, for example with `timedatectl set-ntp true`.",
            )
    needed = case.status.needed
    if case.project and needed is not None and case.status.here < needed:
        away = [member.name for member in _taking_part(case) if member.state != "here"]
        named = ", ".join(away[:8]) or "nobody else is enrolled"
        yield error(
            f"{case.status.here} members are here, and a round needs {needed}",
            f"ask those that are missing ({named}) to start their nodes, or enrol more sites.",
        )


def _clock(case: Examination) -> Iterator[Finding]:
    """A clock that went back: something was written in what it now calls the future."""
    times = [member.last_seen or 0.0 for member in case.status.members]
    times.append(case.status.progress or 0.0)
    if case.project:
        times += [float(line.get("time", 0.0)) for line in json_lines(case.project.front_log)][-1:]
    newest = max(times)
    if newest > case.status.time + CLOCK_MARGIN:
        yield error(
            f"the clock of this machine is behind by at least {in_words(newest - case.status.time)}: something was "
            "written later than it says that it is now",
            "correct it, for example with `timedatectl set-ntp true`: certificates are refused until then.",
        )


def _requests(case: Examination) -> Iterator[Finding]:
    """Requests that nobody serves."""
    status = case.status
    waiting = status.open_requests
    if waiting and status.serving is False:
        named = ", ".join(request.id for request in waiting[:8])
        yield error(f"{len(waiting)} erasure requests wait ({named}), and no server runs", "start the server.")
    for request in waiting:
        its_turn_comes = request.status == "received" and status.next is not None and status.next > status.time
        late = request.deadline is not None and status.time > request.deadline + STALLED
        if late and not its_turn_comes:
            assert request.deadline is not None
            yield error(
                f"{request.id} of {request.client} is past its deadline by {in_words(status.time - request.deadline)}",
                "see the server's log: the fallback should have served it; start the server again.",
            )
    for request in status.requests:
        if request.status == "failed":
            yield warning(
                f"{request.id} of {request.client} failed ({request.reason})",
                "correct the reason, and file the request again.",
            )


def _revoked_requests(case: Examination) -> Iterator[Finding]:
    """Requests of sites that were revoked before the server had them: nobody can ask for them any more."""
    for member in case.status.members:
        if member.state == "revoked" and member.unreceived:
            yield warning(
                f"{member.name} was revoked after it gave notice of {member.unreceived} requests that the server had "
                "not received, and never will",
                "ask its owner, who may have taken them back; "
                f"`fedquit request --server {case.state} --client {member.name}` erases the site.",
            )


def _paused(case: Examination) -> Iterator[Finding]:
    """Training that pauses, and a model that was withdrawn."""
    then = "enrol more sites: training then goes on by itself."
    if case.status.paused:
        yield error(case.status.paused.rstrip("."), then)
    if case.status.withdrawn:
        what = "the model was withdrawn: an erasure left too few members to recover it"
        yield error(what, f"use none that was published before; {then}")


def _stalled(case: Examination) -> Iterator[Finding]:
    status = case.status
    busy = status.phase in ("unlearn", "recover") or (
        status.phase == "train" and status.rounds is not None and status.trained < status.rounds
    )
    if busy and status.running and status.progress is not None and status.time - status.progress > STALLED:
        yield warning(
            f"no round was stored for {in_words(status.time - status.progress)} in the phase {status.phase!r}",
            f"see {case.state / 'events.jsonl'}: the last lines say whom the server waits for.",
        )


def _refusals(case: Examination) -> Iterator[Finding]:
    for reason, count in case.status.refusals.items():
        who, _, what = reason.partition(": ")
        if who in case.source.sites():
            yield warning(
                f"the front refused {who} {count} times in the last day: {what}",
                "ask the site to run `fedquit flower doctor --site`.",
            )


def _modes(case: Examination) -> Iterator[Finding]:
    yield from wrong_modes(case.state, *([case.project.folder] if case.project else []))


def _disks(case: Examination) -> Iterator[Finding]:
    yield from low_disks(case.state, *([case.project.folder] if case.project else []))


CHECKS: tuple[Callable[[Examination], Iterator[Finding]], ...] = (
    _damaged_state,
    _membership,
    _unreadable,
    _project_files,
    _app_signed,
    _ports,
    _two_servers,
    _clock,
    _versions,
    _certificates,
    _members,
    _requests,
    _revoked_requests,
    _paused,
    _stalled,
    _refusals,
    _modes,
    _disks,
)
