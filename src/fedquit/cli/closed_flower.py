# SPDX-License-Identifier: Apache-2.0
"""The members of a closed federation: `fedquit flower init`, `join`, `enrol`, `rotate`, `revoke` and others."""

from __future__ import annotations

import contextlib
import csv
import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedquit.cli.screen import PLAIN
from fedquit.cli.screen import out as screen
from fedquit.errors import FedquitError, InputError

if TYPE_CHECKING:
    from fedquit.flower.closed.bundle import Bundle
    from fedquit.flower.closed.project import Project

ProjectFolder = Annotated[Path, typer.Option("--project", help="The folder that `fedquit flower init` made.")]
RequestFile = Annotated[Path, typer.Argument(metavar="CSR", help="The request that the site made.")]
Name = Annotated[str, typer.Argument(help="The name of the site.")]
BundleOut = Annotated[Path | None, typer.Option("--out", help="The bundle to write; NAME.tar if not given.")]
MAX_LINE = 10_000  # characters of a line of a table
MAX_DIGITS = 20  # of a number that somebody has written
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
    node_key: Annotated[
        Path | None, typer.Option(help="Take this private node key, of a federation from before; it is copied.")
    ] = None,
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
    if node_key is not None:
        if new:
            raise InputError("--node-key takes a key that is there, and --new makes one: give one of them.")
        site.take_node_key(_content(node_key))
    fingerprint = site.join(new=new)
    _say(f"Send {site.request} to the operator, and tell this fingerprint over another channel:")
    _say(f"  {fingerprint}")


def enrol(
    project: ProjectFolder,
    name: Annotated[str, typer.Argument(help="The name of the site.")] = "",
    request: Annotated[Path | None, typer.Argument(metavar="CSR", help="The request that the site made.")] = None,
    examples: Annotated[int, typer.Option(help="How many examples the site has: it counts for these.")] = 0,
    fingerprint: Fingerprint = "",
    out: Annotated[
        Path | None, typer.Option("--out", help="The bundle to write, NAME.tar if not given; with --table a folder.")
    ] = None,
    table: Annotated[
        Path | None,
        typer.Option(help="Admit many: a CSV file with the columns name, csr, examples and, where told, fingerprint."),
    ] = None,
) -> None:
    """Admit a site, or all sites of a table: sign requests and write the bundles that go back."""
    _require_extra()
    from fedquit.flower.closed.project import Admission, Project

    opened = Project.open(project)
    if table is not None:
        if name or request or examples or fingerprint:
            raise InputError("a table names sites, requests, examples and fingerprints: give it alone, with --out.")
        rows = _rows(table)
        sites = []
        for row in rows:
            sites.append(Admission(row.name, _compared(row.request, row.fingerprint, row.name), row.examples))
        folder = out or Path("bundles")
        paths = {site.name: folder / f"{site.name}.tar" for site in sites}
        _write_all(paths, lambda deliver: opened.enrol_many(sites, deliver))
        _say(f"{len(sites)} sites are enrolled. Send each its bundle in {folder}; nothing in them is secret.")
        return
    if not name or request is None or not examples:
        raise InputError("name the site, its request and --examples, or give a --table of many.")
    content = _compared(request, fingerprint)
    path = out or Path(f"{name}.tar")
    _write_all({name: path}, lambda deliver: opened.enrol_many([Admission(name, content, examples)], deliver))
    _say(f"Send {path} to {name}; nothing in it is secret.")


