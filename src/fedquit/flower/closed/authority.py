# SPDX-License-Identifier: Apache-2.0
"""The project's own certificate authority: it signs the certificate of the front and of each site."""

from __future__ import annotations

import datetime
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID

from fedquit.errors import StoreError
from fedquit.flower.closed.private_files import read_private, write_private
from fedquit.flower.deploy.keys import distinguished_name, general_name, key_usage

Use = Literal["client", "server"]
USES = {"client": ExtendedKeyUsageOID.CLIENT_AUTH, "server": ExtendedKeyUsageOID.SERVER_AUTH}
AUTHORITY_YEARS = 10
CLOCK_SKEW = datetime.timedelta(hours=25)  # the clocks of two machines may differ by a day: both say so then
RESTORE = "restore it from a backup; without it no certificate can be issued or renewed."


def new_key() -> ec.EllipticCurvePrivateKey:
    """A new key for TLS, on the curve P-256."""
    return ec.generate_private_key(ec.SECP256R1())


def key_to_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """A private key as PEM."""
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def certificate_to_pem(certificate: x509.Certificate) -> bytes:
    """A certificate as PEM."""
    return certificate.public_bytes(Encoding.PEM)


def certificate_fingerprint(der: bytes) -> str:
    """The SHA-256 of a certificate's DER form, in hexadecimal."""
    return hashlib.sha256(der).hexdigest()


def key_from_pem(content: bytes, path: Path) -> ec.EllipticCurvePrivateKey:
    """A private key from PEM; `path` is named in the error."""
    try:
        key = load_pem_private_key(content, None)
    except ValueError as error:
        raise StoreError(f"{path} holds no private key: {RESTORE}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise StoreError(f"{path} holds a key of another kind than fedquit makes: {RESTORE}")
    return key


def load_certificate(folder: Path) -> x509.Certificate:
    """The certificate of the authority whose files are there; its key may be out of reach."""
    try:
        return x509.load_pem_x509_certificate(read_private(folder / "ca.crt", RESTORE))
    except ValueError as error:
        raise StoreError(f"{folder / 'ca.crt'} holds no certificate: {RESTORE}") from error


@dataclass(frozen=True)
class Authority:
    """An authority: its certificate, which everybody has, and its key, which stays with the operator."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @classmethod
    def make(cls, name: str) -> Authority:
        """A new authority."""
        key = new_key()
        now = datetime.datetime.now(datetime.UTC)
        draft = x509.CertificateBuilder(
            issuer_name=distinguished_name(name),
            subject_name=distinguished_name(name),
            public_key=key.public_key(),
            serial_number=x509.random_serial_number(),
            not_valid_before=now - CLOCK_SKEW,
            not_valid_after=now + datetime.timedelta(days=365 * AUTHORITY_YEARS),
        )
        draft = draft.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        draft = draft.add_extension(key_usage("key_cert_sign", "crl_sign"), critical=True)
        draft = draft.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        return cls(draft.sign(key, hashes.SHA256()), key)

    @classmethod
    def load(cls, folder: Path) -> Authority:
        """The authority whose files `save` wrote."""
        certificate = load_certificate(folder)
        return cls(certificate, key_from_pem(read_private(folder / "ca.key", RESTORE), folder / "ca.key"))

    def save(self, folder: Path) -> None:
        """Write the certificate and the key."""
        write_private(folder / "ca.key", key_to_pem(self.key))
        write_private(folder / "ca.crt", certificate_to_pem(self.certificate))

    def issue(
        self,
        name: str,
        public_key: CertificatePublicKeyTypes,
        seconds: float,
        use: Use,
        hosts: tuple[str, ...] = (),
    ) -> x509.Certificate:
        """A certificate for a public key.

        Args:
            name: the common name.
            public_key: of the holder.
            seconds: for which it is valid from now on.
            use: whether the holder connects or is connected to.
            hosts: the names and addresses of a server.

        Returns:
            The certificate, signed by this authority.
        """
        now = datetime.datetime.now(datetime.UTC)
        draft = x509.CertificateBuilder(
            issuer_name=self.certificate.subject,
            subject_name=distinguished_name(name),
            public_key=public_key,
            serial_number=x509.random_serial_number(),
            not_valid_before=now - CLOCK_SKEW,
            not_valid_after=now + datetime.timedelta(seconds=seconds),
        )
        issuer_id = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        draft = draft.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        draft = draft.add_extension(key_usage("digital_signature"), critical=True)
        draft = draft.add_extension(x509.ExtendedKeyUsage([USES[use]]), critical=False)
        draft = draft.add_extension(issuer_id, critical=False)
        if hosts:
            names = x509.SubjectAlternativeName([general_name(host) for host in hosts])
            draft = draft.add_extension(names, critical=False)
        return draft.sign(self.key, hashes.SHA256())
