# SPDX-License-Identifier: Apache-2.0
"""What the operator and the sites of a closed federation run.

operator: serve      a SuperLink on loopback, the process that runs server apps, the front, and a run of the app
site:     run_site   a SuperNode with the site's certificate, and the process that runs client apps
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from fedquit.errors import FedquitError, InputError, StoreError
from fedquit.flower.closed import pair
from fedquit.flower.closed.app_user import (
    SAME_USER,
    AppUser,
    copy_for,
    hand_over,
    hand_over_tree,
    require_access,
    require_apart,
)
from fedquit.flower.closed.apps import RESTORE_TRUST, archive, read_trust_file, signatures
from fedquit.flower.closed.courier import Courier
from fedquit.flower.closed.front import listen
from fedquit.flower.closed.greeting import ServerWatch
from fedquit.flower.closed.notice_board import read_site_notices, write_told
from fedquit.flower.closed.private_files import holds, make_private_folder, only_one, write_private, write_private_json
from fedquit.flower.closed.project import Project
from fedquit.flower.closed.seen import read_seen
from fedquit.flower.closed.site_folder import SiteFolder
from fedquit.flower.closed.sites import FILE, Site
from fedquit.flower.deploy.commands import Node, Value, on_free_port, superlink_command, supernode_command
from fedquit.flower.deploy.control import AlreadyRegistered, Connection, Control, UnknownNode
from fedquit.flower.deploy.environment import LOOPBACK, environment, free_ports, program
from fedquit.flower.deploy.keys import Tls
from fedquit.flower.deploy.processes import FOR_EVER, ProcessGroup, Say, SupervisedProcess
from fedquit.flower.deploy.standing import Standing, keep_open
from fedquit.flower.deploy.supervision import Hear, Plan, run_until_finished, wait_for_superlink
from fedquit.flower.membership import FILE as MEMBERSHIP
from fedquit.flower.membership import membership_content, write_membership
from fedquit.flower.notices import FILE as NOTICES
from fedquit.flower.notices import notices_content, write_notices
from fedquit.flower.outbox import NODE_FILE
from fedquit.flower.sqlite_wipe import DATABASE, FOLDER, wipe_traces
from fedquit.utils.files import read_json

NODE_LOCK = "lock"  # in the folder of a node's own files; held while it runs
STATE_LOCK = "serve.lock"  # in a state directory; held while a project serves it
SERVED = "serve.json"  # which app and state directory were served last
BY_HAND = (
    "this command starts all processes and supervises them itself, which is for trials: where the federation is to "
    "stand, let systemd (`fedquit flower units`) or containers do so."
)
WATCH = 1.0  # seconds between two looks at the list of sites
MUTE = 86_400.0  # seconds without a word of a site, after which the operator is warned, once a day
SAY_EXPIRED = 600.0  # seconds after which a site says again that its certificate has expired
AFTER_RENEWAL = 3600.0  # seconds after a renewal, or a quarter of the certificate's life if that is shorter
RETRY_RENEWAL = 60.0  # seconds after a renewal that failed, or a tenth of the certificate's life if that is shorter


# The operator's side -------------------------------------------------------------------------------------------------


def read_served(project: Project) -> tuple[Path, Path] | None:
    """The app and the state directory that were served last; None if nothing was."""
    path = project.server / SERVED
    if not path.exists():
        return None
    try:
        content = read_json(path)
        return Path(str(content["app"])), Path(str(content["state"]))
    except (StoreError, KeyError, TypeError) as error:
        raise StoreError(
            f"{path} does not say what was served: give --state and --app; `fedquit flower serve` writes it again."
        ) from error


def require_signed(app: Path, project: Project) -> None:
    """Raise `InputError` for an app that no site would run."""
    trusted = read_trust_file(project.trust, RESTORE_TRUST)
    signed = signatures(hashlib.sha256(archive(app)).hexdigest(), project.apps)
    if not trusted.keys() & signed.keys():
        raise InputError(
            f"{app} is not signed as it is now, so no site would run it: sign it with "
            f"`fedquit flower sign {app} --project {project.folder}`."
        )


def serve(
    plan: Plan,
    project: Project,
    state: Path,
    *,
    app_user: AppUser | None = None,
    attach: bool = False,
    standing: Standing | None = None,
    until_trained: bool = False,
    say: Say = lambda _: None,
    hear: Hear = lambda _: None,
) -> int:
    """Run a closed federation, and keep it open after its training, until this process is interrupted.

    Args:
        plan: the app and its settings.
        project: the authority, the sites, the server's settings.
        state: the state directory of the federation.
        app_user: who runs the SuperLink and the server app; the present user if None.
        attach: whether SuperLink and front run already, for example as units of systemd.
        standing: what is watched after the training; as usual if None.
        until_trained: whether to end when training is over instead.
        say: takes one sentence for the operator.
        hear: takes each line of the run's log.

    Returns:
        The id of the run that finished, if `until_trained`.
    """
    require_signed(plan.app, project)
    with open_federation(
        project, state, app=plan.app, app_user=app_user, attach=attach, patience=plan.patience, say=say
    ) as federation:
        memo = project.server / "run.json"
        link = federation.superlink
        return keep_open(
            partial(run_until_finished, plan, federation.control, memo, superlink=link, say=say, hear=hear),
            standing or Standing(state.resolve()),
            until_trained=until_trained,
            dead=lambda: link.gave_up if link else "",
            say=say,
            announce=partial(write_told, project.server),
        )


@dataclass(frozen=True)
class Federation:
    """The processes of a closed federation's server."""

    control: Control
    superlink: SupervisedProcess | None = None  # with the process that runs server apps; None: others run it
    front: SupervisedProcess | None = None


