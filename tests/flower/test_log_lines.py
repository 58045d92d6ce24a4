# SPDX-License-Identifier: Apache-2.0
"""Log lines have a time, and nobody from outside forges one; what fedquit writes is its owner's alone."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from fedquit.cli import app as fedquit
from fedquit.flower.log_lines import log_line, printable
from fedquit.utils.files import close_to_others, only_owner, open_to_others

FORGED = "weights\nINFO :      fedquit: r0001 done\r\x1b[2K\x1b[31m\u2028\u202eevil"


def test_a_forged_line_stays_on_the_line_that_quotes_it() -> None:
    line = log_line(FORGED, "fedquit", "text", 0.0)
    assert line.startswith("1970-01-01T00:00:00Z weights\\nINFO")
    assert line.endswith("\\r\\x1b[2K\\x1b[31m\\u2028\\u202eevil")
    said = json.loads(log_line(FORGED, "app", "json", 1e9))
    assert said == {"time": "2001-09-09T01:46:40Z", "source": "app", "text": printable(FORGED)}


@given(st.text())
def test_every_text_becomes_one_printable_line(text: str) -> None:
    for style in ("text", "json"):
        line = log_line(text, "fedquit", style, 0.0)
        assert len(line.splitlines()) == 1
        assert not re.search(r"[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\ufeff]", line)


def test_an_ordinary_sentence_is_not_changed() -> None:
    sentence = "hospital-0 (Universitätsklinik Köln, 病院) is here: 1,000 examples"
    assert printable(sentence) == sentence
    assert len(printable("x" * 10**6)) < 2_100


@pytest.mark.flower
def test_a_refusal_cannot_forge_a_line_of_the_server_s_log(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("flwr", reason="needs the extra `flower`")
    from fedquit.flower.server import _Server
    from fedquit.flower.state_folder import StateFolder

    server = _Server.__new__(_Server)
    server.folder = StateFolder(tmp_path)
    server.say(f"no reply of client 2: unknown tensor {FORGED}")
    (event,) = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", event["time"])
    assert event["text"] == f"no reply of client 2: unknown tensor {printable(FORGED)}"
    assert not re.search(r"^.{0,20}fedquit: r0001 done", capfd.readouterr().err, re.MULTILINE)


def test_folders_from_before_are_closed_and_new_files_are_private(tmp_path: Path) -> None:
    state = tmp_path / "state"
    (state / "phases").mkdir(parents=True)
    (state / "ledger.json").write_text("{}")
    (state / "start.sh").write_text("")
    (state / "start.sh").chmod(0o755)
    state.chmod(0o755)
    assert len(open_to_others(state)) == 4
    close_to_others(state)
    assert open_to_others(state) == []
    assert (state / "start.sh").stat().st_mode & 0o777 == 0o700
    with only_owner():
        (state / "new").mkdir()
        (state / "new" / "file").write_text("")
    assert open_to_others(state) == []


def test_a_request_is_readable_by_its_owner_alone(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    with only_owner():
        (home / "node.json").write_text("{}")  # a node has used it
    done = CliRunner().invoke(fedquit, ["request", "--home", str(home)], catch_exceptions=False)
    assert done.exit_code == 0
    assert len(list(home.glob("outbox/*.json"))) == 1
    assert open_to_others(home) == []
