# SPDX-License-Identifier: Apache-2.0
"""`.ci/run`, the workflows that call its stages, the Makefile behind it, and the hooks of pre-commit agree."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
WORKFLOWS = ROOT / ".github" / "workflows"
pytestmark = pytest.mark.skipif(not (ROOT / ".ci" / "run").exists(), reason="needs a checkout")


def ci(*words: str, path: str = os.environ["PATH"]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": path}
    command = [str(ROOT / ".ci" / "run"), *words]
    return subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True, check=False)


def stages() -> list[str]:
    return ci("--list").stdout.split()


@pytest.fixture
def tools(tmp_path: Path) -> str:
    """A path on which `make` only says what it was asked for and fails at `test-core`; nothing is installed."""
    programs = {
        "make": 'echo "make $*"; [ "$1" != "${FAILS:-test-core}" ] || exit 7',
        **dict.fromkeys(("chromium", "strace", "ip", "systemd-analyze"), "exit 0"),
    }
    for name, line in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    return f"{tmp_path}{os.pathsep}{os.environ['PATH']}"


def test_the_workflow_calls_every_stage_and_no_other() -> None:
    text = (WORKFLOWS / "ci.yml").read_text()
    (matrix,) = re.findall(r"stage: \[(.*)\]", text)
    assert matrix.split(", ") == stages()
    assert re.findall(r"run: (.*)", text) == [".ci/run ${{ matrix.stage }}"]


def test_every_command_of_a_workflow_is_a_stage(tools: str) -> None:
    for workflow in WORKFLOWS.glob("*.yml"):
        for command in re.findall(r"- run: (.*)", workflow.read_text()):
            program, name = command.split(maxsplit=1)
            assert program == ".ci/run"
            if "matrix" not in name:
                assert ci(name, path=tools).returncode == 0, name


def test_a_whole_run_goes_through_all_stages_and_ends_with_their_seconds(
    tools: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAILS", "none")
    done = ci(path=tools)
    assert done.returncode == 0, done.stderr
    targets = re.findall(r"^make (?:-j2 )?(\S+)$", done.stdout, re.MULTILINE)
    assert targets == [
        *("environments", "check", "docs", "test-all"),
        *("test-core", "test-kernels", "mutants-short", "test-faults"),
    ]
    table = re.findall(r"^(\w+) +(\d+)$", done.stdout, re.MULTILINE)
    assert [name for name, _ in table] == [*stages(), "total"]


def test_a_stage_that_fails_ends_the_run_with_its_exit_code_and_the_table(tools: str) -> None:
    done = ci("check", "core", "kernels", path=tools)
    assert done.returncode == 7
    assert re.findall(r"^make (?:-j2 )?(\S+)$", done.stdout, re.MULTILINE) == ["check", "test-core"]
    assert re.findall(r"^(\w+) +\d+$", done.stdout, re.MULTILINE) == ["check", "core", "total"]
    assert "the stage 'core' failed" in done.stdout


def test_an_unknown_stage_names_those_that_there_are() -> None:
    done = ci("chek")
    assert done.returncode == 2
    for name in stages():
        assert name in done.stderr


def test_the_stages_are_targets_of_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"make (?:-j2 )?(\w[\w-]+)", (ROOT / ".ci" / "run").read_text()):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_the_tests_without_extras_are_there() -> None:
    (names,) = re.findall(r"^CORE_TESTS := ((?:.*\\\n)*.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    files = names.replace("\\\n", " ").split()
    assert "tests/test_without_extras.py" in files
    for name in files:
        assert (ROOT / name).exists(), name


def test_the_hooks_are_local_and_fetch_nothing() -> None:
    text = (ROOT / ".pre-commit-config.yaml").read_text()
    assert re.findall(r"repo: (.*)", text) == ["local"]
    assert set(re.findall(r"language: (.*)", text)) == {"system"}
    entries = re.findall(r"entry: (.*)", text)
    assert all(entry.startswith(".venv/bin/") for entry in entries)
    for tool in ("ruff check", "ruff format --check", "mypy", "lint-imports"):
        assert f".venv/bin/{tool}" in entries