@contextlib.contextmanager
def open_federation(
    project: Project,
    state: Path,
    *,
    app: Path | None = None,
    app_user: AppUser | None = None,
    attach: bool = False,
    patience: float = 300.0,
    say: Say = lambda _: None,
) -> Iterator[Federation]:
    """Run the SuperLink and the front of a closed federation, for as long as the `with` lasts.

    Args:
        project: the authority, the sites, the server's settings.
        state: the state directory of the federation, which no other project may serve meanwhile.
        app: the app that is served, which is written down for the operator's other commands.
        app_user: who runs the SuperLink and the server app; the present user if None.
        attach: whether both run already: then only the list of sites is carried to the SuperLink.
        patience: seconds for the SuperLink to answer.
        say: takes one sentence for the operator.
    """
    from fedquit.flower.closed.binding import bind  # it needs PyTorch, which a site's node does without

    project = Project(project.folder.resolve())  # processes start in other folders
    require_apart(project.server, state, "--state")  # names of files there are those of the state directory
    state = make_private_folder(state.resolve())
    make_private_folder(project.server)
    processes = _attached if attach else _processes
    with (
        only_one(project.server / "lock", f"another `fedquit flower serve` runs {project.folder}: stop it first."),
        only_one(state / STATE_LOCK, f"another project is served on {state}: stop it, or give another --state."),
    ):
        bind(project, state)
        if app is not None:
            write_private_json(project.server / SERVED, {"app": str(app.resolve()), "state": str(state)})
        with processes(project, state, app_user, patience, say) as federation:
            yield federation


@contextlib.contextmanager
def _attached(
    project: Project, state: Path, app_user: AppUser | None, patience: float, say: Say
) -> Iterator[Federation]:
    """As `open_federation`, with a SuperLink and a front that somebody else runs."""
    address = f"{LOOPBACK}:{project.settings.superlink_port}"
    control = Control(address, project.loopback.authority, project.server / "flower-home")
    wait_for_superlink(control, patience, None, say)
    registrar = Registrar(project, state, control, project.server / "registered.json", app_user, say)
    with registrar.following():
        say(f"sites reach this federation at {project.settings.address}; the front's log is {project.front_log}.")
        yield Federation(control)


