# SPDX-License-Identifier: Apache-2.0
"""Keys, certificates, commands, surroundings, and processes that are process running and never left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from fedquit.cli import app
from fedquit.cli.flower import as_settings
from fedquit.core import State
from fedquit.errors import InputError, StoreError
from fedquit.flower.deploy import demo, reaper, stack
from fedquit.flower.deploy.commands import Node, as_toml, superlink_command, supernode_command
from fedquit.flower.deploy.control import CONNECTION, Control
from fedquit.flower.deploy.environment import LOOPBACK, environment, free_ports, program
from fedquit.flower.deploy.errors import DeploymentError
from fedquit.flower.deploy.keys import NodeKey, Tls, make_node_key, make_tls
from fedquit.flower.deploy.logs import end_reason, tail
from fedquit.flower.deploy.processes import Backoff, ProcessGroup, SupervisedProcess
from fedquit.flower.deploy.service import Link
from fedquit.flower.deploy.supervision import Plan, run_until_finished
from fedquit.flower.outbox import Outbox
from fedquit.utils.files import write_json

pytestmark = pytest.mark.flower
QUICK = Backoff(first=0.05, factor=1.0, attempts=3)


def eventually(holds: Callable[[], bool], seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


# Certificates and keys ------------------------------------------------------------------------------------------------


def shake_hands(server: Tls, trusted: Path, host: str) -> None:
    """A whole TLS handshake, in memory."""
    serving, calling = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context(cafile=str(trusted))
    calling.verify_flags |= ssl.VERIFY_X509_STRICT  # the default from Python 3.13 on
    serving.load_cert_chain(server.certificate, server.key)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        serving.wrap_bio(to_server, to_client, server_side=True),
        calling.wrap_bio(to_client, to_server, server_hostname=host),
    ]
    for _ in range(4):
        for end in ends:
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
    assert ends[1].version() == "TLSv1.3"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_the_certificate_holds_for_this_machine(host: str, tmp_path: Path) -> None:
    made = make_tls(tmp_path)
    shake_hands(made, made.authority, host)


def test_the_certificate_holds_for_no_other_host_and_no_other_authority(tmp_path: Path) -> None:
    made, other = make_tls(tmp_path / "one"), make_tls(tmp_path / "other")
    with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
        shake_hands(made, made.authority, "example.org")
    with pytest.raises(ssl.SSLCertVerificationError, match="verify failed"):
        shake_hands(made, other.authority, "localhost")


def test_a_node_key_is_what_flower_wants(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

    made = make_node_key(tmp_path, "node")
    private, public = (
        load_ssh_private_key(made.private.read_bytes(), None),
        load_ssh_public_key(made.public.read_bytes()),
    )
    assert isinstance(private, ec.EllipticCurvePrivateKey)
    assert isinstance(private.curve, ec.SECP384R1)
    assert private.public_key() == public


def test_nobody_else_can_read_a_secret_and_none_is_overwritten(tmp_path: Path) -> None:
    secrets = [make_tls(tmp_path).key, make_node_key(tmp_path, "node").private]
    assert [path.stat().st_mode & 0o777 for path in secrets] == [0o600, 0o600]
    before = secrets[1].read_bytes()
    with pytest.raises(StoreError, match="never overwritten"):
        make_node_key(tmp_path, "node")
    assert secrets[1].read_bytes() == before


# Commands and surroundings --------------------------------------------------------------------------------------------


NAMES = st.from_regex(r"[a-z][a-z-]{0,8}", fullmatch=True)
VALUES = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.integers(-9, 9) | st.booleans()


@given(st.dictionaries(NAMES, VALUES, max_size=4))
def test_settings_arrive_as_they_were(values: dict[str, str | int | bool]) -> None:
    from flwr.common.config import parse_config_args

    assert parse_config_args([as_toml(values)] if values else None) == values


def test_a_secure_superlink_asks_for_keys_and_installs_nothing(tmp_path: Path) -> None:
    tls = Tls(tmp_path / "ca", tmp_path / "certificate", tmp_path / "key")
    words = superlink_command(9000, tmp_path / "db", tls, "secure")
    assert "--enable-supernode-auth" in words
    assert "--insecure" not in words
    assert words[words.index("--ssl-keyfile") + 1] == str(tls.key)
    assert words[words.index("--database") + 1] == str(tmp_path / "db")
    for mode in ("secure", "insecure", "simulation"):
        assert "--disable-runtime-dependency-installation" in superlink_command(9000, tmp_path / "db", tls, mode)
    assert "--insecure" in superlink_command(9000, tmp_path / "db", tls, "insecure")


def test_a_secure_superlink_without_certificates_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="certificate"):
        superlink_command(9000, tmp_path / "db", None, "secure")


def test_a_node_shows_its_key_to_a_superlink_that_it_checks(tmp_path: Path) -> None:
    node = Node("n", 9001, {"partition-id": 3, "home": "a b"}, NodeKey(tmp_path / "k", tmp_path / "k.pub"))
    words = supernode_command(node, "host:9000", tmp_path / "ca", None)
    assert words[words.index("--root-certificates") + 1] == str(tmp_path / "ca")
    assert words[words.index("--auth-supernode-private-key") + 1] == str(tmp_path / "k")
    assert words[words.index("--node-config") + 1] == 'partition-id=3 home="a b"'
    assert "--insecure" not in words
    assert "--insecure" in supernode_command(Node("n", 9001, {}), "host:9000", None, None)


def test_nothing_calls_home_and_relative_paths_still_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")  # a command of an environment that nobody activated
    monkeypatch.setenv("PYTHONPATH", "src")
    monkeypatch.setenv("NO_PROXY", "example.org")
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "1")
    env = environment(Path("home"), "m")
    assert (env["FLWR_TELEMETRY_ENABLED"], env["FLWR_DISABLE_UPDATE_CHECK"], env["RAY_USAGE_STATS_ENABLED"]) == (
        "0",
        "1",
        "0",
    )
    assert env["FLWR_HOME"] == str(tmp_path / "home")
    assert env["PYTHONPATH"] == str(tmp_path / "src")
    assert env["NO_PROXY"] == "127.0.0.1,localhost,example.org"
    assert Path(env["PATH"].split(os.pathsep)[0], "flower-superexec").exists(), "Flower finds its helpers by the path"
    assert env[reaper.VARIABLE] == "m"


def test_without_the_extra_one_sentence_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DeploymentError, match=r"pip install 'fedquit\[flower\]'"):
        program("flwr")


def test_free_ports_are_free_and_different() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20
    for port in ports:
        with socket.socket() as probe:
            probe.bind((LOOPBACK, port))


def free_neighbours() -> tuple[int, int]:
    """Two ports, one after the other, that nobody listens on."""
    for port in free_ports(50):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind((LOOPBACK, port + 1))
            return port, port + 1
    raise AssertionError("no two neighbours are free")


def test_a_port_that_is_taken_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = free_neighbours()
    monkeypatch.setattr("fedquit.flower.deploy.environment.LOWEST_PORT", first)
    monkeypatch.setattr("fedquit.flower.deploy.environment.HIGHEST_PORT", second + 1)
    with socket.socket() as taken:
        taken.bind((LOOPBACK, first))
        taken.listen()
        assert free_ports(1) == [second]
        with pytest.raises(DeploymentError, match="no 2 free ports"):
            free_ports(2)


# Processes ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def group() -> Iterator[ProcessGroup]:
    with ProcessGroup(grace=0.5) as made:
        yield made


def supervised(group: ProcessGroup, script: str, folder: Path, said: list[str] | None = None) -> SupervisedProcess:
    say = said.append if said is not None else lambda _: None
    return SupervisedProcess(
        group, "it", ["sh", "-c", script], folder / "log", dict(os.environ), backoff=QUICK, say=say
    )


def test_a_process_that_is_killed_is_started_again(group: ProcessGroup, tmp_path: Path) -> None:
    said: list[str] = []
    process = supervised(group, "sleep 1000", tmp_path, said).start()
    first = process.pid
    process.crash()
    assert eventually(lambda: process.starts == 2 and process.running)
    assert process.pid != first
    assert said == ["it ended (killed by SIGKILL): starting it again in 0 s."]
    process.stop()
    assert not process.running


def test_what_a_killed_process_left_is_gone_before_its_successor_starts(group: ProcessGroup, tmp_path: Path) -> None:
    lonely = "setsid sleep 1000 & echo $! >> children; wait"  # in a session of its own, like Flower's helpers
    process = supervised(group, f"cd {tmp_path}; {lonely}", tmp_path).start()
    assert eventually(lambda: (tmp_path / "children").exists() and (tmp_path / "children").read_text().endswith("\n"))
    child = int((tmp_path / "children").read_text())
    process.crash()
    assert eventually(lambda: process.starts == 2)
    assert child not in reaper.marked(group.mark)
    process.stop()
    assert reaper.marked(group.mark) == []


def test_one_that_fails_again_and_again_is_given_up_with_its_reason(group: ProcessGroup, tmp_path: Path) -> None:
    said: list[str] = []
    process = supervised(group, "echo 'ERROR : Exit Code: 305'; echo 'Refused.'; exit 1", tmp_path, said).start()
    assert eventually(lambda: bool(process.gave_up))
    assert process.starts == 4
    assert process.gave_up == "it ended 4 times, the last time: Refused."
    assert said[-1].startswith(process.gave_up)
    process.stop()


def test_one_whose_port_is_taken_moves_to_another(group: ProcessGroup, tmp_path: Path) -> None:
    taken = ["sh", "-c", "echo 'error while attempting to bind: address already in use'; exit 1"]
    process = SupervisedProcess(
        group,
        "it",
        taken,
        tmp_path / "log",
        dict(os.environ),
        backoff=QUICK,
        command_on_other_port=lambda: ["sleep", "1000"],
    ).start()
    assert eventually(lambda: process.starts == 2 and process.running)
    assert process.command == ("sleep", "1000")
    process.stop()


def test_one_that_fails_for_another_reason_stays_where_it_is(group: ProcessGroup, tmp_path: Path) -> None:
    def never() -> list[str]:
        raise AssertionError("its port is free")

    process = SupervisedProcess(
        group, "it", ["false"], tmp_path / "log", dict(os.environ), backoff=QUICK, command_on_other_port=never
    ).start()
    assert eventually(lambda: bool(process.gave_up))
    assert process.command == ("false",)
    process.stop()


def test_no_two_nodes_of_a_stack_are_given_one_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []

    def ports(count: int) -> list[int]:
        drawn.append(count)
        return list(range(9000, 9000 + count))  # as long as nobody listens, the same ones are free

    monkeypatch.setattr(stack, "free_ports", ports)
    monkeypatch.setattr(stack, "superlink_command", lambda *_: ["sleep", "1000"])
    monkeypatch.setattr(stack, "supernode_command", lambda node, **_: ["sleep", str(node.port)])
    monkeypatch.setattr(Control, "healthy", lambda _: True)
    monkeypatch.setattr(Control, "online", lambda _: 3)
    with stack.Stack(tmp_path, [{}] * 3, mode="insecure") as made:
        assert [node.command[1] for node in made.nodes] == ["9000", "9001", "9002"]
    assert drawn == [1, 3], "one for the SuperLink, and all of the nodes' at once"


def test_failures_long_ago_do_not_count(group: ProcessGroup, tmp_path: Path) -> None:
    once = Backoff(first=0.05, attempts=1)
    process = SupervisedProcess(
        group, "it", ["sleep", "0.8"], tmp_path / "log", dict(os.environ), backoff=once, steady=0.05
    ).start()
    assert eventually(lambda: process.starts > once.attempts + 2)
    assert not process.gave_up
    process.stop()


def test_one_that_does_not_listen_is_killed(group: ProcessGroup, tmp_path: Path) -> None:
    process = supervised(group, "trap '' TERM; echo up; sleep 1000 & wait; sleep 1000", tmp_path).start()
    assert eventually(lambda: "up" in process.tail())
    process.stop(grace=0.3)
    assert not process.running
    assert reaper.marked(group.mark) == []


def test_pauses_grow_up_to_a_limit() -> None:
    assert list(Backoff(first=1, factor=2, longest=5, attempts=5)) == [1, 2, 4, 5, 5]


def test_the_tail_of_a_log_has_no_colours(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("a\nb\n\x1b[92mINFO\x1b[0m: c\n")
    assert tail(tmp_path / "log", 2) == "b\nINFO: c"
    assert tail(tmp_path / "none") == "(no log)"
    assert end_reason(tmp_path / "log", 3) == "exit code 3"
    (tmp_path / "log").write_text("ERROR : Exit Code: 305\nFailed.\n[code: 2004] Failed to activate SuperNode.\n")
    assert "not registered" in end_reason(tmp_path / "log", 1)


PARENT = """
import sys, time
from pathlib import Path
from fedquit.flower.deploy.processes import ProcessGroup, orderly_end
script = "trap '' TERM; setsid sleep 1000 & sleep 1000"
with orderly_end(), ProcessGroup(grace=0.2) as group:
    group.start("it", ["sh", "-c", script], Path(sys.argv[1]), {"PATH": "/usr/bin:/bin"})
    print(group.mark, flush=True)
    time.sleep(1000)
