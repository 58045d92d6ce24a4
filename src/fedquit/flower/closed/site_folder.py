# SPDX-License-Identifier: Apache-2.0
"""A site's side of a closed federation: its keys, which never leave it, and what the operator sent.

join      makes the keys and a request, which goes to the operator
install   takes the operator's bundle
renew     asks the front for the next certificate, over the connection that the present one opens
"""

from __future__ import annotations

import http.client
import json
import secrets
import shlex
import ssl
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_private_key

from fedquit.errors import InputError, StoreError
from fedquit.flower.closed.apps import read_trust_file
from fedquit.flower.closed.authority import CLOCK_SKEW, key_from_pem, key_to_pem, new_key
from fedquit.flower.closed.bundle import Bundle
from fedquit.flower.closed.greeting import why_not_reached
from fedquit.flower.closed.private_files import (
    FILE_MODE,
    FOLDER_MODE,
    close_files,
    make_private_folder,
    read_private,
    write_private,
    write_private_json,
)
from fedquit.flower.closed.requests import make_request, read_request
from fedquit.flower.deploy.errors import DeploymentError
from fedquit.flower.deploy.keys import NodeKey, Tls, make_node_key, make_tls
from fedquit.flower.log_lines import printable

RENEW_PATH = "/fedquit/v1/renew"
REQUESTS_PATH = "/fedquit/v1/requests"
POST_TIMEOUT = 30.0  # seconds
MAX_ANSWER = 65_536  # bytes
JOIN = "run `fedquit flower join` with this folder first."
INSTALL = "run `fedquit flower join` with this folder and --bundle, with the file that the operator sent."
RESTORE_KEY = (
    "restore it from a backup, or make new keys with `fedquit flower join --new` and let the operator rotate them."
)
LOOPBACK_DAYS = 3650


