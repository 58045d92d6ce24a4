# SPDX-License-Identifier: Apache-2.0
"""What the operator sees: status, metrics and the doctor, from the files of a federation and without a server."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import socket
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="needs the extra `flower`")

from click.testing import Result
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from fedquit import __version__
from fedquit.cli import app as fedquit
from fedquit.errors import InputError
from fedquit.flower.closed import apps, sites
from fedquit.flower.closed.greeting import Greeting, flower_version
from fedquit.flower.closed.notice_board import NoticeBoard
from fedquit.flower.closed.project import Project
from fedquit.flower.closed.seen import FILE as SEEN
from fedquit.flower.closed.seen import SeenSites
from fedquit.flower.closed.service import SERVED
from fedquit.flower.deploy.demo import app_folder
from fedquit.flower.membership import write_membership
from fedquit.flower.operations import findings as findings_module
from fedquit.flower.operations.metrics import exposition, serve_metrics, write_metrics
from fedquit.flower.operations.observed import is_loopback, listeners, lock_holder
from fedquit.flower.operations.server_doctor import examine_server
from fedquit.flower.operations.status import locate, status_of
from fedquit.flower.twice import copy_of
from fedquit.utils.files import close_to_others
from flower.closed_world import enrolled, new_project
from flower.grid_world import MakeWorld, Setup

pytestmark = pytest.mark.flower
NAMES = ("hospital-0", "hospital-1", "hospital-2")
DAY = 86_400.0


@pytest.fixture
def federation(make: MakeWorld, tmp_path: Path) -> tuple[Project, Path]:
    """A closed federation on disk after two rounds and an erasure, as its server left it; every site is here."""
    project = new_project(tmp_path / "project", 14 * DAY)
    for name in NAMES:
        enrolled(project, tmp_path / name, name)
    apps.sign(app_folder(), apps.load_release_key(project.folder / "release.key"), project.apps)
    setup = make()
    setup.serve(setup.config(min_nodes=4))
    setup.outbox(1).file()
    setup.serve(setup.config(min_nodes=4))
    state = setup.folder / "state"
    _take_over(setup, project)
    events = [json.loads(line) for line in (state / "events.jsonl").read_text().splitlines()]
    quiet = [event for event in events if event.get("client") == 1 or event["event"] == "note"]
    (state / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in quiet))
    write_membership(state, project.sites.values())
    project.server.mkdir(mode=0o700)
    (project.server / SERVED).write_text(json.dumps({"app": str(app_folder()), "state": str(state)}))
    see(project, **dict.fromkeys(NAMES, time.time()))
    close_to_others(state)
    close_to_others(project.folder)
    return project, state


def _take_over(setup: Setup, project: Project) -> None:
    """Give the first three clients the identities of the sites; the other two are gone."""
    path = setup.folder / "state" / "clients.json"
    roster = json.loads(path.read_text())[:3]
    for entry, site in zip(roster, project.sites.values(), strict=True):
        entry |= {"key": f"key:{site.fingerprints[0]}", "name": site.name}
    for file in (path, copy_of(path)):
        file.write_text(json.dumps(roster))


def see(project: Project, **times: float) -> None:
    """Write what the front would write."""
    versions = {"fedquit": __version__, "flower": flower_version(), "skew": 0.0}
    content = {name.replace("_", "-"): {"time": when, **versions} for name, when in times.items()}
    (project.server / SEEN).write_text(json.dumps(content))
    (project.server / SEEN).chmod(0o600)


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(fedquit, ["flower", *map(str, words)])


@contextlib.contextmanager
def listening(*ports: int, host: str = "127.0.0.1") -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for port in ports:
            stack.enter_context(socket.create_server((host, port)))
        yield


@contextlib.contextmanager
def healthy(project: Project, state: Path) -> Iterator[None]:
    """Ports and locks as they are while the federation runs."""
    settings = project.settings
    with listening(settings.port, settings.superlink_port), contextlib.ExitStack() as stack:
        for path in (project.server / "lock", state / ".lock"):
            file = stack.enter_context(path.open("w"))
            fcntl.flock(file, fcntl.LOCK_EX)
        close_to_others(project.folder)
        close_to_others(state)
        yield


# Status --------------------------------------------------------------------------------------------------------------


def test_status_tells_members_rounds_requests_quorum_and_disk(federation: tuple[Project, Path]) -> None:
    project, state = federation
    project.revoke("hospital-2")
    see(project, hospital_0=time.time())
    status = status_of(locate(project.folder, None))
    assert status.state == str(state)
    members = {m.name: m for m in status.members}
    assert {name: m.state for name, m in members.items()} == {
        "hospital-0": "here",
        "hospital-1": "forgotten",
        "hospital-2": "revoked",
    }
    assert 13.9 < (members["hospital-0"].certificate_days or 0) <= 14
    assert members["hospital-1"].last_seen is not None, "it replied before it was forgotten"
    assert (members["hospital-0"].client, members["hospital-0"].fedquit) == (0, __version__)
    assert (status.phase, status.trained, status.rounds) == ("train", 2, 2)
    assert (status.needed, status.here) == (3, 1)
    assert [(r.id, r.client, r.status, r.open) for r in status.requests] == [("r0001", "hospital-1", "done", False)]
    assert (status.serving, status.front, status.superlink) == (False, False, False)
    assert status.disks[0].total > status.disks[0].free > 0
    assert status.damaged == ()
    shown = run("status", "--project", project.folder)
    assert shown.exit_code == 0
    for words in ("hospital-0", "2 of 2 training rounds", "1 members are here, a round needs 3", "r0001", "GiB free"):
        assert words in shown.stdout
    printed = json.loads(run("status", "--project", project.folder, "--json").stdout)
    assert printed["trained"] == 2
    assert printed["members"][0]["name"] == "hospital-0"


def test_status_of_a_federation_that_is_not_closed_and_is_being_served(make: MakeWorld) -> None:
    setup = make()
    setup.serve(setup.config())
    setup.outbox(1).file()
    state = setup.folder / "state"
    looked: list[Any] = []

    def before(message: Any) -> None:
        if "unlearn" in str(message.content.config_records.values()):
            looked.append(status_of(locate(None, state)))

    setup.grid.before = before
    setup.serve(setup.config(deadline=1234.0))
    during = looked[0]
    assert during.serving is True, "it was looked at while the server held the folder"
    (request,) = during.open_requests
    began = json.loads((state / "ledger.json").read_text())  # the phase is another by now
    assert request.status == "started"
    assert began["phase"]["kind"] == "train"
    assert request.deadline is not None
    assert {m.name for m in during.members} == {f"hospital-{i}" for i in range(5)}


def test_between_two_runs_a_federation_that_stands_is_well(federation: tuple[Project, Path]) -> None:
    project, state = federation
    ask(state)
    ledger = json.loads((state / "ledger.json").read_text())
    ledger["entries"][-1]["since"] = time.time() - 9 * 86_400
    for file in (state / "ledger.json", copy_of(state / "ledger.json")):
        file.write_text(json.dumps(ledger))
    result = json.loads((state / "result.json").read_text())
    (state / "result.json").write_text(json.dumps({**result, "next": time.time() + 3600}))
    project.revoke("hospital-2")
    with listening(project.settings.port, project.settings.superlink_port), (project.server / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        status = status_of(locate(project.folder, state))
        sentences = told(project, state)
        shown = run("status", "--project", project.folder).stdout
    assert (status.serving, status.running) == (True, False)
    assert status.next == pytest.approx(time.time() + 3600, abs=60)
    assert not any("no server runs" in sentence or "past its deadline" in sentence for sentence in sentences)
    assert "no run is in progress: one begins when there is something to do" in shown
    metrics = exposition(status).decode()
    assert "fedquit_serving 1.0" in metrics
    assert "fedquit_run_in_progress 0.0" in metrics
    days = {member.name: member.certificate_days for member in status.members}
    assert days["hospital-0"] is not None
    assert (days["hospital-1"], days["hospital-2"]) == (None, None), "forgotten and revoked: nobody renews these"


def test_everything_tells_that_training_pauses_and_the_model_was_withdrawn(federation: tuple[Project, Path]) -> None:
    project, state = federation
    paused = "training pauses: 2 may take part, and the floor is 3; it goes on when more are enrolled"
    ledger = json.loads((state / "ledger.json").read_text())
    ledger["entries"][-1]["method"] = "withdrawal"
    for file in (state / "ledger.json", copy_of(state / "ledger.json")):
        file.write_text(json.dumps(ledger))
    (state / "model.safetensors").unlink()
    (state / "result.json").write_text(json.dumps({"paused": paused, "next": None}))
    status = status_of(locate(project.folder, state))
    assert (status.paused, status.withdrawn) == (paused, True)
    printed = json.loads(run("status", "--project", project.folder, "--json").stdout)
    assert (printed["paused"], printed["withdrawn"]) == (paused, True)
    words = " ".join(run("status", "--project", project.folder).stdout.split())
    assert paused in words
    assert "the model was withdrawn" in words
    metrics = exposition(status).decode()
    assert "fedquit_training_paused 1.0" in metrics
    assert "fedquit_model_withdrawn 1.0" in metrics
    sentences = told(project, state)
    assert any(sentence.startswith(paused) for sentence in sentences)
    assert any("the model was withdrawn" in sentence and "enrol more sites" in sentence for sentence in sentences)


def test_status_names_what_is_damaged_and_shows_the_rest(federation: tuple[Project, Path]) -> None:
    project, state = federation
    for file in (state / "ledger.json", copy_of(state / "ledger.json")):
        file.write_text("{")
    status = status_of(locate(project.folder, state))
    assert [m.name for m in status.members] == list(NAMES)
    (sentence,) = status.damaged
    assert "restore it from a backup. Do not delete it" in sentence


def test_the_federation_must_be_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="say which federation"):
        locate(None, None)
    project = new_project(tmp_path / "project")
    with pytest.raises(InputError, match="was not served yet"):
        locate(project.folder, None)
    with pytest.raises(InputError, match="there is no state directory"):
        locate(None, tmp_path / "nowhere")


# Metrics -------------------------------------------------------------------------------------------------------------


def test_metrics_are_what_prometheus_reads(federation: tuple[Project, Path], tmp_path: Path) -> None:
    project, state = federation
    status = status_of(locate(project.folder, state))
    weird = replace(status.members[0], name='a "quoted"\nname \\')
    text = exposition(replace(status, members=(weird, *status.members[1:]))).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    samples = {(s.name, *sorted(s.labels.values())): s.value for f in families.values() for s in f.samples}
    assert samples["fedquit_rounds_trained",] == 2
    assert samples["fedquit_members", "forgotten"] == 1
    assert samples["fedquit_requests", "done"] == 1
    assert samples["fedquit_requests_open",] == 0
    assert ("fedquit_member_certificate_seconds", 'a "quoted"\nname \\') in samples
    assert all(family.documentation for family in families.values())

    file = tmp_path / "textfile" / "fedquit.prom"
    assert run("status", "--project", project.folder, "--metrics", file).exit_code == 0
    assert "fedquit_rounds_trained 2.0" in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o644, "node_exporter is another user"
    with pytest.raises(InputError, match=r"end with \.prom"):
        write_metrics(status, tmp_path / "metrics.txt")


def test_metrics_over_http_follow_the_files(federation: tuple[Project, Path]) -> None:
    project, state = federation
    port, stop = serve_metrics(lambda: status_of(locate(project.folder, state)), 0)
    try:
        addresses = listeners(port)
        assert addresses == ["127.0.0.1"]
        for here in (2, 0):  # one was forgotten
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
                text = answer.read().decode()
            assert f"fedquit_members_here {here}.0" in text
            see(project, hospital_2=time.time() - 1e4)
    finally:
        stop()


# The doctor ----------------------------------------------------------------------------------------------------------


def told(project: Project, state: Path, **options: Any) -> list[str]:
    return [finding.sentence for finding in examine_server(locate(project.folder, state), **options)]


def test_a_healthy_federation_has_no_findings(federation: tuple[Project, Path]) -> None:
    project, state = federation
    settings = json.loads((state / "settings.json").read_text())
    settings["config"]["min_nodes"] = 3
    settings["config"]["floor"]["closed"] = 2
    (state / "settings.json").write_text(json.dumps(settings))
    with healthy(project, state):
        assert told(project, state) == []
        done = run("doctor", "--project", project.folder)
    assert (done.exit_code, done.stdout.strip()) == (0, "Nothing is wrong, as far as this machine can tell.")


def spoil_sites(project: Project, **changes: Any) -> None:
    def change(listed: dict[str, sites.Site]) -> None:
        listed["hospital-0"] = replace(listed["hospital-0"], **changes)

    sites.change_sites(project.folder, change)


def expire(project: Project, state: Path, days: float) -> None:
    certificate = project.sites["hospital-0"].certificates[-1]
    spoil_sites(project, certificates=(replace(certificate, not_after=time.time() + days * DAY),))


def seen_with(project: Project, **changes: Any) -> None:
    path = project.server / SEEN
    content = json.loads(path.read_text())
    content["hospital-0"] |= changes
    path.write_text(json.dumps(content))


def spoil_checkpoint(state: Path, *, both: bool) -> None:
    (path,) = (state / "phases").rglob("state.safetensors")
    for file in (path, copy_of(path)) if both else (path,):
        file.write_bytes(b"\0" * 100)


def ask(state: Path) -> None:
    """A request that waits in the ledger."""
    for path in (state / "ledger.json", copy_of(state / "ledger.json")):
        ledger = json.loads(path.read_text())
        waiting = {**ledger["entries"][0], "id": "r0002", "client": 0, "status": "received"}
        ledger["entries"].append(waiting)
        path.write_text(json.dumps(ledger))


def unsign(project: Project) -> None:
    for path in project.apps.iterdir():
        path.unlink()


def revoke_with_request(project: Project) -> None:
    """A site gives notice of a request and is revoked before any run has asked for it."""
    NoticeBoard(project.server, "").take("hospital-0", b'{"requests": ["0123456789abcdef"]}')
    project.revoke("hospital-0")


CASES: dict[str, tuple[Any, str]] = {
    "expired": (lambda p, s: expire(p, s, -2), r"certificate of hospital-0 expired 2.0 days ago.*rotate hospital-0"),
    "expires soon": (
        lambda p, s: expire(p, s, 3),
        r"hospital-0 expires in 3.0 days and was not renewed.*start its node",
    ),
    "skewed": (lambda p, s: seen_with(p, skew=90_000.0), r"clock of hospital-0 was 25.0 hours ahead.*timedatectl"),
    "another version": (
        lambda p, s: seen_with(p, fedquit="0.0.1"),
        r"hospital-0 runs fedquit 0.0.1.*install the server's",
    ),
    "silent": (
        lambda p, s: seen_with(p, time=time.time() - 5 * DAY),
        r"hospital-0 was last seen 5.0 days ago.*doctor --site",
    ),
    "too few": (
        lambda p, s: seen_with(p, time=time.time() - 900),
        r"1 members are here, and a round needs 3: ask.*hospital-0",
    ),
    "clock went back": (
        lambda p, s: seen_with(p, time=time.time() + DAY),
        r"clock of this machine is behind by at least",
    ),
    "trusts nobody": (lambda p, s: p.trust.write_text("{}\n"), r"trust.yaml trusts nobody.*restore it from a backup"),
    "unsigned app": (lambda p, s: unsign(p), r"is not signed as it is now.*fedquit flower sign"),
    "modes": (lambda p, s: (s / "ledger.json").chmod(0o644), r"other users .*ledger.json: run `chmod -R go="),
    "one bad copy": (
        lambda p, s: spoil_checkpoint(s, both=False),
        r"one of the two copies of .* is damaged.*look after the disk",
    ),
    "no checkpoint": (
        lambda p, s: spoil_checkpoint(s, both=True),
        r"no checkpoint of the present phase.*restore the whole state",
    ),
    "damaged ledger": (
        lambda p, s: (s / "ledger.json").write_text("{"),
        r"ledger.json cannot be read: the server uses the other",
    ),
    "half copied": (
        lambda p, s: [f.unlink() for f in s.glob("clients*.json")],
        r"has no clients.json.*restore the whole state",
    ),
    "damaged list for the app": (
        lambda p, s: (s / "sites.json").write_text("["),
        r"sites.json is not a list of sites: start `fedquit flower serve` again, which writes it",
    ),
    "revoked with a request": (
        lambda p, s: revoke_with_request(p),
        r"hospital-0 was revoked after it gave notice of 1 requests .*--client hospital-0` erases the site",
    ),
    "damaged sites": (
        lambda p, s: (p.folder / "sites.json").write_text("["),
        r"sites.json is not a list of sites.*: restore it",
    ),
}


def test_who_revokes_a_site_is_told_of_its_requests_that_nobody_will_receive(federation: tuple[Project, Path]) -> None:
    project, state = federation
    served = json.loads((state / "ledger.json").read_text())["entries"][0]["request"]
    requests = {"hospital-0": ["0123456789abcdef", served], "hospital-2": [served]}
    board = NoticeBoard(project.server, "")
    for name, ids in requests.items():
        board.take(name, json.dumps({"requests": ids}).encode())
    lost = run("revoke", "hospital-0", "--project", project.folder)
    assert "warning: hospital-0 gave notice of 1 requests that are not known to have been received" in lost.output
    served_already = run("revoke", "hospital-2", "--project", project.folder)
    assert "warning" not in served_already.output
    members = {member.name: member for member in status_of(locate(project.folder, None)).members}
    assert members["hospital-0"].unreceived == 1


def test_who_cannot_read_the_state_revokes_all_the_same_and_is_told_of_all_notices(
    federation: tuple[Project, Path],
) -> None:
    """The state directory is the app user's: what it says cannot be seen by whoever owns the project alone."""
    project, state = federation
    NoticeBoard(project.server, "").take("hospital-0", json.dumps({"requests": ["0123456789abcdef"]}).encode())
    for path in state.glob("clients*"):
        path.write_text("[")
    done = run("revoke", "hospital-0", "--project", project.folder)
    assert "1 requests that are not known to have been received" in done.output
    assert project.sites["hospital-0"].revoked is not None


