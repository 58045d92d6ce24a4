# SPDX-License-Identifier: Apache-2.0
"""A deployment from before the closed federation becomes one: its clients, requests and history keep their meaning.

`recorded/before_closed.tar.gz` was made by the code of 4b0fb88, the last commit without closed federations: `fedquit
flower serve` with TLS and three members, of which clinic-2 was forgotten; then the operator asked for clinic-1.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import shutil
import sqlite3
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("flwr", reason="needs the extra `flower`")

from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key
from typer.testing import CliRunner

from fedquit.cli import app as fedquit
from fedquit.errors import FedquitError, InputError, StoreError
from fedquit.flower.closed.binding import bind
from fedquit.flower.closed.project import Project
from fedquit.flower.closed.service import open_federation
from fedquit.flower.closed.site_folder import SiteFolder
from fedquit.flower.closed.takeover import take_over
from fedquit.flower.config import ServerConfig
from fedquit.flower.deploy.demo import app_folder
from fedquit.flower.in_process import SUPERLINK
from fedquit.flower.ledger import project_of, read_entries, write_project
from fedquit.flower.membership import write_membership
from fedquit.flower.outbox import Inbox, Outbox
from fedquit.flower.phases import Phases
from fedquit.flower.server import ServerResult, serve
from fedquit.flower.twice import write_json_twice
from fedquit.running.store import locked
from flower.closed_world import new_project
from flower.grid_world import Hurried, InProcess, Node

pytestmark = pytest.mark.flower
RECORDED = Path(__file__).parent / "recorded" / "before_closed.tar.gz"
NAMES = ("clinic-0", "clinic-1", "clinic-2")


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """The folder with the old deployment: state, keys, home-0 to home-2."""
    folder = tmp_path / "old"
    with tarfile.open(RECORDED) as tar:
        tar.extractall(folder, filter="data")
    return folder


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return new_project(tmp_path / "project")


@pytest.fixture
def task() -> Iterator[ModuleType]:
    """The network and the data of the example app, which the old deployment ran."""
    sys.path.insert(0, str(app_folder()))
    try:
        yield importlib.import_module("forgetting.task")
    finally:
        sys.path.remove(str(app_folder()))
        for name in [name for name in sys.modules if name.partition(".")[0] == "forgetting"]:
            del sys.modules[name]


def contents(folder: Path) -> dict[str, bytes]:
    """The files of a state directory; those that SQLite makes when it is read are left out."""
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(p.relative_to(folder)): p.read_bytes() for p in paths if not p.name.endswith(("-wal", "-shm", ".lock"))}


def clinics(task: ModuleType, old: Path) -> InProcess:
    """The nodes of the old deployment, with the keys that they had."""
    from flwr.clientapp import ClientApp

    from fedquit.flower.client import erasable

    nodes = []
    for number, name in enumerate(NAMES):
        app = erasable(
            ClientApp(), model=lambda _: task.Net(), data=lambda _, number=number: task.load_partition(number, 3)
        )
        home = {"partition-id": number, "fedquit-home": str(old / f"home-{number}")}
        public = load_ssh_public_key((old / "keys" / f"{name}.pub").read_bytes())
        key = public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        nodes.append(Node(100 + number, app, home, name=name, key=key))
    return InProcess(nodes)


def served(grid: InProcess, task: ModuleType, state: Path, **changes: object) -> ServerResult:
    settings = {
        "fedquit.state": str(state),
        "fedquit.train.rounds": 3,
        "fedquit.train.batch-size": 16,
        "fedquit.train.lr": 0.1,
        "fedquit.recover-rounds": 1,
        "fedquit.min-nodes": 1,
        "fedquit.floor": 1,
        **changes,
    }
    return run(grid, task, settings)


def run(grid: InProcess, task: ModuleType, settings: Mapping[str, Any]) -> ServerResult:
    from flwr.app import Context, RecordDict

    context = Context(1, SUPERLINK, {}, RecordDict(), {})
    return serve(grid, context, model=lambda _: task.Net(), config=ServerConfig.of(settings), clock=Hurried().clock)


def test_each_key_becomes_a_site_and_nothing_of_the_old_state_is_lost(old: Path, project: Project) -> None:
    state = old / "state"
    before = contents(state)
    taken = take_over(project, state)
    sites = project.sites
    assert sorted(sites) == list(NAMES)
    assert {name: site.examples for name, site in sites.items()} == {"clinic-0": 400, "clinic-1": 473, "clinic-2": 563}
    roster = json.loads(before["clients.json"])
    assert {f"key:{site.fingerprints[0]}" for site in sites.values()} == {member["key"] for member in roster}
    assert [taken.members[name].number for name in NAMES] == [0, 1, 2]
    assert taken.settings == {
        "partitions": 3,
        "fedquit.recover-rounds": 1,
        "fedquit.train.rounds": 2,
        "fedquit.min-nodes": 3,
    }
    after = contents(state)
    assert after.keys() - before.keys() == {"ledger.copy.json", "ledger.sha256"}
    ledger = json.loads(before["ledger.json"])
    assert json.loads(after["ledger.json"]) == {
        **ledger,
        "claim": {**ledger["claim"], "closed": True, "project": project.fingerprint},
    }
    assert {name for name in before if after.get(name) != before[name]} == {"ledger.json"}


def test_a_second_time_nothing_happens(old: Path, project: Project) -> None:
    take_over(project, old / "state")
    listed = (project.folder / "sites.json").stat().st_mtime_ns
    before = contents(old / "state")
    assert take_over(project, old / "state").sites == ()
    assert (project.folder / "sites.json").stat().st_mtime_ns == listed
    assert contents(old / "state") == before


def test_a_takeover_that_was_killed_is_finished_by_the_next(
    old: Path, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(_: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("fedquit.flower.closed.takeover.close_ledger", killed)
        with pytest.raises(KeyboardInterrupt):
            take_over(project, old / "state")
    take_over(project, old / "state")
    assert json.loads((old / "state" / "ledger.json").read_text())["claim"]["closed"]
    assert len(project.sites) == 3


def test_a_takeover_that_was_killed_is_finished_by_no_other_project(
    old: Path, project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else two projects have the same sites, and both may serve one state directory."""

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    for name in ("change_sites", "close_ledger"):
        with monkeypatch.context() as patch:
            patch.setattr(f"fedquit.flower.closed.takeover.{name}", killed)
            with pytest.raises(KeyboardInterrupt):
                take_over(project, old / "state")
        refused(new_project(tmp_path / name), old, "serve it with the project that it belongs to")
    assert len(take_over(project, old / "state").members) == 0, "all are sites since the second time"
    assert len(project.sites) == 3


