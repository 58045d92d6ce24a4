# SPDX-License-Identifier: Apache-2.0
"""Logs of what runs for years: bounded, no line lost or divided, and their owner's alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedquit.utils import rotating_log
from fedquit.utils.rotating_log import RotatingFile

pytest.importorskip("flwr", reason="needs the extra `flower`")

from fedquit.flower import state_folder
from fedquit.flower.deploy.logs import tail
from fedquit.flower.deploy.processes import ProcessGroup
from fedquit.flower.operations.status import json_lines

pytestmark = pytest.mark.flower


def parts(log: Path) -> list[bytes]:
    """The files of a log, the oldest first."""
    numbered = [log.with_name(f"{log.name}.{n}") for n in range(rotating_log.BACKUPS + 1, 0, -1)]
    return [path.read_bytes() for path in (*numbered, log) if path.exists()]


@given(st.lists(st.binary(max_size=40), max_size=60), st.integers(1, 50))
@settings(deadline=None)
def test_every_byte_is_there_in_order_and_no_line_is_divided(pieces: list[bytes], limit: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        file = RotatingFile(str(log), limit, backups=10_000)
        for piece in pieces:
            file.write(piece)
        numbers = sorted((int(p.name.partition(".")[2]) for p in log.parent.glob("log.*")), reverse=True)
        written = [log.with_name(f"log.{n}").read_bytes() for n in numbers]
        assert b"".join([*written, log.read_bytes()]) == b"".join(pieces)
        for part in written:
            assert part.endswith(b"\n")
            assert len(part) >= limit
            assert b"\n" not in part[limit - 1 : -1], "it was given up at the first line end after it was full"


def test_a_log_is_bounded_and_what_is_dropped_is_the_oldest(tmp_path: Path) -> None:
    file = RotatingFile(str(tmp_path / "log"), 1000)
    for number in range(10_000):
        file.write(b"line %d\n" % number)
    kept = b"".join(parts(tmp_path / "log")).splitlines()
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 4 * 1020
    assert len(list(tmp_path.iterdir())) == 1 + rotating_log.BACKUPS
    assert kept == [b"line %d" % number for number in range(10_000 - len(kept), 10_000)]
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}


@pytest.mark.parametrize("failing", ["open", "replace"])
def test_a_rotation_that_fails_loses_no_line_and_is_made_up_for(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    file = RotatingFile(str(log), 100)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, failing, full)
        file.write(b"".join(b"line %d\n" % number for number in range(30)))
    for number in range(30, 40):
        file.write(b"line %d\n" % number)
    assert b"".join(parts(log)).splitlines() == [b"line %d" % number for number in range(40)]
    assert len(parts(log)) == 2, "the new file is begun as soon as that can be"


def test_a_log_whose_folder_comes_later_is_written_then(tmp_path: Path) -> None:
    log = tmp_path / "later" / "log"
    with subprocess.Popen([sys.executable, rotating_log.__file__, str(log)], stdin=subprocess.PIPE) as writer:
        assert writer.stdin is not None
        writer.stdin.write(b"lost\n")
        writer.stdin.flush()
        time.sleep(0.5)
        assert writer.poll() is None, "whoever prints must not be broken"
        log.parent.mkdir()
        writer.stdin.write(b"written\n")
    assert log.read_bytes().splitlines()[-1] == b"written"


PATIENT = "import time\nfor i in range(40): print('line', i, flush=True); time.sleep(0.1)"


def test_a_process_whose_log_writer_is_killed_goes_on_and_so_does_its_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    said: list[str] = []
    with ProcessGroup() as group:
        process = group.start("it", [sys.executable, "-c", PATIENT], log, dict(os.environ), said.append)
        deadline = time.monotonic() + 60
        while not log.exists() or not log.stat().st_size:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(group._log_writers[log].pid, signal.SIGKILL)
        assert process.wait() == 0
        group.wait_for_log(log)
    lines = log.read_text().splitlines()
    assert lines[-1] == "line 39"
    assert len(lines) >= 39, "at most the line is lost that it had in its hands"
    (sentence,) = said
    assert str(log) in sentence


WRITES = (
    "import sys\nfor i in range(20000): print('line', i, flush=True)\nprint('Exit Code: 3\\nit is over')\nsys.exit(3)"
)


def test_a_supervised_process_loses_no_line_and_its_last_words_are_known(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "it.log"
    with ProcessGroup() as group:
        process = group.start("it", [sys.executable, "-c", WRITES], log, dict(os.environ))
        process.wait()
        group.wait_for_log(log)
        assert tail(log, 1) == "it is over"
    lines = log.read_text().splitlines()
    assert lines[:20_000] == [f"line {number}" for number in range(20_000)]
    assert log.stat().st_mode & 0o777 == 0o600
    assert log.parent.stat().st_mode & 0o777 == 0o700


SUPERVISOR = """
import os, sys, time
from pathlib import Path
from fedquit.flower.deploy.processes import ProcessGroup
with ProcessGroup() as group:
    group.start("it", [sys.executable, "-c", sys.argv[2]], Path(sys.argv[1]), dict(os.environ))
    time.sleep(600)
"""
UNTIL_ENDED = """
import os, signal, sys
count = 0
def leave(*_):
    os.write(1, b"the last of %d lines\\n" % count)
    os._exit(0)
signal.signal(signal.SIGTERM, leave)
while True:
    os.write(1, b"line %d\\n" % count)
    count += 1
"""


def test_what_was_printed_when_the_supervisor_is_killed_is_in_the_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    supervisor = subprocess.Popen([sys.executable, "-c", SUPERVISOR, str(log), UNTIL_ENDED])
    deadline = time.monotonic() + 60
    while not log.exists() or log.stat().st_size < 10_000:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(supervisor.pid, signal.SIGKILL)
    supervisor.wait()
    while not log.exists() or "the last of" not in tail(log, 1):
        assert time.monotonic() < deadline, tail(log)
        time.sleep(0.05)
    *lines, last = b"".join(parts(log)).decode().splitlines()
    count = int(last.split()[3])
    first = int(lines[0].split()[1])
    assert lines == [f"line {first + number}" for number in range(len(lines))], "only the oldest may be dropped"
    assert first + len(lines) in (count, count + 1), "the signal may come between a line and its being counted"


def test_the_server_s_own_log_is_bounded_and_still_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_folder, "MAX_BYTES", 2000)
    folder = state_folder.StateFolder(tmp_path)
    for number in range(300):
        folder.append({"event": "reply", "client": number})
        newest = list(json_lines(tmp_path / "events.jsonl"))
        assert newest[-1]["client"] == number, "also when a new file has just been begun"
        assert len(newest) >= min(number, 20)
    kept = [json.loads(line)["client"] for part in parts(tmp_path / "events.jsonl") for line in part.splitlines()]
    assert kept == list(range(300 - len(kept), 300))
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 4 * 2100