@dataclass(frozen=True)
class SiteFolder:
    """The folder of a site's keys and certificates."""

    folder: Path

    @property
    def node_key(self) -> NodeKey:
        """The files of the node key."""
        return NodeKey(self.folder / "node.key", self.folder / "node.key.pub")

    @property
    def request(self) -> Path:
        """The request that goes to the operator."""
        return self.folder / "request.csr"

    @property
    def tls(self) -> Path:
        """The TLS key and its certificate in one file, so that both are replaced at once."""
        return self.folder / "tls.pem"

    @property
    def authority(self) -> Path:
        """The certificate of the project's authority, the only one that the site trusts."""
        return self.folder / "ca.crt"

    @property
    def trust(self) -> Path:
        """The keys that sign apps."""
        return self.folder / "trust.yaml"

    @property
    def about(self) -> dict[str, Any]:
        """The site's name, the server's address and the number of examples, as the operator enrolled them."""
        if not (self.folder / "site.json").is_file():
            raise InputError(f"{self.folder} holds no bundle: {INSTALL}")
        try:
            content: dict[str, Any] = json.loads(read_private(self.folder / "site.json", INSTALL))
            return {name: content[name] for name in ("name", "address", "examples")}
        except (ValueError, KeyError, TypeError) as error:
            raise StoreError(f"{self.folder / 'site.json'} is not what a bundle holds: {INSTALL}") from error

    @property
    def _next_key(self) -> Path:
        """The TLS key of a request that is under way."""
        return self.folder / "next.key"

    def join(self, *, new: bool = False) -> str:
        """Make a request for a certificate.

        Args:
            new: whether to make a new node key too; the present one is kept beside it.

        Returns:
            The fingerprint of the request, which the operator is told over another channel.
        """
        self._require_closed()
        make_private_folder(self.folder)
        if new and self.node_key.private.exists():
            ending = time.strftime("%Y%m%d-%H%M%S") + secrets.token_hex(2)
            for path in (self.node_key.private, self.node_key.public):
                path.rename(path.with_name(f"{path.name}.until-{ending}"))
        if not self.node_key.private.exists():
            make_node_key(self.folder, "node.key")
            self.node_key.public.chmod(FILE_MODE)
        tls_key = new_key()
        request = make_request(tls_key, self._load_node_key())
        write_private(self._next_key, key_to_pem(tls_key))
        write_private(self.request, request)
        return read_request(request).fingerprint

    def take_node_key(self, content: bytes) -> None:
        """Use a node key from before, as OpenSSH writes it; a key that is there already is never overwritten."""
        try:
            key = _private_key(content, "the node key")
        except StoreError as error:
            raise InputError(
                "the node key is no OpenSSH private key on the curve P-384 without a passphrase: give the one that the "
                "node was registered with, or a copy of it changed by `ssh-keygen -p -N '' -f COPY`."
            ) from error
        public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n"
        if self.node_key.private.exists():
            if _spki(self._load_node_key().public_key()) == _spki(key.public_key()):
                return
            raise InputError(f"{self.folder} has another node key already: take another folder.")
        self._require_closed()
        make_private_folder(self.folder)
        write_private(self.node_key.public, public)
        write_private(self.node_key.private, content)

    def _require_closed(self) -> None:
        if self.folder.exists() and self.folder.stat().st_mode & 0o777 != FOLDER_MODE and any(self.folder.iterdir()):
            raise InputError(f"{self.folder} is open to others: give a new folder, or close it with chmod 700.")

    def install(self, bundle: Bundle) -> None:
        """Take the operator's bundle: it must answer this site's request, and be of one project for ever."""
        if not self._next_key.is_file():
            raise InputError(f"{self.folder} has made no request that this bundle could answer: {JOIN}")
        if self.authority.is_file() and self.authority.read_bytes() != bundle.authority:
            raise InputError(
                f"this bundle is of another project than the one that {self.folder} belongs to: take another folder."
            )
        tls_key = key_from_pem(self._next_key.read_bytes(), self._next_key)
        _check_certificate(bundle.certificate, bundle.authority, tls_key)
        write_private(self.folder / "offered-trust.yaml", bundle.trust)
        read_trust_file(self.folder / "offered-trust.yaml")
        (self.folder / "offered-trust.yaml").rename(self.trust)
        write_private(self.authority, bundle.authority)
        about = {"name": bundle.name, "address": bundle.address, "examples": bundle.examples}
        write_private_json(self.folder / "site.json", about)
        write_private(self.tls, key_to_pem(tls_key) + bundle.certificate)
        start = self.folder / "start.sh"
        write_private(start, START.format(folder=shlex.quote(str(self.folder.resolve()))))
        start.chmod(FOLDER_MODE)
        self._next_key.unlink()

    def certificate(self) -> x509.Certificate:
        """The certificate in use."""
        try:
            return x509.load_pem_x509_certificate(read_private(self.tls, INSTALL))
        except ValueError as error:
            raise StoreError(f"{self.tls} holds no certificate: {INSTALL}") from error

    def seconds_left(self) -> float:
        """For how long the certificate is still valid; negative once it has expired."""
        return self.certificate().not_valid_after_utc.timestamp() - time.time()

    def renewal_due(self) -> bool:
        """Whether half of the certificate's life is over."""
        certificate = self.certificate()
        issued = certificate.not_valid_before_utc + CLOCK_SKEW
        whole = (certificate.not_valid_after_utc - issued).total_seconds()
        return whole <= 0 or self.seconds_left() < whole / 2  # a short one of a version with another skew is due

    def context(self) -> ssl.SSLContext:
        """A TLS context that trusts the project's authority alone and shows this site's certificate."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_verify_locations(self.authority)
        context.load_cert_chain(self.tls)
        return context

    def renew(self) -> None:
        """Get the next certificate, for a new key, over the connection that the present one opens."""
        tls_key = new_key()
        answer = self.post(RENEW_PATH, make_request(tls_key, self._load_node_key()))
        _check_certificate(answer, self.authority.read_bytes(), tls_key)
        write_private(self.tls, key_to_pem(tls_key) + answer)

    def post(self, path: str, body: bytes) -> bytes:
        """The front's answer to a request of this site, on one of the paths that are fedquit's own.

        Raises:
            DeploymentError: if the site is not let in or refused, with one sentence that says why.
        """
        self._require_own_certificate()
        address = str(self.about["address"])
        host, _, port = address.rpartition(":")
        try:
            connection = http.client.HTTPSConnection(
                host.strip("[]"), int(port), timeout=POST_TIMEOUT, context=self.context()
            )
            try:
                connection.request("POST", path, body, {"Content-Type": "application/octet-stream"})
                response = connection.getresponse()
                answer = response.read(MAX_ANSWER)
            finally:
                connection.close()
        except (OSError, http.client.HTTPException) as error:
            raise DeploymentError(why_not_reached(error, address)) from error
        if response.status != http.client.OK:
            reason = answer.decode(errors="replace").strip() or response.reason
            raise DeploymentError(f"the server at {address} refuses: {printable(reason)}")
        return answer

    def _require_own_certificate(self) -> None:
        """Raise `DeploymentError` if no server would take this site's certificate, which a server does not say."""
        name = self.about["name"]
        if self.seconds_left() <= 0:
            raise DeploymentError(
                f"the certificate of {name} has expired: run `fedquit flower join {self.folder}` and send the new "
                "request to the operator, who runs `fedquit flower rotate`."
            )
        try:
            authority = x509.load_pem_x509_certificate(read_private(self.authority, INSTALL))
            self.certificate().verify_directly_issued_by(authority)
        except (ValueError, TypeError, InvalidSignature) as error:
            raise DeploymentError(
                f"the certificate of {name} is of another authority than {self.authority}: run `fedquit flower join` "
                "with --bundle and the operator's last bundle."
            ) from error

    def require_keys(self) -> None:
        """Raise `StoreError` where the node key or the certificate is damaged or gone: a node would only start anew."""
        self._load_node_key()
        self.certificate()

    def _load_node_key(self) -> ec.EllipticCurvePrivateKey:
        return _private_key(read_private(self.node_key.private, RESTORE_KEY), str(self.node_key.private))

    def loopback(self) -> Tls:
        """The certificate of the node's own API on loopback, made once: it never leaves this machine."""
        folder = self.folder / "loopback"
        tls = Tls(folder / "ca.crt", folder / "server.pem", folder / "server.key")
        if not tls.key.exists():
            make_private_folder(folder)
            make_tls(folder, days=LOOPBACK_DAYS)
            close_files(folder)
        return tls

    def secret(self) -> Path:
        """The secret that the process which runs apps shares with the node, made once."""
        path = self.folder / "superexec.secret"
        if not path.exists():
            write_private(path, secrets.token_bytes(32))
        return path


START = """#!/bin/sh
# Starts this site's node. Its folder for data and requests, and its settings, are given as arguments:
#   start.sh --home HOME --set partition-id=0
exec fedquit flower node --site {folder} "$@"
"""


def _private_key(content: bytes, name: str) -> ec.EllipticCurvePrivateKey:
    try:
        key = load_ssh_private_key(content, None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise StoreError(f"{name} holds no private key: {RESTORE_KEY}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP384R1):
        raise StoreError(f"{name} is no key on the curve P-384: {RESTORE_KEY}")
    return key


def _check_certificate(pem: bytes, authority: bytes, key: ec.EllipticCurvePrivateKey) -> None:
    """Raise `InputError` unless the certificate is for this key and signed by this authority."""
    try:
        certificate = x509.load_pem_x509_certificate(pem)
        issuer = x509.load_pem_x509_certificate(authority)
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature) as error:
        raise InputError("the certificate is not signed by the project's authority: ask the operator.") from error
    if _spki(certificate.public_key()) != _spki(key.public_key()):
        raise InputError("the certificate is for another request than the last that this folder made: send that one.")


def _spki(key: Any) -> bytes:  # noqa: ANN401 - any kind of public key
    return bytes(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo))