def test_no_site_can_keep_the_operator_from_seeing(federation: tuple[Project, Path], tmp_path: Path) -> None:
    """A greeting with half of a surrogate pair, which no file can hold, and with a terminal's escape sequence."""
    project, _ = federation
    said = Greeting.from_json(b'{"fedquit": "\\ud800\\u001b[31mred\\n\\"", "flower": "\\udfff", "time": 1}')
    seen = SeenSites(project.server)
    seen.note_greeting("hospital-0", said, time.time())
    seen.write_if_due(time.time() + 60)
    for words in (["status"], ["status", "--json"], ["doctor"], ["status", "--metrics", tmp_path / "fedquit.prom"]):
        shown = run(*words, "--project", project.folder)
        assert not isinstance(shown.exception, UnicodeError), words
        assert "\x1b" not in shown.output
    assert 'member="hospital-0"' in (tmp_path / "fedquit.prom").read_text()


@pytest.mark.parametrize("case", CASES)
def test_the_doctor_says_what_to_do_next(case: str, federation: tuple[Project, Path]) -> None:
    project, state = federation
    spoil, expected = CASES[case]
    with healthy(project, state):
        spoil(project, state)
        sentences = told(project, state)
        done = run("doctor", "--project", project.folder, "--state", state, "--json")
    assert any(re.search(expected, sentence) for sentence in sentences), sentences
    assert [finding["what"] for finding in json.loads(done.stdout)], done.stdout
    assert not any("delete" in sentence and "Do not delete" not in sentence for sentence in sentences)


