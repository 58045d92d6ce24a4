# SPDX-License-Identifier: Apache-2.0
"""Which project a state directory belongs to: whoever served it with another one would revoke all its clients.

The ledger holds the fingerprint of the project's authority. A takeover writes it there itself. Else the server app
does, because nobody else writes to the ledger while it runs: `serve` tells it the fingerprint in a file.
"""

from __future__ import annotations

from pathlib import Path

from fedquit.errors import StoreError
from fedquit.flower.closed.project import Project
from fedquit.flower.ledger import FILE as LEDGER
from fedquit.flower.ledger import project_of, read_phase, write_project
from fedquit.flower.roster import read_members
from fedquit.flower.twice import kept

GO_BACK = "serve it with the project that it belongs to"


def bind(project: Project, state: Path) -> None:
    """Tell the server app which project serves a state directory, once it is clear that it is none of another one's.

    Raises:
        StoreError: if it is of another project; nothing is written then.
    """
    require_own_state(project, state)
    write_project(state, project.fingerprint)


def require_own_state(project: Project, state: Path) -> None:
    """Refuse a state directory of another project; nothing is written.

    One from before fingerprints were kept is refused only if none of its clients is a site of the project, as all of
    them would count as revoked then.

    Raises:
        StoreError: if it is of another project.
    """
    if not kept(state / LEDGER):
        return
    require_own_ledger(project, state)
    if project_of(state):
        return
    _, forgotten = read_phase(state)
    staying = {member.key for member in read_members(state) if member.number not in forgotten}
    sites = {f"key:{site.fingerprints[0]}" for site in project.sites.values()}
    if staying and not staying & sites:
        raise StoreError(
            f"no client of {state} is a site of {project.folder}, so all would count as revoked: {GO_BACK}. One that "
            "was not closed is taken over first, with `fedquit flower takeover`."
        )


def require_own_ledger(project: Project, state: Path) -> None:
    """Refuse a state directory whose ledger names another project."""
    owner = project_of(state)
    if owner not in ("", project.fingerprint):
        raise StoreError(
            f"{state} is of the project whose authority has the fingerprint {owner[:16]}, and that of {project.folder} "
            f"has {project.fingerprint[:16]}: {GO_BACK}, or give another --state."
        )
