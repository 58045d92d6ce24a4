# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a site of a closed federation, seen from the site: each finding says what to do next."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from fedquit.errors import FedquitError
from fedquit.flower.closed.apps import read_trust_file
from fedquit.flower.closed.greeting import greet, in_words
from fedquit.flower.closed.service import NODE_LOCK
from fedquit.flower.closed.site_folder import SiteFolder
from fedquit.flower.operations.findings import Finding, error, from_sentence, low_disks, warning, wrong_modes
from fedquit.flower.operations.observed import lock_holder
from fedquit.flower.outbox import Outbox

DAY = 86_400.0
WAITING_DAYS = 3.0  # after which a request that nobody has served is told of


@dataclass(frozen=True)
class SiteExamination:
    """A site under examination."""

    site: SiteFolder
    home: Path | None = None


def examine_site(folder: Path, home: Path | None = None) -> list[Finding]:
    """Everything that is wrong with a site, errors first.

    Args:
        folder: that `fedquit flower join` made.
        home: of the client app, whose requests are looked at.
    """
    examination = SiteExamination(SiteFolder(folder), home)
    findings: list[Finding] = []
    for check in CHECKS:
        try:
            findings.extend(check(examination))
        except FedquitError as problem:
            findings.append(from_sentence(str(problem)))
    return sorted(dict.fromkeys(findings), key=lambda finding: finding.level)


def _bundle(case: SiteExamination) -> Iterator[Finding]:
    """The operator's bundle: name, trust file, node key."""
    site = case.site
    if not site.folder.is_dir():
        yield error(f"there is no folder {site.folder}", "give the one that `fedquit flower join` made.")
        return
    name = site.about["name"]
    read_trust_file(site.trust)
    if not site.node_key.private.is_file():
        yield error(
            f"{site.node_key.private} is missing, so that {name} is nobody",
            "restore it from a backup, or make new keys with `fedquit flower join --new` and let the operator rotate.",
        )


def _certificate(case: SiteExamination) -> Iterator[Finding]:
    site = case.site
    left = site.seconds_left()
    if left < 0:
        yield error(
            f"the certificate expired {in_words(-left)} ago",
            f"check the clock; if it is right, run `fedquit flower join {site.folder}` and send the new request to the "
            "operator, who runs `fedquit flower rotate`.",
        )
    elif site.renewal_due():
        yield warning(
            f"the certificate expires in {in_words(left)} and is past half of its life",
            f"start the node, which renews it, or run `fedquit flower renew {site.folder}`.",
        )


def _server(case: SiteExamination) -> Iterator[Finding]:
    """Whether the server lets this site in, and what it says of clocks and versions."""
    for problem in greet(case.site):
        yield from_sentence(problem)


def _node(case: SiteExamination) -> Iterator[Finding]:
    folder = case.site.folder / "node"
    if lock_holder(folder / NODE_LOCK) == 0:
        yield warning("no node of this site runs on this machine", "start it with start.sh, or with its units.")


def _requests(case: SiteExamination) -> Iterator[Finding]:
    """Requests that have waited for long."""
    if case.home is None:
        return
    if not case.home.is_dir():
        yield error(f"there is no home {case.home}", "give the folder that the node was started with (--home).")
        return
    for entry in Outbox(case.home).pending():
        waited = time.time() - datetime.fromisoformat(entry.filed).timestamp()
        if waited > WAITING_DAYS * DAY:
            yield warning(
                f"the request {entry.id} has waited for {in_words(waited)}",
                "it travels with the node's next reply: see that the node runs, and ask the operator.",
            )


def _modes(case: SiteExamination) -> Iterator[Finding]:
    yield from wrong_modes(case.site.folder, *([case.home] if case.home else []))


def _disks(case: SiteExamination) -> Iterator[Finding]:
    yield from low_disks(case.site.folder, *([case.home] if case.home else []))


CHECKS: tuple[Callable[[SiteExamination], Iterator[Finding]], ...] = (
    _bundle,
    _certificate,
    _server,
    _node,
    _requests,
    _modes,
    _disks,
)
