# SPDX-License-Identifier: Apache-2.0
"""`fedquit doctor` tells what is there from what is missing, and what is missing from what must be mended."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections import namedtuple
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from typer.testing import CliRunner

from fedquit.cli import app
from fedquit.cli.doctor import NEEDED_FOR, Observation, requirement_observations

ROOT = Path(__file__).parent.parent
TORCH = metadata.version("torch")


def of(extra: str, *lines: str) -> list[Observation]:
    return list(requirement_observations([Requirement(line) for line in lines], extra, "this"))


def test_this_environment_is_sound_and_json_says_the_same() -> None:
    shown = CliRunner().invoke(app, ["doctor", "--json"])
    assert shown.exit_code == 0, shown.output
    findings = {one["what"]: one for one in json.loads(shown.output)}
    assert TORCH in findings["packages"]["details"]
    assert findings["device"]["state"] == "ok"
    assert all(one["next_step"] for one in findings.values() if one["state"] != "ok")


def test_an_extra_that_is_absent_is_no_problem_and_a_package_that_is_absent_is_one() -> None:
    line = "no-such-package>=1"
    (optional,) = of("peft", "torch>=1", f"{line}; extra == 'peft'")
    assert (optional.state, optional.next_step) == ("absent", "run `pip install 'fedquit[peft]'`.")
    (needed,) = of("", "torch>=1", line, "other; extra == 'peft'")
    assert needed.state == "problem"
    assert "no-such-package not installed" in needed.details


def test_every_extra_of_a_user_is_looked_at_and_advice_has_one_form() -> None:
    root = Path(__file__).parent.parent
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert NEEDED_FOR.keys() == extras.keys() - {"bench", "docs", "dev"}
    for file in (root / "src").rglob("*.py"):
        assert "-e '.[" not in file.read_text(), (
            f"{file}: say pip install 'fedquit[EXTRA]', which holds in a clone, too"
        )


def test_another_version_than_the_pinned_one_is_a_problem() -> None:
    (pinned,) = of("flower", "torch==0.1; extra == 'flower'")
    assert pinned.state == "problem"
    assert pinned.details.startswith(f"torch {TORCH}, not ==0.1")
    assert of("flower", f"torch=={TORCH}; extra == 'flower'")[0].state == "ok"


def test_a_disk_that_is_nearly_full_ends_with_exit_code_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", ("total", "used", "free"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 9 * 10**8, 10**8))
    shown = CliRunner().invoke(app, ["doctor", "--out", str(tmp_path / "not" / "yet")])
    assert shown.exit_code == 1
    assert "disk of results: make room." in shown.output


def test_data_sets_are_looked_for_where_data_lies(tmp_path: Path) -> None:
    (tmp_path / "tinyshakespeare.txt").write_text("To be")
    shown = CliRunner().invoke(app, ["doctor", "--data-dir", str(tmp_path), "--json"])
    states = [(one["state"], one["details"]) for one in json.loads(shown.output) if one["what"] == "data sets"]
    assert states[0][0] == "ok"
    assert states[0][1].startswith("shakespeare in ")
    assert states[1][1].startswith("cifar10, cifar100, cub200, sotu not in ")


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("doc", ["doctor"]),
        ("run settings/sh", ["settings/shakespeare"]),
        ("study run smo", ["smoke"]),
        ("list eng", ["engines"]),
        ("run demo --partition-f", ["--partition-file"]),
        ("flower ini", ["init"]),
    ],
)
def test_the_shell_completes_commands_options_and_names(typed: str, completed: list[str]) -> None:
    words = ["fedquit", *typed.split()]
    environment = {"_FEDQUIT_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(words)}
    environment["COMP_CWORD"] = str(len(words) - 1)
    shown = CliRunner().invoke(app, [], prog_name="fedquit", env=environment)
    assert shown.output.split() == completed


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_itself_completes_after_what_the_readme_says(tmp_path: Path) -> None:
    """`fedquit --show-completion`, sourced by a bash, completes a recipe's name."""
    command = tmp_path / "fedquit"
    command.write_text(f"#!{sys.executable}\nfrom fedquit.cli import main\nmain()\n")  # as pip writes it
    command.chmod(0o755)
    script = """
        eval "$(_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION=1 fedquit --show-completion bash)"
        complete -p fedquit
        COMP_WORDS=(fedquit run settings/sh) COMP_CWORD=2
        _fedquit_completion fedquit
        echo "${COMPREPLY[@]}"
    """
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=False)
    registered, completed = done.stdout.splitlines()
    assert registered.endswith("-F _fedquit_completion fedquit")
    assert completed == "settings/shakespeare"
