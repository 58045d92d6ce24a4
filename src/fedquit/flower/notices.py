# SPDX-License-Identifier: Apache-2.0
"""Notices of requests: the ids of requests that lie in a site's outbox, which the site tells the front by itself.

A notice carries no request. It lets the server ask the site, whose reply carries the request as always: at once, and
also when no run is in progress. `fedquit flower serve --project` writes the file from what the front was told.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from fedquit.errors import StoreError
from fedquit.utils.files import read_json, write_secret

if TYPE_CHECKING:
    from fedquit.flower.ledger import Erasure

FILE = "notices.json"
Notices = Mapping[str, frozenset[str]]  # ids of requests, by the identity of their site


def write_notices(state: Path, notices: Notices) -> Path:
    """Write the notices for the server app; the file."""
    path = state / FILE
    write_secret(path, notices_content(notices))
    return path


def notices_content(notices: Notices) -> bytes:
    """What the file says of notices."""
    listed = {identity: sorted(requests) for identity, requests in sorted(notices.items())}
    return (json.dumps(listed, indent=2) + "\n").encode()


def read_notices(state: Path) -> dict[str, frozenset[str]]:
    """The notices of all sites; none where they cannot be read, since a sweep finds every request too."""
    path = state / FILE
    if not path.exists():
        return {}
    try:
        content = read_json(path)
        return {str(identity): frozenset(map(str, requests)) for identity, requests in content.items()}
    except (StoreError, AttributeError, TypeError):
        return {}


def unknown_requests(state: Path, entries: Iterable[Erasure]) -> dict[str, set[str]]:
    """The ids of requests that sites have given notice of and that are not in the ledger, by identity."""
    known = {entry.request for entry in entries}
    unknown = {identity: set(requests) - known for identity, requests in read_notices(state).items()}
    return {identity: requests for identity, requests in unknown.items() if requests}
