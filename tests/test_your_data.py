# SPDX-License-Identifier: Apache-2.0
"""The page on one's own data tells the truth: its code, its recipe and its commands run as they stand."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fedquit.cli import main
from fedquit.data import load_dataset
from fedquit.data.preprocessing import DRAWS, Pixels
from fedquit.errors import UnknownNameError

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "your-data.md").read_text()


def saved(page: str, folder: Path) -> None:
    """Every block under the name that the text before it gives: "Save this as `name`"."""
    for name, block in re.findall(
        r"[Ss]ave this as\s`([\w.]+)`.*?\n```\w+\n(.*?)^```$", page, re.DOTALL | re.MULTILINE
    ):
        (folder / name).write_text(block)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the page asks for."""
    folder = tmp_path_factory.mktemp("mine")
    saved(PAGE, folder)
    assert {path.name for path in folder.iterdir()} == {"make_digits.py", "my_data.py", "digits.toml"}
    subprocess.run([sys.executable, "make_digits.py"], cwd=folder, check=True)
    return folder


@pytest.fixture
def ours(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same, as the working folder, and on PYTHONPATH as the commands have it."""
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(place)
    monkeypatch.delitem(sys.modules, "my_data", raising=False)
    return place


def test_the_commands_of_the_page_run_as_they_stand(ours: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    (commands,) = (block for language, block in blocks if not language)
    for line in commands.splitlines():
        setting, program, *arguments = shlex.split(line)
        assert (setting, program) == ("PYTHONPATH=.", "fedquit")
        monkeypatch.setattr("sys.argv", [program, *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code
    results = {out: json.loads((ours / "runs" / out / "results.json").read_text()) for out in ("drawn", "writers")}
    tried = json.loads((ours / "runs" / "tried" / "results.json").read_text())
    assert tried["recipe"]["title"] == "Digits: a writer leaves (smoke)"
    assert sum(map(sum, tried["clients"].values())) < 50
    writers = json.loads((ours / "writers.json").read_text())
    for client, positions in writers.items():
        held = len(positions) // 10
        assert sum(results["writers"]["clients"][client]) == len(positions) - held
    assert results["drawn"]["clients"] != results["writers"]["clients"]
    page = (ours / "runs" / "writers" / "report.html").read_text()
    assert "Labels by client" in page
    assert results["drawn"]["rows"][0]["test_acc"] > 30, "it has learnt something"


def test_the_function_of_the_page_gives_bytes_that_its_look_normalises(ours: Path) -> None:
    data = load_dataset("my_data:digits", folder=ours)
    assert (data.x.dtype, data.shape, len(data.y), len(data.test_y)) == (torch.uint8, (1, 8, 8), 1500, 297)
    seen = data.look.plain(data.x)
    assert abs(float(seen.mean())) < 0.02
    assert abs(float(seen.std()) - 1) < 0.02
    assert isinstance(data.look, Pixels)
    assert data.look.vary == "enlarge-crop-flip"
    with pytest.raises(UnknownNameError, match=r"unknown option of data set 'my_data:digits' 'augmented'"):
        load_dataset("my_data:digits", folder=ours, augmented=False)


def test_the_page_names_every_way_to_vary() -> None:
    assert all(f"`{way}`" in PAGE for way in DRAWS)


def test_the_links_of_the_page_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", PAGE):
        assert (ROOT / "docs" / target).exists()