def test_another_project_does_not_serve_the_state(
    old: Path, project: Project, task: ModuleType, tmp_path: Path
) -> None:
    """It would revoke everybody, and the request that waits would withdraw the model."""
    state = old / "state"
    other = new_project(tmp_path / "other")
    with pytest.raises(StoreError, match=r"no client of .* is a site of .*taken over first"):
        open_federation(other, state).__enter__()
    take_over(project, state)
    write_membership(state, project.sites.values())
    before = contents(state)
    with pytest.raises(StoreError, match="serve it with the project that it belongs to") as refusal:
        open_federation(other, state).__enter__()
    assert project.fingerprint[:16] in str(refusal.value)
    assert contents(state) == before, "before the list of sites is written"
    write_project(state, other.fingerprint)
    with pytest.raises(StoreError, match="give the --project that it belongs to"):
        served(clinics(task, old), task, state)
    assert [entry.client for entry in read_entries(state)] == [2], "the operator's request still waits"
    bind(project, state)
    assert served(clinics(task, old), task, state).erased == {1, 2}


def test_a_closed_state_from_before_fingerprints_is_bound_at_its_next_start(
    old: Path, project: Project, task: ModuleType, tmp_path: Path
) -> None:
    state = old / "state"
    take_over(project, state)
    ledger = json.loads((state / "ledger.json").read_text())
    del ledger["claim"]["project"]
    write_json_twice(state / "ledger.json", ledger)
    write_membership(state, project.sites.values())
    bind(project, state)
    assert project_of(state) == "", "the server app may be running: nobody else writes to its ledger"
    served(clinics(task, old), task, state)
    assert project_of(state) == project.fingerprint
    log = (state / "events.jsonl").read_text()
    assert log.count(f"belongs to the project {project.fingerprint[:16]} from now on") == 1
    served(clinics(task, old), task, state)
    assert (state / "events.jsonl").read_text().count("from now on") == 1
    with pytest.raises(StoreError, match="serve it with the project that it belongs to"):
        bind(new_project(tmp_path / "other"), state)


