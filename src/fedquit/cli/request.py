# SPDX-License-Identifier: Apache-2.0
"""`fedquit request`: ask a federation on Flower to forget, as the owner of a client's data or as the operator."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from fedquit.cli.screen import LOOK, PLAIN, AsJson
from fedquit.cli.screen import out as screen
from fedquit.errors import InputError
from fedquit.utils.files import only_owner

if TYPE_CHECKING:
    from fedquit.flower.outbox import Entry, Filed

Home = Annotated[Path | None, typer.Option(help="The home of a client: its fedquit-home.")]
Server = Annotated[Path | None, typer.Option(help="The state folder of the server, for its operator.")]


def request(
    home: Home = None,
    server: Server = None,
    client: Annotated[str, typer.Option(help="With --server: a key's fingerprint, a node's name or number.")] = "",
    samples: Annotated[Path | None, typer.Option(help="A file with the samples to forget, counted from 0.")] = None,
    fraction: Annotated[float, typer.Option(help="Forget so many of the samples, chosen at random.")] = 0.0,
    show: Annotated[bool, typer.Option("--show", help="Only show the requests and what became of them.")] = False,
    as_json: AsJson = False,
) -> None:
    """Ask to be forgotten: a whole client, or some of its samples. The client's next reply carries it to the server."""
    if (home is None) == (server is None):
        raise InputError("say whose request it is: --home DIR for a client, or --server DIR --client KEY.")
    with only_owner():
        if home is not None:
            _of_client(home, client, samples, fraction, show=show, as_json=as_json)
        elif server is not None:
            if samples or fraction:
                raise InputError(
                    "which samples to forget is the client's own knowledge: ask with --home, at the client."
                )
            _of_operator(server, client, show=show, as_json=as_json)


def _of_client(home: Path, client: str, samples: Path | None, fraction: float, *, show: bool, as_json: bool) -> None:
    from fedquit.flower.outbox import Outbox, read_positions

    if client:
        raise InputError("a home is of one client: leave --client out.")
    outbox = Outbox(home)
    if not show:
        entry = outbox.file(positions=read_positions(samples) if samples else (), fraction=fraction)
        _say(entry, f"request {entry.id} is filed: the client's next reply carries it to the server.", as_json=as_json)
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
        _say_audit(e.id, e.audit)


def _of_operator(server: Path, client: str, *, show: bool, as_json: bool) -> None:
    from fedquit.flower.outbox import Inbox
    from fedquit.flower.roster import Roster

    if show:
        _show_ledger(server, as_json=as_json)
        return
    if not client:
        raise InputError("say who is to be forgotten: --client with a key's fingerprint, a node's name or number.")
    member = Roster(server).find(client)
    filed = Inbox(server).file(member.key)
    _say(filed, f"request {filed.id} is filed: the server forgets {member.title} after this round.", as_json=as_json)


def _show_ledger(server: Path, *, as_json: bool) -> None:
    from fedquit.flower.roster import read_irreplaceable
    from fedquit.flower.twice import kept

    if not kept(server / "ledger.json"):
        raise InputError(f"{server} has no ledger.json: give the state directory of the server.")
    entries = read_irreplaceable(server / "ledger.json")["entries"]
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
