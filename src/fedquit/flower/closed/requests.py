# SPDX-License-Identifier: Apache-2.0
"""The request by which a site asks for a certificate: a PKCS #10 request that also names the site's node key.

The request is signed with the site's TLS key. The node key signs the TLS key's public half, so that nobody can ask for
a certificate that is bound to another site's node key.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_der_public_key

from fedquit.errors import InputError
from fedquit.flower.deploy.keys import distinguished_name

NODE_KEY = x509.ObjectIdentifier("2.25.233160219216245120158637287531838160521")  # of a random UUID
NODE_PROOF = x509.ObjectIdentifier("2.25.233160219216245120158637287531838160522")
PURPOSE = b"fedquit: this node key belongs to the site with the TLS key "
MAX_REQUEST = 16_384  # bytes
MAKE_ANOTHER = "make one with `fedquit flower join` and send the file whole."


@dataclass(frozen=True)
class SiteRequest:
    """What a request says, after its signatures were verified."""

    tls_key: ec.EllipticCurvePublicKey
    node_key: ec.EllipticCurvePublicKey

    @property
    def fingerprint(self) -> str:
        """What the operator and the site compare over another channel: 32 hexadecimal digits of both keys' SHA-256."""
        digest = hashlib.sha256(_spki(self.tls_key) + _spki(self.node_key)).hexdigest()[:32]
        return " ".join(digest[i : i + 4] for i in range(0, len(digest), 4))

    @property
    def node_header(self) -> str:
        """The node key as Flower's header `flwr-public-key` carries it."""
        pem = self.node_key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        return base64.b64encode(pem).decode()


def _spki(key: ec.EllipticCurvePublicKey) -> bytes:
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def make_request(tls_key: ec.EllipticCurvePrivateKey, node_key: ec.EllipticCurvePrivateKey) -> bytes:
    """A request for a certificate, as PEM."""
    proof = node_key.sign(PURPOSE + _spki(tls_key.public_key()), ec.ECDSA(hashes.SHA256()))
    draft = x509.CertificateSigningRequestBuilder().subject_name(distinguished_name("a site"))
    draft = draft.add_extension(x509.UnrecognizedExtension(NODE_KEY, _spki(node_key.public_key())), critical=False)
    draft = draft.add_extension(x509.UnrecognizedExtension(NODE_PROOF, proof), critical=False)
    return draft.sign(tls_key, hashes.SHA256()).public_bytes(Encoding.PEM)


def read_request(content: bytes) -> SiteRequest:
    """Read a request and verify both of its signatures.

    Raises:
        InputError: if it is anything else than what `make_request` made.
    """
    if len(content) > MAX_REQUEST:
        raise InputError(f"a request has at most {MAX_REQUEST} bytes, and this has {len(content)}: {MAKE_ANOTHER}")
    try:
        request = x509.load_pem_x509_csr(content)
        tls_key = request.public_key()
        node_key = load_der_public_key(_extension(request, NODE_KEY))
        proof = _extension(request, NODE_PROOF)
        valid = request.is_signature_valid
    except (ValueError, x509.ExtensionNotFound) as error:
        raise InputError(f"this is no request of a site: {MAKE_ANOTHER}") from error
    if not isinstance(tls_key, ec.EllipticCurvePublicKey) or not isinstance(tls_key.curve, ec.SECP256R1):
        raise InputError(f"the request's TLS key is not on the curve P-256: {MAKE_ANOTHER}")
    if not isinstance(node_key, ec.EllipticCurvePublicKey) or not isinstance(node_key.curve, ec.SECP384R1):
        raise InputError(f"the request's node key is not on the curve P-384, which Flower requires: {MAKE_ANOTHER}")
    try:
        node_key.verify(proof, PURPOSE + _spki(tls_key), ec.ECDSA(hashes.SHA256()))
    except InvalidSignature as error:
        raise InputError(f"the request is not signed by the node key that it names: {MAKE_ANOTHER}") from error
    if not valid:
        raise InputError(f"the request is not signed by its own key: {MAKE_ANOTHER}")
    return SiteRequest(tls_key, node_key)


def _extension(request: x509.CertificateSigningRequest, oid: x509.ObjectIdentifier) -> bytes:
    value = request.extensions.get_extension_for_oid(oid).value
    if not isinstance(value, x509.UnrecognizedExtension):
        raise ValueError(oid.dotted_string)
    return value.value
