# SPDX-License-Identifier: Apache-2.0
"""What the front writes down of the sites, and what it tells them: notices of requests.

The front and `serve` are two processes of one user. They meet in files of the project's folder `server`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fedquit.errors import InputError, StoreError
from fedquit.flower.closed.private_files import write_private_json
from fedquit.flower.outbox import now, require_id
from fedquit.flower.token_bucket import SiteLimit, TokenBucket
from fedquit.utils.files import read_json

NOTICES = "notices.json"  # ids of requests, by the name of their site
TOLD = "told.json"  # what all sites are told
MAX_REQUESTS = 64  # ids that are kept of a site, the newest
MAX_NOTICE = 4096  # bytes of a notice
LIMIT = TokenBucket(burst=10, every=5.0)  # notices of one site
NEWS = TokenBucket(burst=5, every=3600.0)  # those that name new requests: each may start a run, which asks all sites


class TooManyNotices(InputError):
    """A site gives notice too often."""


def requests_from(body: bytes) -> list[str]:
    """The ids of requests in the body of a notice."""
    try:
        content = json.loads(body)
        requests = [require_id(str(request), "request") for request in content["requests"]]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError("a notice is JSON with the ids of requests: run the same version on both sides.") from error
    if len(requests) > MAX_REQUESTS:
        raise InputError(f"a notice names {len(requests)} requests, and {MAX_REQUESTS} are the most.")
    return requests


@dataclass
class NoticeBoard:
    """Takes notices of new requests from sites, so many at a time, and gives receipts."""

    folder: Path  # of the server's own files in a project
    address: str  # of the front, for receipts
    _notices: SiteLimit = field(default_factory=lambda: SiteLimit(LIMIT))
    _news: SiteLimit = field(default_factory=lambda: SiteLimit(NEWS))

    def take(self, site: str, body: bytes) -> bytes:
        """Write a site's notice down, and answer with a receipt and with what all sites are told.

        A site that has named new requests too often has no receipt for more of them for now. They are not lost: the
        site gives notice again, and the server asks all sites by itself too.
        """
        moment = time.time()
        if not self._notices.take(site, moment):
            raise TooManyNotices("notices come too often: wait some seconds.")
        requests = requests_from(body)
        notices = {name: list(ids) for name, ids in read_site_notices(self.folder).items()}
        known = notices.get(site, [])
        fresh = [request for request in requests if request not in known]
        if fresh and self._news.take(site, moment):
            notices[site] = [*known, *fresh][-MAX_REQUESTS:]
            write_private_json(self.folder / NOTICES, notices)
        noted = [request for request in requests if request in notices.get(site, [])]
        answer = {"received": now(), "by": self.address, "requests": noted, "told": read_told(self.folder)}
        return json.dumps(answer).encode()


def read_site_notices(folder: Path) -> dict[str, list[str]]:
    """The ids of requests that sites have given notice of, by the name of the site."""
    content = _read(folder / NOTICES)
    return {str(name): [str(i) for i in ids] for name, ids in content.items() if isinstance(ids, list)}


def read_told(folder: Path) -> str:
    """What all sites are told: why training pauses, or ""."""
    return str(_read(folder / TOLD).get("sentence", ""))


def write_told(folder: Path, sentence: str) -> None:
    """Let all sites be told something."""
    if sentence != read_told(folder):
        write_private_json(folder / TOLD, {"sentence": sentence, "at": now()})


def _read(path: Path) -> Mapping[str, object]:
    """A JSON object; empty where it cannot be read: a sweep finds every request too."""
    if not path.exists():
        return {}
    try:
        content = read_json(path)
    except StoreError:
        return {}
    return content if isinstance(content, dict) else {}
