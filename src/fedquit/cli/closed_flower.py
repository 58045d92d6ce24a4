# SPDX-License-Identifier: Apache-2.0
"""`fedquit flower init`, `join`, `enrol`, `rotate`, `revoke`, `sign`, `renew`: the members of a closed federation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedquit.cli.screen import PLAIN
from fedquit.cli.screen import out as screen
from fedquit.errors import InputError

if TYPE_CHECKING:
    from fedquit.flower.closed.bundle import Bundle

ProjectFolder = Annotated[Path, typer.Option("--project", help="The folder that `fedquit flower init` made.")]
RequestFile = Annotated[Path, typer.Argument(metavar="CSR", help="The request that the site made.")]
Name = Annotated[str, typer.Argument(help="The name of the site.")]
BundleOut = Annotated[Path | None, typer.Option("--out", help="The bundle to write; NAME.tar if not given.")]
Fingerprint = Annotated[str, typer.Option(help="What the site printed; the request is refused if it has another.")]


def _say(line: str) -> None:
    screen.print(line, **PLAIN)


def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder for the project's keys.")],
    host: Annotated[str, typer.Option(help="The name or address by which the sites reach the server.")],
    port: Annotated[int, typer.Option(help="The port that the sites reach.")] = 9443,
    listen: Annotated[str, typer.Option(help="The address of this machine on which the front listens.")] = "0.0.0.0",
    superlink_port: Annotated[int, typer.Option(help="The port of the SuperLink, on loopback.")] = 9092,
    certificate_days: Annotated[float, typer.Option(help="For how long a certificate is valid.")] = 14.0,
) -> None:
    """Make a closed federation: its authority, the key that signs apps, the server's settings, a list of sites."""
    _require_extra()
    from fedquit.flower.closed.project import Project, Settings

    project = Project.init(folder, Settings(host, port, listen, superlink_port, certificate_days))
    _say(f"{folder} holds the project: sites reach it at {project.settings.address}. Back the folder up.")
    _say(f"Sign the app with `fedquit flower sign APP --project {folder}`, then enrol the sites.")


def join(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of this site's keys; it is made.")],
    bundle: Annotated[Path | None, typer.Option(help="What the operator sent back.")] = None,
    new: Annotated[bool, typer.Option("--new", help="Make a new node key too: the old one may be known.")] = False,
) -> None:
    """At a site: make its keys and a request for the operator; then, with --bundle, take the operator's answer."""
    _require_extra()
    from fedquit.flower.closed.bundle import Bundle
    from fedquit.flower.closed.site_folder import SiteFolder

    site = SiteFolder(folder)
    if bundle is not None:
        site.install(Bundle.unpack(_content(bundle)))
        days = site.seconds_left() / 86_400
        _say(
            f"{site.about['name']} can start with {folder / 'start.sh'}; its certificate is valid for {days:.1f} days."
        )
        return
    fingerprint = site.join(new=new)
    _say(f"Send {site.request} to the operator, and tell this fingerprint over another channel:")
    _say(f"  {fingerprint}")


def enrol(
    name: Name,
    request: RequestFile,
    project: ProjectFolder,
    examples: Annotated[int, typer.Option(help="How many examples the site counts for at most.")],
    fingerprint: Fingerprint = "",
    out: BundleOut = None,
) -> None:
    """Admit a site: sign its request and write the bundle that goes back to it."""
    _require_extra()
    from fedquit.flower.closed.project import Project

    content = _compared(request, fingerprint)
    _issue(name, out, lambda deliver: Project.open(project).enrol(name, content, examples, deliver))


def rotate(
    name: Name, request: RequestFile, project: ProjectFolder, fingerprint: Fingerprint = "", out: BundleOut = None
) -> None:
    """Give a site new keys and a new certificate: it stays the same site. What it had before is refused."""
    _require_extra()
    from fedquit.flower.closed.project import Project

    content = _compared(request, fingerprint)
    _issue(name, out, lambda deliver: Project.open(project).rotate(name, content, deliver))


def revoke(name: Name, project: ProjectFolder) -> None:
    """Remove a site for good: it is cut off within a second. What the model learned from it stays in the model."""
    _require_extra()
    from fedquit.flower.closed.project import Project

    Project.open(project).revoke(name)
    _say(f"{name} is revoked. To remove what the model learned from it: fedquit request --server STATE --client {name}")


def sign(
    flower_app: Annotated[Path, typer.Argument(metavar="APP", help="The folder of the Flower app.")],
    project: ProjectFolder,
    key: Annotated[Path | None, typer.Option(help="The key that signs; DIR/release.key if not given.")] = None,
) -> None:
    """Sign an app as it is now: sites run no other."""
    _require_extra()
    from fedquit.flower.closed import apps
    from fedquit.flower.closed.project import Project

    opened = Project.open(project)
    release_key = apps.load_release_key(key or project / "release.key")
    if apps.key_id(release_key.public_key()) not in apps.read_trust_file(opened.trust):
        raise InputError(f"the sites do not trust this key: give the one that {opened.trust} names.")
    digest = apps.sign(flower_app, release_key, opened.apps)
    _say(f"{flower_app} is signed; the SHA-256 of its archive is {digest}.")


def renew(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of this site's keys.")],
    if_due: Annotated[bool, typer.Option("--if-due", help="Only after half of the certificate's life.")] = False,
) -> None:
    """At a site: get the next certificate now. A running node does so by itself after half of a certificate's life."""
    _require_extra()
    from fedquit.flower.closed.greeting import greet
    from fedquit.flower.closed.site_folder import SiteFolder

    site = SiteFolder(folder)
    if if_due and not site.renewal_due():
        for problem in greet(site):
            _say(f"warning: {problem}")
        _say(f"{site.about['name']} needs no new certificate for now.")
        return
    site.renew()
    _say(f"{site.about['name']} has a new certificate, valid for {site.seconds_left() / 86_400:.1f} days.")


def _require_extra() -> None:
    from fedquit.flower.deploy.environment import require_flower

    require_flower()


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path} ({error.strerror}): give the file that was sent.") from error


def _compared(request: Path, fingerprint: str) -> bytes:
    """A request whose fingerprint is the one that the site told, where it told one."""
    from fedquit.flower.closed.requests import read_request

    content = _content(request)
    actual = read_request(content).fingerprint
    if fingerprint and fingerprint.replace(" ", "").lower() != actual.replace(" ", ""):
        raise InputError(
            f"the request has the fingerprint {actual}: it is not the one that the site made. Ask the site."
        )
    if not fingerprint:
        _say(f"Compare with what the site printed: {actual}")
    return content


def _issue(name: str, out: Path | None, issue: Callable[[Callable[[Bundle], None]], Bundle]) -> None:
    """Write the bundle before the site is admitted; if either fails, neither is there."""
    from fedquit.utils.files import write_secret

    path = out or Path(f"{name}.tar")
    if path.exists():
        raise InputError(f"{path} exists: move it away, or give --out another name.")
    try:
        issue(lambda bundle: write_secret(path, bundle.pack()))
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    _say(f"Send {path} to {name}; nothing in it is secret.")


def add_to(app: typer.Typer) -> None:
    """Add these commands to `fedquit flower`."""
    for command in (init, join, enrol, rotate, revoke, sign, renew):
        app.command()(command)
