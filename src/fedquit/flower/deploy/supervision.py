# SPDX-License-Identifier: Apache-2.0
"""Seeing a run through: it is submitted again after every failure, until it has finished.

Flower does not take up a run that was cut off: when the SuperLink or the ServerApp dies, the run has failed. The
ServerApp of an erasable federation keeps all that matters on disk, so a new run goes on where the last one stopped.
What is missing is somebody who starts it. That is `serve`.
"""

from __future__ import annotations

import contextlib
import ipaddress
import queue
import secrets
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from fedquit.errors import InputError, StoreError
from fedquit.flower.deploy.keys import NodeKey, Tls, make_tls
from fedquit.flower.deploy.processes import COLOURS, HERE, DeploymentError, Guard, Keeper, Pauses, Say, environment
from fedquit.flower.deploy.stack import (
    REFUSED,
    Control,
    Mode,
    Node,
    Value,
    elsewhere,
    superlink_command,
    supernode_command,
)
from fedquit.flower.sqlite_wipe import DATABASE, wipe_traces
from fedquit.utils.files import read_json, write_json

Hear = Callable[[str], None]
STATE = "fedquit.state"  # the setting by which an app learns where its state lies
AGAIN = Pauses(first=2.0, factor=2.0, most=60.0, attempts=10)
COMPLETED, STOPPED = "finished:completed", "finished:stopped"
LOST_AFTER = 150.0  # seconds in which a SuperLink notices by itself that a ServerApp is gone
UNKNOWN_RUN = "Run ID not found"  # in Flower's words
ASKED_AGAIN = 1.0  # seconds between two questions about a run
OPEN_PORT = (
    "warning: whoever can reach {address} can run code on this machine and on every node, with TLS and registered keys "
    "too, because Flower's control API asks for no authentication; keep the port behind a firewall or a tunnel "
    "(see SECURITY.md)."
)


@dataclass(frozen=True)
class Plan:
    """What is to be run, and how long to go on trying."""

    app: Path
    config: Mapping[str, Value] = field(default_factory=dict)
    federation: Mapping[str, Value] = field(default_factory=dict)
    pauses: Pauses = AGAIN
    patience: float = 300.0  # seconds without a SuperLink that answers

    def __post_init__(self) -> None:
        if not (self.app / "pyproject.toml").exists():
            raise InputError(f"{self.app} is no Flower app: give the folder that holds the app's pyproject.toml.")


def see_through(
    plan: Plan,
    control: Control,
    memo: Path,
    *,
    superlink: Keeper | None = None,
    say: Say = lambda _: None,
    hear: Hear = lambda _: None,
) -> int:
    """Run an app until it has finished, starting it again when it failed; the number of the run that finished.

    `memo` is a file with the number of the run that is under way: a supervisor that is started after a crash follows it
    on, unless the run went down with a SuperLink of our own.
    """
    pauses, run = iter(plan.pauses), _under_way(memo)
    _wait_for_superlink(control, plan.patience, superlink, say)
    if run is not None and superlink:
        _give_up(control, run)
        run = None
    while True:
        _wait_for_superlink(control, plan.patience, superlink, say)
        began, starts = time.monotonic(), superlink.starts if superlink else 0
        run = run if run is not None else _submitted(plan, control, memo, superlink, say)
        end = "it could not be submitted"
        if run is not None:
            end = _follow(control, run, plan.patience, superlink, starts, say, hear)
        if run is not None and end == COMPLETED:
            say(f"run {run} has finished.")
            memo.unlink(missing_ok=True)
            return run
        if end == STOPPED:
            memo.unlink(missing_ok=True)
            raise DeploymentError(f"run {run} was stopped by an operator: start it again with the same command.")
        if time.monotonic() - began > LOST_AFTER:
            pauses = iter(plan.pauses)  # it got somewhere: earlier failures are forgotten
        if (pause := next(pauses, None)) is None:
            raise DeploymentError(f"run {run} is lost, as were {plan.pauses.attempts} before it. The last: {end}")
        say(f"run {run} is lost ({end}): the next one starts in {pause:.0f} s and goes on from the state on disk.")
        time.sleep(pause)
        run = None


