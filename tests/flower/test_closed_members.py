# SPDX-License-Identifier: Apache-2.0
"""Who is a member of a closed federation: requests, certificates, bundles, the list of sites, signed apps."""

from __future__ import annotations

import contextlib
import dataclasses
import http.server
import inspect
import io
import itertools
import json
import os
import re
import stat
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

pytest.importorskip("cryptography")
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_ssh_public_key,
)
from typer.testing import CliRunner

from fedquit.cli import app as fedquit
from fedquit.errors import FedquitError, InputError, StoreError
from fedquit.flower.closed import apps, bundle, requests, rules, service, sites, supernode
from fedquit.flower.closed.app_user import SAME_USER, AppUser, copy_for, hand_over_tree, require_access
from fedquit.flower.closed.authority import new_key
from fedquit.flower.closed.bundle import Bundle
from fedquit.flower.closed.notice_board import NoticeBoard
from fedquit.flower.closed.private_files import make_private_folder, only_one
from fedquit.flower.closed.project import Project, Settings
from fedquit.flower.closed.site_folder import SiteFolder
from fedquit.flower.deploy.commands import Node
from fedquit.flower.deploy.control import Connection
from fedquit.flower.deploy.errors import DeploymentError
from fedquit.flower.deploy.keys import make_node_key
from fedquit.flower.membership import read_membership
from fedquit.flower.notices import read_notices
from fedquit.flower.roster import Identity, Roster
from fedquit.utils.files import read_json, write_private_json

pytestmark = pytest.mark.flower
ROOT = Path(__file__).parents[2]
NOW = 2_000_000_000.0


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project.init(tmp_path / "project", Settings("127.0.0.1"))


def site(tmp_path: Path, name: str) -> SiteFolder:
    folder = SiteFolder(tmp_path / name)
    folder.join()
    return folder


def enrolled(project: Project, tmp_path: Path, name: str, examples: int = 10) -> SiteFolder:
    folder = site(tmp_path, name)
    folder.install(project.enrol(name, folder.request.read_bytes(), examples))
    return folder


def modes(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): oct(stat.S_IMODE(p.stat().st_mode)) for p in [folder, *folder.rglob("*")]}


# The request ---------------------------------------------------------------------------------------------------------


def test_a_request_names_a_node_key_only_if_that_key_signed_it() -> None:
    own, other = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    tls = new_key()
    asked = requests.read_request(requests.make_request(tls, own))
    assert (asked.node_key, asked.tls_key) == (own.public_key(), tls.public_key())

    class Stolen(ec.EllipticCurvePrivateKey):  # signs with its own key and names the other site's
        def sign(self, *args: object) -> bytes:
            return own.sign(*args)  # type: ignore[arg-type]

        def public_key(self) -> ec.EllipticCurvePublicKey:
            return other.public_key()

    Stolen.__abstractmethods__ = frozenset()
    with pytest.raises(InputError, match="not signed by the node key that it names"):
        requests.read_request(requests.make_request(tls, Stolen()))  # type: ignore[abstract]


def test_a_request_must_be_whole_and_of_the_right_kind() -> None:
    node = ec.generate_private_key(ec.SECP384R1())
    good = requests.make_request(new_key(), node)
    for bad in (b"", b"hello", good[:200], good + b" " * requests.MAX_REQUEST):
        with pytest.raises(InputError, match="fedquit flower join"):
            requests.read_request(bad)
    with pytest.raises(InputError, match="P-384"):
        requests.read_request(requests.make_request(new_key(), new_key()))
    with pytest.raises(InputError, match="P-256"):
        requests.read_request(requests.make_request(node, node))


# The operator's list -------------------------------------------------------------------------------------------------


def test_everything_is_closed_to_other_users(project: Project, tmp_path: Path) -> None:
    folder = enrolled(project, tmp_path, "hospital-0").folder
    SiteFolder(folder).loopback()
    SiteFolder(folder).secret()
    for place in (project.folder, folder):
        for name, mode in modes(place).items():
            expected = "0o700" if (place / name).is_dir() or name == "start.sh" else "0o600"
            assert mode == expected, name


def test_private_keys_are_in_no_bundle(project: Project, tmp_path: Path) -> None:
    folder = site(tmp_path, "hospital-0")
    packed = project.enrol("hospital-0", folder.request.read_bytes(), 10).pack()
    assert b"PRIVATE" not in packed
    assert b"PRIVATE" not in folder.request.read_bytes()
    assert Bundle.unpack(packed).address == "127.0.0.1:9443"


def test_a_name_and_a_node_key_are_of_one_site_for_ever(project: Project, tmp_path: Path) -> None:
    first = enrolled(project, tmp_path, "hospital-0")
    second = site(tmp_path, "hospital-1")
    with pytest.raises(InputError, match="there is a site hospital-0 already"):
        project.enrol("hospital-0", second.request.read_bytes(), 10)
    with pytest.raises(InputError, match="is that of hospital-0"):
        project.enrol("hospital-2", first.request.read_bytes(), 10)
    project.revoke("hospital-0")
    with pytest.raises(InputError, match="there is a site hospital-0 already"):
        project.enrol("hospital-0", second.request.read_bytes(), 10)
    with pytest.raises(InputError, match="is that of hospital-0"):
        project.enrol("hospital-2", first.request.read_bytes(), 10)
    assert list(project.sites) == ["hospital-0"]


