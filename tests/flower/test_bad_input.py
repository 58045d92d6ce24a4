# SPDX-License-Identifier: Apache-2.0
"""What goes wrong in a closed federation is told in one sentence, on the side that can act; nothing is lost."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import http.server
import json
import os
import re
import resource
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs the extra `flower`")

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from typer.testing import CliRunner

from fedquit import __version__
from fedquit.cli import app as fedquit
from fedquit.errors import FedquitError, InputError, StoreError
from fedquit.flower.canaries import HomeCanaries
from fedquit.flower.closed import apps, greeting
from fedquit.flower.closed.app_user import SAME_USER
from fedquit.flower.closed.authority import Authority, certificate_to_pem, key_to_pem, new_key
from fedquit.flower.closed.courier import Courier
from fedquit.flower.closed.greeting import Greeting, ServerWatch, differences, greet
from fedquit.flower.closed.private_files import only_one
from fedquit.flower.closed.project import Project
from fedquit.flower.closed.seen import read_seen
from fedquit.flower.closed.service import STATE_LOCK, open_federation
from fedquit.flower.closed.site_folder import SiteFolder
from fedquit.flower.closed.sites import change_sites, read_sites
from fedquit.flower.deploy.demo import app_folder
from fedquit.flower.deploy.errors import DeploymentError
from fedquit.flower.deploy.keys import distinguished_name, general_name
from fedquit.flower.ledger import Ledger
from fedquit.flower.membership import read_membership, write_membership
from fedquit.flower.operations.server_doctor import examine_server
from fedquit.flower.operations.site_doctor import examine_site
from fedquit.flower.operations.status import locate, status_of
from fedquit.flower.outbox import Inbox, Outbox, last_contact
from fedquit.flower.roster import Roster
from fedquit.flower.state_folder import StateFolder
from fedquit.running.lifecycle import Phase
from fedquit.running.store import locked
from fedquit.utils.files import HALF_WRITTEN, write_json
from flower.closed_world import enrolled, new_project, running
from flower.grid_world import MakeWorld

pytestmark = [pytest.mark.flower, pytest.mark.timeout(120)]
DAY = 86_400.0
SOURCES = Path(__file__).parents[2] / "src"


@pytest.fixture
def project(tmp_path: Path) -> Project:
    made = new_project(tmp_path / "project", 14 * DAY)
    made.server.mkdir(mode=0o700)
    return made


@pytest.fixture
def site(project: Project, tmp_path: Path) -> SiteFolder:
    return enrolled(project, tmp_path / "site", "hospital-0")


def told(site: SiteFolder) -> str:
    """Why the site is not let in: one sentence, which its doctor and its running node say too."""
    with pytest.raises(DeploymentError) as refusal:
        greet(site)
    sentence = str(refusal.value)
    assert "\n" not in sentence
    said: list[str] = []
    ServerWatch(site, said.append).look()
    assert said == [f"warning: {sentence}"]
    assert any(finding.level == "error" and finding.sentence == sentence for finding in examine_site(site.folder))
    return sentence


# Certificates --------------------------------------------------------------------------------------------------------


def test_the_wrong_authority_on_either_side(project: Project, site: SiteFolder, tmp_path: Path) -> None:
    other = new_project(tmp_path / "other")
    stranger = enrolled(other, tmp_path / "stranger", "hospital-0")
    address = json.loads((site.folder / "site.json").read_text())["address"]
    about = json.loads((stranger.folder / "site.json").read_text())
    write_json(stranger.folder / "site.json", {**about, "address": address})
    with running(project, project.front_log):
        assert "certificate of another authority than the one that this site trusts: do not go on" in told(stranger)
        shutil.copy(site.authority, stranger.authority)  # and one that trusts the server, but is of another project
        assert "is of another authority than" in told(stranger)
        assert greet(site) == []
    assert list(read_seen(project.server)) in ([], ["hospital-0"])


def test_an_expired_certificate(project: Project, site: SiteFolder) -> None:
    key = new_key()
    expired = Authority.load(project.folder).issue("hospital-0", key.public_key(), -DAY, "client")
    site.tls.write_bytes(key_to_pem(key) + certificate_to_pem(expired))
    with running(project, project.front_log):
        assert "the certificate of hospital-0 has expired: run `fedquit flower join" in told(site)
        with pytest.raises(DeploymentError, match="who runs `fedquit flower rotate`"):
            site.renew()
        findings = [finding.sentence for finding in examine_site(site.folder)]
        assert any("the certificate expired 24.0 hours ago: check the clock" in sentence for sentence in findings)


def test_a_revoked_site(project: Project, site: SiteFolder) -> None:
    with running(project, project.front_log):
        assert greet(site) == []
        project.revoke("hospital-0")
        time.sleep(1.2)
        assert "a site that was revoked, or whose keys were rotated: ask the operator" in told(site)


def test_a_server_that_is_not_there(project: Project, site: SiteFolder) -> None:
    assert "nothing listens at" in told(site)
    about = json.loads((site.folder / "site.json").read_text())
    write_json(site.folder / "site.json", {**about, "address": "nowhere.invalid:9443"})
    assert "is not known here" in told(site)


# Clocks --------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def server_with_certificate(project: Project, valid_from: float, valid_until: float) -> Iterator[None]:
    """A server on the front's port whose certificate is valid for these seconds from now on."""
    key = new_key()
    authority = Authority.load(project.folder)
    now = datetime.datetime.now(datetime.UTC)
    draft = x509.CertificateBuilder(
        issuer_name=authority.certificate.subject,
        subject_name=distinguished_name("front"),
        public_key=key.public_key(),
        serial_number=x509.random_serial_number(),
        not_valid_before=now + datetime.timedelta(seconds=valid_from),
        not_valid_after=now + datetime.timedelta(seconds=valid_until),
    )
    draft = draft.add_extension(x509.SubjectAlternativeName([general_name("127.0.0.1")]), critical=False)
    pem = project.folder / "skewed.pem"
    pem.write_bytes(key_to_pem(key) + certificate_to_pem(draft.sign(authority.key, hashes.SHA256())))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    with socket.create_server(("127.0.0.1", project.settings.port)) as listener:
        stop = threading.Event()

        def take() -> None:
            while not stop.is_set():
                with contextlib.suppress(OSError):
                    connection, _ = listener.accept()
                    with connection, context.wrap_socket(connection, server_side=True):
                        pass

        thread = threading.Thread(target=take, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", project.settings.port), 5):
                pass
            thread.join(10)


def test_a_site_s_clock_a_day_behind(project: Project, site: SiteFolder) -> None:
    with server_with_certificate(project, DAY - 3600, 15 * DAY):
        assert "is not valid yet by the clock of this machine" in told(site)


def test_a_site_s_clock_weeks_ahead(project: Project, site: SiteFolder) -> None:
    with server_with_certificate(project, -30 * DAY, -2 * DAY):
        assert "has expired by the clock of this machine" in told(site)


def test_a_site_s_clock_a_day_ahead(project: Project, site: SiteFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    class Ahead:
        """The clock of the site, a day ahead."""

        monotonic = staticmethod(time.monotonic)

        @staticmethod
        def time() -> float:
            return time.time() + DAY

    with running(project, project.front_log):
        monkeypatch.setattr(greeting, "time", Ahead)
        (sentence,) = greet(site)
        assert "clock of this machine is 24.0 hours ahead of the server's" in sentence
        monkeypatch.undo()
        deadline = time.monotonic() + 30
        while "hospital-0" not in read_seen(project.server):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        (member,) = status_of(locate(project.folder, project.folder)).members
        assert abs(member.skew - DAY) < 60
        findings = [finding.sentence for finding in examine_server(locate(project.folder, project.folder))]
    assert any("the clock of hospital-0 was 24.0 hours ahead of this machine's" in sentence for sentence in findings)


@pytest.mark.parametrize(("ahead", "skewed"), [(3.0, False), (6.0, True), (-200.0, False), (-400.0, True)])
def test_clocks_that_flower_accepts_are_accepted(ahead: float, skewed: bool) -> None:
    server = Greeting.own()
    assert bool(differences(server, dataclasses.replace(server, time=server.time + ahead))) == skewed


# Versions ------------------------------------------------------------------------------------------------------------


def test_a_node_with_another_version(project: Project, site: SiteFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(project, project.front_log):
        monkeypatch.setattr(greeting, "package_version", lambda: "0.0.1")
        (sentence,) = greet(site)
        said: list[str] = []
        ServerWatch(site, said.append).look()
    assert f"runs fedquit 0.0.1 on Flower 1.41.0, and the server fedquit {__version__}" in sentence
    assert "install the server's versions here" in sentence
    assert said == [f"warning: {sentence}"]


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{}", b'{"fedquit": 1, "flower": 2, "time": "now"}', b"[" * 10_000, b"\xff"]
)
def test_what_is_no_greeting_is_refused(body: bytes, project: Project, site: SiteFolder) -> None:
    with pytest.raises(ValueError, match="this is no greeting"):
        Greeting.from_json(body)


def test_the_front_survives_what_is_no_greeting(project: Project, site: SiteFolder) -> None:
    with running(project, project.front_log):
        with pytest.raises(DeploymentError, match="this is no greeting"):
            site.post(greeting.GREET_PATH, b"x")
        with pytest.raises(DeploymentError, match="this is no time"):
            site.post(greeting.GREET_PATH, b'{"fedquit": "", "flower": "", "time": 1e999}')
        assert greet(site) == []


# Two servers ---------------------------------------------------------------------------------------------------------


def test_two_servers_on_one_project_or_one_state_directory(project: Project, make: MakeWorld, tmp_path: Path) -> None:
    (project.server / "lock").touch()
    holder = "import fcntl, sys; f = open(sys.argv[1]); fcntl.flock(f, 2); print('held', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", holder, str(project.server / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as first:
        assert first.stdout
        first.stdout.readline()
        with pytest.raises(StoreError, match="another `fedquit flower serve` runs") as refusal:
            open_federation(project, tmp_path / "state").__enter__()
        first.kill()
    assert "stop it first" in str(refusal.value)
    other = new_project(tmp_path / "other")
    holder_of_state = open_federation(project, tmp_path / "state", attach=True, patience=0.0)
    with contextlib.ExitStack() as held:
        held.enter_context(only_one(tmp_path / "state" / STATE_LOCK, "held"))
        with pytest.raises(
            StoreError, match=r"another project is served on .*: stop it, or give another --state"
        ) as no:
            open_federation(other, tmp_path / "state", app=tmp_path).__enter__()
    assert "\n" not in str(no.value)
    assert not (other.server / "serve.json").exists(), "before anything was written"
    assert sorted(path.name for path in (tmp_path / "state").iterdir()) == [STATE_LOCK]
    with pytest.raises(DeploymentError):  # now it is free: nobody answers there, and the lock is given back
        holder_of_state.__enter__()
    with only_one(tmp_path / "state" / STATE_LOCK, "held"):
        pass
    setup = make()
    with locked(setup.folder / "state"), pytest.raises(StoreError, match=r"another server runs on .*: stop it"):
        setup.serve(setup.config())


def test_two_copies_of_a_project_on_one_machine(project: Project, tmp_path: Path) -> None:
    copied = Project(Path(shutil.copytree(project.folder, tmp_path / "copied")))
    said: list[str] = []
    with running(project, project.front_log), pytest.raises(StoreError, match="stop the other server") as refusal:
        open_federation(copied, tmp_path / "state", say=said.append).__enter__()
    assert str(project.settings.port) in str(refusal.value)
    assert SAME_USER in said, "where users cannot be separated, that is said"


def test_a_half_copied_project(project: Project, tmp_path: Path) -> None:
    for name in ("sites.json", "ca.key", "server.toml"):
        copied = Path(shutil.copytree(project.folder, tmp_path / f"without-{name}"))
        (copied / name).unlink()
        with pytest.raises(InputError, match=f"has no {name}: restore it from a backup"):
            Project.open(copied)
    copied = Path(shutil.copytree(project.folder, tmp_path / "truncated"))
    (copied / "sites.json").write_text((copied / "sites.json").read_text()[:10])
    with pytest.raises(StoreError, match=r"is not a list of sites.*: restore it from a backup, .*\. Do not delete it"):
        read_sites(copied)


@pytest.mark.parametrize("name", ["superexec.secret", "loopback/ca.crt", "loopback/server.key", "trust.yaml", "ca.crt"])
def test_a_half_copied_project_is_not_served(name: str, project: Project, tmp_path: Path) -> None:
    apps.sign(app_folder(), apps.load_release_key(project.folder / "release.key"), project.apps)
    (project.folder / name).unlink()
    words = ["flower", "serve", str(app_folder()), "--state", str(tmp_path / "state"), "--project", str(project.folder)]
    done = CliRunner().invoke(fedquit, [*words, "--until-trained"])
    assert isinstance(done.exception, FedquitError), "one sentence, and no traceback"
    assert name in str(done.exception)
    assert "restore" in str(done.exception)


@pytest.mark.parametrize("length", [None, 40], ids=["gone", "half"])
@pytest.mark.parametrize("name", ["node.key", "tls.pem", "trust.yaml", "site.json"])
def test_a_half_copied_site_does_not_start_its_node(
    name: str, length: int | None, project: Project, site: SiteFolder, tmp_path: Path
) -> None:
    path = site.folder / name
    content = path.read_bytes()
    path.unlink()
    if length:
        path.write_bytes(content[:length])
    words = ["flower", "node", "--site", str(site.folder), "--home", str(tmp_path / "home")]
    done = CliRunner().invoke(fedquit, words)
    assert isinstance(done.exception, FedquitError)
    assert str(site.folder) in str(done.exception)
    assert not (tmp_path / "home").exists(), "nothing was begun"


def test_folders_of_keys_are_not_given_to_app_code(project: Project, site: SiteFolder, tmp_path: Path) -> None:
    """`--state project`: the list of the server app, which has the same name, would replace that of the project."""
    apps.sign(app_folder(), apps.load_release_key(project.folder / "release.key"), project.apps)
    before = snapshot(project.folder), snapshot(site.folder)
    at = ["--project", str(project.folder), "--state"]
    commands = [
        ["serve", str(app_folder()), *at, str(project.folder)],
        ["serve", str(app_folder()), *at, str(tmp_path)],
        ["prepare", *at, str(project.folder)],
        ["node", "--site", str(site.folder), "--home", str(site.folder)],
        ["prepare", "--site", str(site.folder), "--home", str(tmp_path)],
    ]
    for words in commands:
        done = CliRunner().invoke(fedquit, ["flower", *words])
        assert isinstance(done.exception, InputError), words
        assert "give --state a folder of its own" in str(done.exception) or "--home" in words
    assert (snapshot(project.folder), snapshot(site.folder)) == before
    (tmp_path / "link").symlink_to(project.folder)
    done = CliRunner().invoke(fedquit, ["flower", "serve", str(app_folder()), *at, str(tmp_path / "link")])
    assert "is or holds" in str(done.exception)
    at[-1:] = ["--state", str(project.server)]
    done = CliRunner().invoke(fedquit, ["flower", "serve", str(app_folder()), *at])
    assert "give --state a folder of its own" in str(done.exception), "notices.json is the name of files of both"
    (tmp_path / "ledger.json").write_text("{}")  # of an earlier version, which allowed it
    done = CliRunner().invoke(fedquit, ["flower", "serve", str(app_folder()), *at[:-1], str(tmp_path)])
    assert "has requests" in str(done.exception)
    assert f"keep {tmp_path} for --state" in str(done.exception), "another folder would be another federation"


def test_two_ports_that_are_one(tmp_path: Path) -> None:
    words = ["flower", "init", str(tmp_path / "new"), "--host", "a", "--port", "9443", "--superlink-port", "9443"]
    assert "give two ports" in str(CliRunner().invoke(fedquit, words).exception)
    assert not (tmp_path / "new").exists()
    assert not CliRunner().invoke(fedquit, [*words, "--listen", "10.0.0.5"]).exception, "the SuperLink is on loopback"


# A full disk ---------------------------------------------------------------------------------------------------------


def with_full_disk(limit: int, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run fedquit where no file can grow beyond so many bytes, as on a disk that is full."""

    def fill() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    env = {**os.environ, "PYTHONPATH": str(SOURCES), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "fedquit", "flower", *map(str, words)]
    return subprocess.run(command, env=env, capture_output=True, text=True, preexec_fn=fill, check=False)


def snapshot(folder: Path) -> dict[str, bytes]:
    ignored = ("sites.lock",)
    files = [p for p in folder.rglob("*") if p.is_file() and p.name not in ignored]
    assert not any(HALF_WRITTEN.search(p.name) for p in files)
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}


def crowd(project: Project, site: SiteFolder) -> None:
    """So many sites that the list is larger than a bundle."""

    def add(listed: dict[str, object]) -> None:
        one = project.sites["hospital-0"]
        for i in range(40):
            listed[f"crowd-{i}"] = dataclasses.replace(one, name=f"crowd-{i}")

    change_sites(project.folder, add)  # type: ignore[arg-type]


@pytest.mark.parametrize(("limit", "prepare"), [(4_096, lambda p, s: None), (16_384, crowd)], ids=["bundle", "list"])
def test_a_full_disk_during_enrolment(
    limit: int, prepare: Callable[[Project, SiteFolder], None], project: Project, site: SiteFolder, tmp_path: Path
) -> None:
    prepare(project, site)
    joining = SiteFolder(tmp_path / "joining")
    joining.join()
    before = snapshot(project.folder)
    words: list[str | Path] = ["enrol", "hospital-9", joining.request, "--project", project.folder, "--examples", "10"]
    out = tmp_path / "hospital-9.tar"
    done = with_full_disk(limit, *words, "--out", out)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "free space" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert snapshot(project.folder) == before, "the site is not admitted, and no other is lost"
    assert not out.exists(), "and has no bundle"
    again = with_full_disk(1 << 30, *words, "--out", out)
    assert again.returncode == 0, again.stderr
    assert "hospital-9" in project.sites


def test_a_full_disk_while_a_site_joins(tmp_path: Path) -> None:
    done = with_full_disk(64, "join", tmp_path / "site")
    assert done.returncode == 2, done.stdout + done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert with_full_disk(1 << 30, "join", tmp_path / "site").returncode == 0


def test_a_full_disk_at_a_site_does_not_end_its_node(project: Project, site: SiteFolder, tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "full").write_text("")  # what lies below cannot be written
    filed = Outbox(tmp_path / "home").file()
    with running(project, project.front_log):
        courier = Courier(site, tmp_path / "home", tmp_path / "full" / "server.json", said.append)
        courier.step()
        courier.step()
    assert [line for line in said if "cannot write" in line] == said[:1], "it says so once"
    assert any(f"has noted request {filed.id}" in line for line in said)


def test_what_a_server_says_cannot_reach_the_terminal_of_a_site(project: Project, site: SiteFolder) -> None:
    class Hostile(http.server.BaseHTTPRequestHandler):
        """A server with a valid certificate that writes to terminals."""

        def do_POST(self) -> None:
            words = b"\x1b]0;owned\x07 no\nerror: forged"
            self.send_response(403)
            self.send_header("Content-Length", str(len(words)))
            self.end_headers()
            self.wfile.write(words)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with running(project, project.front_log):
        pass  # it makes the front's certificate
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(project.folder / "front.pem")
    with http.server.HTTPServer(("127.0.0.1", project.settings.port), Hostile) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        with pytest.raises(DeploymentError) as refusal:
            site.renew()
        thread.join()
    assert str(refusal.value).isprintable()
    assert "\\x1b]0;owned" in str(refusal.value)


@pytest.mark.parametrize("content", ["", "{", "[1", '"words"', '{"other": 1}'])
def test_a_request_of_the_operator_that_cannot_be_read_is_named_and_the_others_are_taken(
    content: str, tmp_path: Path
) -> None:
    said: list[str] = []
    inbox = Inbox(tmp_path, said.append)
    filed = inbox.file("hospital-0")
    damaged = inbox.folder / "0a.json"
    damaged.write_text(content)
    for _ in range(3):
        assert list(inbox.waiting()) == [filed]
    (sentence,) = said
    assert str(damaged) in sentence
    assert damaged.exists()


@pytest.mark.parametrize("content", ["", "{", "[1", '"words"'])
def test_no_damaged_file_of_a_federation_is_answered_with_advice_to_remove_it(
    content: str, project: Project, site: SiteFolder, tmp_path: Path
) -> None:
    """Without its list of sites a state directory would be open; the rest cannot be made again."""
    home = tmp_path / "home"
    state = tmp_path / "state"
    entry = Outbox(home).file()
    members = write_membership(state, project.sites.values())
    ledger = state / "ledger.json"
    seed = home / "canaries.json"
    readers: dict[Path, Callable[[], object]] = {
        project.folder / "sites.json": lambda: project.sites,
        members: lambda: read_membership(state),
        ledger: lambda: Ledger(state, {}),
        state / "clients.json": lambda: Roster(state),
        home / "outbox" / f"{entry.id}.json": lambda: Outbox(home).entries(),
        seed: lambda: HomeCanaries(home, 40).drawn(100),
        site.folder / "site.json": lambda: site.about,
        home / "contact.json": lambda: last_contact(home),
        project.server / "serve.json": lambda: locate(project.folder, None),
    }
    for path, read in readers.items():
        path.write_text(content)
        with pytest.raises(FedquitError) as refusal:
            read()
        sentence = str(refusal.value).replace("Do not delete", "")
        assert not re.search(r"delet|remov|move it|new folder|another folder", sentence), sentence
    (state / "settings.json").write_text(content)
    damaged = status_of(locate(project.folder, state)).damaged
    assert not any(re.search(r"delet|remov|move it|new folder", line.replace("Do not delete", "")) for line in damaged)
    words = ["request", "--server", str(state), "--show"]
    shown = CliRunner().invoke(fedquit, words)
    assert isinstance(shown.exception, StoreError)
    assert "Do not delete it" in str(shown.exception)


def test_a_server_app_leaves_alone_what_the_operator_s_process_is_writing(tmp_path: Path) -> None:
    ending = "0123456789abcdef"
    names = [f".{name}.{ending}" for name in ("sites.json", "notices.json", "ledger.json", "state.safetensors")]
    for name in names:
        (tmp_path / name).touch()
    StateFolder(tmp_path).clean(Phase())
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names[:2])