@contextlib.contextmanager
def _processes(
    project: Project, state: Path, app_user: AppUser | None, patience: float, say: Say
) -> Iterator[Federation]:
    """As `open_federation`. The state directory is the app user's: what root writes itself lies with the project."""
    folder = make_private_folder(state / FOLDER)
    hand_over_tree(state, app_user)
    require_access(folder, app_user)
    say(BY_HAND)
    if app_user is None:
        say(SAME_USER)
    wipe_traces(folder / DATABASE, say)
    settings = project.settings
    for host, port in ((settings.listen, settings.port), (LOOPBACK, settings.superlink_port)):
        listen(host, port).close()  # or another server has it: said now, and not in a log of a process
    address = f"{LOOPBACK}:{settings.superlink_port}"
    with ProcessGroup() as group:
        link = _start_superlink(group, project, folder, app_user, say)
        front = _start_front(group, project, say)
        home = project.server / "flower-home"
        control = Control(address, project.loopback.authority, home, group.mark_of("control"))
        try:
            wait_for_superlink(control, patience, link, say)
            registrar = Registrar(project, state, control, project.server / "registered.json", app_user, say)
            with registrar.following():
                say(f"sites reach this federation at {settings.address}; the front's log is {project.front_log}.")
                yield Federation(control, link, front)
        finally:
            link.stop()
            front.stop()
            wipe_traces(folder / DATABASE, say)


def superlink_descriptions(project: Project, folder: Path, app_user: AppUser | None) -> list[dict[str, Any]]:
    """The SuperLink and the process that runs server apps, as `pair` starts them; what they read is made ready.

    Args:
        project: whose settings and certificates they use.
        folder: of the SuperLink's files, in the state directory.
        app_user: who runs both; the present user if None.
    """
    own = project.loopback
    copies = copy_for(app_user, folder / "run", own.authority, own.certificate, own.key, project.secret)
    tls = Tls(*copies[:3])
    secret = copies[3]
    port = project.settings.superlink_port
    isolation = ["--isolation", "process", "--superexec-auth-secret-file", str(secret)]
    command = [*superlink_command(port, folder / DATABASE, tls, "secure"), *isolation]
    home = hand_over(make_private_folder(folder / "run" / "flower-home"), app_user)
    variables = {"FLWR_HOME": str(home.resolve())}
    return [
        _described(command, app_user, variables, folder / "run"),
        _described(superexec_command(port, tls.authority, secret), app_user, variables, folder / "run"),
    ]


def _start_superlink(
    group: ProcessGroup, project: Project, folder: Path, app_user: AppUser | None, say: Say
) -> SupervisedProcess:
    both = superlink_descriptions(project, folder, app_user)
    log = project.server / "logs" / "superlink.log"
    say(f"the SuperLink starts on loopback; its log is {log}.")
    env = environment(project.server / "flower-home")
    return SupervisedProcess(group, "superlink", pair_command(both), log, env, say=say).start()


def _start_front(group: ProcessGroup, project: Project, say: Say) -> SupervisedProcess:
    command = [sys.executable, "-m", "fedquit.flower.closed.front", str(project.folder), str(project.front_log)]
    log = project.server / "logs" / "front.log"
    env = environment(project.server / "flower-home")
    return SupervisedProcess(group, "front", command, log, env, backoff=FOR_EVER, say=say).start()


def superexec_command(port: int, authority: Path, secret: Path) -> list[str]:
    """The command that starts Flower's process that runs apps.

    Args:
        port: of the SuperLink's or SuperNode's API, on loopback.
        authority: of the certificate of that API.
        secret: the file of the secret that both share.
    """
    place = ["--runtime-api-address", f"{LOOPBACK}:{port}", "--root-certificates", str(authority.resolve())]
    return [program("flower-superexec"), *place, "--superexec-auth-secret-file", str(secret.resolve())]


def _described(
    command: Sequence[str], user: AppUser | None, variables: Mapping[str, str], folder: Path
) -> dict[str, Any]:
    """A process as `pair` starts it."""
    return {
        "command": list(command),
        "uid": user.uid if user else None,
        "gid": user.gid if user else None,
        "environment": dict(variables),
        "folder": str(folder.resolve()),
    }


def pair_command(descriptions: Sequence[Mapping[str, Any]]) -> list[str]:
    """The command that runs these processes as one."""
    return [sys.executable, "-I", pair.__file__, json.dumps(descriptions)]


