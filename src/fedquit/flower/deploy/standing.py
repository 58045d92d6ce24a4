# SPDX-License-Identifier: Apache-2.0
"""A federation that stays open after its training: the app is run again whenever there is something to do.

Flower ends a run when the server app returns. A run on a state directory whose training is over asks all nodes for
requests, serves them, and ends. `keep_open` submits such a run when the operator has filed a request, when a site has
given notice of one, when a request that had to wait is due, when training that paused can go on, after a run that was
lost, and from time to time. What one site says, or what a run leaves undone, never makes it run without a pause.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedquit.errors import StoreError
from fedquit.flower.deploy.errors import DeploymentError
from fedquit.flower.deploy.processes import Say
from fedquit.flower.membership import FILE as SITES
from fedquit.flower.notices import read_notices
from fedquit.flower.token_bucket import TokenBucket
from fedquit.utils.files import read_json

SWEEP = 3600.0  # seconds after which all nodes are asked for requests
LOOK = 1.0  # seconds between two looks at the state directory
FIRST_PAUSE = 60.0  # seconds after a run that was lost; doubled each time, up to the time between two sweeps
LOST = "the last run was lost"
NOTICED_RUNS = TokenBucket(burst=3, every=600.0)  # runs that the notices of one site lead to


@dataclass
class Standing:
    """What a federation that stands watches in its state directory.

    Attributes:
        state: the server's state directory.
        sweep: seconds after which all nodes are asked for requests.
        clock: Unix time.
        sleep: waits for so many seconds.
    """

    state: Path
    sweep: float = SWEEP
    clock: Callable[[], float] = time.time
    sleep: Callable[[float], None] = time.sleep
    _notices: Mapping[str, frozenset[str]] = field(default_factory=dict)
    _sites: bytes = b""
    _noticed_runs: dict[str, list[float]] = field(default_factory=dict)  # when notices of a site led to runs
    _files: frozenset[str] = frozenset()  # of the operator, when the last run began
    _left: frozenset[str] = frozenset()  # those that it did not take
    _left_pause: float = 0.0  # seconds until these are tried again

    def note_start(self) -> None:
        """A run begins: what is known by now is its business."""
        now = self.clock()
        notices = read_notices(self.state)
        for identity in self._fresh_notices(notices):
            within = NOTICED_RUNS.burst * NOTICED_RUNS.every
            recent = [when for when in self._noticed_runs.get(identity, []) if 0 <= now - when < within]
            self._noticed_runs[identity] = [*recent, now]
        self._notices = notices
        self._sites = self._read_sites()
        self._files = self._read_files()

    def note_end(self) -> str:
        """A run has ended; a sentence for the operator if it left a file of his where it was, "" otherwise."""
        self._left = self._files & self._read_files()
        if not self._left:
            self._left_pause = 0.0
            return ""
        self._left_pause = min(self.sweep, 2 * self._left_pause or FIRST_PAUSE)
        return (
            f"warning: the run did not take {', '.join(sorted(self._left)[:8])} in {self.state / 'requests'}: see that "
            f"the app's user may read and remove it. The next run for it is after {self._left_pause:.0f} s."
        )

    def _read_files(self) -> frozenset[str]:
        return frozenset(path.name for path in (self.state / "requests").glob("*.json"))

    def _fresh_notices(self, notices: Mapping[str, frozenset[str]]) -> list[str]:
        """The sites that have given notice of something since the last run began."""
        return [site for site, requests in notices.items() if requests - self._notices.get(site, frozenset())]

    def _read_sites(self) -> bytes:
        with contextlib.suppress(OSError):
            return (self.state / SITES).read_bytes()
        return b""

    @property
    def result(self) -> Mapping[str, Any]:
        """What the last run led to; empty if that cannot be read."""
        with contextlib.suppress(StoreError):
            content = read_json(self.state / "result.json")
            if isinstance(content, dict):
                return content
        return {}

    def reason_to_run(self, since: float) -> str:
        """Why the app is run again; "" if there is no reason yet.

        Args:
            since: when the last run ended (Unix time).
        """
        now = self.clock()
        files = self._read_files()
        if files - self._left or (files and now - since >= self._left_pause):
            return "the operator has filed a request"
        for identity in self._fresh_notices(read_notices(self.state)):
            past = [when for when in self._noticed_runs.get(identity, []) if when <= now]  # a clock may be set back
            if NOTICED_RUNS.next_token(past) <= now:
                return "a site has given notice of a request"
        result = self.result
        due = result.get("next")
        if isinstance(due, int | float) and since < due <= now:
            return "a request that waited is due"
        if result.get("paused") and self._read_sites() != self._sites:
            return "the list of sites has changed"
        return "it is time to ask all nodes for requests" if now - since >= self.sweep else ""

    def wait(self, lost: float = 0.0) -> str:
        """Wait until there is a reason to run the app; the reason.

        Args:
            lost: seconds to wait after a run that was lost, which is then reason enough; 0 after one that was not.
        """
        since = self.clock()
        while True:
            since = min(since, self.clock())  # a clock that was set back must not make all requests wait for it
            if lost and self.clock() - since >= lost:
                return LOST
            reason = "" if lost else self.reason_to_run(since)
            if reason:
                return reason
            self.sleep(LOOK)


def keep_open(
    run_once: Callable[[], int],
    standing: Standing,
    *,
    until_trained: bool = False,
    dead: Callable[[], str] = lambda: "",
    say: Say = lambda _: None,
    announce: Callable[[str], None] = lambda _: None,
) -> int:
    """Run an app, and run it again whenever there is something to do, until this process is interrupted.

    Args:
        run_once: runs the app until it has finished, and returns the id of the run.
        standing: what is watched.
        until_trained: whether to return after the first run instead.
        dead: why no run can ever succeed again, such as a SuperLink that is given up; "" otherwise.
        say: takes one sentence for the operator.
        announce: takes the sentence that all sites are told: why training pauses, or "".

    Returns:
        The id of the first run, if `until_trained`.

    Raises:
        DeploymentError: when the first run is lost, or `dead` says so, or training pauses that should be seen through.
    """
    standing.note_start()
    run = run_once()
    paused = str(standing.result.get("paused") or "")
    announce(paused)
    if until_trained:
        if paused:
            raise DeploymentError(f"{paused}. Enrol more, and start the same command again.")
        return run
    say("training pauses." if paused else "training is over.")
    say(
        "the federation stays open: it takes requests and serves them until it is stopped. All nodes are asked for "
        f"requests every {standing.sweep / 60:.0f} minutes."
    )
    if left := standing.note_end():
        say(left)
    pause = 0.0
    while True:
        reason = standing.wait(pause)
        say(f"{reason}: the app is run again.")
        standing.note_start()
        try:
            run_once()
        except DeploymentError as error:
            if dead():
                raise
            pause = min(standing.sweep, 2 * pause or FIRST_PAUSE)
            say(f"warning: no run succeeds: {error} The next is tried after {pause:.0f} s.")
        else:
            pause = 0.0
            announce(str(standing.result.get("paused") or ""))
            if left := standing.note_end():
                say(left)