def test_the_request_that_waited_is_served_and_a_forgotten_client_stays_forgotten(
    old: Path, project: Project, task: ModuleType
) -> None:
    state = old / "state"
    take_over(project, state)
    with pytest.raises(StoreError, match="closed federation"):  # and never again without its sites
        served(clinics(task, old), task, state)
    write_membership(state, project.sites.values())
    grid = clinics(task, old)
    result = served(grid, task, state)
    first, second = read_entries(state)
    assert (first.id, first.client, first.status, first.told) == ("r0001", 2, "done", True)
    assert (second.client, second.request, second.source, second.status) == (1, "0670ae7b30ad4248", "operator", "done")
    assert second.method == "fedquit"
    assert result.erased == {1, 2}
    assert result.rounds == 3, "the two rounds of before count"
    assert "train.fedquit" not in grid.nodes[102].asked, "clinic-2 was forgotten before the takeover"
    assert "train.fedquit" in grid.nodes[100].asked


def test_served_as_the_command_says_the_model_stays(old: Path, project: Project, task: ModuleType) -> None:
    """One site stays, below the floor of a closed federation: a request that waits would withdraw the model."""
    state = old / "state"
    taken = take_over(project, state)
    assert taken.staying == 1, "clinic-2 was forgotten, and clinic-1 is about to be"
    assert taken.settings_to_serve == {**taken.settings, "fedquit.floor": 1}
    write_membership(state, project.sites.values())
    settings = {**taken.settings_to_serve, "fedquit.state": str(state)}
    result = run(clinics(task, old), task, settings)
    assert [(entry.status, entry.method) for entry in result.erasures] == [("done", "fedquit")] * 2
    assert result.rounds == 2, "none of the rounds is lost"


def test_the_floor_counts_who_stays(old: Path, project: Project) -> None:
    state = old / "state"
    shutil.rmtree(state / "requests")
    taken = take_over(project, state)
    assert (taken.staying, taken.floor) == (2, 3)
    chosen = dataclasses.replace(taken, settings={"fedquit.floor": 3})
    assert chosen.settings_to_serve == chosen.settings, "what the operator has set stays"
    assert "as it was set: training pauses" in chosen.warning
    assert "unless you set fedquit.floor=2" in chosen.warning
    enough = dataclasses.replace(taken, settings={"fedquit.floor": 2})
    assert (enough.settings_to_serve, enough.warning) == (enough.settings, "")
    Inbox(state).file(taken.members["clinic-0"].key)
    assert take_over(project, state).staying == 1
    project.revoke("clinic-1")
    nobody = take_over(project, state)
    assert nobody.staying == 0
    assert nobody.settings_to_serve == nobody.settings
    assert "Enrol more sites before you serve it" in nobody.warning


@pytest.mark.parametrize(("status", "staying"), [("received", 1), ("recovered", 1), ("failed", 2), ("withdrawn", 2)])
def test_a_request_in_the_ledger_counts_while_it_is_open(
    status: str, staying: int, old: Path, project: Project
) -> None:
    state = old / "state"
    shutil.rmtree(state / "requests")
    ledger = json.loads((state / "ledger.json").read_text())
    ledger["entries"].append({**ledger["entries"][0], "id": "r0002", "client": 1, "request": "0b", "status": status})
    write_json_twice(state / "ledger.json", ledger)
    assert take_over(project, state).staying == staying
    Inbox(state).withdraw("r0002")
    assert take_over(project, state).staying == (2 if status == "received" else staying), "it is taken back"