def takeover(
    state: Annotated[Path, typer.Argument(metavar="STATE", help="The state directory of a federation from before.")],
    project: ProjectFolder,
    member: Annotated[
        list[str], typer.Option(help="name=file of a public key, as `serve` got it; the SuperLink has the others.")
    ] = [],  # noqa: B006 - typer copies it
    name: Annotated[list[str], typer.Option(help="number=name: what a client is called as a site.")] = [],  # noqa: B006 - typer copies it
    examples: Annotated[
        list[str], typer.Option(help="number=N: the examples that a client counts for, instead of what it said.")
    ] = [],  # noqa: B006 - typer copies it
) -> None:
    """Take over a federation that was not closed: each node key becomes a site. Its state stays where it is."""
    _require_extra()
    from fedquit.cli.flower import members_of
    from fedquit.flower.closed.project import Project
    from fedquit.flower.closed.takeover import take_over

    counts = {number: _count(word) for number, word in _by_number("--examples", examples).items()}
    taken = take_over(Project.open(project), state, members_of(member), _by_number("--name", name), counts)
    for site in taken.sites:
        number = taken.members[site.name].number
        revoked = ", revoked" if site.revoked is not None else ""
        _say(f"client {number} is the site {site.name}, with {site.examples} examples{revoked}")
    if not taken.sites:
        _say(f"Every client of {state} is a site of {project} already: nothing was changed.")
    for one in taken.forgotten:
        _say(f"{one.title} was forgotten, and its key is not known: it has no site, and needs none")
    for unknown in taken.never_here:
        _say(f"{unknown} was registered and never took part: enrol it with `fedquit flower enrol` if it is to")
    if taken.sites:
        _say("The numbers of examples are those that the clients said: correct them with `fedquit flower examples`.")
        _say("Each site runs `fedquit flower join DIR --node-key KEY`; answer it with `fedquit flower rotate`.")
    words = [shlex.quote(f"{key}={value}") for key, value in _as_words(taken.settings_to_serve).items()]
    options = "".join(f" --set {word}" for word in words)
    _say(f"Serve it with: fedquit flower serve APP --state {state} --project {project}{options}")
    if taken.warning:
        _say(taken.warning)


def _by_number(option: str, words: list[str]) -> dict[int, str]:
    """Read words that say something of a client, by its number."""
    found: dict[int, str] = {}
    for word in words:
        number, sign, given = word.partition("=")
        if not number.isdecimal() or len(number) > MAX_DIGITS or not sign:
            raise InputError(f"{option} {word}: write the number of a client, =, and what is to hold for it.")
        found[int(number)] = given
    return found


def _count(word: str) -> int:
    """The whole number that a word says; whether so many examples are believed is decided elsewhere."""
    if not word.isdecimal() or len(word) > MAX_DIGITS:
        raise InputError(f"{word[:40]!r} is no number of examples: give a whole number.")
    return int(word)


def _as_words(settings: Mapping[str, Any]) -> dict[str, str]:
    """Settings as `--set` takes them."""
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in settings.items()}


def examples(
    name: Name,
    number: Annotated[int, typer.Argument(metavar="N", help="How many examples the site has: it counts for these.")],
    project: ProjectFolder,
) -> None:
    """Agree on another number of examples with a site, which has got more data or never had as much."""
    _require_extra()
    from fedquit.flower.closed.project import Project

    before = Project.open(project).agree_examples(name, number)
    _say(f"{name} counts for {number} examples from the next round on, and for {before} until now.")


def rotate(
    name: Name, request: RequestFile, project: ProjectFolder, fingerprint: Fingerprint = "", out: BundleOut = None
) -> None:
    """Give a site new keys and a new certificate: it stays the same site. What it had before is refused."""
    _require_extra()
    from fedquit.flower.closed.project import Project

    content = _compared(request, fingerprint)
    path = out or Path(f"{name}.tar")
    opened = Project.open(project)
    _write_all({name: path}, lambda deliver: opened.rotate(name, content, lambda bundle: deliver([bundle])))
    _say(f"Send {path} to {name}; nothing in it is secret.")


def revoke(name: Name, project: ProjectFolder) -> None:
    """Remove a site for good: it is cut off within a second. What the model learned from it stays in the model."""
    _require_extra()
    from fedquit.flower.closed.project import Project

    opened = Project.open(project)
    opened.revoke(name)
    _say(f"{name} is revoked. To remove what the model learned from it: fedquit request --server STATE --client {name}")
    waiting = _unreceived(opened, name)
    if waiting:
        _say(
            f"warning: {name} gave notice of {waiting} requests that are not known to have been received, and cannot "
            "give them any more: look with `fedquit flower status`, ask its owner, or run that command."
        )


