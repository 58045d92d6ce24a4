# SPDX-License-Identifier: Apache-2.0
"""Real processes, TLS and node keys: an erasure from beginning to end, who is not let in, and Ctrl-C."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedquit.flower.deploy.commands import Value
from fedquit.flower.deploy.keys import make_node_key, make_tls
from fedquit.flower.deploy.processes import Backoff
from fedquit.flower.deploy.stack import Stack
from fedquit.flower.outbox import Outbox
from flower.real_world import LONG, Federation, places_in, running_in

pytestmark = [pytest.mark.flower, pytest.mark.timeout(600)]
LEAVING = 0


def test_a_node_asks_and_is_forgotten(tmp_path: Path) -> None:
    with Federation(tmp_path, 2, {"train.rounds": 1}) as fed:
        assert running_in(tmp_path), "the processes are found by what they were given"
        fed.begin()
        fed.until("is here")
        asked = fed.ask(LEAVING)
        fed.finish()
        client, (entry,) = fed.number(LEAVING), fed.ledger["entries"]
        assert (entry["client"], entry["request"], entry["source"]) == (client, asked.id, "client")
        assert entry["authenticated"], "the node's registered key says who asked"
        assert [status for status, _ in entry["history"]] == ["received", "started", "unlearned", "recovered", "done"]
        assert fed.ledger["erased"] == [client]
        asked_to_work = {(e["phase"], e["client"]) for e in fed.events if e["event"] == "reply"}
        other = fed.number(1)
        assert asked_to_work == {("train", client), ("train", other), ("unlearn-0", client), ("recover-0", other)}
        assert Outbox(fed.homes[LEAVING]).get(asked.id).status == "served", "its owner can see it"
        assert len(list((fed.state / "phases").iterdir())) == 1
    assert running_in(tmp_path) == []


def test_a_node_without_a_registered_key_or_with_a_wrong_authority_is_refused(tmp_path: Path) -> None:
    once, keys = Backoff(attempts=0), tmp_path / "keys"
    with Stack(tmp_path / "stack", timeout=LONG) as stack:
        stranger = stack.add_node({}, make_node_key(keys, "stranger"), backoff=once)
        known = make_node_key(keys, "known")
        stack.control.register(known, "known")
        misled = stack.add_node({}, known, authority=make_tls(keys / "other").authority, backoff=once)
        deadline = time.monotonic() + LONG
        while not (stranger.gave_up and misled.gave_up):
            assert time.monotonic() < deadline, f"{stranger.tail()}\n{misled.tail()}"
            time.sleep(0.1)
        assert "refuses its key: it is not registered" in stranger.gave_up
        assert "not from the authority that it trusts" in misled.gave_up
        assert stack.control.online() == 0
    assert stack.process_ids == []


@pytest.mark.parametrize(
    ("line", "place"),
    [
        ('connect(9, {sa_family=AF_INET, sin_port=htons(443), sin_addr=inet_addr("192.0.2.1")}, 16) = 0', "192.0.2.1"),
        (
            "connect(9, {sa_family=AF_INET6, sin6_port=htons(443), sin6_flowinfo=htonl(0), "
            'inet_pton(AF_INET6, "2001:db8::1", &sin6_addr), sin6_scope_id=0}, 28) = -1 ENETUNREACH',
            "2001:db8::1",
        ),
    ],
)
def test_a_trace_shows_where_a_connection_goes(line: str, place: str) -> None:
    assert places_in(f'{line}\nconnect(9, {{sa_family=AF_UNIX, sun_path="/run/socket"}}, 110) = 0\n') == {place}


def test_ctrl_c_leaves_no_process_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fedquit", "flower", "demo", "--out", str(tmp_path / "demo")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as demo:
        assert demo.stderr
        said = []
        for line in demo.stderr:
            said.append(line)
            if "training round 1 " in line:
                break
        assert len(running_in(tmp_path)) > 4, said
        os.killpg(demo.pid, signal.SIGINT)  # what a terminal does
        demo.stderr.read()
        assert demo.wait(LONG) == 130
    assert running_in(tmp_path) == []


@pytest.mark.slow
def test_the_demo_ends_with_its_table_and_leaves_no_process_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fedquit", "flower", "demo", "--out", str(tmp_path / "demo")]
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    own = {**os.environ, "TMPDIR": str(temporary)}
    demo = subprocess.run(command, capture_output=True, text=True, check=False, env=own)
    assert demo.returncode == 0, demo.stderr[-3000:]
    assert "node-0 asked to be forgotten; fedquit served it" in demo.stdout
    rows = re.findall(r"^ +(\w+) +(\d+\.\d) +(\d+\.\d)", demo.stdout, re.MULTILINE)
    forget = {when: float(accuracy) for when, _, accuracy in rows}
    assert list(forget) == ["before", "unlearned", "recovered", "Natural", "Retrain"], demo.stderr[-3000:]
    assert forget["unlearned"] < forget["before"], "the node's data was unlearned"
    assert "points from the mean of 19 Retrains" in demo.stdout
    assert running_in(tmp_path) == []
    assert list(temporary.iterdir()) == []
    databases = list((tmp_path / "demo").rglob("superlink.db*"))
    assert databases, "they are where this test looks"
    for path in databases:
        assert b"NUMPY" not in path.read_bytes(), f"{path} holds a tensor"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_hundred_nodes_in_one_simulation(tmp_path: Path) -> None:
    many: dict[str, Value] = {"allow-unauthenticated": True, "train.clients-per-round": 10, "train.rounds": 10}
    with Federation(tmp_path, 100, many, mode="simulation") as fed:
        fed.begin()
        fed.until("training round 1 ")
        fed.ask(3)
        fed.finish()
        (entry,) = fed.ledger["entries"]
        assert (entry["status"], entry["client"], entry["authenticated"]) == ("done", fed.number(3), False)
        roster = json.loads((fed.state / "clients.json").read_text())
        assert len(roster) == 100
        assert not any(member["authenticated"] for member in roster), "anybody could claim a partition"
    assert fed.stack.process_ids == []