def _submitted(plan: Plan, control: Control, memo: Path, superlink: Keeper | None, say: Say) -> int | None:
    """The number of a new run; None if the SuperLink went away meanwhile, also where it is back by now."""
    starts = superlink.starts if superlink else 0
    try:
        run = control.submit(plan.app, plan.config, plan.federation)
    except DeploymentError:
        went_away = superlink is not None and (superlink.starts != starts or not superlink.running)
        if control.healthy() and not went_away:  # then it is the app that is at fault, and will be the next time
            raise
        return None
    write_json(memo, {"run": str(run)})
    say(f"run {run} started.")
    return run


def _under_way(memo: Path) -> int | None:
    """The run that an earlier supervisor was following, if any."""
    if not memo.exists():
        return None
    with contextlib.suppress(StoreError, KeyError, TypeError, ValueError):
        return int(read_json(memo)["run"])
    return None


def _give_up(control: Control, run: int) -> None:
    """A run that went down with its SuperLink would count as running for another minute."""
    with contextlib.suppress(DeploymentError):  # the SuperLink may know already
        control.stop(run)


def _wait_for_superlink(control: Control, patience: float, superlink: Keeper | None, say: Say) -> None:
    deadline, told = time.monotonic() + patience, False
    while not control.healthy():
        if superlink and superlink.gave_up:
            raise DeploymentError(f"{superlink.gave_up}. Its log:\n{superlink.tail()}")
        if time.monotonic() > deadline:
            raise DeploymentError(f"no SuperLink answered on {control.address} for {patience:.0f} s: start it.")
        if not told:
            say(f"waiting for the SuperLink on {control.address}.")
            told = True
        time.sleep(0.5)


def _follow(
    control: Control, run: int, patience: float, superlink: Keeper | None, starts: int, say: Say, hear: Hear
) -> str:
    """Follow a run to its end; how it ended. It has also ended when the SuperLink that carried it was started again."""
    silent_since: float | None = None
    while True:
        _listen(control, run, hear, lambda: superlink is not None and superlink.starts != starts)
        _wait_for_superlink(control, patience, superlink, say)
        if superlink and superlink.starts != starts:
            _give_up(control, run)
            return "the SuperLink was started again"
        try:
            known = control.run(run)
        except DeploymentError as error:
            if UNKNOWN_RUN in str(error):
                return "the SuperLink does not know it"
            if silent_since is None:  # it may have gone away between two questions
                say(f"what became of run {run} cannot be told: {error} It is asked for up to {patience:.0f} s.")
                silent_since = time.monotonic()
            if time.monotonic() - silent_since > patience:
                return f"nobody could tell for {patience:.0f} s what became of it: {error}"
            time.sleep(ASKED_AGAIN)
            continue
        silent_since = None
        status, details = str(known["status"]), str(known.get("status-details", ""))
        if status in (COMPLETED, STOPPED):
            return status
        if status.startswith("finished"):
            return f"{status}, {details}"
        time.sleep(ASKED_AGAIN)  # the log broke off, the run did not


def _listen(control: Control, run: int, hear: Hear, lost: Callable[[], bool]) -> None:
    """Pass on what a run says until it ends, the connection breaks, or the run is known to be lost."""
    lines: queue.Queue[str | None] = queue.Queue()
    with control.stream(run) as stream:
        reader = threading.Thread(target=_pump, args=(stream, lines), daemon=True)
        reader.start()
        try:
            while not lost():
                with contextlib.suppress(queue.Empty):
                    line = lines.get(timeout=0.5)
                    if line is None:
                        return
                    hear(line)
        finally:
            stream.kill()
            reader.join()


