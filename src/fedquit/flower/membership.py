# SPDX-License-Identifier: Apache-2.0
"""Which sites take part in a closed federation, as the server app reads it from its state directory.

`fedquit flower serve --project` writes the file from the project's list of sites, and again after every change. Without
the file every registered key is a client of its own, as in a deployment that is not closed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from fedquit.errors import StoreError
from fedquit.utils.files import json_bytes, read_json, with_checksum, without_checksum, write_secret

FILE = "sites.json"


class EnrolledSite(Protocol):
    """What the server app must know of a site."""

    @property
    def name(self) -> str:
        """As the operator enrolled it."""
        ...

    @property
    def examples(self) -> int:
        """How many examples it counts for, less what it erases."""
        ...

    @property
    def fingerprints(self) -> tuple[str, ...]:
        """Of all keys that it has had, the oldest first."""
        ...

    @property
    def revoked(self) -> float | None:
        """When it was revoked, if it was."""
        ...


@dataclass(frozen=True)
class Membership:
    """A site, as the server app knows it."""

    name: str
    examples: int
    identity: str  # the fingerprint of its first key: it stays when its keys change


def write_membership(state: Path, sites: Iterable[EnrolledSite]) -> Path:
    """Write which sites take part; the file."""
    path = state / FILE
    write_secret(path, membership_content(sites))
    return path


def membership_content(sites: Iterable[EnrolledSite]) -> bytes:
    """What the file says of which sites take part."""
    listed = []
    for site in sites:
        entry = {
            "name": site.name,
            "examples": site.examples,
            "keys": list(site.fingerprints),
            "revoked": site.revoked is not None,
        }
        listed.append(entry)
    return json_bytes(with_checksum({"sites": listed}))


def read_membership(state: Path) -> dict[str, Membership] | None:
    """The site of each key that is in use, by fingerprint; None where the federation is not closed."""
    path = state / FILE
    if not path.exists():
        return None
    try:
        content = read_json(path)
        if isinstance(content, dict):  # a list is of an earlier version
            content = without_checksum(content)["sites"]
        if not isinstance(content, list):
            raise TypeError(type(content).__name__)
        in_use = [entry for entry in content if not entry["revoked"]]
        return {e["keys"][-1]: Membership(e["name"], int(e["examples"]), e["keys"][0]) for e in in_use}
    except (StoreError, KeyError, IndexError, TypeError, ValueError) as error:
        raise StoreError(
            f"{path} is not a list of sites: start `fedquit flower serve` again, which writes it."
        ) from error