@dataclass
class Registrar:
    """Registers the keys of sites at the SuperLink, and unregisters those that no longer count."""

    project: Project
    state: Path
    control: Control
    memo: Path  # the node id of each key that was registered, by fingerprint
    app_user: AppUser | None
    say: Say
    _stop: threading.Event = field(default_factory=threading.Event)
    _warned: dict[str, float] = field(default_factory=dict)  # when the operator was last warned of a site (Unix time)
    _membership: bytes = b""  # who takes part, as it was last written for the server app

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """Bring the SuperLink up to date now, and then after every change of the list of sites."""
        version = self._version()
        self.forget_unknown_nodes()
        self.bring_up_to_date()
        thread = threading.Thread(target=self._follow, args=(version,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()

    def _version(self) -> tuple[int, int]:
        status = (self.project.folder / FILE).stat()
        return status.st_mtime_ns, status.st_ino

    def _follow(self, version: tuple[int, int]) -> None:
        while not self._stop.wait(WATCH):
            try:
                seen = self._version()
                if seen != version:
                    self.bring_up_to_date()
                    version = seen
                self.mend_membership()
                self.carry_notices()
                self.warn_of_mute_sites(time.time())
            except (FedquitError, OSError) as error:  # the front refuses whom it must meanwhile
                self.say(f"the list of sites could not be carried to the SuperLink and is tried again: {error}")
                self._stop.wait(10 * WATCH)

    def mend_membership(self) -> None:
        """Write who takes part again where the file of the server app is damaged or gone: the project knows."""
        path = self.state / MEMBERSHIP
        if self._membership and not holds(path, self._membership):
            hand_over(write_private(path, self._membership), self.app_user)
            self.say(f"{path} was damaged or gone, and is written again as the project has it: look after the disk.")

    def carry_notices(self) -> None:
        """Write for the server app of which requests the sites have given notice."""
        sites = self.project.sites
        notices = {}
        for name, requests in read_site_notices(self.project.server).items():
            if name in sites and sites[name].revoked is None:
                notices[sites[name].fingerprints[0]] = frozenset(requests)
        path = self.state / NOTICES
        if not holds(path, notices_content(notices)) and (notices or path.exists()):
            hand_over(write_notices(self.state, notices), self.app_user)

    def warn_of_mute_sites(self, now: float) -> None:
        """Tell the operator once a day which sites cannot be heard: their requests would reach nobody.

        Sites that were revoked, or that the server has forgotten, have nothing to ask any more.
        """
        seen = read_seen(self.project.server)
        for site in self.project.sites.values():
            if site.revoked is not None or 0 <= now - self._warned.get(site.name, 0.0) < MUTE:
                continue
            last = max(seen[site.name].time if site.name in seen else 0.0, site.enrolled)
            until = max((c.not_after for c in site.certificates), default=0.0)
            if until > now and now - last < MUTE:
                continue
            self._warned[site.name] = now
            if self._is_forgotten(site):
                continue
            days = (now - last) / 86_400
            heard = f"was last seen {days:.0f} days ago" if site.name in seen else "was never seen"
            self.say(
                f"warning: {site.name} {heard}: a request of its owner would not reach this server. "
                + ("Ask the site to start its node." if until > now else EXPIRED.format(name=site.name))
            )

    def _is_forgotten(self, site: Site) -> bool:
        """Whether the server has erased a site, as its list of clients says."""
        from fedquit.flower.roster import FORGOTTEN, read_members

        try:
            members = read_members(self.state)
        except FedquitError:  # damaged: the server says so
            return False
        key = f"key:{site.fingerprints[0]}"
        return any(member.key == key and member.standing == FORGOTTEN for member in members)

    def forget_unknown_nodes(self) -> None:
        """Register again what the SuperLink does not know, for example because its database was replaced."""
        if self.memo.exists():
            with self.control.connected() as connection:
                known = set(connection.nodes().values())
            registered = {key: node for key, node in self._registered().items() if node in known}
            write_private_json(self.memo, registered)

    def _registered(self) -> dict[str, int | None]:
        """The node id of each key that was registered, by fingerprint; None for one that is not known any more."""
        try:
            return dict(read_json(self.memo)) if self.memo.exists() else {}
        except (StoreError, TypeError, ValueError):
            self.say(f"{self.memo} cannot be read and is made anew; the front refuses who was revoked all the same.")
            return {}

    def bring_up_to_date(self) -> None:
        """Write who takes part for the server app, register new keys, and unregister those given up."""
        sites = self.project.sites
        # Never read back: the folder is the app's, who could put a link to a key in the file's place.
        self._membership = membership_content(sites.values())
        hand_over(write_membership(self.state, sites.values()), self.app_user)
        registered = self._registered()
        new = [site for site in sites.values() if _current(site) and _current(site) not in registered]
        given_up = []
        for site in sites.values():
            former = [key for key in site.fingerprints if key != _current(site) and registered.get(key) is not None]
            given_up += [(site, key) for key in former]
        if not new and not given_up:
            return
        try:
            with self.control.connected() as connection:
                known = connection.nodes() if new else {}
                for site in new:
                    registered[_current(site)] = self._register(connection, site, known)
                for site, key in given_up:
                    self._unregister(connection, site, registered[key])
                    registered[key] = None
        finally:  # also what was done before something failed; a key that is not noted is found at the SuperLink
            write_private_json(self.memo, registered)

    def _register(self, connection: Connection, site: Site, known: Mapping[bytes, int]) -> int | None:
        """The node id of a site's key, which is registered where the SuperLink does not know it."""
        node = known.get(site.key_pem.strip())
        if node is not None:
            self.say(f"{site.name} is registered already, as node {node}.")
            return node
        try:
            node = connection.register(site.key_pem, site.name)
        except AlreadyRegistered:  # it was unregistered before, which Flower never takes back
            self.say(f"the SuperLink refuses the node key of {site.name} for good: {NEW_KEY.format(name=site.name)}")
            return None
        self.say(f"{site.name} is registered as node {node}.")
        return node

    def _unregister(self, connection: Connection, site: Site, node: int | None) -> None:
        if node is not None:
            with contextlib.suppress(UnknownNode):  # forgotten already; whatever else fails is tried again
                connection.unregister(node)
        self.say(f"node {node} of {site.name} is unregistered.")


def _current(site: Site) -> str:
    """The fingerprint of the key in use; "" where the site takes no part any more."""
    return "" if site.revoked is not None else site.fingerprints[-1]


NEW_KEY = (
    "let the site make new keys with `fedquit flower join --new`, and answer its request with `fedquit flower rotate "
    "{name}`."
)
EXPIRED = (
    "Its certificate has expired: let the site make a new request with `fedquit flower join`, and answer it with "
    "`fedquit flower rotate {name}`."
)


# The site's side -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SiteRun:
    """How a site's node is run."""

    site: SiteFolder
    home: Path  # what the client app keeps, and its owner's requests
    config: Mapping[str, Value] = field(default_factory=dict)
    app_user: AppUser | None = None

    @property
    def folder(self) -> Path:
        """Where the node's own files lie: with the keys, and not in the home, which is the app user's."""
        return self.site.folder / "node"

    def command(self, node: Node) -> list[str]:
        """The command that runs the node and, beside it, the process that runs apps."""
        return pair_command(self.descriptions(node))

    def descriptions(self, node: Node) -> list[dict[str, Any]]:
        """The node and the process that runs apps, as `pair` starts them; what they read is made ready."""
        site = self.site
        tls = site.loopback()
        run = self.home / "flower"
        authority, secret = copy_for(self.app_user, run, tls.authority, site.secret())
        home = hand_over(make_private_folder(run / "flower-home"), self.app_user)
        flower = supernode_command(node, str(site.about["address"]), site.authority, tls)[1:]
        closed = ["--trusted-entities", str(site.trust), "--isolation", "process"]
        closed += ["--superexec-auth-secret-file", str(site.secret())]
        supernode = [sys.executable, "-m", "fedquit.flower.closed.supernode", str(site.folder), *flower, *closed]
        variables = {"FLWR_HOME": str(home.resolve())}
        return [
            _described(supernode, None, {}, self.folder),
            _described(superexec_command(node.port, authority, secret), self.app_user, variables, run),
        ]


def note_node(run: SiteRun) -> None:
    """Write into a home which node uses it: requests are filed only where one does."""
    about = run.site.about
    started = {"name": about["name"], "server": about["address"], "started": time.time()}
    hand_over(write_private_json(run.home / NODE_FILE, started), run.app_user)


def run_site(run: SiteRun, *, say: Say = lambda _: None) -> None:
    """Run the node of a site and renew its certificate, until this process is interrupted.

    Args:
        run: what is run.
        say: takes one sentence for the owner of the site.
    """
    site = SiteFolder(run.site.folder.resolve())
    run = SiteRun(site, run.home.resolve(), run.config, run.app_user)
    about = site.about
    read_trust_file(site.trust)
    site.require_keys()
    require_apart(site.folder, run.home, "--home")
    if not run.home.exists():
        hand_over(make_private_folder(run.home), run.app_user)
    make_private_folder(run.folder)
    say(BY_HAND)
    if run.app_user is None:
        say(SAME_USER)
    require_access(run.home, run.app_user)
    name = str(about["name"])
    note_node(run)
    config: dict[str, Value] = {"fedquit-home": str(run.home), **run.config}
    node = Node(name, free_ports(1)[0], config, site.node_key)
    another = f"another node of {name} runs on this machine: stop it first."
    with only_one(run.folder / NODE_LOCK, another), ProcessGroup() as group:
        process = SupervisedProcess(
            group,
            name,
            run.command(node),
            run.folder / "logs" / f"{name}.log",
            environment(run.folder / "flower-home"),
            backoff=FOR_EVER,
            command_on_other_port=lambda: run.command(on_free_port(node)),
            say=say,
        )
        say(f"{name} starts and goes to {about['address']}; its log is {process.log}.")
        process.start()
        try:
            keep_in_touch(site, run.home, say)
        finally:
            process.stop()


def keep_in_touch(site: SiteFolder, home: Path, say: Say) -> None:
    """Renew a site's certificate and tell the front of its requests, until this process is interrupted.

    Args:
        site: its keys and its server.
        home: of the client app; the names of its requests are read.
        say: takes one sentence for the owner of the site.
    """
    courier = Courier(site, home, site.folder / "node" / "server.json", say)
    _keep_certificate(site, str(site.about["name"]), courier, say)


def _keep_certificate(site: SiteFolder, name: str, courier: Courier, say: Say) -> None:
    """Renew the certificate after half of its life, for ever; say it again and again when that fails.

    Between renewals the front is told of requests, and greeted, which says why a site is not let in.
    """
    watch = ServerWatch(site, say)
    next_try = 0.0  # by the monotonic clock: the other one may be set back by a year
    failed = 0  # the certificate that was not renewed: another one, which the operator sent, is not its matter
    unreadable = ""  # what was last said of a certificate that cannot be read
    while True:
        time.sleep(WATCH)
        watch.look()
        courier.step()
        try:
            serial, due, left = site.certificate().serial_number, site.renewal_due(), site.seconds_left()
        except (FedquitError, OSError) as error:  # the node goes on with the one that it has read
            if str(error) != unreadable:
                unreadable = str(error)
                say(f"warning: the certificate of {name} cannot be looked after: {error}")
            continue
        unreadable = ""
        if not due or (serial == failed and time.monotonic() < next_try):
            continue
        failed = serial
        try:
            site.renew()
            serial, left = site.certificate().serial_number, site.seconds_left()
        except (FedquitError, OSError) as error:
            validity = f"is valid for {left / 86_400:.1f} more days" if left > 0 else "HAS EXPIRED"
            say(f"warning: the certificate of {name} {validity} and was not renewed: {error}")
            pause = min(RETRY_RENEWAL, max(WATCH, left / 10)) if left > 0 else SAY_EXPIRED
            next_try = time.monotonic() + pause
        else:
            say(f"{name} has a new certificate, valid for {left / 86_400:.1f} days.")
            failed = serial  # a server of another version may give one that is due at once
            next_try = time.monotonic() + min(AFTER_RENEWAL, max(WATCH, left / 4))
