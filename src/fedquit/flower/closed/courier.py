# SPDX-License-Identifier: Apache-2.0
"""A site's word to the front that requests lie in its outbox, and what the front answers.

Flower's nodes only answer. Without a notice a request would wait until the server asks by itself. A notice holds the
names of the request files alone: they are of the app's user, and what is in them is read and sent by the app.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fedquit.errors import FedquitError
from fedquit.flower.closed.notice_board import MAX_REQUESTS
from fedquit.flower.closed.private_files import write_private_json
from fedquit.flower.closed.site_folder import REQUESTS_PATH, SiteFolder
from fedquit.flower.deploy.processes import Say

HELLO = 60.0  # seconds after which the front is spoken to even if there is nothing to tell
RETRY = 30.0  # seconds after a notice that was not received
MUTE = 900.0  # seconds without an answer, after which the owner of the site is warned, again and again
ID_LENGTH = 16  # of a request's id


@dataclass
class Courier:
    """Tells the front of the requests in a home.

    Attributes:
        site: the site's keys and its server.
        home: of the client.
        record: where it is written down what the front answered last.
        say: takes one sentence for the owner of the site.
        clock: seconds, which never go back.
    """

    site: SiteFolder
    home: Path
    record: Path
    say: Say
    clock: Callable[[], float] = time.monotonic
    _told: set[str] = field(default_factory=set)  # requests that the front knows of
    _next: float = -math.inf
    _failing: bool = False  # whether the last notice was not received, or not all of it
    _answered: float = field(init=False)
    _warned: float = -math.inf
    _sentence: str = ""
    _unwritten: bool = False  # whether the last answer could not be written down

    def __post_init__(self) -> None:
        self._answered = self.clock()

    def step(self) -> None:
        """Tell the front what is new, if anything is, and say so when it does not answer."""
        now = self.clock()
        requests = self._requests()
        fresh = [request for request in requests if request not in self._told]
        if now < self._next and (self._failing or not fresh):
            return
        try:
            answer = json.loads(self.site.post(REQUESTS_PATH, json.dumps({"requests": requests}).encode()))
            received, by, sentence = str(answer["received"]), str(answer["by"]), str(answer["told"])
            noted = {str(request) for request in answer["requests"]}
        except (FedquitError, ValueError, KeyError, TypeError) as error:
            self._next = now + RETRY
            self._failing = True
            self._warn(now, f"{error}", fresh)
            return
        self._next = now + HELLO
        self._failing = not noted.issuperset(requests)
        self._answered = now
        self._told = noted
        listed = [request for request in requests if request in noted]
        self._record({"answered": received, "by": by, "requests": listed, "told": sentence})
        for request in noted.intersection(fresh):
            self.say(f"the front at {by} has noted request {request} ({received}).")
        if sentence != self._sentence:
            self.say(f"the server says: {sentence}." if sentence else "the server says: training goes on.")
            self._sentence = sentence

    def _record(self, answer: Mapping[str, object]) -> None:
        """Write down what the front answered; a full disk must not end the node."""
        try:
            write_private_json(self.record, answer)
        except FedquitError as error:
            if not self._unwritten:
                self.say(f"warning: {error}")
            self._unwritten = True
        else:
            self._unwritten = False

    def _requests(self) -> list[str]:
        """The ids of the newest requests in the outbox, by the names of their files."""
        try:
            files = [(entry.stat(follow_symlinks=False).st_mtime, entry.name) for entry in os.scandir(self._outbox)]
        except OSError:
            return []
        names = [name.removesuffix(".json") for _, name in sorted(files) if name.endswith(".json")]
        return [name for name in names if len(name) == ID_LENGTH and name.isalnum()][-MAX_REQUESTS:]

    @property
    def _outbox(self) -> Path:
        return self.home / "outbox"

    def _warn(self, now: float, reason: str, fresh: list[str]) -> None:
        """Say that the server does not answer: at once if a request waits, and then again and again."""
        silent = now - self._answered
        if (fresh or silent >= MUTE) and now - self._warned >= MUTE:
            self._warned = now
            waiting = f" {len(fresh)} requests wait for it." if fresh else ""
            self.say(f"warning: the server has not answered this site for {silent / 60:.0f} minutes: {reason}{waiting}")
