# SPDX-License-Identifier: Apache-2.0
"""The front, on real sockets: who gets through the handshake, what is refused, renewal with lifetimes of seconds."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("h11")
from cryptography import x509

from fedquit.errors import StoreError
from fedquit.flower.closed import authority, front, notice_board, rules
from fedquit.flower.closed.authority import Authority, certificate_to_pem, key_to_pem, new_key
from fedquit.flower.closed.courier import Courier
from fedquit.flower.closed.greeting import greet
from fedquit.flower.closed.notice_board import NEWS, NoticeBoard, read_site_notices, write_told
from fedquit.flower.closed.private_files import exclusive
from fedquit.flower.closed.project import Project
from fedquit.flower.closed.seen import read_seen
from fedquit.flower.closed.site_folder import REQUESTS_PATH, SiteFolder
from fedquit.flower.closed.sites import change_sites
from fedquit.flower.closed.supernode import watch_certificate
from fedquit.flower.deploy.errors import DeploymentError
from fedquit.flower.outbox import Outbox
from flower.closed_world import (
    CUT,
    connect,
    enrolled,
    new_project,
    post,
    running,
    with_certificate,
    without_certificate,
)

pytestmark = [pytest.mark.flower, pytest.mark.timeout(120)]
FLEET = "/v1/fleet/pull-messages"


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return new_project(tmp_path / "project")


@pytest.fixture
def site(project: Project, tmp_path: Path) -> SiteFolder:
    return enrolled(project, tmp_path / "hospital-0", "hospital-0")


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "front.jsonl"


def refusals(log: Path) -> list[str]:
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    reasons = [line.get("refused") or line.get("cut") or "" for line in lines]
    return [reason for reason in reasons if "Connection" not in reason]  # `running` connects once to see if it is there


def ask(project: Project, context: ssl.SSLContext, path: str, given: dict[str, str]) -> int:
    """The status of the answer to one request."""
    with contextlib.closing(connect(project, context)) as connection:
        return post(connection, path, b"x", given)[0]


def headers(project: Project, name: str = "hospital-0") -> dict[str, str]:
    return {"flwr-public-key": project.sites[name].key}


def test_a_site_gets_through_and_is_told_that_the_superlink_is_down(
    project: Project, site: SiteFolder, log: Path
) -> None:
    with running(project, log), contextlib.closing(connect(project, site.context())) as connection:
        assert post(connection, FLEET, b"x", headers(project))[0] == 503, "a SuperNode tries again"


def test_nobody_else_gets_an_answer(project: Project, site: SiteFolder, log: Path, tmp_path: Path) -> None:
    foreign = enrolled(new_project(tmp_path / "foreign"), tmp_path / "stranger", "hospital-0")
    key = new_key()
    authority = Authority.load(project.folder)
    pems = {}
    for use in ("client", "server"):  # of the project's own authority, but of no site
        certificate = authority.issue("hospital-0", key.public_key(), 60, use)
        pems[use] = tmp_path / f"{use}.pem"
        pems[use].write_bytes(key_to_pem(key) + certificate_to_pem(certificate))
    expired = tmp_path / "expired.pem"
    certificate = authority.issue("hospital-0", key.public_key(), -1, "client")
    expired.write_bytes(key_to_pem(key) + certificate_to_pem(certificate))
    contexts = {
        "no certificate": without_certificate(project),
        "a foreign authority": with_certificate(project, foreign.tls),
        "not enrolled": with_certificate(project, pems["client"]),
        "a server's certificate": with_certificate(project, pems["server"]),
        "expired": with_certificate(project, expired),
    }
    with running(project, log):
        for context in contexts.values():
            for path in (FLEET, "/v1/control/list-runs", rules.RENEW.decode()):
                with pytest.raises(CUT):
                    ask(project, context, path, headers(project))
        old = ssl.create_default_context(cafile=str(project.folder / "ca.crt"))
        old.load_cert_chain(site.tls)
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises(CUT):
            ask(project, old, FLEET, headers(project))
        with contextlib.closing(connect(project, site.context())) as connection:
            assert post(connection, FLEET, b"x", headers(project))[0] == 503, "the site still gets through"
    assert len(refusals(log)) == 16, "each is written down"


def test_a_site_is_refused_all_that_is_not_its_own(
    project: Project, site: SiteFolder, log: Path, tmp_path: Path
) -> None:
    enrolled(project, tmp_path / "hospital-1", "hospital-1")
    other = headers(project, "hospital-1")
    own = headers(project)
    big = {**own, "content-length": str(rules.MAX_BODY + 1)}
    cases = [
        ("/v1/control/start-run", own, 403),
        ("/v1/control/stop-run", own, 403),
        ("/v1/control/register-node", own, 403),
        ("/v1/runtime/acquire-task", own, 403),
        ("/v1/fleet/register-node", own, 403),
        ("/openapi.json", own, 403),
        (FLEET, other, 403),
        (FLEET, {}, 403),
        (FLEET, big, 413),
        (FLEET, {**own, "transfer-encoding": "chunked"}, 411),
    ]
    with running(project, log):
        for path, given, status in cases:
            with contextlib.closing(connect(project, site.context())) as connection:
                connection.putrequest("POST", path)
                lengths = {} if "content-length" in given or "transfer-encoding" in given else {"content-length": "0"}
                for name, value in {**lengths, **given}.items():
                    connection.putheader(name, value)
                connection.endheaders()
                assert connection.getresponse().status == status, (path, given)


def test_a_second_request_hidden_behind_the_first_is_not_passed_on(
    project: Project, site: SiteFolder, log: Path
) -> None:
    settings = project.settings
    key = project.sites["hospital-0"].key
    head = f"POST {FLEET} HTTP/1.1\r\nhost: x\r\nflwr-public-key: {key}\r\n"
    hidden = "POST /v1/control/stop-run HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n"
    both = "content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"
    two = "content-length: 4\r\ncontent-length: 5\r\n\r\nabcd"
    with running(project, log):
        for text in (head + both + hidden, head + two + hidden, hidden, "x" * 40_000):
            raw = socket.create_connection((settings.host, settings.port), 20)
            with contextlib.closing(site.context().wrap_socket(raw, server_hostname=settings.host)) as tls:
                with contextlib.suppress(OSError):
                    tls.sendall(text.encode())
                answer = b""
                with contextlib.suppress(OSError):
                    while piece := tls.recv(65_536):
                        answer += piece
            assert not answer or answer.split()[1] in (b"400", b"403", b"411"), answer
            assert b"200" not in answer[:20]


def test_a_revoked_site_is_cut_off_while_it_is_connected(project: Project, site: SiteFolder, log: Path) -> None:
    with running(project, log), contextlib.closing(connect(project, site.context())) as connection:
        connection.connect()
        time.sleep(0.2)
        project.revoke("hospital-0")
        connection.sock.settimeout(20)
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            assert connection.sock.recv(1) == b"", "nobody sent anything, and the connection ended"
        with pytest.raises(CUT):
            ask(project, site.context(), FLEET, headers(project))
        with pytest.raises(DeploymentError, match="a site that was revoked"):
            site.renew()


def test_the_number_of_connections_is_bounded(project: Project, site: SiteFolder, log: Path) -> None:
    settings = project.settings
    with running(project, log), contextlib.ExitStack() as stack:
        for _ in range(front.MAX_CONNECTIONS):
            connection = stack.enter_context(contextlib.closing(connect(project, site.context())))
            connection.connect()
        time.sleep(0.5)
        with pytest.raises(CUT):
            ask(project, site.context(), FLEET, headers(project))
        for _ in range(front.MAX_HANDSHAKES_OF_PEER):
            silent = socket.create_connection((settings.host, settings.port), 20)
            stack.enter_context(contextlib.closing(silent))
        time.sleep(0.5)
        last = stack.enter_context(contextlib.closing(socket.create_connection((settings.host, settings.port), 20)))
        with contextlib.suppress(ConnectionError):
            assert last.recv(1) == b"", "it is closed at once"
    assert {"too many connections at once", "too many handshakes at once"} <= set(refusals(log))


def test_a_site_s_notice_of_a_request_is_received_whether_a_run_is_in_progress_or_not(
    project: Project, site: SiteFolder, log: Path, tmp_path: Path
) -> None:
    filed = Outbox(tmp_path / "home").file()
    said: list[str] = []
    with running(project, log):
        courier = Courier(site, tmp_path / "home", tmp_path / "server.json", said.append)
        courier.step()
        address = project.settings.address
        assert any(f"the front at {address} has noted request {filed.id}" in line for line in said)
        assert read_site_notices(log.parent) == {"hospital-0": [filed.id]}
        assert json.loads((tmp_path / "server.json").read_text())["requests"] == [filed.id]
        write_told(log.parent, "training pauses: 2 may take part, and the floor is 3")
        later = Courier(site, tmp_path / "home", tmp_path / "server.json", said.append)
        later.step()
        assert said[-1] == "the server says: training pauses: 2 may take part, and the floor is 3."

        def given(body: bytes) -> int:
            with contextlib.closing(connect(project, site.context())) as connection:
                return post(connection, REQUESTS_PATH, body)[0]

        for bad in (b"", b"{}", b"[" * 4000, b'{"requests": ["../../x"]}', b'{"requests": 3}'):
            assert given(bad) == 400, bad
        assert given(b"x" * 5000) == 413
        assert 429 in [given(b'{"requests": []}') for _ in range(10)], "a flood of notices is refused"
        deadline = time.monotonic() + 30
        while "hospital-0" not in read_seen(log.parent):
            assert time.monotonic() < deadline
            time.sleep(0.2)
    assert read_site_notices(log.parent) == {"hospital-0": [filed.id]}


def test_a_site_that_invents_requests_is_heard_a_few_times_and_then_once_an_hour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1e9]
    monkeypatch.setattr(notice_board, "time", SimpleNamespace(time=lambda: now[0]))
    board = NoticeBoard(tmp_path, "127.0.0.1:9443")
    board.take("hospital-1", b'{"requests": ["ff"]}')
    for minute in range(24 * 60):
        board.take("hospital-0", json.dumps({"requests": [f"{minute:016x}"]}).encode())
        now[0] += 60
    notices = read_site_notices(tmp_path)
    assert len(notices["hospital-0"]) <= NEWS.burst + 24
    assert len(notices["hospital-0"]) >= NEWS.burst + 23
    assert json.loads(board.take("hospital-1", b'{"requests": ["ff", "fe"]}'))["requests"] == ["ff", "fe"]


def test_an_owner_with_many_requests_is_told_only_of_those_that_were_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1e9]
    monkeypatch.setattr(notice_board, "time", SimpleNamespace(time=lambda: now[0]))
    board = NoticeBoard(tmp_path, "127.0.0.1:9443")
    posts: list[bytes] = []

    def give(_path: str, body: bytes) -> bytes:
        posts.append(body)
        return board.take("hospital-0", body)

    said: list[str] = []
    site: Any = SimpleNamespace(post=give)
    courier = Courier(site, tmp_path / "home", tmp_path / "record.json", said.append, clock=lambda: now[0])
    filed: list[str] = []
    for _ in range(NEWS.burst + 1):
        filed.append(Outbox(tmp_path / "home").file(positions=[len(filed)]).id)
        courier.step()
        now[0] += 10
    assert sum("has noted request" in line for line in said) == NEWS.burst
    assert json.loads((tmp_path / "record.json").read_text())["requests"] == filed[:-1]
    before = len(posts)
    for _ in range(60):
        courier.step()
        now[0] += 1
    assert len(posts) - before <= 2, "it does not ask every second"
    now[0] += NEWS.every
    courier.step()
    assert f"has noted request {filed[-1]}" in said[-1]


def test_a_site_gets_some_certificates_at_once_and_then_has_to_wait(
    project: Project, site: SiteFolder, log: Path
) -> None:
    other = enrolled(project, site.folder.parent / "hospital-1", "hospital-1")
    with running(project, log):
        for _ in range(front.RENEWALS):
            site.renew()
        with pytest.raises(DeploymentError, match="certificates are asked for too often"):
            site.renew()
        assert greet(site) == [], "what it has counts"
        other.renew()


def test_a_full_disk_does_not_end_the_front(tmp_path: Path, log: Path) -> None:
    seconds = 20.0
    project = new_project(tmp_path / "project", seconds)
    site = enrolled(project, tmp_path / "hospital-0", "hospital-0")
    with running(project, log):
        pass
    before = (project.folder / "front.pem").read_bytes()
    with running(project, log, size=100):
        time.sleep(seconds / 10 + 1)  # it tries in vain to renew its certificate
        assert greet(site) == []
    assert (project.folder / "front.pem").read_bytes() == before


def test_settings_that_cannot_be_read_do_not_end_the_front(project: Project, site: SiteFolder, log: Path) -> None:
    seconds = 8.0  # of the front's certificate
    path, own = project.folder / "server.toml", project.folder / "front.pem"
    path.write_text(dataclasses.replace(project.settings, certificate_days=seconds / 86_400).as_toml())

    def wait(holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 30
        while not holds():
            assert time.monotonic() < deadline
            time.sleep(0.1)

    with running(project, log):
        before, first = path.read_text(), own.read_bytes()
        path.write_text("host = ")  # an operator who edits it
        wait(lambda: "server.toml cannot be used" in log.read_text())
        assert greet(site) == [], "its certificate is still valid"
        path.write_text(before)
        wait(lambda: own.read_bytes() != first)
        assert greet(site) == []


def test_a_command_that_was_stopped_while_it_changes_the_list_of_sites_stops_nobody_else(
    project: Project, site: SiteFolder, log: Path
) -> None:
    """Ctrl-Z in the middle of `enrol`: the front serves and follows revocations all the same."""
    other = enrolled(project, site.folder.parent / "hospital-1", "hospital-1")
    with running(project, log):
        site.renew()
        with exclusive(project.folder / "sites.lock", 0.0):
            began = time.monotonic()
            with pytest.raises(DeploymentError, match="the server cannot do this now"):
                site.renew()
            assert greet(other) == []
            assert time.monotonic() - began < 10
            with pytest.raises(StoreError, match=r"another command holds .*sites\.lock, and nothing was changed"):
                change_sites(project.folder, lambda sites: sites.clear(), 0.2)
        site.renew()
    assert sorted(project.sites) == ["hospital-0", "hospital-1"]


def calendar_off_by(seconds: float) -> SimpleNamespace:
    """The module `datetime` on a machine whose clock is ahead."""
    off = datetime.timedelta(seconds=seconds)
    now = SimpleNamespace(now=lambda zone: datetime.datetime.now(zone) + off)
    return SimpleNamespace(datetime=now, timedelta=datetime.timedelta, UTC=datetime.UTC)


def test_a_clock_that_is_set_back_makes_the_front_renew_its_certificate_at_once(
    project: Project, site: SiteFolder, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that started with a wrong clock: by the right one the front's certificate is not valid yet."""
    year = 365 * 86_400.0

    def not_before() -> float:
        pem = (project.folder / "front.pem").read_bytes()
        return x509.load_pem_x509_certificate(pem).not_valid_before_utc.timestamp()

    async def watch(running: front.Front) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(running._watch(), 3 * front.WATCH)

    clock = SimpleNamespace(time=lambda: time.time() + year)
    monkeypatch.setattr(front, "time", clock)
    monkeypatch.setattr(authority, "datetime", calendar_off_by(year))
    made = front.Front(project, log)
    assert not_before() > time.time() + 0.9 * year
    monkeypatch.undo()
    asyncio.run(watch(made))
    assert not_before() < time.time()
    first = not_before()
    time.sleep(1.1)
    asyncio.run(watch(made))
    assert not_before() == first, "once"
    made._log.handlers[0].close()