def _unreceived(project: Project, name: str) -> int:
    """How many requests a site gave notice of that the server served last does not have in its ledger."""
    from fedquit.flower.closed.notice_board import read_site_notices

    noticed = len(read_site_notices(project.server).get(name, ()))
    if not noticed:
        return 0
    from fedquit.flower.operations.status import locate, status_of

    try:
        members = status_of(locate(project.folder, None)).members
    except (FedquitError, OSError):  # where the ledger lies is not known, or is another user's
        return noticed
    return next((member.unreceived for member in members if member.name == name), noticed)


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
    if apps.key_id(release_key.public_key()) not in apps.read_trust_file(opened.trust, apps.RESTORE_TRUST):
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
    except (OSError, ValueError) as error:  # no path can hold a zero byte
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"cannot read {str(path)[:200]} ({reason}): give the file that was sent.") from error


def _compared(request: Path, fingerprint: str, name: str = "the site") -> bytes:
    """A request whose fingerprint is the one that the site told, where it told one."""
    from fedquit.flower.closed.requests import read_request

    content = _content(request)
    actual = read_request(content).fingerprint
    if fingerprint and fingerprint.replace(" ", "").lower() != actual.replace(" ", ""):
        raise InputError(
            f"the request of {name} has the fingerprint {actual}: it is not the one that the site made. Ask the site."
        )
    if not fingerprint:
        _say(f"Compare with what {name} printed: {actual}")
    return content


@dataclass(frozen=True)
class _Row:
    """A line of a table of sites."""

    name: str
    request: Path
    examples: int
    fingerprint: str


def _rows(table: Path) -> list[_Row]:
    """The lines of a table of sites; paths in it are relative to the table."""
    from fedquit.flower.closed.sites import check_name

    text = _content(table).decode("utf-8-sig", errors="replace")
    lines = csv.DictReader(text.splitlines())
    columns = {"name", "csr", "examples"}
    if max(map(len, text.splitlines()), default=0) > MAX_LINE or not columns <= set(lines.fieldnames or ()):
        raise InputError(f"{table} has no column for each of name, csr and examples: name them in its first line.")
    rows = []
    for number, line in enumerate(lines, 2):
        count = (line["examples"] or "").strip()
        if not count.isdecimal() or len(count) > MAX_DIGITS:
            raise InputError(f"line {number} of {table} has {count[:40]!r} examples: give a whole number.")
        name = (line["name"] or "").strip()
        check_name(name)
        request = table.parent / (line["csr"] or "").strip()
        fingerprint = (line.get("fingerprint") or "").strip()
        rows.append(_Row(name, request, int(count), fingerprint))
    if not rows:
        raise InputError(f"{table} names no site: give a line for each.")
    return rows


def _write_all(paths: Mapping[str, Path], issue: Callable[[Callable[[list[Bundle]], None]], object]) -> None:
    """Write the bundle of each site before any is admitted; if something fails, nothing is there."""
    from fedquit.flower.closed.sites import check_name
    from fedquit.utils.files import write_secret

    for name, path in paths.items():
        check_name(name)  # it is a part of the path
        if path.exists():
            raise InputError(f"{path} exists: move it away, or give --out another name.")

    def deliver(bundles: list[Bundle]) -> None:
        for bundle in bundles:
            write_secret(paths[bundle.name], bundle.pack())

    try:
        issue(deliver)
    except BaseException:
        for path in paths.values():
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        raise


def add_to(app: typer.Typer) -> None:
    """Add these commands to `fedquit flower`."""
    for command in (init, join, enrol, takeover, examples, rotate, revoke, sign, renew):
        app.command()(command)