def test_samples_that_are_being_erased_are_taken_off_the_number_that_is_agreed(
    old: Path, project: Project, task: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the site counts for what it has given up, and is refused later when it leaves with what it has."""
    state = old / "state"
    shutil.rmtree(state / "requests")
    Outbox(old / "home-0").file(positions=[0, 1, 2, 3])

    def stop_when_started(phases: Phases, *turn: Any) -> None:
        start(phases, *turn)
        raise KeyboardInterrupt

    start = Phases._start
    with monkeypatch.context() as patch:
        patch.setattr(Phases, "_start", stop_when_started)
        with pytest.raises(KeyboardInterrupt):
            served(clinics(task, old), task, state)
    take_over(project, state)
    assert project.sites["clinic-0"].examples == 400
    write_membership(state, project.sites.values())
    served(clinics(task, old), task, state)
    member = json.loads((state / "clients.json").read_text())[0]
    assert (member["examples"], member["erased_samples"]) == (396, 4)
    Outbox(old / "home-0").file()
    leaves = served(clinics(task, old), task, state).erasures[-1]
    assert (leaves.client, leaves.kind, leaves.status, leaves.method) == (0, "client", "done", "fedquit"), leaves.reason


def test_samples_that_were_erased_before_are_not_taken_off_again(old: Path, project: Project) -> None:
    state = old / "state"
    clients = json.loads((state / "clients.json").read_text())
    clients[0] |= {"said": 400, "erased_samples": 30}
    (state / "clients.json").write_text(json.dumps(clients))
    take_over(project, state)
    after = json.loads((state / "clients.json").read_text())
    assert [(member["enrolled"], member["erased_samples"]) for member in after] == [(400, 0), (0, 0), (0, 0)]
    assert [member["examples"] for member in after] == [400, 473, 563]


def test_a_site_goes_on_with_the_key_that_it_had(old: Path, project: Project, tmp_path: Path) -> None:
    take_over(project, old / "state")
    identity = project.sites["clinic-0"].fingerprints
    site = SiteFolder(tmp_path / "site")
    site.take_node_key((old / "keys" / "clinic-0").read_bytes())
    site.join()
    site.install(project.rotate("clinic-0", site.request.read_bytes()))
    assert project.sites["clinic-0"].fingerprints == identity
    assert len(project.sites["clinic-0"].certificates) == 1
    assert site.node_key.private.stat().st_mode & 0o777 == 0o600
    site.take_node_key((old / "keys" / "clinic-0").read_bytes())  # again: nothing to do
    with pytest.raises(InputError, match="another node key"):
        site.take_node_key((old / "keys" / "clinic-1").read_bytes())
    with pytest.raises(InputError, match="no OpenSSH private key"):
        SiteFolder(tmp_path / "other").take_node_key((old / "keys" / "clinic-1.pub").read_bytes())


@pytest.mark.parametrize(
    ("missing", "sentence"),
    [
        ("ledger.json", "there is no ledger"),
        ("clients.json", r"has no clients\.json, .*copied in part"),
        ("phases", "has no model of phase 3, as a folder that was copied in part"),
    ],
)
def test_a_folder_that_was_copied_in_part_is_refused(missing: str, sentence: str, old: Path, project: Project) -> None:
    path = old / "state" / missing
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    before = contents(old / "state")
    refused(project, old, sentence)
    assert contents(old / "state") == before


def test_a_list_of_clients_without_one_that_the_ledger_names_is_refused(old: Path, project: Project) -> None:
    clients = json.loads((old / "state" / "clients.json").read_text())
    (old / "state" / "clients.json").write_text(json.dumps(clients[:2]))
    refused(project, old, r"speaks of client 2, whom clients\.json does not list, .*copied in part")


def refused(project: Project, old: Path, sentence: str, **options: dict[int, str]) -> None:
    with pytest.raises(FedquitError, match=sentence) as error:
        take_over(project, old / "state", **options)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)
    assert project.sites == {}, "nobody is let in"


def test_a_checkpoint_that_is_cut_off_is_refused(old: Path, project: Project) -> None:
    model = old / "state" / "phases" / "000003" / "state.safetensors"
    model.write_bytes(model.read_bytes()[:-1000])
    refused(project, old, "cannot be read")


def test_a_state_that_is_served_is_not_taken_over(old: Path, project: Project) -> None:
    for folder in (old / "state", old / "state" / "flower"):
        with locked(folder):
            refused(project, old, "another process is running")


def test_nothing_is_written_into_a_state_that_is_served(old: Path, project: Project) -> None:
    """As a server deletes a checkpoint: the file is gone, and its copy is not yet. Nobody may bring the file back."""
    model = old / "state" / "phases" / "000003" / "state.safetensors"
    model.rename(model.with_name("state.copy.safetensors"))
    before = contents(old / "state")
    with locked(old / "state"):
        refused(project, old, "another process is running")
    assert contents(old / "state") == before
    take_over(project, old / "state")
    assert model.exists(), "whoever holds the state directory mends it"


def test_a_folder_that_is_no_state_directory_is_not_made(project: Project, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="there is no ledger"):
        take_over(project, tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()


def test_keys_that_the_superlink_does_not_have_are_asked_for(old: Path, project: Project) -> None:
    state = old / "state"
    (state / "flower" / "superlink.db").unlink()
    refused(project, old, r"--member clinic-0=FILE")
    keys = {f"clinic-{i}": old / "keys" / f"clinic-{i}.pub" for i in range(2)}
    taken = take_over(project, state, keys)  # clinic-2 was forgotten, and needs no site
    assert [site.name for site in taken.sites] == ["clinic-0", "clinic-1"]
    assert [member.name for member in taken.forgotten] == ["clinic-2"]


def test_a_database_that_is_damaged_is_the_same_as_none(old: Path, project: Project) -> None:
    (old / "state" / "flower" / "superlink.db").write_bytes(b"no database" * 1000)
    refused(project, old, r"--member clinic-0=FILE")


def test_a_key_that_the_operator_had_removed_becomes_a_revoked_site(old: Path, project: Project) -> None:
    change_database(old, "UPDATE node SET status = 'unregistered' WHERE name = 'clinic-0'")
    take_over(project, old / "state")
    assert [name for name, site in project.sites.items() if site.revoked is not None] == ["clinic-0"]


def test_a_key_that_the_operator_had_removed_does_not_come_back_with_its_file(old: Path, project: Project) -> None:
    """Whoever gives all keys once more need not remember whom he has removed: the database does."""
    change_database(old, "UPDATE node SET status = 'unregistered' WHERE name = 'clinic-0'")
    keys = {f"clinic-{i}": old / "keys" / f"clinic-{i}.pub" for i in range(3)}
    taken = take_over(project, old / "state", keys)
    assert [name for name, site in project.sites.items() if site.revoked is not None] == ["clinic-0"]
    assert taken.never_here == ()


def change_database(old: Path, sql: str) -> None:
    database = sqlite3.connect(old / "state" / "flower" / "superlink.db")
    database.execute(sql)
    database.commit()
    database.close()


def test_names_that_no_site_can_have_are_given_anew(old: Path, project: Project) -> None:
    clients = json.loads((old / "state" / "clients.json").read_text())
    clients[1]["name"] = "Clinic B"
    (old / "state" / "clients.json").write_text(json.dumps(clients))
    refused(project, old, r"Give --name 1=NAME")
    refused(project, old, r"clients 0 and 1 have the name clinic-0", names={1: "clinic-0"})
    take_over(project, old / "state", names={1: "clinic-b"})
    assert sorted(project.sites) == ["clinic-0", "clinic-2", "clinic-b"]


def with_examples(old: Path, *counts: int) -> None:
    clients = json.loads((old / "state" / "clients.json").read_text())
    for client, count in zip(clients, counts, strict=True):
        client["examples"] = count
    write_json_twice(old / "state" / "clients.json", clients)


def test_a_client_that_said_far_more_examples_than_the_others_is_not_taken_at_its_word(
    old: Path, project: Project
) -> None:
    with_examples(old, 400, 10**12, 473)
    refused(project, old, r"client 1 \(clinic-1\) said .*000000 examples, .* than 4000 .* give --examples 1=N\.$")
    command = ["flower", "takeover", str(old / "state"), "--project", str(project.folder), "--examples"]
    for word, sentence in (
        ("1=many", "is no number of examples"),
        ("one=5", "write the number of a client"),
        (f"1={'9' * 5000}", "is no number of examples"),
        ("1=0", "at least one example"),
        (f"1={10**12}", "cannot have more than 1,000,000,000 examples"),
        ("7=5", "no client 7 becomes a site"),
    ):
        done = CliRunner().invoke(fedquit, [*command, word])
        assert sentence in str(done.exception), word
        assert project.sites == {}
        assert project_of(old / "state") == ""
    done = CliRunner().invoke(fedquit, [*command, "1=473"])
    assert done.exit_code == 0, done.output
    assert {site.name: site.examples for site in project.sites.values()} == {
        "clinic-0": 400,
        "clinic-1": 473,
        "clinic-2": 473,
    }
    assert "nothing was changed" in CliRunner().invoke(fedquit, [*command, "1=473"]).output, "as after a kill"
    again = CliRunner().invoke(fedquit, [*command, "1=474"])
    assert "is changed with `fedquit flower examples`" in str(again.exception)


@pytest.mark.parametrize(("counts", "believed"), [((100, 1000, 100), True), ((100, 1001, 100), False)])
def test_ten_times_the_median_of_the_others_is_believed(
    counts: tuple[int, int, int], believed: bool, old: Path, project: Project
) -> None:
    with_examples(old, *counts)
    if believed:
        take_over(project, old / "state")
        assert project.sites["clinic-1"].examples == 1000
    else:
        refused(project, old, "give --examples 1=N")
        take_over(project, old / "state", examples={1: 1001})
        assert project.sites["clinic-1"].examples == 1001, "the operator has the last word"


def test_a_client_without_a_key_cannot_become_a_site(old: Path, project: Project) -> None:
    clients = json.loads((old / "state" / "clients.json").read_text())
    clients[0] |= {"key": "partition:0", "name": "", "authenticated": False}
    (old / "state" / "clients.json").write_text(json.dumps(clients))
    refused(project, old, "had no key")


def test_a_state_of_another_project_is_not_taken_over(old: Path, project: Project, tmp_path: Path) -> None:
    take_over(project, old / "state")
    refused(new_project(tmp_path / "another"), old, "serve it with the project that it belongs to")


def test_the_command_says_what_comes_next(old: Path, project: Project) -> None:
    command = ["flower", "takeover", str(old / "state"), "--project", str(project.folder)]
    done = CliRunner().invoke(fedquit, command)
    assert done.exit_code == 0, done.output
    assert "client 1 is the site clinic-1, with 473 examples" in done.output
    assert "--set fedquit.train.rounds=2" in done.output
    assert "--set fedquit.floor=1" in done.output
    assert "without fedquit.floor=1 training pauses, and a request to be forgotten drops the model" in done.output
    assert "nothing was changed" in CliRunner().invoke(fedquit, command).output


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_old_nodes_and_the_old_database_go_on_behind_the_front(old: Path, project: Project, tmp_path: Path) -> None:
    """Real processes: the SuperLink of before, with its keys, and nodes with their old keys and homes."""
    state, app, log = old / "state", tmp_path / "app", (tmp_path / "log").open("w")
    shutil.copytree(app_folder(), app)
    command = [sys.executable, "-m", "fedquit", "flower"]
    subprocess.run([*command, "sign", app, "--project", project.folder], check=True, capture_output=True)
    take_over(project, state)
    settings = {"train.rounds": 3, "recover-rounds": 1, "floor": 1, "min-nodes": 2}
    options = ["--set=partitions=3", *(f"--set=fedquit.{name}={value}" for name, value in settings.items())]

    def start(*words: object) -> subprocess.Popen[bytes]:
        return subprocess.Popen([*command, *map(str, words)], stdout=log, stderr=log)

    processes = []
    with log:
        for number in (0, 1):
            site = SiteFolder(tmp_path / f"site-{number}")
            site.take_node_key((old / "keys" / f"clinic-{number}").read_bytes())
            site.join()
            site.install(project.rotate(f"clinic-{number}", site.request.read_bytes()))
            home = ["--home", old / f"home-{number}", "--set", f"partition-id={number}"]
            processes.append(start("node", "--site", site.folder, *home))
        processes.append(start("serve", app, "--state", state, "--project", project.folder, *options))
        try:
            deadline = time.monotonic() + 500
            while [entry.status for entry in read_entries(state)] != ["done", "done"]:
                assert time.monotonic() < deadline, (tmp_path / "log").read_text()[-5000:]
                assert processes[-1].poll() is None, (tmp_path / "log").read_text()[-5000:]
                time.sleep(0.3)
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                process.wait(60)
    assert read_entries(state)[1].client == 1
    assert "is registered already" in (tmp_path / "log").read_text(), "the SuperLink knew the keys"
    clients = json.loads((state / "clients.json").read_text())
    assert [member["name"] for member in clients] == list(NAMES), "nobody has become a new client"
