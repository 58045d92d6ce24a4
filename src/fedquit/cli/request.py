# SPDX-License-Identifier: Apache-2.0
"""`fedquit request`: ask a federation on Flower to forget, as the owner of a client's data or as the operator."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from fedquit.cli.screen import LOOK, PLAIN, AsJson, err
from fedquit.cli.screen import out as screen
from fedquit.errors import InputError, StoreError
from fedquit.utils.files import only_owner

if TYPE_CHECKING:
    from fedquit.flower.outbox import Entry, Filed

MUTE_DAYS = 2.0  # without a word of the server, after which the owner of a request is warned
Home = Annotated[Path | None, typer.Option(help="The home of a client: its fedquit-home.")]
Server = Annotated[Path | None, typer.Option(help="The state folder of the server, for its operator.")]


def request(
    home: Home = None,
    server: Server = None,
    client: Annotated[str, typer.Option(help="With --server: a key's fingerprint, a node's name or number.")] = "",
    samples: Annotated[Path | None, typer.Option(help="A file with the samples to forget, counted from 0.")] = None,
    fraction: Annotated[float, typer.Option(help="Forget so many of the samples, chosen at random.")] = 0.0,
    show: Annotated[bool, typer.Option("--show", help="Only show the requests and what became of them.")] = False,
    withdraw: Annotated[str, typer.Option(metavar="REQUEST", help="Take a request back, until it is served.")] = "",
    yes: Annotated[bool, typer.Option("--yes", help="With --server: do not ask whether that client is meant.")] = False,
    as_json: AsJson = False,
) -> None:
    """Ask to be forgotten: a whole client, or some of its samples. The client's next reply carries it to the server."""
    if (home is None) == (server is None):
        raise InputError("say whose request it is: --home DIR for a client, or --server DIR --client KEY.")
    with only_owner():
        if withdraw and (client or samples or fraction or show):
            raise InputError("a request is taken back by its number alone: leave the other options out.")
        if home is not None:
            if withdraw:
                _withdraw_of_client(home, withdraw, as_json=as_json)
            else:
                _of_client(home, client, samples, fraction, show=show, as_json=as_json)
        elif server is not None:
            if samples or fraction:
                raise InputError(
                    "which samples to forget is the client's own knowledge: ask with --home, at the client."
                )
            if withdraw:
                _withdraw_of_operator(server, withdraw)
            else:
                _of_operator(server, client, show=show, yes=yes, as_json=as_json)


def _of_client(home: Path, client: str, samples: Path | None, fraction: float, *, show: bool, as_json: bool) -> None:
    from fedquit.flower.outbox import OPEN, Outbox, read_positions, require_used_home

    if client:
        raise InputError("a home is of one client: leave --client out.")
    positions = read_positions(samples) if samples else ()
    require_used_home(home)
    outbox = Outbox(home)
    if not show:
        entry = outbox.file(positions=positions, fraction=fraction)
        sentence = (
            f"request {entry.id} is filed, and nobody has received it yet: the client's next reply carries it to the "
            f"server. `fedquit request --home {home} --show` says when it was received."
        )
        _say(entry, sentence, as_json=as_json)
        _warn_if_mute(home)
        return
    entries = outbox.entries()
    if as_json:
        typer.echo(json.dumps([asdict(e) for e in entries]))
        return
    table = Table(title="Requests of this client", **LOOK)
    for head in ("request", "filed", "of", "status", "reason"):
        table.add_column(head)
    for e in entries:
        table.add_row(e.id, e.filed, e.kind, e.status, e.reason)
    screen.print(table)
    for e in entries:
        screen.print(f"{e.id}: {e.received}.", **PLAIN)
        _say_audit(e.id, e.audit)
    if any(e.status in OPEN for e in entries):
        _warn_if_mute(home)


