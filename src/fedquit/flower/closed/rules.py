# SPDX-License-Identifier: Apache-2.0
"""What a site may ask for: ten of Flower's paths under its own node key, its next certificate, and to be heard."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fedquit.flower.closed.greeting import GREET_PATH
from fedquit.flower.closed.notice_board import MAX_NOTICE
from fedquit.flower.closed.site_folder import RENEW_PATH, REQUESTS_PATH
from fedquit.flower.closed.sites import Site, Sites

FLEET_PATHS = frozenset(
    f"/v1/fleet/{name}".encode()
    for name in (
        "activate-node",
        "deactivate-node",
        "send-node-heartbeat",
        "pull-messages",
        "push-messages",
        "get-run",
        "get-fab",
        "push-object",
        "pull-object",
        "confirm-message-received",
    )
)
RENEW = RENEW_PATH.encode()
REQUESTS = REQUESTS_PATH.encode()
GREET = GREET_PATH.encode()
GET_FAB = b"/v1/fleet/get-fab"
NODE_KEY = b"flwr-public-key"
PASSED_HEADERS = frozenset(  # nothing else reaches the SuperLink
    (
        b"content-type",
        b"accept",
        b"user-agent",
        NODE_KEY,
        b"flwr-signature",
        b"flwr-timestamp",
        b"flwr-package-name",
        b"flwr-package-version",
        b"flwr-component-name",
    )
)
MAX_BODY = 16 * 2**20  # bytes: Flower sends arrays in pieces of 5 MiB
MAX_RENEWAL = 16_384
OWN_PATHS = {RENEW: MAX_RENEWAL, REQUESTS: MAX_NOTICE, GREET: MAX_NOTICE}  # fedquit's own: bytes of a body

Headers = Iterable[tuple[bytes, bytes]]


@dataclass(frozen=True)
class Refusal:
    """Why a request is refused."""

    status: int
    reason: str


def find_site(sites: Sites, sha256: str, now: float) -> Site | Refusal:
    """The site that holds a certificate.

    Args:
        sites: all of them.
        sha256: the certificate's fingerprint.
        now: Unix time.
    """
    for site in sites.values():
        certificate = site.certificate(sha256)
        if certificate:
            return site if now < certificate.not_after else Refusal(403, "the certificate has expired")
    return Refusal(403, "the certificate is not that of a site that takes part")


def judge(site: Site, method: bytes, target: bytes, headers: Headers) -> Refusal | int:
    """Decide on a request by its first line and its headers.

    Args:
        site: who sent it, by its certificate.
        method: as sent.
        target: as sent; it must be one of the paths, byte for byte.
        headers: names in lower case.

    Returns:
        The length of the body that follows, or why the request is refused.
    """
    if method != b"POST" or (target not in FLEET_PATHS and target not in OWN_PATHS):
        return Refusal(403, "no such path for sites")
    lengths = [value for name, value in headers if name == b"content-length"]
    if any(name == b"transfer-encoding" for name, _ in headers) or len(lengths) != 1 or not lengths[0].isdigit():
        return Refusal(411, "a body needs one length")
    length = int(lengths[0][:20])
    if length > OWN_PATHS.get(target, MAX_BODY):
        return Refusal(413, "the body is too large")
    if target not in OWN_PATHS:
        keys = [value for name, value in headers if name == NODE_KEY]
        if keys != [site.key.encode()]:
            return Refusal(403, "the node key is not this site's")
    names = [name for name, _ in headers if name in PASSED_HEADERS]
    if len(names) != len(set(names)):
        return Refusal(400, "a header came twice")
    return length