@pytest.mark.parametrize("days", [1.0, -1.0])
def test_certificates_that_a_clock_issued_which_is_off_by_a_day_are_valid(
    days: float, project: Project, tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weeks = new_project(tmp_path / "weeks", 14 * 86_400.0)
    with monkeypatch.context() as wrong:
        wrong.setattr(authority, "datetime", calendar_off_by(days * 86_400))
        site = enrolled(weeks, tmp_path / "site", "hospital-0")
    with running(weeks, log):
        assert greet(site) == []
        site.renew()
        assert greet(site) == []
        assert not site.renewal_due()


def test_too_many_open_files_do_not_end_the_front(project: Project, site: SiteFolder, log: Path) -> None:
    settings = project.settings
    with running(project, log, files=14), contextlib.ExitStack() as opened:
        for _ in range(12):
            opened.enter_context(socket.create_connection((settings.host, settings.port)))
        deadline = time.monotonic() + 20
        while not any("Too many open files" in line for line in log.read_text().splitlines()):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        opened.close()
        time.sleep(front.ACCEPT_PAUSE + 0.5)
        assert greet(site) == []


def test_a_site_says_loudly_that_its_server_does_not_answer(site: SiteFolder, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    said: list[str] = []
    now = [1e9]
    courier = Courier(site, tmp_path / "home", tmp_path / "server.json", said.append, clock=lambda: now[0])
    for _ in range(10):
        courier.step()
        now[0] += 30
    assert said == [], "a server may be off for some minutes"
    Outbox(tmp_path / "home").file()
    courier.step()
    assert "nothing listens at" in said[0]
    assert "1 requests wait for it" in said[0]
    for _ in range(120):
        now[0] += 30
        courier.step()
    assert 4 <= len(said) <= 6, "again and again, and not all the time"


def test_certificates_of_seconds_are_renewed_without_a_restart(tmp_path: Path, log: Path) -> None:
    project = new_project(tmp_path / "project", seconds=6.0)
    site = enrolled(project, tmp_path / "hospital-0", "hospital-0")
    idle = enrolled(project, tmp_path / "hospital-1", "hospital-1")
    first, idle_context = site.tls.read_bytes(), idle.context()
    context = site.context()  # as a SuperNode has it: one for all of its life
    stop = threading.Event()
    watcher = threading.Thread(target=watch_certificate, args=(site, context, stop))
    watcher.start()
    with running(project, log):
        server_certificates = set()
        open_connection = connect(project, idle_context)
        open_connection.connect()
        end = time.monotonic() + 9.0
        while time.monotonic() < end:
            if site.renewal_due():
                site.renew()
            with contextlib.closing(connect(project, context)) as connection:
                assert post(connection, FLEET, b"x", headers(project))[0] == 503
                connection.connect()
                server_certificates.add(connection.sock.getpeercert(True))
            time.sleep(0.2)
        assert site.tls.read_bytes() != first
        assert len(server_certificates) > 1, "the front renewed its own"
        assert idle.seconds_left() < 0
        with pytest.raises(CUT):  # the connection was opened in time, and outlived its certificate
            post(open_connection, FLEET, b"x", headers(project, "hospital-1"))
        open_connection.close()
        with pytest.raises(CUT):
            ask(project, idle_context, FLEET, headers(project, "hospital-1"))
        with pytest.raises(DeploymentError, match="has expired: run `fedquit flower join"):
            idle.renew()
        idle.join()
        idle.install(project.rotate("hospital-1", idle.request.read_bytes()))
        time.sleep(1.0)
        with contextlib.closing(connect(project, idle.context())) as connection:
            assert post(connection, FLEET, b"x", headers(project, "hospital-1"))[0] == 503, "it is back"
    stop.set()
    watcher.join()


def test_a_rotated_site_is_refused_with_its_old_certificate_and_key(
    project: Project, site: SiteFolder, log: Path
) -> None:
    old_context, old_headers = site.context(), headers(project)
    site.join(new=True)
    site.install(project.rotate("hospital-0", site.request.read_bytes()))
    with running(project, log):
        with pytest.raises(CUT):
            ask(project, old_context, FLEET, old_headers)
        with contextlib.closing(connect(project, site.context())) as connection:
            assert post(connection, FLEET, b"", old_headers)[0] == 403
        with contextlib.closing(connect(project, site.context())) as connection:
            assert post(connection, FLEET, b"", headers(project))[0] == 503