def _warn_if_mute(home: Path) -> None:
    """Say loudly that a request may lie here for long: the server has not spoken to this client of late."""
    from fedquit.flower.outbox import last_contact

    try:
        contact = last_contact(home)
    except StoreError as error:
        err.print(f"warning: {error}", **PLAIN)
        return
    if contact is None:
        err.print("warning: the server has never spoken to this node. Is the node running, and enrolled?", **PLAIN)
    elif contact.days > MUTE_DAYS:
        err.print(
            f"warning: the server last spoke to this node {contact.days:.0f} days ago, on {contact.at}. Look at the "
            "node's log: its certificate may have expired, or the server may be off.",
            **PLAIN,
        )


def _withdraw_of_client(home: Path, request: str, *, as_json: bool) -> None:
    from fedquit.flower.outbox import Outbox, require_used_home

    require_used_home(home)
    entry = Outbox(home).withdraw(request)
    sentence = f"request {entry.id} is taken back, unless the server serves it already: --show says what it answers."
    _say(entry, sentence, as_json=as_json)


def _withdraw_of_operator(server: Path, request: str) -> None:
    from fedquit.flower.ledger import read_entries
    from fedquit.flower.outbox import Inbox

    inbox = Inbox(server)
    if any(filed.id == request for filed in inbox.waiting()):
        inbox.withdraw(request)
        screen.print(f"request {request} is taken back: the server had not read it yet.", **PLAIN)
        return
    entry = next((e for e in read_entries(server) if request in (e.id, e.request)), None)
    if entry is None:
        raise InputError(f"there is no request {request!r} in {server}: --show lists them.")
    if entry.source != "operator":
        raise InputError(f"{entry.id} was filed by the client, whose owner alone can take it back.")
    if entry.status != "received":
        raise InputError(f"{entry.id} is {entry.status} already: it cannot be taken back any more.")
    inbox.withdraw(entry.id)
    screen.print(f"{entry.id} is taken back, unless the server begins to serve it meanwhile.", **PLAIN)


def _of_operator(server: Path, client: str, *, show: bool, yes: bool, as_json: bool) -> None:
    from fedquit.flower.outbox import Inbox
    from fedquit.flower.roster import find_member, read_members

    if show:
        _show_ledger(server, as_json=as_json)
        return
    if not client:
        raise InputError("say who is to be forgotten: --client with a key's fingerprint, a node's name or number.")
    member = find_member(read_members(server), client)
    if not yes:
        _confirm(f"Forget {member.title}, with {member.examples} examples, for ever?")
    filed = Inbox(server).file(member.key)
    _say(filed, f"request {filed.id} is filed: the server forgets {member.title} after this round.", as_json=as_json)


def _confirm(question: str) -> None:
    if not sys.stdin.isatty():
        raise InputError(f"{question} It cannot be undone once it is served: say --yes if it is meant.")
    typer.confirm(question, abort=True)


def _show_ledger(server: Path, *, as_json: bool) -> None:
    from fedquit.flower.ledger import read_entries

    entries = [asdict(entry) for entry in read_entries(server)]
    if as_json:
        typer.echo(json.dumps(entries))
        return
    table = Table(title="Erasure requests", **LOOK)
    for head in ("request", "client", "of", "status", "method", "since", "reason"):
        table.add_column(head)
    for e in entries:
        method = f"{e['method']} (fallback)" if e["fallback"] else e["method"]
        table.add_row(e["id"], str(e["client"]), e["kind"], e["status"], method, e["history"][-1][1], e["reason"])
    screen.print(table)
    for e in entries:
        _say_audit(e["id"], e.get("audit", {}))


def _say_audit(request: str, audit: Mapping[str, Any]) -> None:
    """The one-run audit by the client's own canaries, where there is one."""
    if audit:
        verdict, sentence = audit["canary_natural_verdict"], audit["canary_natural_sentence"]
        screen.print(f"One-run audit of {request}: {verdict}. {sentence}", **PLAIN)


def _say(what: Entry | Filed, sentence: str, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(asdict(what)))
    else:
        screen.print(sentence, **PLAIN)
