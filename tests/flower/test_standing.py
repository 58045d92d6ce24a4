# SPDX-License-Identifier: Apache-2.0
"""A federation that stays open: what makes it run its app again, and what it survives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from fedquit.flower.deploy.errors import DeploymentError
from fedquit.flower.deploy.standing import FIRST_PAUSE, NOTICED_RUNS, Standing, keep_open
from fedquit.flower.membership import FILE as SITES
from fedquit.flower.notices import unknown_requests, write_notices
from fedquit.flower.outbox import Inbox
from fedquit.flower.token_bucket import TokenBucket
from fedquit.utils.files import write_json

YEAR = 365 * 86_400.0


class Stopped(Exception):
    """The operator stops the federation."""


class Scene:
    """A state directory, a clock that passes while one sleeps, and an app that is run."""

    def __init__(self, state: Path, end: float = 10 * YEAR) -> None:
        self.state = state
        self.now = 1e9
        self.end = self.now + end
        self.step = max(1.0, end / 5000)  # seconds that a sleep takes at least
        self.runs: list[float] = []  # seconds after the beginning
        self.said: list[str] = []
        self.told: list[str] = []
        self.at: dict[float, Callable[[], object]] = {}  # what happens at which second
        self.outcome: Iterator[str] = iter(())  # what goes wrong in each run
        self.during: Callable[[], None] = lambda: None  # what happens in each run

    def sleep(self, seconds: float) -> None:
        self.now += max(seconds, self.step)
        for when in [when for when in self.at if self.now >= 1e9 + when]:
            self.at.pop(when)()
        if self.now > self.end:
            raise Stopped

    def run_once(self) -> int:
        self.runs.append(round(self.now - 1e9))
        self.during()
        wrong = next(self.outcome, "")
        if wrong:
            raise DeploymentError(wrong)
        for file in (self.state / "requests").glob("*.json"):
            file.unlink()
        return len(self.runs)

    def keep_open(self, sweep: float = 3600.0, *, until_trained: bool = False, dead: str = "") -> int:
        standing = Standing(self.state, sweep, lambda: self.now, self.sleep)
        return keep_open(
            self.run_once,
            standing,
            until_trained=until_trained,
            dead=lambda: dead,
            say=self.said.append,
            announce=self.told.append,
        )


def test_a_request_that_comes_months_after_training_is_taken_at_once(tmp_path: Path) -> None:
    scene = Scene(tmp_path, end=7_010_000.0)
    scene.at[7_000_000.0] = lambda: Inbox(tmp_path).file("hospital-1")
    with pytest.raises(Stopped):
        scene.keep_open(sweep=10 * YEAR)
    assert scene.runs[0] == 0
    assert 7_000_000 <= scene.runs[1] <= 7_000_000 + 2 * scene.step
    assert len(scene.runs) == 2
    assert any("stays open" in line for line in scene.said)
    assert any("the operator has filed a request" in line for line in scene.said)


def test_a_notice_of_a_site_is_taken_at_once_and_only_once(tmp_path: Path) -> None:
    scene = Scene(tmp_path, end=2000.0)
    for when, requests in ((100.0, {"aa"}), (500.0, {"aa"}), (900.0, {"aa", "bb"})):
        notices = {"site": frozenset(requests)}
        scene.at[when] = partial(write_notices, tmp_path, notices)
    with pytest.raises(Stopped):
        scene.keep_open(sweep=YEAR)
    assert [run // 100 for run in scene.runs] == [0, 1, 9]


def test_all_nodes_are_asked_from_time_to_time_for_ever(tmp_path: Path) -> None:
    scene = Scene(tmp_path, end=YEAR / 50)
    with pytest.raises(Stopped):
        scene.keep_open(sweep=3600.0)
    assert len(scene.runs) == pytest.approx(YEAR / 50 / 3600.0, rel=0.05)


def test_a_clock_that_is_set_back_by_a_year_makes_nothing_wait_for_it(tmp_path: Path) -> None:
    scene = Scene(tmp_path, end=20_000.0)
    scene.now += YEAR  # a machine that starts with a wrong clock
    scene.end += YEAR
    scene.outcome = iter(["", "lost"])
    site = {"site": frozenset({"aa"})}

    def set_back() -> None:
        scene.now -= YEAR
        scene.end -= YEAR

    scene.at[YEAR + 130.0] = set_back  # while it waits after a run that was lost
    scene.at[YEAR + 100.0] = partial(write_notices, tmp_path, site)
    with pytest.raises(Stopped):
        scene.keep_open(sweep=3600.0)
    runs = [run for run in scene.runs if run < YEAR / 2]
    assert len(runs) >= 4, "all nodes are asked every hour"
    assert runs[0] < 130 + 100, "and the run that was lost is tried again"


def test_notices_before_a_clock_was_set_back_keep_no_site_from_being_heard(tmp_path: Path) -> None:
    scene = Scene(tmp_path, end=20_000.0)
    scene.now += YEAR
    scene.end += YEAR
    for number in range(4):
        ids = frozenset(f"{i:02x}" for i in range(number + 1))
        scene.at[YEAR + 100.0 * (number + 1)] = partial(write_notices, tmp_path, {"site": ids})

    def set_back() -> None:
        scene.now -= YEAR
        scene.end -= YEAR

    scene.at[YEAR + 450.0] = set_back
    with pytest.raises(Stopped):
        scene.keep_open(sweep=10 * YEAR)
    assert [run // 100 for run in scene.runs if run < YEAR / 2] == [4], "the fourth, whose turn had not come"


def test_what_had_to_wait_is_served_when_it_is_due(tmp_path: Path) -> None:
    write_json(tmp_path / "result.json", {"next": 1e9 + 400})
    scene = Scene(tmp_path, end=1000.0)
    with pytest.raises(Stopped):
        scene.keep_open(sweep=YEAR)
    assert [run // 100 for run in scene.runs] == [0, 4], "once, though the result stays as it is"


def test_training_that_paused_goes_on_when_the_list_of_sites_changes_and_sites_are_told(tmp_path: Path) -> None:
    write_json(tmp_path / "result.json", {"paused": "training pauses: 2 may take part, and the floor is 3"})
    scene = Scene(tmp_path, end=1000.0)

    def enrolled() -> None:
        (tmp_path / SITES).write_text("[]")

    def trains() -> None:
        if (tmp_path / SITES).exists():
            write_json(tmp_path / "result.json", {"paused": ""})

    scene.at[300.0] = enrolled
    scene.during = trains
    with pytest.raises(Stopped):
        scene.keep_open(sweep=YEAR)
    assert [run // 100 for run in scene.runs] == [0, 3]
    assert scene.told == ["training pauses: 2 may take part, and the floor is 3", ""]


def test_who_waits_for_the_end_of_training_gets_it_or_is_told_that_it_pauses(tmp_path: Path) -> None:
    assert Scene(tmp_path).keep_open(until_trained=True) == 1
    write_json(tmp_path / "result.json", {"paused": "training pauses: 2 may take part, and the floor is 3"})
    with pytest.raises(DeploymentError, match=r"training pauses: .* Enrol more"):
        Scene(tmp_path).keep_open(until_trained=True)


def test_runs_that_are_lost_later_end_nothing_and_come_more_seldom(tmp_path: Path) -> None:
    scene = Scene(tmp_path, end=40_000.0)
    scene.outcome = iter(["", *["nodes are missing."] * 6])
    scene.at[10.0] = lambda: Inbox(tmp_path).file("hospital-1")
    with pytest.raises(Stopped):
        scene.keep_open(sweep=3600.0)
    gaps = [b - a for a, b in zip(scene.runs[1:8], scene.runs[2:9], strict=True)]
    assert gaps[0] == pytest.approx(FIRST_PAUSE, abs=2 * scene.step)
    assert gaps[1] == pytest.approx(2 * FIRST_PAUSE, abs=2 * scene.step)
    assert max(gaps) <= 3600 + 2 * scene.step
    assert sum("no run succeeds: nodes are missing." in line for line in scene.said) == 6


def test_a_run_that_was_lost_is_tried_again_when_it_says_so(tmp_path: Path) -> None:
    scene = Scene(tmp_path, end=3000.0)
    scene.outcome = iter(["", "the SuperLink is gone.", ""])
    scene.at[100.0] = partial(write_notices, tmp_path, {"site": frozenset({"aa"})})
    with pytest.raises(Stopped):
        scene.keep_open(sweep=YEAR)
    assert [run // 10 for run in scene.runs] == [0, 10, 16], "the notice is known, and the loss is reason enough"
    assert "the last run was lost: the app is run again." in scene.said


def test_a_file_of_the_operator_that_no_run_takes_does_not_make_it_run_without_end(tmp_path: Path) -> None:
    scene = Scene(tmp_path, end=7200.0)
    stuck = tmp_path / "requests" / "stuck.json"

    def cannot_be_read() -> None:
        stuck.parent.mkdir()
        stuck.mkdir()  # as a file of another user, which the app can neither read nor remove

    scene.at[10.0] = cannot_be_read
    scene.at[1000.0] = lambda: Inbox(tmp_path).file("hospital-1")
    scene.run_once = partial(_takes_files_only, scene)  # type: ignore[method-assign]
    with pytest.raises(Stopped):
        scene.keep_open(sweep=3600.0)
    assert len(scene.runs) <= 10
    gaps = [b - a for a, b in zip(scene.runs[1:], scene.runs[2:], strict=False)]
    assert gaps[0] == pytest.approx(FIRST_PAUSE, abs=5)
    assert any(1000 <= run <= 1005 for run in scene.runs), "a new one is taken at once"
    assert any("the run did not take stuck.json" in line for line in scene.said)


def _takes_files_only(scene: Scene) -> int:
    scene.runs.append(round(scene.now - 1e9))
    for file in (scene.state / "requests").glob("*.json"):
        if file.is_file():
            file.unlink()
    return len(scene.runs)


def test_notices_of_one_site_lead_to_few_runs_and_of_another_at_once(tmp_path: Path) -> None:
    scene = Scene(tmp_path, end=600.0)
    for i in range(1, 60):
        notices = {"site": frozenset(f"{j:016x}" for j in range(i))}
        if i > 50:
            notices["other"] = frozenset({"aa"})
        scene.at[i * 10.0] = partial(write_notices, tmp_path, notices)
    with pytest.raises(Stopped):
        scene.keep_open(sweep=YEAR)
    assert len(scene.runs) <= 1 + NOTICED_RUNS.burst + 2
    assert any(510 <= run <= 515 for run in scene.runs), "the other site does not wait for it"


@pytest.mark.parametrize("dead", ["", "the SuperLink ended 20 times"])
def test_a_first_run_that_is_lost_and_a_superlink_that_is_given_up_end_it(dead: str, tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.outcome = iter(["", "no"] if dead else ["no"])
    with pytest.raises(DeploymentError, match="no"):
        scene.keep_open(dead=dead)


def test_a_result_that_cannot_be_read_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text("{")
    (tmp_path / "notices.json").write_text("[]")
    assert Scene(tmp_path).keep_open(until_trained=True) == 1
    assert unknown_requests(tmp_path, []) == {}


def test_a_bucket_gives_many_tokens_at_once_and_then_one_in_a_while() -> None:
    bucket = TokenBucket(burst=3, every=10.0)
    assert bucket.next_token([]) < 0
    assert bucket.next_token([100.0, 100.0]) <= 100.0
    assert bucket.next_token([100.0, 100.0, 100.0]) == 110.0
    assert bucket.next_token([100.0, 100.0, 100.0, 110.0]) == 120.0
    assert bucket.next_token([100.0, 100.0, 100.0, 200.0]) <= 200.0, "it is full again, and not more than full"
    assert bucket.next_token([100.0, 100.0, 100.0, 200.0, 200.0, 200.0]) == 210.0
