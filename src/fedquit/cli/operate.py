# SPDX-License-Identifier: Apache-2.0
"""`fedquit flower status`, `doctor`, `metrics`, `units`: what an operator sees and sets up."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from fedquit.cli.screen import LOOK, PLAIN, AsJson
from fedquit.cli.screen import out as screen
from fedquit.errors import InputError
from fedquit.flower.log_lines import printable, timestamp

if TYPE_CHECKING:
    from fedquit.flower.operations.findings import Finding
    from fedquit.flower.operations.status import MemberStatus, RequestStatus, Status

ProjectFolder = Annotated[
    Path | None, typer.Option("--project", help="A closed federation: the folder that `fedquit flower init` made.")
]
StateFolder = Annotated[
    Path | None, typer.Option("--state", help="The state directory; the one that was served last if not given.")
]
WRONG = 1  # the exit code of a doctor that found an error


def _say(line: str) -> None:
    screen.print(line, **PLAIN)


def status(
    project: ProjectFolder = None,
    state: StateFolder = None,
    metrics: Annotated[
        Path | None, typer.Option(help="Write the status as Prometheus metrics to this file (NAME.prom) instead.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """See where a federation stands: members, certificates, rounds, requests, quorum, disk. No server need run."""
    _require_extra()
    from fedquit.flower.operations.status import locate, status_of

    current = status_of(locate(project, state))
    if metrics is not None:
        from fedquit.flower.operations.metrics import write_metrics

        write_metrics(current, metrics)
    elif as_json:
        typer.echo(json.dumps(current.as_json()))
    else:
        _show(current)


def metrics(
    project: ProjectFolder = None,
    state: StateFolder = None,
    port: Annotated[int, typer.Option(help="The port on loopback.", min=1, max=65_535)] = 9464,
) -> None:
    """Serve the status as Prometheus metrics over HTTP, on loopback; read anew for every scrape. Ctrl-C ends it."""
    _require_extra()
    from fedquit.flower.deploy.processes import orderly_end
    from fedquit.flower.operations.metrics import serve_metrics
    from fedquit.flower.operations.status import locate, status_of

    locate(project, state)
    with orderly_end():
        number, stop = serve_metrics(lambda: status_of(locate(project, state)), port)
        _say(f"metrics are at http://127.0.0.1:{number}/metrics.")
        try:
            while True:
                signal.pause()
        finally:
            stop()


def doctor(
    project: ProjectFolder = None,
    state: StateFolder = None,
    site: Annotated[
        Path | None, typer.Option(help="At a site: the folder that `fedquit flower join` made, instead of a project.")
    ] = None,
    home: Annotated[Path | None, typer.Option(help="With --site: the home of its node.")] = None,
    flower_app: Annotated[Path | None, typer.Option("--app", help="The folder of the Flower app.")] = None,
    days: Annotated[float, typer.Option(help="After how many days of silence a member is told of.", min=0.0)] = 3.0,
    as_json: AsJson = False,
) -> None:
    """Find out why a federation is stuck: each finding with what to do next. Exit code 1 if there is an error."""
    _require_extra()
    from fedquit.flower.operations.server_doctor import examine_server
    from fedquit.flower.operations.site_doctor import examine_site
    from fedquit.flower.operations.status import locate

    if site is not None:
        if project or state or flower_app:
            raise InputError("--site is for a site, the other options for the server: give one side.")
        findings = examine_site(site, home)
    else:
        findings = examine_server(locate(project, state), app=flower_app, silent_days=days)
    if as_json:
        typer.echo(json.dumps([finding.as_json() for finding in findings]))
    else:
        _show_findings(findings)
    if any(finding.level == "error" for finding in findings):
        raise typer.Exit(WRONG)


def _show_findings(findings: Sequence[Finding]) -> None:
    for finding in findings:
        _say(f"{finding.level}: {printable(finding.sentence)}")
    if not findings:
        _say("Nothing is wrong, as far as this machine can tell.")


def _show(current: Status) -> None:
    now = current.time
    planned = "" if current.rounds is None else f" of {current.rounds}"
    since = "" if current.progress is None else f", the last stored {_ago(now - current.progress)}"
    _say(f"{timestamp(now)}  state {current.state}")
    _say(f"server {_word(current.serving)}, front {_word(current.front)}, SuperLink {_word(current.superlink)}")
    run = {True: "a run is in progress", False: "no run is in progress: one begins when there is something to do"}
    if current.serving and current.running is not None:
        _say(run[current.running])
    if current.paused:
        _say(current.paused)
    if current.withdrawn:
        _say("the model was withdrawn: an erasure left too few members to recover it")
    if current.next is not None and current.next > now:
        _say(f"the next request that waits can be started at {timestamp(current.next)}")
    _say(f"phase {current.phase or 'none yet'}: {current.trained}{planned} training rounds are done{since}")
    if current.needed is not None:
        _say(f"{current.here} members are here, a round needs {current.needed}")
    screen.print(_member_table(current.members, now))
    if current.requests:
        screen.print(_request_table(current.requests, now))
    for disk in current.disks:
        _say(f"disk of {disk.path}: {disk.free / 2**30:.1f} GiB free, {100 * disk.free_fraction:.0f} %")
    refused = sum(current.refusals.values())
    if refused:
        _say(f"the front refused {refused} connections or requests in the last day; `fedquit flower doctor` says more")
    for sentence in current.damaged:
        _say(f"damaged: {printable(sentence)}")


def _member_table(members: Sequence[MemberStatus], now: float) -> Table:
    table = Table(title="Members", **LOOK)
    for head in ("member", "state", "client", "examples", "last seen", "certificate", "fedquit"):
        table.add_column(head)
    for member in members:
        days = member.certificate_days
        table.add_row(
            escape(printable(member.name)),
            member.state,
            "" if member.client is None else str(member.client),
            str(member.examples),
            "" if member.last_seen is None else _ago(now - member.last_seen),
            "" if days is None else f"{days:.1f} days",
            escape(printable(member.fedquit)),
        )
    return table


def _request_table(requests: Sequence[RequestStatus], now: float) -> Table:
    table = Table(title="Erasure requests", **LOOK)
    for head in ("request", "member", "of", "status", "since", "deadline", "method", "reason"):
        table.add_column(head)
    for request in requests:
        left = "" if request.deadline is None else f"in {(request.deadline - now) / 60:.0f} min"
        cells = (request.client, request.kind, request.status, request.since, left, request.method, request.reason)
        table.add_row(request.id, *(escape(printable(cell)) for cell in cells))
    return table


def _word(value: bool | None) -> str:
    return {True: "runs", False: "does not run", None: "not known"}[value]


def _ago(seconds: float) -> str:
    from fedquit.flower.closed.greeting import in_words

    return f"{in_words(max(0.0, seconds))} ago"


def _require_extra() -> None:
    from fedquit.flower.deploy.environment import require_flower

    require_flower()


SiteKeys = Annotated[Path | None, typer.Option("--site", help="At a site: the folder that `fedquit flower join` made.")]
Home = Annotated[Path | None, typer.Option("--home", help="At a site: the home of its node.")]
Settings = Annotated[list[str], typer.Option("--set", help="A setting, as key=value; again for more.")]
NodePort = Annotated[int, typer.Option("--port", help="At a site: the port of the node's own API, on loopback.")]
NODE_PORT = 9094


def units(
    out: Annotated[Path, typer.Option(help="The folder for the units, such as /etc/systemd/system.")],
    project: ProjectFolder = None,
    state: StateFolder = None,
    flower_app: Annotated[Path | None, typer.Option("--app", help="With --project: the folder of the app.")] = None,
    site: SiteKeys = None,
    home: Home = None,
    settings: Settings = [],  # noqa: B006 - typer copies it
    user: Annotated[str, typer.Option(help="The user who owns the keys.")] = "fedquit",
    app_user: Annotated[str, typer.Option(help="The user who runs app code, and owns state or home.")] = "fedquit-app",
    port: NodePort = NODE_PORT,
    data: Annotated[list[Path], typer.Option(help="At a site: a folder that the app reads; again for more.")] = [],  # noqa: B006 - typer copies it
) -> None:
    """Write systemd units that run the server (--project, --state, --app) or a site (--site, --home)."""
    _require_extra()
    from fedquit.cli.flower import as_settings
    from fedquit.flower.operations.units import ServerUnits, SiteUnits, write_units

    given = as_settings(settings)
    if project and state and flower_app and not site:
        rendered = ServerUnits(project, state, flower_app, given, user, app_user).render()
    elif site and home and not project:
        rendered = SiteUnits(site, home, given, user, app_user, port, tuple(data)).render()
    else:
        raise InputError("give --project, --state and --app for the server, or --site and --home for a site.")
    for path in write_units(rendered, out):
        _say(str(path))
    first = "fedquit-node.service" if site else "fedquit-serve.service fedquit-front.socket"
    _say(f"Then: systemctl daemon-reload && systemctl enable --now {first}")


def prepare(
    project: ProjectFolder = None,
    state: StateFolder = None,
    site: SiteKeys = None,
    home: Home = None,
    settings: Settings = [],  # noqa: B006 - typer copies it
    app_user: Annotated[str, typer.Option(help="The user who runs app code, and owns state or home.")] = "",
    port: NodePort = NODE_PORT,
) -> None:
    """For units: make ready what the parts of a server or a site read, and hand it to their users."""
    _require_extra()
    from fedquit.cli.flower import as_settings
    from fedquit.flower.closed.app_user import AppUser
    from fedquit.flower.closed.project import Project
    from fedquit.flower.closed.site_folder import SiteFolder
    from fedquit.flower.operations.parts import prepare_server, prepare_site
    from fedquit.utils.files import only_owner

    user = AppUser.named(app_user) if app_user else None
    with only_owner():
        if project and state and not site:
            prepare_server(Project.open(project), state, user)
        elif site and home and not project:
            prepare_site(SiteFolder(site), home, as_settings(settings), user, port)
        else:
            raise InputError("give --project and --state for the server, or --site and --home for a site.")


def part(
    name: Annotated[str, typer.Argument(help="superlink, superexec, front; node, apps, keeper.")],
    project: ProjectFolder = None,
    state: StateFolder = None,
    site: SiteKeys = None,
    home: Home = None,
) -> None:
    """For units: run one part of a server or a site, which `fedquit flower prepare` made ready."""
    _require_extra()
    from fedquit.flower.closed.site_folder import SiteFolder
    from fedquit.flower.deploy.processes import orderly_end
    from fedquit.flower.operations import parts
    from fedquit.utils.files import only_owner

    with only_owner():
        if name in ("superlink", "superexec") and state:
            parts.run_server_part(name, state)
        elif name == "front" and project:
            parts.run_front(project)
        elif name == "node" and site:
            parts.run_node(SiteFolder(site))
        elif name == "apps" and home:
            parts.run_apps(home)
        elif name == "keeper" and site and home:
            from fedquit.cli.flower import log_to_screen

            with orderly_end():
                parts.run_keeper(SiteFolder(site), home, log_to_screen("fedquit"))
        else:
            raise InputError(
                "give superlink or superexec with --state, front with --project, node with --site, apps with --home, "
                "keeper with --site and --home."
            )


def add_to(app: typer.Typer) -> None:
    """Add these commands to `fedquit flower`."""
    for command in (status, metrics, doctor, units):
        app.command()(command)
    for for_units in (prepare, part):
        app.command(hidden=True)(for_units)
