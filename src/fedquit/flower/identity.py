# SPDX-License-Identifier: Apache-2.0
"""The identity of a node: the key that the operator registered for it, not its node id or what it claims.

In a closed federation a registered key counts only if it is the one in use of a site that takes part, and all keys that
a site ever had are one identity (`fedquit.flower.membership`).

A node without a registered key, as in an insecure deployment or a simulation, is identified by the partition that it
claims, and marked unauthenticated.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from flwr.proto.node_pb2 import NodeInfo  # what `Grid.get_nodes` returns

from fedquit.flower.membership import Membership
from fedquit.flower.roster import Identity

Sites = Mapping[str, Membership]  # by the fingerprint of the key in use


def fingerprint(public_key: bytes) -> str:
    """The fingerprint of a public key: the first 32 hexadecimal digits of its SHA-256."""
    return hashlib.sha256(public_key).hexdigest()[:32]


def is_registered(node: NodeInfo) -> bool:
    """Whether the operator registered the node's key: only then does the SuperLink have a name for it."""
    return node.HasField("name") and bool(node.name) and bool(node.public_key)


def takes_part(node: NodeInfo, sites: Sites | None) -> bool:
    """Whether a node may be asked anything: in a closed federation only with a key in use of one of the sites."""
    return sites is None or (is_registered(node) and fingerprint(node.public_key) in sites)


def identity_of(node: NodeInfo, claimed: object, sites: Sites | None = None) -> Identity | None:
    """The identity of a node.

    Args:
        node: what the SuperLink knows of it.
        claimed: the partition that the node claims, which counts only where it has no registered key.
        sites: the site of each key in use, in a closed federation.

    Returns:
        Its identity; None where it has neither a registered key nor a valid partition, or belongs to no site.
    """
    if sites is not None:
        site = sites.get(fingerprint(node.public_key)) if is_registered(node) else None
        return Identity(f"key:{site.identity}", site.name, authenticated=True) if site else None
    if is_registered(node):
        return Identity(f"key:{fingerprint(node.public_key)}", node.name, authenticated=True)
    if not isinstance(claimed, str) or not claimed.isdecimal() or len(claimed) > 9:
        return None
    return Identity(f"partition:{claimed}", "", authenticated=False)
