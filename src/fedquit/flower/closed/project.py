# SPDX-License-Identifier: Apache-2.0
"""The operator's side of a closed federation: its folder, and the commands that admit and remove sites.

A command changes `sites.json` and nothing else. The front and `serve`, where they run, follow within a second.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import re
import secrets
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.serialization import Encoding

from fedquit.errors import InputError, StoreError
from fedquit.flower.closed.apps import RESTORE_TRUST, make_release_key, read_trust_file, trust_file
from fedquit.flower.closed.authority import Authority, certificate_fingerprint, certificate_to_pem, load_certificate
from fedquit.flower.closed.bundle import Bundle
from fedquit.flower.closed.private_files import close_files, make_private_folder, read_private, write_private
from fedquit.flower.closed.requests import SiteRequest, read_request
from fedquit.flower.closed.sites import (
    Certificate,
    Site,
    Sites,
    change_sites,
    check_name,
    known_site,
    read_sites,
    write_sites,
)
from fedquit.flower.deploy.keys import Tls, make_tls

SETTINGS = "server.toml"
CERTIFICATE_DAYS = 14.0
LOOPBACK_DAYS = 3650  # these certificates never leave the machine, and a SuperLink cannot read new ones
DAY = 86_400.0
RENEWAL_PATIENCE = 0.2  # seconds
MAX_EXAMPLES = 10**9  # of a site
HOST = re.compile(r"(?=.{1,253}$)[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?)*")
Deliver = Callable[[Bundle], None]
RESTORE = "restore it from a backup, or make a project with `fedquit flower init`."


@dataclass(frozen=True)
class Settings:
    """What `server.toml` says."""

    host: str  # the name or address by which the sites reach the server
    port: int = 9443
    listen: str = "0.0.0.0"  # the address of this machine on which the front listens
    superlink_port: int = 9092  # of the SuperLink, on loopback
    certificate_days: float = CERTIFICATE_DAYS

    def __post_init__(self) -> None:
        if not _is_address(self.host) and not HOST.fullmatch(self.host):
            raise InputError(f"{self.host!r} is no host: give the name or address by which the sites reach the server.")
        if not _is_address(self.listen):
            raise InputError(f"{self.listen!r} is no address of this machine: give one such as 0.0.0.0.")
        for port in (self.port, self.superlink_port):
            if not 0 < port < 65_536:
                raise InputError(f"{port} is no port: give a number from 1 to 65535.")
        if self.port == self.superlink_port and _meets_loopback(self.listen):
            raise InputError(f"the front and the SuperLink cannot both have port {self.port}: give two ports.")
        if not 0 < self.certificate_days <= 400:
            raise InputError("certificates can be valid for up to 400 days: give a number of days.")

    @property
    def address(self) -> str:
        """host:port, as a site connects to it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def certificate_seconds(self) -> float:
        """For how long a certificate is valid."""
        return self.certificate_days * DAY

    def as_toml(self) -> str:
        """The content of the file."""
        return (
            f'host = "{self.host}"  # the name or address by which the sites reach the server\n'
            f"port = {self.port}\n"
            f'listen = "{self.listen}"  # the address of this machine on which the front listens\n'
            f"superlink-port = {self.superlink_port}  # on loopback\n"
            f"certificate-days = {self.certificate_days!r}  # renewed after half of it, without a restart\n"
        )

    @classmethod
    def read(cls, path: Path) -> Settings:
        """What the file says."""
        try:
            content = tomllib.loads(read_private(path, RESTORE).decode())
            values = {name.replace("-", "_"): value for name, value in content.items()}
            return cls(**values)
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, TypeError) as error:
            raise StoreError(f"{path} cannot be used ({error}): correct it.") from error


def _meets_loopback(listen: str) -> bool:
    """Whether who listens on an address has the ports of loopback, too."""
    address = ipaddress.ip_address(listen)
    return address.is_unspecified or address.is_loopback


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


@dataclass(frozen=True)
class Admission:
    """A site that is to be admitted.

    Attributes:
        name: of the site.
        request: the content of the file that the site made with `fedquit flower join`.
        examples: how many examples the site has: it counts for these, whatever it says.
    """

    name: str
    request: bytes
    examples: int


def read_admission(admission: Admission) -> SiteRequest:
    """What a site asks for; raises `InputError` for what no site can be admitted with."""
    check_name(admission.name)
    require_examples(admission.name, admission.examples)
    return read_request(admission.request)


def require_examples(name: str, examples: int) -> None:
    """Raise `InputError` for a number of examples that no site counts for."""
    if examples < 1:
        raise InputError(f"{name} has at least one example, not {examples}.")
    if examples > MAX_EXAMPLES:
        raise InputError(
            f"{name} cannot have more than {MAX_EXAMPLES:,} examples: the number is its weight in the mean, so that "
            "one with too many digits would make its model that of all."
        )