@pytest.mark.parametrize("name", ["", "Hospital", "a/b", "..", "a b", "-a", "a" * 64, "a\nb"])
def test_a_name_is_a_plain_word(name: str, project: Project, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is no name of a site"):
        project.enrol(name, site(tmp_path, "x").request.read_bytes(), 10)


def test_a_rotated_site_is_the_same_site_and_its_old_key_counts_no_more(project: Project, tmp_path: Path) -> None:
    folder = enrolled(project, tmp_path, "hospital-0", examples=7)
    before = project.sites["hospital-0"]
    folder.join(new=True)
    folder.install(project.rotate("hospital-0", folder.request.read_bytes()))
    after = project.sites["hospital-0"]
    assert after.keys[0] == before.key
    assert after.key != before.key
    assert after.fingerprints[0] == before.fingerprints[0], "its identity stays"
    assert (after.examples, len(after.certificates)) == (7, 1)
    assert after.certificate(before.certificates[0].sha256) is None, "the old certificate is refused"
    kept = list(folder.folder.glob("node.key.until-*"))
    assert len(kept) == 1, "the old key is kept beside the new one"


def test_a_node_of_before_keeps_its_identity_when_it_joins_with_its_key(project: Project, tmp_path: Path) -> None:
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes

    from fedquit.flower.identity import fingerprint

    folder = make_private_folder(tmp_path / "site")
    public = load_ssh_public_key(make_node_key(folder, "node.key").public.read_bytes())
    enrolled(project, tmp_path, "site")
    assert isinstance(public, ec.EllipticCurvePublicKey)
    known_as = fingerprint(public_key_to_bytes(public))  # the bytes that the SuperLink knows a node by
    assert project.sites["site"].fingerprints == (known_as,)


def test_a_site_cannot_go_back_to_a_key_that_it_gave_up(project: Project, tmp_path: Path) -> None:
    folder = enrolled(project, tmp_path, "hospital-0")
    old = folder.request.read_bytes()
    folder.join(new=True)
    project.rotate("hospital-0", folder.request.read_bytes())
    with pytest.raises(InputError, match="gave up this node key"):
        project.rotate("hospital-0", old)


def test_a_rotation_with_the_same_node_key_is_a_new_certificate_only(project: Project, tmp_path: Path) -> None:
    folder = enrolled(project, tmp_path, "hospital-0")
    folder.join()
    folder.install(project.rotate("hospital-0", folder.request.read_bytes()))
    assert len(project.sites["hospital-0"].keys) == 1


def test_renewal_needs_the_node_key_in_use_and_never_a_revoked_site(project: Project, tmp_path: Path) -> None:
    folder = enrolled(project, tmp_path, "hospital-0")
    other = site(tmp_path, "other")
    with pytest.raises(InputError, match="another node key"):
        project.renew("hospital-0", other.request.read_bytes())
    for _ in range(6):
        project.renew("hospital-0", folder.request.read_bytes())
    assert len(project.sites["hospital-0"].certificates) == sites.MAX_CERTIFICATES
    project.revoke("hospital-0")
    with pytest.raises(InputError, match="was revoked"):
        project.renew("hospital-0", folder.request.read_bytes())
    with pytest.raises(InputError, match="was revoked"):
        project.rotate("hospital-0", other.request.read_bytes())
    with pytest.raises(InputError, match="no site 'hospital-9'"):
        project.revoke("hospital-9")


def test_a_full_disk_during_enrolment_admits_nobody(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = site(tmp_path, "hospital-0")
    out = tmp_path / "hospital-0.tar"
    words = ["flower", "enrol", "hospital-0", str(folder.request), "--project", str(project.folder), "--examples", "3"]
    command = [*words, "--out", str(out)]
    real = os.fsync
    for allowed in range(3):
        left = [allowed]

        def full(descriptor: int, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise OSError(28, "No space left on device")
            real(descriptor)

        monkeypatch.setattr(os, "fsync", full)
        result = CliRunner().invoke(fedquit, command)
        if result.exit_code == 0:
            break
        assert project.sites == {}
        assert not out.exists()
    monkeypatch.setattr(os, "fsync", real)
    assert CliRunner().invoke(fedquit, command).exit_code == 0
    assert list(project.sites) == ["hospital-0"]


def test_a_list_of_sites_that_cannot_be_read_is_an_error_and_not_an_empty_list(project: Project) -> None:
    for content in ("", "[]", "{}", '{"version": 1, "sites": [{"name": "x"}]}'):
        (project.folder / "sites.json").write_text(content)
        with pytest.raises(StoreError) as caught:
            _ = project.sites
        assert "restore it from a" in str(caught.value)


def test_a_project_is_made_once(project: Project, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not empty"):
        Project.init(project.folder, Settings("127.0.0.1"))
    (project.folder / "ca.key").unlink()
    with pytest.raises(InputError, match=r"has no ca\.key"):
        Project.open(project.folder)
    for host in ("a b", "", 'x"\ny', "-"):
        with pytest.raises(InputError, match="is no host"):
            Settings(host)


# The site's side -----------------------------------------------------------------------------------------------------


def test_a_bundle_must_answer_the_site_s_own_request_and_be_of_its_project(project: Project, tmp_path: Path) -> None:
    own, other = site(tmp_path, "own"), site(tmp_path, "other")
    foreign = Project.init(tmp_path / "foreign", Settings("127.0.0.1"))
    answer = project.enrol("other", other.request.read_bytes(), 1)
    with pytest.raises(InputError, match="for another request"):
        own.install(answer)
    own.install(project.enrol("own", own.request.read_bytes(), 1))
    own.join()
    with pytest.raises(InputError, match="of another project"):
        own.install(foreign.enrol("own", own.request.read_bytes(), 1))
    good = project.rotate("own", own.request.read_bytes())
    forged = Bundle(
        good.name, good.address, 1, foreign.rotate("own", own.request.read_bytes()).certificate, *_rest(good)
    )
    with pytest.raises(InputError, match="not signed by the project's authority"):
        own.install(forged)


def _rest(good: Bundle) -> tuple[bytes, bytes]:
    return good.authority, good.trust


def test_an_empty_trust_file_is_an_error(project: Project, tmp_path: Path) -> None:
    folder = site(tmp_path, "hospital-0")
    good = project.enrol("hospital-0", folder.request.read_bytes(), 1)
    for trust in (b"", b"{}\n", b"# nobody\n"):
        with pytest.raises(StoreError, match="trusts nobody"):
            folder.install(Bundle(good.name, good.address, 1, good.certificate, good.authority, trust))
    assert not folder.trust.exists()
    folder.install(good)
    project.trust.write_text("{}\n")
    with pytest.raises(StoreError, match="trusts nobody"):
        project.enrol("hospital-1", site(tmp_path, "other").request.read_bytes(), 1)


def test_a_bundle_with_odd_members_writes_nothing(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name in bundle.FILES:
            entry = tarfile.TarInfo(name)
            entry.type = tarfile.SYMTYPE
            entry.linkname = "/etc/passwd"
            tar.addfile(entry)
    for content in (buffer.getvalue(), b"", b"x" * 2000):
        with pytest.raises(InputError, match="is no bundle"):
            Bundle.unpack(content)


@pytest.mark.parametrize(
    "about",
    [
        {"name": "../../elsewhere"},
        {"name": "\x1b[31mred"},
        {"name": 7},
        {"address": "nowhere"},
        {"address": "fed.example.org:port"},
        {"address": "fed.example.org:9443/x"},
        {"address": "a b:9443"},
        {"examples": "many"},
    ],
    ids=str,
)
def test_a_bundle_that_says_what_no_operator_says_is_refused(
    about: dict[str, Any], project: Project, tmp_path: Path
) -> None:
    """The name becomes that of a log, and the address goes to the network."""
    folder = site(tmp_path, "hospital-0")
    good = project.enrol("hospital-0", folder.request.read_bytes(), 10)
    before = sorted(folder.folder.iterdir())
    with pytest.raises(InputError, match="is no bundle"):
        folder.install(Bundle.unpack(dataclasses.replace(good, **about).pack()))
    assert sorted(folder.folder.iterdir()) == before
    assert Bundle.unpack(good.pack()) == good
    for host in ("[::1]:9443", "[fe80::1%eth0]:9443", "10.0.0.1:443", "fed.example.org:9443"):
        assert Bundle.unpack(dataclasses.replace(good, address=host).pack()).address == host


@pytest.mark.parametrize("text", ["[" * 50_000, '{"name": "a", "address": "a:1", "examples": 1e999}'])
def test_a_bundle_whose_words_are_no_words_is_refused(text: str, project: Project, tmp_path: Path) -> None:
    good = project.enrol("hospital-0", site(tmp_path, "hospital-0").request.read_bytes(), 10)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, content in zip(
            bundle.FILES, (text.encode(), good.certificate, good.authority, good.trust), strict=True
        ):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    with pytest.raises(InputError, match="is no bundle"):
        Bundle.unpack(buffer.getvalue())


def test_a_certificate_is_due_for_renewal_after_half_of_its_life(tmp_path: Path) -> None:
    project = Project.init(tmp_path / "project", Settings("127.0.0.1", certificate_days=2.0 / 86_400))
    folder = enrolled(project, tmp_path, "hospital-0")
    left = folder.certificate().not_valid_after_utc.timestamp() - time.time()
    assert left <= 2.0
    time.sleep(max(0.0, left - 0.9))
    assert folder.renewal_due()
    day = Project.init(tmp_path / "day", Settings("127.0.0.1", certificate_days=1.0))
    assert not enrolled(day, tmp_path, "hospital-1").renewal_due()


# What a site may ask for ---------------------------------------------------------------------------------------------


def request(
    member: sites.Site, target: bytes, method: bytes = b"POST", extra: tuple[tuple[bytes, bytes], ...] = ()
) -> rules.Refusal | int:
    headers = ((b"content-length", b"5"), (b"flwr-public-key", member.key.encode()), *extra)
    return rules.judge(member, method, target, headers)


@pytest.fixture
def member(project: Project, tmp_path: Path) -> sites.Site:
    enrolled(project, tmp_path, "hospital-0")
    return project.sites["hospital-0"]


def test_only_the_fleet_paths_and_the_renewal_pass(member: sites.Site) -> None:
    from flwr.supernode.fleet_http_client import FleetHttpClient

    for path in [*rules.FLEET_PATHS, rules.RENEW]:
        assert request(member, path) == 5
    used = {path.encode() for path in re.findall(r'"(/v1/fleet/.*?)"', inspect.getsource(FleetHttpClient))}
    assert used - rules.FLEET_PATHS == {b"/v1/fleet/register-node", b"/v1/fleet/unregister-node"}
    assert used >= rules.FLEET_PATHS, "each is one that a SuperNode of the pinned Flower asks for"
    refused = [
        b"/v1/fleet/register-node",
        b"/v1/fleet/unregister-node",
        b"/v1/control/start-run",
        b"/v1/runtime/acquire-task",
        b"/health",
        b"/docs",
        b"/v1/fleet/get-run?x",
        b"/v1/fleet/%67et-run",
        b"/v1/fleet/get-run/../../control/stop-run",
        b"//v1/fleet/get-run",
        b"https://127.0.0.1/v1/fleet/get-run",
    ]
    for path in refused:
        assert request(member, path) == rules.Refusal(403, "no such path for sites"), path
    assert isinstance(request(member, b"/v1/fleet/get-run", b"GET"), rules.Refusal)


def test_the_header_must_name_the_site_s_own_key_once_and_the_body_one_length(member: sites.Site) -> None:
    path = b"/v1/fleet/get-run"
    key, length = (b"flwr-public-key", member.key.encode()), (b"content-length", b"5")
    assert rules.judge(member, b"POST", path, [key, length]) == 5
    bad = {
        403: [[length], [(key[0], b"x"), length], [key, key, length], [(key[0], key[1].lower()), length]],
        411: [
            [key],
            [key, length, length],
            [key, (b"content-length", b"-1")],
            [key, length, (b"transfer-encoding", b"")],
        ],
        413: [[key, (b"content-length", str(rules.MAX_BODY + 1).encode())], [key, (b"content-length", b"9" * 40)]],
        400: [[key, length, (b"flwr-timestamp", b"1"), (b"flwr-timestamp", b"2")]],
    }
    for status, cases in bad.items():
        for headers in cases:
            decision = rules.judge(member, b"POST", path, headers)
            assert isinstance(decision, rules.Refusal), headers
            assert decision.status == status, headers


def test_a_certificate_counts_until_it_expires_or_its_site_is_revoked(project: Project, member: sites.Site) -> None:
    (certificate,) = member.certificates
    known = {"hospital-0": member}
    assert rules.find_site(known, certificate.sha256, certificate.not_after - 1) == member
    assert isinstance(rules.find_site(known, certificate.sha256, certificate.not_after), rules.Refusal)
    assert isinstance(rules.find_site(known, "0" * 64, 0.0), rules.Refusal)
    project.revoke("hospital-0")
    assert isinstance(rules.find_site(project.sites, certificate.sha256, 0.0), rules.Refusal)


# Signed apps ---------------------------------------------------------------------------------------------------------


def test_flower_s_own_check_accepts_what_is_signed_and_nothing_else(project: Project, tmp_path: Path) -> None:
    from flwr.supercore.fab import Fab
    from flwr.supernode.start_client_internal import _verify_fab

    app = ROOT / "examples" / "flower_app"
    key = apps.load_release_key(project.folder / "release.key")
    content = apps.archive(app)
    digest = apps.sign(app, key, project.apps)
    trusted = dict(line.split(": ", 1) for line in project.trust.read_text().splitlines())
    entities = {name: line.strip("'") for name, line in trusted.items()}

    def verified(signatures: dict[str, str], content: bytes = content) -> bool:
        import hashlib

        return bool(_verify_fab(Fab(hashlib.sha256(content).hexdigest(), content, signatures), entities))

    signed = apps.signatures(digest, project.apps)
    assert verified(signed)
    assert not verified({})
    assert not verified(signed, content + b"x"), "another app"
    stranger = apps.make_release_key(tmp_path / "stranger.key")
    apps.sign(app, stranger, tmp_path)
    (name,) = entities
    forged = apps.signatures(digest, tmp_path)
    assert not verified(forged)
    assert not verified({name: next(iter(forged.values()))}), "the stranger's signature under the trusted name"
    assert apps.signatures("../" + digest[3:], project.apps) == {}


def test_an_app_is_signed_with_a_key_that_the_sites_trust(project: Project, tmp_path: Path) -> None:
    stranger = tmp_path / "stranger.key"
    apps.make_release_key(stranger)
    words = ["flower", "sign", str(ROOT / "examples" / "flower_app"), "--project", str(project.folder)]
    result = CliRunner().invoke(fedquit, [*words, "--key", str(stranger)])
    assert isinstance(result.exception, InputError)
    assert "do not trust this key" in str(result.exception)
    assert not list(project.apps.iterdir())


# The command line ----------------------------------------------------------------------------------------------------


def test_the_operator_compares_the_fingerprint_that_the_site_tells(project: Project, tmp_path: Path) -> None:
    folder = SiteFolder(tmp_path / "site")
    told = folder.join()
    words = ["flower", "enrol", "hospital-0", str(folder.request), "--project", str(project.folder), "--examples", "3"]
    out = ["--out", str(tmp_path / "b.tar")]
    wrong = CliRunner().invoke(fedquit, [*words, *out, "--fingerprint", "0000" + told[4:]])
    assert "not the one that the site made" in str(wrong.exception)
    assert project.sites == {}
    right = CliRunner().invoke(fedquit, [*words, *out, "--fingerprint", told.upper()])
    assert right.exit_code == 0, right.output
    assert project.sites["hospital-0"].examples == 3
    content = json.loads((project.folder / "sites.json").read_text())
    assert content["sites"][0]["name"] == "hospital-0"


def test_a_certificate_is_for_clients_of_this_project_only(project: Project, tmp_path: Path) -> None:
    certificate = enrolled(project, tmp_path, "hospital-0").certificate()
    use = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert [o.dotted_string for o in use] == ["1.3.6.1.5.5.7.3.2"]
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


# The user who runs app code ------------------------------------------------------------------------------------------


def test_only_root_can_run_apps_as_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(InputError, match="only root can run app code as another user"):
        AppUser.named("nobody")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(InputError, match="there is no user"):
        AppUser.named("no-such-user-here")
    with pytest.raises(InputError, match="must not run as root"):
        AppUser.named("root")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_the_user_of_apps_gets_copies_and_cannot_read_the_keys(project: Project, tmp_path: Path) -> None:
    user = AppUser.named("nobody")
    folder = tmp_path / "run"
    (copy,) = copy_for(user, folder, project.secret)
    assert (folder.stat().st_uid, copy.stat().st_uid) == (user.uid, user.uid)
    assert modes(folder) == {".": "0o700", "superexec.secret": "0o600"}
    target = tmp_path / "of-root"
    target.touch()
    (folder / "link").symlink_to(target)
    hand_over_tree(folder, user)
    assert target.stat().st_uid == 0, "a link that the user made gives it nothing"
    (tmp_path / "linked").symlink_to(folder)
    with pytest.raises(StoreError, match="is a link"):
        make_private_folder(tmp_path / "linked")
    readable = ["cat", str(project.folder / "ca.key")]
    done = subprocess.run(readable, user=user.uid, group=user.gid, extra_groups=[], capture_output=True, check=False)
    assert done.returncode != 0
    with pytest.raises(InputError, match=r"cannot (write in|run)"):
        require_access(project.folder, user)


def table_of(tmp_path: Path, names: list[str], *extra: str) -> Path:
    """A table of sites that have each made a request."""
    lines = ["name,csr,examples"]
    for name in names:
        site(tmp_path, name)
        lines.append(f"{name},{name}/request.csr,10")
    path = tmp_path / "sites.csv"
    path.write_text("\n".join([*lines, *extra]) + "\n")
    return path


def test_many_sites_are_enrolled_in_one_call(project: Project, tmp_path: Path) -> None:
    table = table_of(tmp_path, ["a", "b", "c"])
    words = ["flower", "enrol", "--table", str(table), "--project", str(project.folder), "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(fedquit, words)
    assert result.exit_code == 0, result.output
    assert sorted(project.sites) == ["a", "b", "c"]
    assert "3 sites are enrolled" in result.output
    for name in "abc":
        folder = SiteFolder(tmp_path / name)
        folder.install(Bundle.unpack((tmp_path / "out" / f"{name}.tar").read_bytes()))
        assert folder.about["name"] == name


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("a,a/request.csr,10", "named twice"),
        ("d,a/request.csr,10", "node key of this request is that of a"),
        ("d,nowhere.csr,10", "cannot read"),
        ("d,a/request.csr,many", "line 4 of"),
        ("D!,a/request.csr,10", "no name of a site"),
        ("d\0,a/request.csr,10", "no name of a site"),
        ("ä,a/request.csr,10", "no name of a site"),
        (f"{'d' * 300},a/request.csr,10", "no name of a site"),
        ("../d,a/request.csr,10", "no name of a site"),
        ("d,a/request\0.csr,10", "cannot read"),
        (f"d,{'x' * 300}.csr,10", "cannot read"),
        (f"d,{'x' * 200_000},10", "no column for each of"),
        (f"d,d/request.csr,{'9' * 5000}", "line 4 of"),
        ("d,d/request.csr,1000000000000", "cannot have more than 1,000,000,000 examples"),
    ],
    ids=lambda value: value[:24].replace("\0", "0"),
)
def test_a_table_with_a_wrong_line_admits_nobody(project: Project, tmp_path: Path, line: str, sentence: str) -> None:
    table = table_of(tmp_path, ["a", "b"], line)
    site(tmp_path, "d")
    words = ["flower", "enrol", "--table", str(table), "--project", str(project.folder), "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(fedquit, words)
    assert result.exit_code != 0
    assert isinstance(result.exception, InputError), "one sentence, and no traceback"
    assert sentence in str(result.exception)
    assert len(str(result.exception)) < 600
    assert project.sites == {}
    assert not list((tmp_path / "out").glob("*.tar"))


@pytest.mark.parametrize("command", ["enrol", "rotate"])
def test_a_very_long_name_is_answered_with_a_sentence(command: str, project: Project, tmp_path: Path) -> None:
    words = ["flower", command, "d" * 300, str(site(tmp_path, "d").request), "--project", str(project.folder)]
    result = CliRunner().invoke(fedquit, [*words, *(["--examples", "10"] if command == "enrol" else [])])
    assert isinstance(result.exception, InputError)
    assert "no name of a site" in str(result.exception)


def test_bundles_that_cannot_be_written_where_the_operator_says(project: Project, tmp_path: Path) -> None:
    table = table_of(tmp_path, ["a", "b"])
    (tmp_path / "out").write_text("a file")
    words = ["flower", "enrol", "--table", str(table), "--project", str(project.folder), "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(fedquit, words)
    assert isinstance(result.exception, StoreError)
    assert "cannot write" in str(result.exception)
    assert project.sites == {}
    assert (tmp_path / "out").read_text() == "a file"


def test_a_fingerprint_in_the_table_is_compared(project: Project, tmp_path: Path) -> None:
    site(tmp_path, "a")
    table = tmp_path / "sites.csv"
    table.write_text("name,csr,examples,fingerprint\na,a/request.csr,10,ab cd\n")
    words = ["flower", "enrol", "--table", str(table), "--project", str(project.folder)]
    result = CliRunner().invoke(fedquit, words)
    assert "the request of a has the fingerprint" in str(result.exception or result.output)
    assert project.sites == {}


def test_the_operator_agrees_on_another_number_of_examples(project: Project, tmp_path: Path) -> None:
    enrolled(project, tmp_path, "hospital-0", examples=7)
    words = ["flower", "examples", "hospital-0", "12", "--project", str(project.folder)]
    result = CliRunner().invoke(fedquit, words)
    assert "counts for 12 examples from the next round on, and for 7 until now" in result.output
    assert project.sites["hospital-0"].examples == 12
    with pytest.raises(InputError, match="at least one example"):
        project.agree_examples("hospital-0", 0)
    with pytest.raises(InputError, match="cannot have more than 1,000,000,000 examples"):
        project.agree_examples("hospital-0", 10**12)


# The commands of the processes ---------------------------------------------------------------------------------------


def pairs(command: list[str]) -> dict[str, str]:
    """Each word of a command with the one that follows it."""
    return dict(itertools.pairwise(command))


def test_apps_run_apart_from_the_node_and_the_superlink_and_know_a_secret(project: Project, tmp_path: Path) -> None:
    """Without the secret anybody on the machine is given the task of an app, as `test_stranger.py` tries."""
    folder = enrolled(project, tmp_path, "hospital-0")
    node = Node("hospital-0", 9094, {}, folder.node_key)
    sides = [
        service.superlink_descriptions(project, make_private_folder(tmp_path / "state"), None),
        service.SiteRun(folder, tmp_path / "home").descriptions(node),
    ]
    for serving, running in sides:
        secret = Path(pairs(serving["command"])["--superexec-auth-secret-file"]).read_bytes()
        assert len(secret) == 32
        assert pairs(serving["command"])["--isolation"] == "process"
        assert Path(pairs(running["command"])["--superexec-auth-secret-file"]).read_bytes() == secret
    of_node = pairs(sides[1][0]["command"])
    assert of_node["--trusted-entities"] == str(folder.trust)
    assert "--insecure" not in of_node


@pytest.mark.parametrize(
    ("trust", "words", "sentence"),
    [
        ("{}\n", ["--trusted-entities", "trust.yaml", "--isolation", "process"], "trusts nobody"),
        (None, ["--isolation", "process"], "runs signed apps only"),
        (None, ["--trusted-entities", "trust.yaml"], "in a process of their own"),
    ],
)
def test_a_node_that_would_run_any_app_does_not_start(
    trust: str | None,
    words: list[str],
    sentence: str,
    project: Project,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = enrolled(project, tmp_path, "hospital-0")
    if trust is not None:
        folder.trust.write_text(trust)
    monkeypatch.setattr(sys, "argv", ["supernode", str(folder.folder), *words])
    with pytest.raises(FedquitError, match=sentence):
        supernode.main()


# A node that keeps its certificate -----------------------------------------------------------------------------------


class _Ended(Exception):
    """The node is stopped."""


def test_a_new_certificate_is_renewed_in_time_though_the_one_before_had_expired(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [1e9]
    renewals: list[float] = []
    said: list[str] = []

    class Site:
        """A site whose certificate has expired, and whose operator sends another after 100 s."""

        def certificate(self) -> SimpleNamespace:
            return SimpleNamespace(serial_number=1 if now[0] < 1e9 + 100 else 2)

        def seconds_left(self) -> float:
            return -1.0 if now[0] < 1e9 + 100 else 30.0

        def renewal_due(self) -> bool:
            return not renewals

        def post(self, path: str, body: bytes) -> bytes:
            raise DeploymentError("the front cannot be reached.")

        def renew(self) -> None:
            if self.seconds_left() < 0:
                raise InputError("it has expired.")
            renewals.append(now[0] - 1e9)

    def sleep(seconds: float) -> None:
        now[0] += seconds
        if now[0] > 1e9 + 300:
            raise _Ended

    clock = SimpleNamespace(time=lambda: now[0], monotonic=lambda: now[0], sleep=sleep)
    monkeypatch.setattr(service, "time", clock)
    courier = SimpleNamespace(step=lambda: None)
    with pytest.raises(_Ended):
        service._keep_certificate(Site(), "hospital-0", courier, said.append)  # type: ignore[arg-type]
    assert renewals == [pytest.approx(100, abs=2)]
    assert sum("HAS EXPIRED" in line for line in said) == 1, "it says so, and not every second"


def test_a_clock_that_is_set_back_by_a_year_does_not_keep_a_certificate_from_being_renewed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A machine that starts with a wrong clock: its certificate has expired by that one, and is due a week later."""
    year = 365 * 86_400.0
    passed, wrong = [0.0], [year]
    renewals: list[float] = []

    class Site:
        """A site whose certificate is valid for 14 days."""

        def certificate(self) -> SimpleNamespace:
            return SimpleNamespace(serial_number=1)

        def seconds_left(self) -> float:
            return 14 * 86_400 - passed[0] - wrong[0]

        def renewal_due(self) -> bool:
            return self.seconds_left() < 7 * 86_400 and not renewals

        def post(self, path: str, body: bytes) -> bytes:
            raise DeploymentError("the front cannot be reached.")

        def renew(self) -> None:
            if self.seconds_left() < 0:
                raise DeploymentError("it has expired.")
            renewals.append(passed[0] / 86_400)

    def sleep(_: float) -> None:
        passed[0] += 600.0
        if passed[0] > 3600:
            wrong[0] = 0.0  # a time server was asked
        if passed[0] > 15 * 86_400:
            raise _Ended

    clock = SimpleNamespace(time=lambda: 1e9 + passed[0] + wrong[0], monotonic=lambda: passed[0], sleep=sleep)
    monkeypatch.setattr(service, "time", clock)
    courier = SimpleNamespace(step=lambda: None)
    with pytest.raises(_Ended):
        service._keep_certificate(Site(), "hospital-0", courier, lambda _: None)  # type: ignore[arg-type]
    assert renewals == [pytest.approx(7, abs=0.1)]


def test_a_certificate_that_cannot_be_read_ends_no_node_and_one_that_is_due_at_once_is_not_renewed_every_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passed = [0.0]
    renewals: list[float] = []
    said: list[str] = []

    class Site:
        """A site whose disk fails for a while, and whose server gives certificates of a day that count as over."""

        def certificate(self) -> SimpleNamespace:
            if passed[0] < 60:
                raise StoreError("cannot read tls.pem (Input/output error): look after the disk.")
            return SimpleNamespace(serial_number=len(renewals))

        def seconds_left(self) -> float:
            return 86_400.0

        def renewal_due(self) -> bool:
            return True

        def renew(self) -> None:
            renewals.append(passed[0])

        def post(self, path: str, body: bytes) -> bytes:
            raise DeploymentError("the front cannot be reached.")

    def sleep(seconds: float) -> None:
        passed[0] += seconds
        if passed[0] > 7200:
            raise _Ended

    clock = SimpleNamespace(time=lambda: passed[0], monotonic=lambda: passed[0], sleep=sleep)
    monkeypatch.setattr(service, "time", clock)
    with pytest.raises(_Ended):
        service._keep_certificate(Site(), "hospital-0", SimpleNamespace(step=lambda: None), said.append)  # type: ignore[arg-type]
    assert sum("cannot be looked after" in line for line in said) == 1, "once, and the node goes on"
    assert renewals[0] == pytest.approx(60, abs=2)
    assert len(renewals) <= 7200 / service.AFTER_RENEWAL + 1


def test_a_node_says_that_app_code_could_read_its_keys_and_never_gives_up(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that is started before its server, or before it is registered, ends and is started again, for years."""
    folder = enrolled(project, tmp_path, "hospital-0")
    started: list[dict[str, Any]] = []

    def supervised(*_: object, **options: Any) -> None:
        started.append(options)
        raise _Ended

    monkeypatch.setattr(service, "SupervisedProcess", supervised)
    said: list[str] = []
    with pytest.raises(_Ended):
        service.run_site(service.SiteRun(folder, tmp_path / "home"), say=said.append)
    assert SAME_USER in said
    pauses = itertools.islice(started[0]["backoff"], 100_000)
    assert max(pauses) <= 60, "soon after its server is there"
    year = 365 * 86_400
    assert started[0]["backoff"].attempts * started[0]["backoff"].longest > 100 * year
    lock = folder.folder / "node" / service.NODE_LOCK
    with only_one(lock, ""), pytest.raises(StoreError, match="another node of hospital-0 runs on this machine"):
        service.run_site(service.SiteRun(folder, tmp_path / "home"), say=said.append)


def test_the_list_of_sites_has_a_history(project: Project, tmp_path: Path) -> None:
    folder = enrolled(project, tmp_path, "hospital-0")
    folder.join(new=True)
    project.rotate("hospital-0", folder.request.read_bytes())
    project.revoke("hospital-0")
    site = project.sites["hospital-0"]
    assert [what for what, _ in site.history] == ["enrolled", "rotated", "revoked"]
    assert site.history[-1][1] == site.revoked


# What the server learns of its sites ---------------------------------------------------------------------------------


def registrar(project: Project, state: Path, say: Callable[[str], None]) -> service.Registrar:
    for folder in (project.server, state):
        make_private_folder(folder)
    nobody: Any = None  # nothing here is asked of a SuperLink
    return service.Registrar(project, state, nobody, project.server / "registered.json", None, say)


def test_who_takes_part_is_written_again_at_once_where_the_server_apps_file_is_damaged_or_gone(
    project: Project, tmp_path: Path
) -> None:
    enrolled(project, tmp_path, "hospital-0")
    said: list[str] = []
    state = tmp_path / "state"
    following = registrar(project, state, said.append)
    following.control = SimpleNamespace(  # type: ignore[assignment]
        connected=lambda: contextlib.nullcontext(SimpleNamespace(nodes=dict, register=lambda *_: 1, unregister=id))
    )
    with following.following():
        (state / "sites.json").write_bytes((state / "sites.json").read_bytes()[:40])
        eventually(lambda: bool(readable(state)))
        (state / "sites.json").unlink()
        eventually(lambda: bool(readable(state)))
        assert (state / "sites.json").stat().st_mode & 0o777 == 0o600
        sentence = "was damaged or gone, and is written again as the project has it"
        eventually(lambda: sum(sentence in line for line in said) == 2)
        project.revoke("hospital-0")
        eventually(lambda: readable(state) == {})
    assert len([line for line in said if "damaged or gone" in line]) == 2, "a change is no damage"


def test_what_app_code_puts_in_the_place_of_the_servers_files_is_neither_read_nor_waited_for(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state directory is the app's: a link to a key of root's, a pipe that nobody writes to, a file without end."""
    enrolled(project, tmp_path, "hospital-0")
    state = tmp_path / "state"
    following = registrar(project, state, lambda _: None)
    following.control = SimpleNamespace(  # type: ignore[assignment]
        connected=lambda: contextlib.nullcontext(SimpleNamespace(nodes=dict, register=lambda *_: 1, unregister=id))
    )
    secret = project.folder / "ca.key"

    def swapped(path: Path, _: object) -> Path:
        """App code wins the race: at once after the write there is a link."""
        path.unlink()
        path.symlink_to(secret)
        return path

    with monkeypatch.context() as race:
        race.setattr(service, "hand_over", swapped)
        following.bring_up_to_date()
    assert (state / "sites.json").is_symlink()
    before = secret.read_bytes()
    for place in ("link", "pipe", "endless"):
        for name in ("sites.json", "notices.json"):
            (state / name).unlink(missing_ok=True)
            if place == "pipe":
                os.mkfifo(state / name)
            else:
                (state / name).symlink_to(secret if place == "link" else "/dev/zero")
        following.mend_membership()
        following.carry_notices()
        for name in ("sites.json", "notices.json"):
            assert stat.S_ISREG((state / name).lstat().st_mode), "another file, and not through the link"
        assert b"PRIVATE" not in (state / "sites.json").read_bytes()
        assert readable(state)
    assert secret.read_bytes() == before


def readable(state: Path) -> dict[str, Any] | None:
    """Who takes part; None where the file is damaged or gone."""
    with contextlib.suppress(StoreError):
        return read_membership(state)
    return None


def eventually(holds: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_node_key_that_cannot_be_taken_over_is_answered_with_how_to_make_it_so(tmp_path: Path) -> None:
    key = ec.generate_private_key(ec.SECP384R1())
    folder = SiteFolder(tmp_path / "site")
    folder.folder.mkdir(mode=0o755)
    locked = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))
    pkcs8 = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    for content in (locked, pkcs8, b"no key"):
        with pytest.raises(InputError, match="ssh-keygen -p"):
            folder.take_node_key(content)
    folder.take_node_key(key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    assert folder.folder.stat().st_mode & 0o777 == 0o700, "also where an empty folder was there"
    folder.join()


class SuperLink(http.server.BaseHTTPRequestHandler):
    """Answers to `unregister-node` as it is told to; with nothing where no answer is left."""

    answers: ClassVar[list[tuple[int, bytes]]]

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.answers:
            status, body = self.answers.pop(0)
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("last", [(200, b""), (404, b"Node ID not found for account.")])
def test_a_key_counts_as_unregistered_once_the_superlink_has_said_so(
    last: tuple[int, bytes], project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    enrolled(project, tmp_path, "hospital-0")
    project.revoke("hospital-0")
    (key,) = project.sites["hospital-0"].fingerprints
    said: list[str] = []
    carrier = registrar(project, tmp_path / "state", said.append)
    write_private_json(carrier.memo, {key: 7})
    monkeypatch.setattr(SuperLink, "answers", [], raising=False)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), SuperLink) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{server.server_port}"

        @contextlib.contextmanager
        def connected() -> Iterator[Connection]:
            with contextlib.closing(HTTPConnection(address, timeout=5)) as connection:
                yield Connection(connection, address)

        carrier.control = SimpleNamespace(connected=connected)  # type: ignore[assignment]
        for answers in ([], [(503, b"Service Unavailable")], [(404, b"Not Found")]):
            SuperLink.answers[:] = answers
            with pytest.raises(DeploymentError):
                carrier.bring_up_to_date()
            assert read_json(carrier.memo) == {key: 7}, "it is tried again"
            assert said == []
        SuperLink.answers[:] = [last]
        carrier.bring_up_to_date()
        server.shutdown()
    assert read_json(carrier.memo) == {key: None}
    assert said == ["node 7 of hospital-0 is unregistered."]


def test_the_server_app_learns_of_which_requests_sites_have_given_notice(project: Project, tmp_path: Path) -> None:
    for name in ("hospital-0", "hospital-1"):
        enrolled(project, tmp_path, name)
    carrier = registrar(project, tmp_path / "state", lambda _: None)
    board = NoticeBoard(project.server, "127.0.0.1:9443")
    board.take("hospital-0", b'{"requests": ["0a", "0b"]}')
    board.take("hospital-1", b'{"requests": ["0c"]}')
    project.revoke("hospital-1")
    carrier.carry_notices()
    identity = project.sites["hospital-0"].fingerprints[0]
    assert read_notices(tmp_path / "state") == {identity: {"0a", "0b"}}, "by identity, and not of a revoked site"
    board.take("hospital-0", b'{"requests": ["0d"]}')
    carrier.carry_notices()
    assert read_notices(tmp_path / "state") == {identity: {"0a", "0b", "0d"}}


def test_the_operator_is_told_once_a_day_of_sites_that_cannot_be_heard(project: Project, tmp_path: Path) -> None:
    for name in ("hospital-0", "hospital-1", "hospital-2"):
        enrolled(project, tmp_path, name)
    enrolled(project, tmp_path, "hospital-3")
    project.revoke("hospital-2")
    forgotten = Identity(f"key:{project.sites['hospital-3'].fingerprints[0]}", "hospital-3", authenticated=True)
    roster = Roster(tmp_path / "state")
    roster.enrol([(forgotten, 10)])
    roster.note_standing({0}, set())
    checksum = tmp_path / "state" / "clients.sha256"
    checksum.write_text("of the list that the server is about to write\n")
    said: list[str] = []
    watcher = registrar(project, tmp_path / "state", said.append)
    now = time.time()
    (project.server / "seen.json").write_text(json.dumps({"hospital-0": {"time": now + 2.5 * 86_400}}))
    watcher.warn_of_mute_sites(now)
    assert said == [], "they were enrolled a moment ago"
    for hour in range(48):
        watcher.warn_of_mute_sites(now + 3 * 86_400 + 3600 * hour)
    assert ["hospital-1 was never seen" in line for line in said] == [True, False, True, False]
    assert sum("hospital-0 was last seen 1 days ago" in line for line in said) == 1
    assert "Ask the site to start its node" in said[0]
    assert not any("hospital-2" in line or "hospital-3" in line for line in said), "nobody waits for them"
    watcher.warn_of_mute_sites(now + 30 * 86_400)
    assert "answer it with `fedquit flower rotate hospital-1`" in said[-1]
    assert "about to write" in checksum.read_text(), "who only looks writes nothing there"