"""


ENDS = {signal.SIGINT: -signal.SIGINT, signal.SIGTERM: 128 + signal.SIGTERM, signal.SIGKILL: -signal.SIGKILL}


@pytest.mark.parametrize(("how", "code"), ENDS.items())
def test_nothing_outlives_its_parent(how: signal.Signals, code: int, tmp_path: Path) -> None:
    command = [sys.executable, "-c", PARENT, str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as parent:
        assert parent.stdout
        mark = parent.stdout.readline().strip()
        assert eventually(lambda: len(reaper.marked(mark)) == 3), "a shell and two that sleep"
        parent.send_signal(how)
        assert parent.wait(60) == code
    assert eventually(lambda: reaper.marked(mark) == [])


# Seeing a run through -------------------------------------------------------------------------------------------------


class Scripted(Control):
    """A SuperLink that does what it is told: each run ends as the script says."""

    def __init__(self, ends: list[str]) -> None:
        self.address, self.ends, self.runs, self.stopped = "nowhere:1", ends, 0, list[int]()
        self.up = True

    def healthy(self, timeout: float = 3.0) -> bool:
        return self.up

    def submit(self, app: Path, config: object = None, federation: object = None) -> int:
        self.runs += 1
        return self.runs

    def run(self, run: int) -> dict[str, Any]:
        return {"status": self.ends[run - 1], "status-details": "because"}

    def stop(self, run: int) -> None:
        self.stopped.append(run)

    def stream(self, run: int) -> subprocess.Popen[str]:
        return subprocess.Popen(["echo", f"run {run} speaks"], stdout=subprocess.PIPE, text=True)


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    (tmp_path / "pyproject.toml").touch()
    return Plan(tmp_path, backoff=QUICK, patience=0.5)


def test_a_run_that_failed_is_submitted_again_until_one_finishes(plan: Plan, tmp_path: Path) -> None:
    control = Scripted(["finished:failed", "finished:failed", "finished:completed"])
    heard, said = list[str](), list[str]()
    assert run_until_finished(plan, control, tmp_path / "memo", say=said.append, hear=heard.append) == 3
    assert heard == ["run 1 speaks", "run 2 speaks", "run 3 speaks"]
    assert any("run 2 is lost (finished:failed, because)" in line for line in said)


def test_a_supervisor_that_was_restarted_goes_on_with_the_run_under_way(plan: Plan, tmp_path: Path) -> None:
    control = Scripted(["finished:completed", "finished:completed"])
    (tmp_path / "memo").write_text('{"run": "2"}')
    assert run_until_finished(plan, control, tmp_path / "memo") == 2
    assert control.runs == 0, "nothing was submitted"


def test_a_run_that_went_down_with_our_superlink_is_not_waited_for(
    plan: Plan, group: ProcessGroup, tmp_path: Path
) -> None:
    link, control = supervised(group, "sleep 1000", tmp_path).start(), Scripted(["finished:completed"])
    (tmp_path / "memo").write_text('{"run": "7"}')
    assert run_until_finished(plan, control, tmp_path / "memo", superlink=link) == 1
    assert control.stopped == [7]
    assert not (tmp_path / "memo").exists(), "the next `serve` starts a new run"
    link.stop()


def test_there_is_a_limit_to_trying_again(plan: Plan, tmp_path: Path) -> None:
    control = Scripted(["finished:failed"] * 9)
    with pytest.raises(DeploymentError, match=r"run 4 is lost, as were 3 before.*failed, because"):
        run_until_finished(plan, control, tmp_path / "memo")
    assert control.runs == 1 + QUICK.attempts


def test_a_run_that_an_operator_stopped_stays_stopped(plan: Plan, tmp_path: Path) -> None:
    control = Scripted(["finished:stopped"])
    with pytest.raises(DeploymentError, match="stopped by an operator"):
        run_until_finished(plan, control, tmp_path / "memo")
    assert control.runs == 1


def test_when_the_superlink_was_restarted_its_run_is_given_up_at_once(
    plan: Plan, group: ProcessGroup, tmp_path: Path
) -> None:
    link = supervised(group, "sleep 1000", tmp_path).start()
    control = Scripted(["running", "finished:completed"])
    streamed = control.stream

    def stream(run: int) -> subprocess.Popen[str]:
        if run == 1:
            link.crash()
            eventually(lambda: link.starts == 2)
        return streamed(run)

    control.stream = stream  # type: ignore[method-assign]
    assert run_until_finished(plan, control, tmp_path / "memo", superlink=link) == 2
    assert control.stopped == [1], "the old run would go on as `running` for another minute"
    link.stop()


def test_a_superlink_that_goes_away_while_a_run_is_submitted_is_waited_for(plan: Plan, tmp_path: Path) -> None:
    control = Scripted(["finished:completed"])
    submitted, answers = control.submit, iter([False, False])

    def submit(*_: object) -> int:
        control.submit = submitted  # type: ignore[method-assign]
        control.healthy = lambda timeout=3.0: next(answers, True)  # type: ignore[method-assign]
        raise DeploymentError("no connection")

    control.submit = submit  # type: ignore[assignment, method-assign]
    said: list[str] = []
    assert run_until_finished(replace(plan, patience=60.0), control, tmp_path / "memo", say=said.append) == 1
    assert "waiting for the SuperLink on nowhere:1." in said


def test_a_superlink_that_is_back_before_the_failure_is_told_is_not_taken_for_the_apps_fault(
    plan: Plan, group: ProcessGroup, tmp_path: Path
) -> None:
    link, control = supervised(group, "sleep 1000", tmp_path).start(), Scripted(["finished:completed"])
    submitted = control.submit

    def submit(*_: object) -> int:
        control.submit = submitted  # type: ignore[method-assign]
        link.crash()
        assert eventually(lambda: link.starts == 2)
        raise DeploymentError("no connection")

    control.submit = submit  # type: ignore[assignment, method-assign]
    assert run_until_finished(plan, control, tmp_path / "memo", superlink=link) == 1
    link.stop()


def test_a_run_that_the_superlink_does_not_know_is_lost(plan: Plan, tmp_path: Path) -> None:
    control, said = Scripted(["finished:completed"]), list[str]()
    known = control.run

    def run(run: int) -> dict[str, Any]:
        if run == 5:
            raise DeploymentError("`flwr list` failed: [code: 16] Run ID not found.")
        return known(run)

    control.run = run  # type: ignore[method-assign]
    (tmp_path / "memo").write_text('{"run": "5"}')
    assert run_until_finished(plan, control, tmp_path / "memo", say=said.append) == 1
    assert any("run 5 is lost (the SuperLink does not know it)" in line for line in said)


def test_a_run_that_nobody_can_tell_of_is_asked_for_with_pauses_and_not_for_ever(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedquit.flower.deploy.supervision.STATUS_PAUSE", 0.2)
    control, said, asked = Scripted([]), list[str](), list[int]()

    def run(run: int) -> dict[str, Any]:
        asked.append(run)
        raise DeploymentError("`flwr list` failed: out of order.")

    control.run = run  # type: ignore[method-assign]
    with pytest.raises(DeploymentError, match=r"nobody could tell for 0 s what became of it: .* out of order"):
        run_until_finished(plan, control, tmp_path / "memo", say=said.append)
    assert set(asked) == {1, 2, 3, 4}
    assert len(asked) <= 4 * 5, "half a second for each, with pauses"
    assert sum("cannot be told" in line for line in said) == 4, "once for each"


def test_what_follows_a_log_can_be_found_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[dict[str, str]] = []
    monkeypatch.setattr(subprocess, "Popen", lambda *_, env, **__: begun.append(env))
    Control("host:1", None, tmp_path, "the mark").stream(1)
    assert begun[0][reaper.VARIABLE] == "the mark"


def test_an_app_that_cannot_be_submitted_is_told_at_once(plan: Plan, tmp_path: Path) -> None:
    control = Scripted([])

    def submit(*_: object) -> int:
        raise DeploymentError("no such key")

    control.submit = submit  # type: ignore[assignment, method-assign]
    with pytest.raises(DeploymentError, match="no such key"):
        run_until_finished(plan, control, tmp_path / "memo")


def test_a_silent_superlink_is_told_of_after_a_while(plan: Plan, tmp_path: Path) -> None:
    control = Scripted([])
    control.up = False
    with pytest.raises(DeploymentError, match="no SuperLink answered on nowhere:1"):
        run_until_finished(plan, control, tmp_path / "memo")


def test_what_cannot_be_served_is_told_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"pyproject\.toml"):
        Plan(tmp_path)
    with pytest.raises(InputError, match="host:port"):
        Link("localhost")


def test_the_operator_reaches_the_superlink_with_its_authority(tmp_path: Path) -> None:
    Control("host:1", tmp_path / "ca.crt", tmp_path)
    written = tomllib.loads((tmp_path / "config.toml").read_text())["superlink"]
    assert written[written["default"]] == {"address": "host:1", "root-certificates": str(tmp_path / "ca.crt")}
    Control("host:1", None, tmp_path)
    written = tomllib.loads((tmp_path / "config.toml").read_text())["superlink"]
    assert written[CONNECTION] == {"address": "host:1", "insecure": True}


def test_health_is_asked_over_tls_only_where_the_authority_is_known(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    assert not Control(f"{LOOPBACK}:{port}", None, tmp_path).healthy(), "nobody listens"


# The command line -----------------------------------------------------------------------------------------------------


def test_settings_keep_their_kind() -> None:
    words = ["a=1", "b=0.5", "c=true", "d=text", 'e="1"', "f=x=y", "g=[1]"]
    expected = {"a": 1, "b": 0.5, "c": True, "d": "text", "e": "1", "f": "x=y", "g": "[1]"}
    assert as_settings(words) == expected
    with pytest.raises(InputError, match="key=value"):
        as_settings(["nothing"])


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["serve", ".", "--state", "s"], "give --ca, --certificate and --key"),
        (["serve", ".", "--state", "s", "--attach"], "give --ca with the authority"),
        (["serve", ".", "--state", "s", "--insecure", "--address", "here"], "host:port"),
        (["serve", ".", "--state", "s", "--insecure", "--member", "a=no-such-file"], "name=file"),
        (["node", "--superlink", "h:1", "--home", "h"], "give --ca and --key"),
        (["node", "--superlink", "h:1", "--home", "h", "--ca", "no-ca", "--key", "no-key"], "no file no-key"),
    ],
)
def test_what_is_missing_is_told_before_anything_starts(words: list[str], sentence: str, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").touch()
    with contextlib.chdir(tmp_path):
        told = CliRunner().invoke(app, ["flower", *words])
    assert isinstance(told.exception, InputError)
    assert sentence in str(told.exception)
    assert list(tmp_path.iterdir()) == [tmp_path / "pyproject.toml"]


COMMANDS = [["demo"], ["serve", ".", "--state", "s"], ["node", "--superlink", "h:1", "--home", "h"]]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_names_the_extra(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedquit.flower.deploy.environment.find_spec", lambda _: None)
    told = CliRunner().invoke(app, ["flower", *command])
    assert str(told.exception) == "this needs Flower: pip install 'fedquit[flower]'."


class NoStack:
    """Stands where the demo's processes would."""

    control, superlink = Scripted([]), None

    def __init__(self, *_: object, **__: object) -> None:
        self.control.run = lambda run: {"network-traffic": {"total-bytes": run}}  # type: ignore[method-assign]

    def __enter__(self) -> NoStack:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The requests that lie in the outbox when each run of the demo begins: only these reach the server."""
    filed: list[int] = []

    def run_until_finished(plan: Plan, _: Control, memo: Path, **__: object) -> int:
        waiting = [entry.id for entry in Outbox(memo.parent / "node-0").entries()]
        result = Path(str(plan.config["fedquit.state"])) / "result.json"
        result.parent.mkdir(exist_ok=True)
        write_json(result, {"erasures": [{"request": request} for request in waiting]})
        filed.append(len(waiting))
        return len(filed)

    monkeypatch.setattr(demo, "Stack", NoStack)
    monkeypatch.setattr(demo, "run_until_finished", run_until_finished)
    monkeypatch.setattr(demo, "_params", lambda _: {})
    monkeypatch.setattr(demo, "_accuracies", lambda *_: {})
    monkeypatch.setattr(demo, "_references", lambda *_: {})
    return filed


def test_a_demo_whose_request_comes_after_the_last_round_goes_on_with_another_run(
    runs: list[int], tmp_path: Path
) -> None:
    said: list[str] = []
    results = demo.run(tmp_path / "demo", say=said.append)
    assert runs == [0, 1], "the second run finds the request"
    assert results["bytes"] == 2
    assert results["erasure"]["request"]
    assert sum("asks to be forgotten" in line for line in said) == 1


def test_a_demo_without_a_folder_leaves_none_behind(
    runs: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    demo.run(None)
    assert runs
    assert list(tmp_path.iterdir()) == []


def test_the_demo_compares_with_natural_and_retrain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "RETRAINS", 3)
    app = demo.app_folder()
    task = demo._task(app)
    first = State(dict(task.Net().state_dict()), clock=1)
    models = demo._references(app, tmp_path, first)
    assert [name for name in models if not name.startswith("Retrain")] == ["Natural"]
    accuracies = demo._accuracies(app, {"before": first.params, "recovered": first.params, **models})
    compared = demo._compared(accuracies)
    assert list(accuracies) == ["before", "recovered", "Natural", "Retrain"]
    assert len({row["forget"] for row in compared["retrains"]}) > 1, "each has a seed of its own"
    assert accuracies["Natural"]["test"] > accuracies["before"]["test"] + 20, "it was trained"
    results = {
        "leaving": "node-0",
        "erasure": {"method": "fedquit"},
        "accuracy": accuracies,
        "seconds": 1.0,
        "bytes": 1000,
        **compared,
    }
    text = "\n".join(demo.summary(json.loads(json.dumps(results))))
    assert "points from the mean of 3 Retrains" in text
    assert compared["verdict"]["word"] in ("differs", "cannot tell")
    assert "trained without the node, 3 seeds" in text


def test_a_stack_that_ends_leaves_no_message_in_its_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wiped: list[Path] = []
    monkeypatch.setattr(stack, "wipe_traces", lambda path, _: wiped.append(path))
    ended = stack.Stack(tmp_path)
    ended.superlink = Stopped()  # type: ignore[assignment]
    ended._stop()
    assert wiped == [tmp_path / "superlink.db"]


class Stopped:
    """A process that can be stopped."""

    def stop(self) -> None:
        pass


def test_the_demo_takes_a_new_folder(tmp_path: Path) -> None:
    (tmp_path / "something").touch()
    with pytest.raises(InputError, match="not empty"):
        demo.run(tmp_path)
