# SPDX-License-Identifier: Apache-2.0
"""Who is a node? The key that the operator registered for it; never its node id, and never what it says of itself.

A node that registered itself, as all do in an insecure deployment and in a simulation, is known only by the partition
that it claims, and marked unauthenticated.
"""

from __future__ import annotations

import hashlib

from flwr.proto.node_pb2 import NodeInfo  # what `Grid.get_nodes` returns

from fedquit.flower.roster import Identity


def fingerprint(public_key: bytes) -> str:
    """Of a public key: the beginning of its SHA-256, in hexadecimal."""
    return hashlib.sha256(public_key).hexdigest()[:32]


def is_registered(node: NodeInfo) -> bool:
    """Whether the operator registered the node's key: only then does it have a name in the SuperLink's books."""
    return node.HasField("name") and bool(node.name) and bool(node.public_key)


def identity_of(node: NodeInfo, claimed: object) -> Identity | None:
    """The identity of a node that claims a partition; None where there is nothing to know it by."""
    if is_registered(node):
        return Identity(f"key:{fingerprint(node.public_key)}", node.name, authenticated=True)
    if not isinstance(claimed, str) or not claimed.isdecimal() or len(claimed) > 9:
        return None
    return Identity(f"partition:{claimed}", "", authenticated=False)
