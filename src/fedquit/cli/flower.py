# SPDX-License-Identifier: Apache-2.0
"""`fedquit flower`: start and supervise a federation on Flower (demo, serve, node), closed or not.

The commands that make a federation closed (init, join, enrol, takeover, examples, rotate, revoke, sign,
renew) are in `closed_flower`.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedquit.cli import closed_flower, operate
from fedquit.cli.screen import PLAIN, AsJson, err
from fedquit.cli.screen import out as screen
from fedquit.errors import InputError
from fedquit.flower.log_lines import log_line
from fedquit.utils.files import close_to_others, only_owner

if TYPE_CHECKING:
    from fedquit.flower.deploy.keys import Tls
    from fedquit.flower.deploy.standing import Standing
    from fedquit.flower.deploy.supervision import Plan

app = typer.Typer(help="Unlearning in a real federation, on Flower.", no_args_is_help=True)
Settings = Annotated[list[str], typer.Option("--set", help="A setting, as key=value; again for more.")]
Authority = Annotated[
    Path | None, typer.Option("--ca", help="The certificate of the authority that vouches for the SuperLink.")
]
AppUserName = Annotated[
    str, typer.Option("--app-user", help="In a closed federation: the user who runs app code, apart from the keys.")
]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="No TLS and no node keys: on this machine, and for trials only.")
]


class LogStyle(StrEnum):
    """How log lines are written."""

    text = "text"
    json = "json"


Logs = Annotated[LogStyle, typer.Option("--log", help="Log lines as text, or as one JSON object a line.")]


def log_to_screen(source: str, style: LogStyle = LogStyle.text) -> Callable[[str], None]:
    """A function that prints a line of a log, with its time."""

    def print_line(line: str) -> None:
        err.print(log_line(line, source, style.value), **PLAIN)

    return print_line


def as_settings(words: list[str]) -> dict[str, str | int | float | bool]:
    """Read `key=value` words; a value is a number, a truth value, or else text."""
    settings: dict[str, str | int | float | bool] = {}
    for word in words:
        key, sign, value = word.partition("=")
        if not key or not sign:
            raise InputError(f"{word!r} is not a setting: write key=value.")
        settings[key] = _value(value)
    return settings


def _value(text: str) -> str | int | float | bool:
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    return value if isinstance(value, str | int | float | bool) else text


def members_of(words: list[str]) -> Mapping[str, Path]:
    """Read `name=file` words, whose files must be there."""
    pairs = [word.partition("=") for word in words]
    for name, sign, file in pairs:
        if not name or not sign or not Path(file).is_file():
            raise InputError(f"--member {name}{sign}{file}: write name=file with the public key of a node.")
    return {name: Path(file) for name, _, file in pairs}


@app.command()
def demo(
    out: Annotated[
        Path | None, typer.Option(help="A folder that keeps logs, keys and state; else none is kept.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """See a node forgotten in a real federation: a SuperLink, 4 SuperNodes, TLS, node keys. Under 4 minutes."""
    from fedquit.flower.deploy import demo as shown
    from fedquit.flower.deploy.environment import require_flower
    from fedquit.flower.deploy.processes import orderly_end

    require_flower()
    with orderly_end():
        results = shown.run(out, say=log_to_screen("fedquit"))
    if as_json:
        typer.echo(json.dumps(results))
    else:
        for line in shown.summary(results):
            screen.print(line, **PLAIN)


@app.command()
def serve(
    flower_app: Annotated[Path, typer.Argument(metavar="APP", help="The folder of the Flower app.")],
    state: Annotated[
        Path, typer.Option(help="The folder of the federation's state; the same command goes on from it.")
    ],
    address: Annotated[str, typer.Option(help="Where the SuperLink listens: host:port.")] = "127.0.0.1:9092",
    ca: Authority = None,
    certificate: Annotated[Path | None, typer.Option(help="The SuperLink's own certificate.")] = None,
    key: Annotated[Path | None, typer.Option(help="The key to that certificate.")] = None,
    member: Annotated[list[str], typer.Option(help="A node that may take part: name=file of its public key.")] = [],  # noqa: B006 - typer copies it
    settings: Settings = [],  # noqa: B006 - typer copies it
    attach: Annotated[bool, typer.Option("--attach", help="The SuperLink runs elsewhere already.")] = False,
    attempts: Annotated[int, typer.Option(help="How often in a row a run may fail.", min=0)] = 10,
    insecure: Insecure = False,
    project: Annotated[
        Path | None, typer.Option(help="A closed federation: the folder that `fedquit flower init` made.")
    ] = None,
    app_user: AppUserName = "",
    until_trained: Annotated[
        bool, typer.Option("--until-trained", help="End when training is over, instead of staying open.")
    ] = False,
    sweep: Annotated[
        float, typer.Option(help="After training: seconds after which all nodes are asked for requests.", min=1.0)
    ] = 3600.0,
    log: Logs = LogStyle.text,
) -> None:
    """Run a federation: train, then stay open and serve erasure requests until it is stopped."""
    from dataclasses import replace

    from fedquit.flower.deploy.environment import require_flower
    from fedquit.flower.deploy.processes import orderly_end
    from fedquit.flower.deploy.service import Link
    from fedquit.flower.deploy.service import serve as run_service
    from fedquit.flower.deploy.standing import Standing
    from fedquit.flower.deploy.supervision import RUN_BACKOFF, STATE, Plan
    from fedquit.flower.sqlite_wipe import FOLDER

    require_flower()
    standing = Standing(state.resolve(), sweep)
    if project is not None:
        if member or ca or certificate or key or insecure:
            raise InputError(
                "with --project the sites, certificates and addresses are the project's: leave the rest out."
            )
        config = {STATE: str(state.resolve()), **as_settings(settings)}
        plan = Plan(flower_app, config, backoff=replace(RUN_BACKOFF, attempts=attempts))
        run = _serve_closed(plan, project, standing, app_user, log, attach=attach, until_trained=until_trained)
        screen.print(f"Run {run} has finished. State: {state}", **PLAIN)
        return
    members = members_of(member)
    tls = None if attach or insecure else _tls(ca, certificate, key)
    if attach and not insecure and not ca:
        raise InputError("give --ca with the authority of the SuperLink to attach to, or say --insecure.")
    link = Link(address, tls, None if insecure else ca, ours=not attach, mode="insecure" if insecure else "secure")
    config = {STATE: str(state.resolve()), **as_settings(settings)}
    plan = Plan(flower_app, config, backoff=replace(RUN_BACKOFF, attempts=attempts))
    say, hear = log_to_screen("fedquit", log), log_to_screen("app", log)
    with only_owner(), orderly_end():
        close_to_others(state)
        run = run_service(
            plan,
            link,
            state / FOLDER,
            members=members,
            standing=standing,
            until_trained=until_trained,
            say=say,
            hear=hear,
        )
    screen.print(f"Run {run} has finished. State: {state}", **PLAIN)


def _serve_closed(
    plan: Plan, project: Path, standing: Standing, app_user: str, log: LogStyle, *, attach: bool, until_trained: bool
) -> int:
    from fedquit.flower.closed.app_user import AppUser
    from fedquit.flower.closed.project import Project
    from fedquit.flower.closed.service import serve as serve_closed
    from fedquit.flower.deploy.processes import orderly_end

    user = AppUser.named(app_user) if app_user else None
    say, hear = log_to_screen("fedquit", log), log_to_screen("app", log)
    with only_owner(), orderly_end():
        close_to_others(standing.state)
        return serve_closed(
            plan,
            Project.open(project),
            standing.state,
            app_user=user,
            attach=attach,
            standing=standing,
            until_trained=until_trained,
            say=say,
            hear=hear,
        )


def _tls(ca: Path | None, certificate: Path | None, key: Path | None) -> Tls:
    from fedquit.flower.deploy.keys import Tls

    if ca is None or certificate is None or key is None:
        raise InputError("give --ca, --certificate and --key, or say --insecure for a trial on this machine.")
    return Tls(*(_file(path) for path in (ca, certificate, key)))


def _file(path: Path) -> Path:
    if not path.is_file():
        raise InputError(f"there is no file {path}.")
    return path


@app.command()
def node(
    home: Annotated[Path, typer.Option(help="The folder of this node: what it keeps, and its owner's requests.")],
    superlink: Annotated[str, typer.Option(help="The SuperLink: host:port.")] = "",
    ca: Authority = None,
    key: Annotated[
        Path | None, typer.Option(help="This node's private key; its public half must be registered.")
    ] = None,
    name: Annotated[str, typer.Option(help="For the log.")] = "node",
    settings: Settings = [],  # noqa: B006 - typer copies it
    insecure: Insecure = False,
    site: Annotated[
        Path | None, typer.Option(help="A site of a closed federation: the folder that `fedquit flower join` made.")
    ] = None,
    app_user: AppUserName = "",
    log: Logs = LogStyle.text,
) -> None:
    """Run a SuperNode and start it again when it ends; Ctrl-C stops it."""
    from fedquit.flower.deploy.commands import Node
    from fedquit.flower.deploy.environment import free_ports, require_flower
    from fedquit.flower.deploy.keys import NodeKey
    from fedquit.flower.deploy.processes import orderly_end
    from fedquit.flower.deploy.service import run_node

    require_flower()
    if site is not None:
        if superlink or ca or key or insecure:
            raise InputError("with --site the server, its authority and the keys are the site's: leave the rest out.")
        _run_site(site, home, as_settings(settings), app_user, log)
        return
    if not superlink:
        raise InputError("give --site with the folder of a closed federation's site, or --superlink with host:port.")
    if not insecure and (ca is None or key is None):
        raise InputError("give --ca and --key, or say --insecure for a trial on this machine.")
    own = None if insecure or key is None else NodeKey(_file(key), key.with_name(f"{key.name}.pub"))
    config: dict[str, Any] = {"fedquit-home": str(home.resolve()), **as_settings(settings)}
    made = Node(name, free_ports(1)[0], config, own)
    say = log_to_screen("fedquit", log)
    with only_owner(), orderly_end():
        close_to_others(home)
        run_node(made, superlink, None if insecure or ca is None else _file(ca), home / "flower", say=say)


def _run_site(
    site: Path, home: Path, settings: dict[str, str | int | float | bool], app_user: str, log: LogStyle
) -> None:
    from fedquit.flower.closed.app_user import AppUser
    from fedquit.flower.closed.service import SiteRun, run_site
    from fedquit.flower.closed.site_folder import SiteFolder
    from fedquit.flower.deploy.processes import orderly_end

    user = AppUser.named(app_user) if app_user else None
    with only_owner(), orderly_end():
        close_to_others(site)
        close_to_others(home)
        run_site(SiteRun(SiteFolder(site), home, settings, user), say=log_to_screen("fedquit", log))


closed_flower.add_to(app)
operate.add_to(app)
