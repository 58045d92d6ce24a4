# SPDX-License-Identifier: Apache-2.0
"""Temporary certificates and node keys for demos, tests, and a node's API on loopback.

In a federation of several parties, use certificates of your own authority, and let every node make its own key.
"""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fedquit.errors import StoreError
from fedquit.utils.files import write_atomic, write_secret

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.x509 import Certificate, CertificateBuilder, GeneralName, KeyUsage, Name

HOSTS = ("127.0.0.1", "localhost")
AUTHORITY = "fedquit: made for the occasion"


@dataclass(frozen=True)
class Tls:
    """The TLS files of a server."""

    authority: Path  # the certificate of the authority that signed the server's
    certificate: Path
    key: Path  # the private key of `certificate`


@dataclass(frozen=True)
class NodeKey:
    """The files of a node's key pair, in OpenSSH's format."""

    private: Path  # stays with the node
    public: Path  # is registered at the SuperLink


def make_tls(folder: Path, hosts: tuple[str, ...] = HOSTS, days: int = 30) -> Tls:
    """Make an authority and a server certificate that it signs. The authority's private key is not written.

    Args:
        folder: where the files are written.
        hosts: the names and addresses for which the certificate is valid.
        days: how long both certificates are valid.

    Returns:
        The paths of the files.
    """
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    folder.mkdir(parents=True, exist_ok=True)
    authority_key = ec.generate_private_key(ec.SECP256R1())
    server_key = ec.generate_private_key(ec.SECP256R1())
    authority = _authority_certificate(authority_key, days)
    certificate = _server_certificate(server_key, authority_key, authority, hosts, days)
    tls = Tls(folder / "ca.crt", folder / "server.pem", folder / "server.key")
    write_atomic(tls.authority, authority.public_bytes(Encoding.PEM))
    write_atomic(tls.certificate, certificate.public_bytes(Encoding.PEM))
    _write_secret(tls.key, server_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return tls


def make_node_key(folder: Path, name: str) -> NodeKey:
    """Make a key pair on the curve P-384, which Flower requires.

    Args:
        folder: where the files are written.
        name: the name of the private key's file; the public key's has `.pub` added.

    Returns:
        The paths of the files.
    """
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

    folder.mkdir(parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP384R1())
    files = NodeKey(folder / name, folder / f"{name}.pub")
    _write_secret(files.private, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    write_atomic(files.public, key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n")
    return files


def _write_secret(path: Path, content: bytes) -> None:
    """Write a private key that only its owner can read; never over an existing one."""
    if path.exists():
        raise StoreError(f"{path} exists: a key is never overwritten; take another folder.")
    write_secret(path, content)  # whole or not at all: half a key would be in the way of a whole one


def distinguished_name(name: str) -> Name:
    """A distinguished name that has a common name only."""
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _draft(subject: str, days: int) -> CertificateBuilder:
    from cryptography import x509

    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(distinguished_name(subject))
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))  # the clocks of two machines may differ
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def key_usage(*allowed: str) -> KeyUsage:
    """What the key of a certificate may be used for."""
    from cryptography import x509

    names = ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
    all_names = (*names, "key_cert_sign", "crl_sign", "encipher_only", "decipher_only")
    return x509.KeyUsage(**{name: name in allowed for name in all_names})


def _authority_certificate(key: EllipticCurvePrivateKey, days: int) -> Certificate:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    draft = _draft(AUTHORITY, days)
    draft = draft.issuer_name(distinguished_name(AUTHORITY)).public_key(key.public_key())
    draft = draft.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    draft = draft.add_extension(key_usage("key_cert_sign", "crl_sign"), critical=True)
    draft = draft.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    return draft.sign(key, hashes.SHA256())


def _server_certificate(
    server_key: EllipticCurvePrivateKey,
    authority_key: EllipticCurvePrivateKey,
    authority: Certificate,
    hosts: tuple[str, ...],
    days: int,
) -> Certificate:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.x509.oid import ExtendedKeyUsageOID

    issuer_id = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    draft = _draft(hosts[0], days).issuer_name(authority.subject).public_key(server_key.public_key())
    draft = draft.add_extension(x509.SubjectAlternativeName([general_name(host) for host in hosts]), critical=False)
    draft = draft.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    draft = draft.add_extension(key_usage("digital_signature"), critical=True)
    draft = draft.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    draft = draft.add_extension(x509.SubjectKeyIdentifier.from_public_key(server_key.public_key()), critical=False)
    draft = draft.add_extension(issuer_id, critical=False)
    return draft.sign(authority_key, hashes.SHA256())


def general_name(host: str) -> GeneralName:
    """The address or name of a host, as a certificate's subjectAltName has it."""
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
