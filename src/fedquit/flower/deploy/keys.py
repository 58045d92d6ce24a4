# SPDX-License-Identifier: Apache-2.0
"""Certificates and node keys, made for the occasion: a demo or a test brings its own small authority.

In a federation of several parties, take the certificates of your own authority, and let every node make its own key.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fedquit.errors import StoreError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.x509 import Certificate, CertificateBuilder, GeneralName, KeyUsage, Name

HOSTS = ("127.0.0.1", "localhost")
AUTHORITY = "fedquit: made for the occasion"


@dataclass(frozen=True)
class Tls:
    """The files of a server: the authority that vouches for it, its certificate, and the key to that."""

    authority: Path
    certificate: Path
    key: Path


@dataclass(frozen=True)
class NodeKey:
    """The two halves of a node's key, in OpenSSH's format: the private one stays, the public one is registered."""

    private: Path
    public: Path


def make_tls(folder: Path, hosts: tuple[str, ...] = HOSTS, days: int = 30) -> Tls:
    """Make an authority and, signed by it, a certificate for these hosts. The authority's key is not kept."""
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    folder.mkdir(parents=True, exist_ok=True)
    signer, server = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    authority = _authority(signer, days)
    certificate = _server_certificate(server, signer, authority, hosts, days)
    made = Tls(folder / "ca.crt", folder / "server.pem", folder / "server.key")
    made.authority.write_bytes(authority.public_bytes(Encoding.PEM))
    made.certificate.write_bytes(certificate.public_bytes(Encoding.PEM))
    _write_secret(made.key, server.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return made


def make_node_key(folder: Path, name: str) -> NodeKey:
    """Make a key on the curve P-384, as Flower wants it."""
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

    folder.mkdir(parents=True, exist_ok=True)
    key, made = ec.generate_private_key(ec.SECP384R1()), NodeKey(folder / name, folder / f"{name}.pub")
    _write_secret(made.private, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    made.public.write_bytes(key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n")
    return made


def _write_secret(path: Path, content: bytes) -> None:
    """Write what nobody else may read; never over an existing key."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError as error:
        raise StoreError(f"{path} exists: a key is never overwritten; take another folder.") from error
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)


def _called(name: str) -> Name:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _draft(subject: str, days: int) -> CertificateBuilder:
    from cryptography import x509

    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(_called(subject))
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))  # clocks differ
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _usage(*allowed: str) -> KeyUsage:
    from cryptography import x509

    names = ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
    all_names = (*names, "key_cert_sign", "crl_sign", "encipher_only", "decipher_only")
    return x509.KeyUsage(**{name: name in allowed for name in all_names})


def _authority(signer: EllipticCurvePrivateKey, days: int) -> Certificate:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    draft = _draft(AUTHORITY, days)
    draft = draft.issuer_name(_called(AUTHORITY)).public_key(signer.public_key())
    draft = draft.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    draft = draft.add_extension(_usage("key_cert_sign", "crl_sign"), critical=True)
    draft = draft.add_extension(x509.SubjectKeyIdentifier.from_public_key(signer.public_key()), critical=False)
    return draft.sign(signer, hashes.SHA256())


def _server_certificate(
    server: EllipticCurvePrivateKey,
    signer: EllipticCurvePrivateKey,
    authority: Certificate,
    hosts: tuple[str, ...],
    days: int,
) -> Certificate:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.x509.oid import ExtendedKeyUsageOID

    known_as = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    draft = _draft(hosts[0], days).issuer_name(authority.subject).public_key(server.public_key())
    draft = draft.add_extension(x509.SubjectAlternativeName([_name(host) for host in hosts]), critical=False)
    draft = draft.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    draft = draft.add_extension(_usage("digital_signature"), critical=True)
    draft = draft.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    draft = draft.add_extension(x509.SubjectKeyIdentifier.from_public_key(server.public_key()), critical=False)
    draft = draft.add_extension(known_as, critical=False)
    return draft.sign(signer, hashes.SHA256())


def _name(host: str) -> GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