def _pump(stream: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    for line in stream.stdout or ():
        lines.put(COLOURS.sub("", line).rstrip())
    lines.put(None)


@dataclass(frozen=True)
class Link:
    """A SuperLink: where it is, how it proves who it is, and whether it is ours to run."""

    address: str  # host:port
    tls: Tls | None = None  # to run one with TLS
    authority: Path | None = None  # to reach one that somebody else runs
    ours: bool = True
    mode: Mode = "secure"

    def __post_init__(self) -> None:
        host, _, port = self.address.rpartition(":")
        if not host or not port.isdigit():
            raise InputError(f"{self.address!r} is no address: write host:port, for example {HERE}:9092.")

    @property
    def host(self) -> str:
        """The address without its port."""
        return self.address.rpartition(":")[0]

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it. A name other than localhost may stand for any address: it cannot."""
        try:
            return ipaddress.ip_address(self.host.strip("[]")).is_loopback
        except ValueError:
            return self.host == "localhost"


def serve(
    plan: Plan,
    link: Link,
    folder: Path,
    *,
    members: Mapping[str, Path] | None = None,
    say: Say = lambda _: None,
    hear: Hear = lambda _: None,
) -> int:
    """Run a SuperLink, or attach to one, and see a run of the app through.

    `members` are the public keys of the nodes that may take part, by name; one that is registered already stays so.
    """
    folder.mkdir(parents=True, exist_ok=True)
    authority = link.tls.authority if link.tls else link.authority
    if link.ours:  # one that was killed has not tidied up
        wipe_traces(folder / DATABASE, say)
    with Guard() as guard:
        control = Control(link.address, authority, folder / "flower-home", guard.mark_of("control"))
        keeper = _superlink(guard, link, folder, say) if link.ours else None
        try:
            _wait_for_superlink(control, plan.patience, keeper, say)
            for name, public in (members or {}).items():
                _register(control, name, public, say)
            return see_through(plan, control, folder / "run.json", superlink=keeper, say=say, hear=hear)
        finally:
            if keeper:
                keeper.stop()
                wipe_traces(folder / DATABASE, say)


def _superlink(guard: Guard, link: Link, folder: Path, say: Say) -> Keeper:
    _, _, port = link.address.rpartition(":")
    command = superlink_command(int(port), folder / DATABASE, link.tls, link.mode, link.host)
    log = folder / "logs" / "superlink.log"
    say(f"the SuperLink starts on {link.address}; its log is {log}.")
    if not link.is_loopback:
        say(OPEN_PORT.format(address=link.address))
    return Keeper(guard, "superlink", command, log, environment(folder / "flower-home"), say=say).start()


def _register(control: Control, name: str, public: Path, say: Say) -> None:
    try:
        number = control.register(NodeKey(public.with_suffix(""), public), name)
    except DeploymentError as error:
        if "already" not in str(error).lower():
            raise
        say(f"{name} is registered already.")
    else:
        say(f"{name} is registered as node {number}.")


def attend(node: Node, superlink: str, authority: Path | None, folder: Path, *, say: Say = lambda _: None) -> None:
    """Run a SuperNode and start it again when it ends, until this process is told to stop or gives up."""
    log = folder / "logs" / f"{node.name}.log"
    own = make_tls(folder / "keys" / secrets.token_hex(8)) if authority else None
    command = partial(supernode_command, superlink=superlink, authority=authority, own=own)
    env = environment(folder / "flower-home")
    with Guard() as guard:
        keeper = Keeper(
            guard,
            node.name,
            command(node),
            log,
            env,
            pauses=REFUSED,
            elsewhere=lambda: command(elsewhere(node)),
            say=say,
        )
        say(f"{node.name} starts and goes to {superlink}; its log is {log}.")
        keeper.start()
        try:
            while not keeper.gave_up:
                time.sleep(0.5)
        finally:
            keeper.stop()
    raise DeploymentError(f"{keeper.gave_up}. Its log:\n{keeper.tail()}")