def _new_site(sites: Sites, admission: Admission, asked: SiteRequest) -> Site:
    name = admission.name
    if name in sites:
        raise InputError(
            f"there is a site {name} already: give its new request to `fedquit flower rotate`, or take another name."
        )
    _require_unused(sites, asked, "")
    now = time.time()
    return Site(name, admission.examples, (asked.node_header,), (), now, history=(("enrolled", now),))


@dataclass(frozen=True)
class Project:
    """A closed federation, as its operator has it on disk."""

    folder: Path

    @classmethod
    def init(cls, folder: Path, settings: Settings) -> Project:
        """Make the folder of a new project: authority, key that signs apps, settings, an empty list of sites."""
        if folder.exists() and any(folder.iterdir()):
            raise InputError(f"{folder} is not empty: give a new folder; a project's keys are never overwritten.")
        make_private_folder(folder)
        project = cls(folder)
        Authority.make(f"fedquit project {secrets.token_hex(4)}").save(folder)
        release_key = make_release_key(folder / "release.key")
        write_private(project.trust, trust_file(release_key.public_key()))
        make_private_folder(project.loopback_folder)
        make_tls(project.loopback_folder, days=LOOPBACK_DAYS)
        close_files(project.loopback_folder)
        make_private_folder(project.apps)
        write_private(project.secret, secrets.token_bytes(32))
        write_private(folder / SETTINGS, settings.as_toml())
        write_sites(folder, {})
        return project

    @classmethod
    def open(cls, folder: Path) -> Project:
        """An existing project."""
        missing = [name for name in (SETTINGS, "sites.json", "ca.crt", "ca.key") if not (folder / name).is_file()]
        if missing:
            raise InputError(f"{folder} has no {missing[0]}: {RESTORE}")
        return cls(folder)

    @property
    def settings(self) -> Settings:
        """What `server.toml` says now."""
        return Settings.read(self.folder / SETTINGS)

    @property
    def fingerprint(self) -> str:
        """The SHA-256 of the authority's certificate, by which state directories know their project."""
        return certificate_fingerprint(load_certificate(self.folder).public_bytes(Encoding.DER))

    @property
    def sites(self) -> dict[str, Site]:
        """The sites, by name."""
        return read_sites(self.folder)

    @property
    def apps(self) -> Path:
        """Where the signatures of apps lie."""
        return self.folder / "apps"

    @property
    def trust(self) -> Path:
        """The public keys that sign apps, which every site gets."""
        return self.folder / "trust.yaml"

    @property
    def secret(self) -> Path:
        """The secret that the process which runs server apps shares with the SuperLink."""
        return self.folder / "superexec.secret"

    @property
    def server(self) -> Path:
        """What `serve` keeps of its own: logs, and which keys are registered."""
        return self.folder / "server"

    @property
    def front_log(self) -> Path:
        """Who was refused at the front, and why: one JSON object a line."""
        return self.server / "front.jsonl"

    @property
    def loopback_folder(self) -> Path:
        """Where the SuperLink's own certificate lies, which only the front and the operator see."""
        return self.folder / "loopback"

    @property
    def loopback(self) -> Tls:
        """The SuperLink's own certificate."""
        folder = self.loopback_folder
        return Tls(folder / "ca.crt", folder / "server.pem", folder / "server.key")

    def enrol(self, name: str, request: bytes, examples: int, deliver: Deliver = lambda _: None) -> Bundle:
        """Admit a site.

        Args:
            name: of the site; no two sites have the same, ever.
            request: the file that the site made with `fedquit flower join`.
            examples: how many examples the site has: it counts for these, whatever it says.
            deliver: takes the bundle before the site is admitted; if it fails, the site is not.

        Returns:
            What is sent to the site.
        """
        (bundle,) = self.enrol_many([Admission(name, request, examples)], lambda bundles: deliver(bundles[0]))
        return bundle

    def enrol_many(
        self, admissions: Sequence[Admission], deliver: Callable[[list[Bundle]], None] = lambda _: None
    ) -> list[Bundle]:
        """Admit several sites: all of them, or nobody.

        Args:
            admissions: who.
            deliver: takes the bundles before the sites are admitted; if it fails, they are not.

        Returns:
            What is sent to each site, in the order of `admissions`.
        """
        asked = {admission.name: read_admission(admission) for admission in admissions}
        twice = [name for name, count in Counter(a.name for a in admissions).items() if count > 1]
        if twice:
            raise InputError(f"{twice[0]} is named twice: each site has a name of its own.")
        bundles: list[Bundle] = []

        def change(sites: dict[str, Site]) -> None:
            for admission in admissions:
                request = asked[admission.name]
                site = _new_site(sites, admission, request)
                sites[site.name], pem = self._with_certificate(site, request)
                bundles.append(self._bundle(sites[site.name], pem))
            deliver(bundles)

        read_trust_file(self.trust, RESTORE_TRUST)  # a site must not get one that trusts nobody
        change_sites(self.folder, change)
        return bundles

    def agree_examples(self, name: str, examples: int) -> int:
        """Let a site count for another number of examples from now on; what it counted for before."""
        require_examples(name, examples)
        before: list[int] = []

        def change(sites: dict[str, Site]) -> None:
            site = known_site(sites, name)
            before.append(site.examples)
            sites[name] = dataclasses.replace(site, examples=examples)

        change_sites(self.folder, change)
        return before[0]

    def rotate(self, name: str, request: bytes, deliver: Deliver = lambda _: None) -> Bundle:
        """Give a site a new certificate, and a new node key if its request names one; its identity stays.

        Certificates and keys that it had before are refused from now on.
        """
        asked = read_request(request)

        def change(sites: dict[str, Site]) -> Site:
            site = known_site(sites, name)
            _require_unused(sites, asked, name)
            if asked.node_header in site.keys[:-1]:
                raise InputError(
                    f"{name} gave up this node key before: make new keys with `fedquit flower join --new`."
                )
            keys = site.keys if asked.node_header == site.key else (*site.keys, asked.node_header)
            history = (*site.history, ("rotated", time.time()))
            return dataclasses.replace(site, keys=keys, certificates=(), history=history)

        return self._issue(name, asked, change, deliver)

    def renew(self, name: str, request: bytes) -> bytes:
        """A new certificate for a site that has a valid one, as PEM; its node key must be the one in use.

        The old certificate stays valid until it expires, so that nothing in progress is cut. The front does nothing
        else meanwhile, so it hardly waits for a command that changes the list of sites: the site asks again.
        """
        asked = read_request(request)
        issued: list[bytes] = []

        def change(sites: dict[str, Site]) -> None:
            site = known_site(sites, name)
            if asked.node_header != site.key:
                raise InputError(f"the request names another node key than that of {name}: the operator rotates keys.")
            sites[name], pem = self._with_certificate(site, asked)
            issued.append(pem)

        change_sites(self.folder, change, RENEWAL_PATIENCE)
        return issued[0]

    def revoke(self, name: str) -> None:
        """Remove a site for good: its certificates and keys are refused from now on."""

        def change(sites: dict[str, Site]) -> None:
            site = known_site(sites, name)
            now = time.time()
            sites[name] = dataclasses.replace(site, revoked=now, history=(*site.history, ("revoked", now)))

        change_sites(self.folder, change)

    def _issue(
        self, name: str, asked: SiteRequest, make: Callable[[dict[str, Site]], Site], deliver: Deliver
    ) -> Bundle:
        read_trust_file(self.trust, RESTORE_TRUST)  # a site must not get one that trusts nobody
        bundles: list[Bundle] = []

        def change(sites: dict[str, Site]) -> None:
            sites[name], pem = self._with_certificate(make(sites), asked)
            bundles.append(self._bundle(sites[name], pem))
            deliver(bundles[0])

        change_sites(self.folder, change)
        return bundles[0]

    def _bundle(self, site: Site, certificate: bytes) -> Bundle:
        """What is sent to a site."""
        return Bundle(
            name=site.name,
            address=self.settings.address,
            examples=site.examples,
            certificate=certificate,
            authority=read_private(self.folder / "ca.crt", RESTORE),
            trust=self.trust.read_bytes(),
        )

    def _with_certificate(self, site: Site, asked: SiteRequest) -> tuple[Site, bytes]:
        certificate = Authority.load(self.folder).issue(
            site.name, asked.tls_key, self.settings.certificate_seconds, "client"
        )
        pem = certificate_to_pem(certificate)
        sha256 = certificate_fingerprint(certificate.public_bytes(Encoding.DER))
        issued = Certificate(sha256, certificate.not_valid_after_utc.timestamp())
        return site.with_certificate(issued, time.time()), pem


def _require_unused(sites: Sites, asked: SiteRequest, name: str) -> None:
    """Raise `InputError` if another site than `name` has, or had, the node key of a request."""
    for site in sites.values():
        if site.name != name and asked.node_header in site.keys:
            raise InputError(
                f"the node key of this request is that of {site.name}: each site makes its own with "
                "`fedquit flower join --new`."
            )
