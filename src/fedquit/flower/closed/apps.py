# SPDX-License-Identifier: Apache-2.0
"""Signatures of apps: a node runs an app only if a key of its trust file has signed it.

Flower's SuperNode verifies an Ed25519 signature over the time and the SHA-256 of the app's archive (FAB), which a
SuperLink hands out with the archive. Flower's own command signs apps of its hub only. `sign` makes the same signature
for an app in a folder, and the front adds it where a node asks for the archive.
"""

from __future__ import annotations

import base64
import hashlib
import json
import time
import warnings
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_ssh_private_key,
    load_ssh_public_key,
)

from fedquit.errors import InputError, StoreError
from fedquit.flower.closed.private_files import read_private, write_private, write_private_json

LICENSE = {"valid_license": "Valid"}  # without it a SuperNode does not look at the signatures
ASK_OPERATOR = "ask the operator for the bundle again."
RESTORE_TRUST = "restore it from a backup of the project."


def make_release_key(path: Path) -> Ed25519PrivateKey:
    """A new key that signs apps."""
    key = Ed25519PrivateKey.generate()
    write_private(path, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    return key


def load_release_key(path: Path) -> Ed25519PrivateKey:
    """The key that `make_release_key` wrote."""
    content = read_private(path, "give the key that signs apps, or restore it from a backup.")
    try:
        key = load_ssh_private_key(content, None)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise StoreError(f"{path} holds no private key in OpenSSH's format: give the key that signs apps.") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise StoreError(f"{path} is no Ed25519 key: give the key that signs apps.")
    return key


def key_id(key: Ed25519PublicKey) -> str:
    """The name of a key in signatures and trust files."""
    return f"fpk_{hashlib.sha256(key.public_bytes_raw()).hexdigest()[:16]}"


def trust_file(key: Ed25519PublicKey) -> str:
    """The content of a trust file that trusts one key."""
    line = key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
    return f"{key_id(key)}: '{line}'\n"


def read_trust_file(path: Path, what_to_do: str = ASK_OPERATOR) -> dict[str, Ed25519PublicKey]:
    """The keys of a trust file, by name.

    Args:
        path: the file.
        what_to_do: the end of the sentence that says what to do when it cannot be used; at a site if not given.

    Raises:
        StoreError: if there are none. Flower would run every app then.
    """
    try:
        content: Any = yaml.safe_load(read_private(path, what_to_do))
        keys = {str(name): load_ssh_public_key(line.encode()) for name, line in dict(content or {}).items()}
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, RecursionError, UnsupportedAlgorithm) as error:
        raise StoreError(f"{path} is no trust file: {what_to_do}") from error
    if not keys:
        raise StoreError(f"{path} trusts nobody, and with such a file a node would run every app: {what_to_do}")
    trusted = {name: key for name, key in keys.items() if isinstance(key, Ed25519PublicKey)}
    if len(trusted) < len(keys):
        raise StoreError(f"{path} names a key that is not Ed25519: {what_to_do}")
    return trusted


def archive(app: Path) -> bytes:
    """The archive of an app, as `flwr run` sends it: the same files give the same bytes."""
    from flwr.cli.build import build_fab_from_disk

    if not (app / "pyproject.toml").exists():
        raise InputError(f"{app} is no Flower app: give the folder that holds the app's pyproject.toml.")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a library that Flower uses
        return bytes(build_fab_from_disk(app))


def sign(app: Path, key: Ed25519PrivateKey, folder: Path) -> str:
    """Sign an app.

    Args:
        app: its folder.
        key: a key that the nodes trust.
        folder: where the signature is written.

    Returns:
        The SHA-256 of the app's archive, in hexadecimal.
    """
    digest = hashlib.sha256(archive(app)).digest()
    now = int(time.time())
    signature = base64.urlsafe_b64encode(key.sign(signed_message(digest, now))).rstrip(b"=").decode()
    entry = json.dumps({"signed_at": now, "signature": signature})
    write_private_json(folder / f"{digest.hex()}.json", {key_id(key.public_key()): entry, **LICENSE})
    return digest.hex()


def signed_message(digest: bytes, when: int) -> bytes:
    """What a signature is over: the time in seconds, as 8 bytes, and the SHA-256 of the archive."""
    return when.to_bytes(8, "big") + digest


def signatures(digest: str, folder: Path) -> dict[str, str]:
    """The signatures of the archive with this SHA-256; none if it was not signed."""
    path = folder / f"{digest}.json"
    if len(digest) != 64 or not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text())
        return {str(name): str(value) for name, value in content.items()}
    except (OSError, ValueError, AttributeError) as error:
        raise StoreError(
            f"cannot read the signature {path} ({error}): let the user who runs this own it, or sign the app again."
        ) from error