def test_the_doctor_on_ports_and_locks(federation: tuple[Project, Path]) -> None:
    project, state = federation
    settings = project.settings
    assert any("no server runs for" in sentence for sentence in told(project, state))
    ask(state)
    assert any("1 erasure requests wait (r0002), and no server runs" in sentence for sentence in told(project, state))
    with listening(settings.port):
        sentences = told(project, state)
    assert any(f"no SuperLink on {settings.superlink_port}: sites get 503" in sentence for sentence in sentences)
    assert any("a copy of this project, has the port" in sentence for sentence in sentences)
    with listening(settings.superlink_port):
        assert any("no front on port" in sentence for sentence in told(project, state))
    with listening(settings.superlink_port, host="0.0.0.0"):
        assert any("can run code on this machine" in sentence for sentence in told(project, state))
    with (state / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert any(f"process {os.getpid()} holds {state}" in sentence for sentence in told(project, state))


def test_a_disk_that_is_nearly_full_is_told_of(
    federation: tuple[Project, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    project, state = federation
    monkeypatch.setattr(findings_module, "LOW_FRACTION", 1.0)
    (sentence,) = [s for s in told(project, state) if "the disk of" in s]
    assert "nothing in the state directory may be deleted" in sentence


def test_the_doctor_s_exit_code_tells_errors_from_warnings(federation: tuple[Project, Path]) -> None:
    project, _ = federation
    assert run("doctor", "--project", project.folder).exit_code == 1
    done = run("doctor", "--project", project.folder, "--site", "elsewhere")
    assert isinstance(done.exception, InputError)


# What the machine tells ----------------------------------------------------------------------------------------------


def test_listeners_and_locks_are_read_without_touching_them(tmp_path: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_server(("::1", 0), family=socket.AF_INET6) as six,
    ):
        assert listeners(server.getsockname()[1]) == ["127.0.0.1"]
        assert listeners(six.getsockname()[1]) == ["::1"]
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()
    path = tmp_path / "lock"
    assert lock_holder(path) == 0
    with path.open("w") as file:
        assert lock_holder(path) == 0
        fcntl.flock(file, fcntl.LOCK_EX)
        assert lock_holder(path) == os.getpid()
    assert lock_holder(path) == 0
    assert is_loopback("127.0.0.1")
    assert is_loopback("::ffff:127.0.0.1")
    assert not is_loopback("0.0.0.0")
    assert not is_loopback("::")
