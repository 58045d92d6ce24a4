# SPDX-License-Identifier: Apache-2.0
"""The list of sites: who may take part, with which keys and certificates, and with how many examples.

A site keeps its identity when its keys change: the fingerprint of its first key, which the server's roster knows it by.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedquit.errors import InputError, StoreError
from fedquit.flower.closed.private_files import exclusive, write_private_json
from fedquit.utils.files import with_checksum, without_checksum

FILE = "sites.json"
NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
VERSION = 1
PATIENCE = 60.0  # seconds that a command waits for another one that changes the list
MAX_CERTIFICATES = 4  # that a site has at one time


@dataclass(frozen=True)
class Certificate:
    """A certificate that was issued to a site."""

    sha256: str
    not_after: float  # Unix time


@dataclass(frozen=True)
class Site:
    """One site: a name, a list of keys of which the last is in use, one contribution."""

    name: str
    examples: int  # as agreed with the operator: it counts for these, less what it erases
    keys: tuple[str, ...]  # node keys, as Flower's header carries them, the oldest first
    certificates: tuple[Certificate, ...]  # the newest last
    enrolled: float  # Unix time
    revoked: float | None = None  # Unix time
    history: tuple[tuple[str, float], ...] = ()  # (enrolled, rotated or revoked; when, Unix time)

    @property
    def key(self) -> str:
        """The node key in use."""
        return self.keys[-1]

    @property
    def key_pem(self) -> bytes:
        """The node key in use, as PEM."""
        return base64.b64decode(self.key)

    @property
    def fingerprints(self) -> tuple[str, ...]:
        """The fingerprints of all its keys, as `fedquit.flower.identity` has them; the first is its identity."""
        return tuple(hashlib.sha256(base64.b64decode(key)).hexdigest()[:32] for key in self.keys)

    def certificate(self, sha256: str) -> Certificate | None:
        """Its certificate with this fingerprint; None if there is none, or the site was revoked."""
        if self.revoked is not None:
            return None
        return next((c for c in self.certificates if c.sha256 == sha256), None)

    def with_certificate(self, certificate: Certificate, now: float) -> Site:
        """The site with one more certificate, and without those that have expired."""
        valid = tuple(c for c in self.certificates if c.not_after > now)
        return dataclasses.replace(self, certificates=(*valid[1 - MAX_CERTIFICATES :], certificate))

    def as_json(self) -> dict[str, Any]:
        """The site as `from_json` reads it."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Site:
        """The site that `as_json` made."""
        certificates = tuple(Certificate(**c) for c in value["certificates"])
        history = tuple((str(what), float(when)) for what, when in value.get("history", ()))
        return cls(**{**value, "keys": tuple(value["keys"]), "certificates": certificates, "history": history})


Sites = Mapping[str, Site]  # by name


def read_sites(folder: Path) -> dict[str, Site]:
    """The sites of a project, by name."""
    path = folder / FILE
    try:
        text = path.read_bytes()
    except OSError as error:
        raise StoreError(
            f"cannot read {path} ({error.strerror}): let the user who runs this own it, or restore it from a backup."
        ) from error
    try:
        content = without_checksum(json.loads(text))
        version = content["version"]
        sites = [Site.from_json(value) for value in content["sites"]] if version == VERSION else []
    except (KeyError, TypeError, AttributeError, ValueError, StoreError) as error:
        raise StoreError(
            f"{path} is not a list of sites, or a byte of it has changed: restore it from a backup, and revoke again "
            "who was revoked since. Do not delete it: it says who may take part."
        ) from error
    if version != VERSION:
        raise StoreError(f"{path} is of another version of fedquit: use that version.")
    return {site.name: site for site in sites}


def write_sites(folder: Path, sites: Sites) -> None:
    """Write the list of sites, whole or not at all."""
    listed = [site.as_json() for _, site in sorted(sites.items())]
    write_private_json(folder / FILE, with_checksum({"version": VERSION, "sites": listed}))


def change_sites(folder: Path, change: Callable[[dict[str, Site]], None], patience: float = PATIENCE) -> None:
    """Change the list of sites; nobody else changes it meanwhile.

    Args:
        folder: of the project.
        change: changes the sites in place. If it raises, nothing is written.
        patience: seconds to wait for somebody else who changes it.
    """
    with exclusive(folder / "sites.lock", patience):
        sites = read_sites(folder)
        change(sites)
        write_sites(folder, sites)


def known_site(sites: Sites, name: str) -> Site:
    """The site with that name, which must take part."""
    site = sites.get(name)
    if site is None:
        known = ", ".join(sorted(sites)) or "none yet"
        raise InputError(f"there is no site {name!r}: known are {known}.")
    if site.revoked is not None:
        when = time.strftime("%Y-%m-%d", time.gmtime(site.revoked))
        raise InputError(f"{name} was revoked on {when}: it takes part again only under another name, with new keys.")
    return site


def check_name(name: str) -> None:
    """Raise `InputError` for a name that no site can have."""
    if not NAME.fullmatch(name):
        raise InputError(f"{name[:80]!r} is no name of a site: use lower-case letters, digits and hyphens, at most 63.")
