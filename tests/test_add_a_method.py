# SPDX-License-Identifier: Apache-2.0
"""The documents tell the truth: add-a-method.md runs as it stands, and every method's page agrees with its class."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from fedquit.core import Batch
from fedquit.core.method import Method
from fedquit.errors import InputError
from fedquit.methods import METHODS
from fedquit.running.recipe import build, load
from fedquit.running.runner import run
from fedquit.running.store import StateFile
from worlds import tiny

ROOT = Path(__file__).parent.parent
GUIDE = (ROOT / "docs" / "add-a-method.md").read_text()
EXAMPLE = ROOT / "examples" / "my_method.py"
PAGES = {name: "baselines" if name in ("natural", "retrain") else name for name in METHODS}
REQUESTS: dict[str, dict[str, Any]] = {
    "client": {"clients": [1]},
    "several": {"clients": [1, 2]},
    "samples": {"clients": [1], "samples": 0.5},
}


def blocks(text: str, language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [block for word, block in found if word == language]


def page(name: str) -> str:
    return (ROOT / "docs" / "methods" / f"{PAGES[name]}.md").read_text()


@pytest.fixture
def soft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what the guide asks for: its recipe, and the example on PYTHONPATH."""
    (tmp_path / "examples").mkdir()
    shutil.copy(EXAMPLE, tmp_path / "examples")
    (recipe,) = blocks(GUIDE, "toml")
    (tmp_path / "soft.toml").write_text(recipe)
    monkeypatch.syspath_prepend(tmp_path / "examples")
    monkeypatch.delitem(sys.modules, "my_method", raising=False)
    return tmp_path


def test_the_commands_of_the_guide_run_as_they_stand(soft: Path) -> None:
    commands = [line for block in blocks(GUIDE, "") for line in block.splitlines()]
    assert len(commands) == 3
    for line in commands:
        setting, program, *arguments = shlex.split(line)
        variable, _, folder = setting.partition("=")
        assert (variable, program) == ("PYTHONPATH", "fedquit")
        paths = os.pathsep.join([folder, str(ROOT / "src")])
        done = subprocess.run(
            [sys.executable, "-m", "fedquit", *arguments],
            cwd=soft,
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    rows = json.loads((soft / "runs" / "soft" / "results.json").read_text())["rows"]
    assert [(r["phase"], r["rounds"]) for r in rows][2:] == [("unlearned", 2), ("recovered", 2)]
    table = json.loads((soft / "runs" / "compared" / "comparison.json").read_text())["table"]
    assert [(line["method"], line["runs"]) for line in table][3:] == [
        ("my_method:SoftForgetting", 2),
        ("fedquit", 2),
        ("natural", 2),
    ]


def test_the_code_in_the_guide_is_that_of_the_example() -> None:
    shown = blocks(GUIDE, "python")
    assert len(shown) >= 4
    for block in shown:
        assert block in EXAMPLE.read_text()


def test_the_files_that_the_documents_link_to_exist() -> None:
    for document in [ROOT / "docs" / "add-a-method.md", *(ROOT / "docs" / "methods").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[a-z]+)?\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


@pytest.mark.parametrize("kind", REQUESTS)
def test_the_example_serves_every_kind_of_request_and_costs_what_the_guide_says(kind: str, soft: Path) -> None:
    request = REQUESTS[kind]
    method = {"name": "my_method:SoftForgetting", "preset": "gentle", "lr": 1e-2}
    rows = run(tiny(method=method, request=[request]), soft / "out")["rows"]
    unlearned = {r["phase"]: r for r in rows}["unlearned"]
    leaving = len(request["clients"])
    assert (unlearned["participations"], unlearned["client_epochs"]) == (2 * leaving, 2 * leaving)
    model = unlearned["up_bytes"] // (2 * leaving)
    assert unlearned["down_bytes"] == 3 * leaving * model, "one download in the first round, two in the second"
    assert unlearned["server_storage_bytes"] == 2 * model, "the model, and the one before"


def test_the_example_forgets_and_goes_on_after_a_kill_between_its_rounds(soft: Path) -> None:
    recipe = load(str(soft / "soft.toml"))
    rows = {r["phase"]: r for r in run(recipe, soft / "a")["rows"]}
    assert rows["unlearned"]["forget_loss"] > rows["original"]["forget_loss"] + 0.1

    class Killed(Exception):
        pass

    class Killer:
        title = ""

        def phase(self, title: str, rounds: int | None, done: int) -> None:
            self.title = title

        def round(self, done: int, note: str) -> None:
            if self.title.startswith("Unlearning") and done == 1:
                raise Killed

    with pytest.raises(Killed):
        run(recipe, soft / "b", reporter=Killer())
    halfway = StateFile(soft / "b" / "request-0" / "unlearned.safetensors").load()
    assert halfway is not None
    assert (halfway[0].round, set(halfway[0].kept)) == (1, {"before"})
    again = {r["phase"]: r for r in run(recipe, soft / "b")["rows"]}
    assert again["unlearned"]["fingerprint"] == rows["unlearned"]["fingerprint"]
    assert again["recovered"]["fingerprint"] == rows["recovered"]["fingerprint"]


def test_the_example_s_teacher_by_hand(soft: Path) -> None:
    """With w as logits: before = (0.8, 0.2), weight 0.5, so the teacher is (0.65, 0.35)."""
    task = importlib.import_module("my_method").Soften(weight=0.5)
    before = {"w": torch.tensor([0.8, 0.2], dtype=torch.float64).log()}
    student = {"w": torch.tensor([0.5, 0.5], dtype=torch.float64).log().requires_grad_()}
    one = torch.zeros(1)
    batch = Batch(one, one.long(), one, one, one.bool())

    def model(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return params["w"].expand(len(x), 2)

    loss = task.loss(model, student, {"start": student, "before": before}, batch)
    (gradient,) = torch.autograd.grad(loss.sum(), [student["w"]])
    torch.testing.assert_close(gradient, torch.tensor([0.5 - 0.65, 0.5 - 0.35], dtype=torch.float64))


def test_the_example_refuses_what_its_types_allow(soft: Path) -> None:
    for wrong in ({"weight": 1.5}, {"steps": 0}):
        with pytest.raises(InputError, match="soft forgetting"):
            tiny(method={"name": "my_method:SoftForgetting", **wrong})


def options_of(cls: type[Method]) -> dict[str, Any]:
    return {f.name: f.default for f in dataclasses.fields(cls)}


@pytest.mark.parametrize("name", METHODS)
def test_the_options_on_a_page_are_those_of_the_class_with_their_defaults(name: str) -> None:
    text = page(name)
    shown = tomllib.loads(blocks(text, "toml")[0])["method"]
    assert shown.pop("name") in (name, "retrain")
    options = options_of(METHODS[name])
    if name == "fedquit":  # the options of single teachers are in its table of teachers
        options = {k: v for k, v in options.items() if k in shown or f"`{k}`" not in text}
        assert options.pop("weight_decay") is None, "TOML has no word for it"
    assert shown == options
    assert build(METHODS[name], shown, "method") == METHODS[name](), "they can be given as they are written"


@pytest.mark.parametrize("name", METHODS)
def test_the_presets_on_a_page_are_those_of_the_class(name: str) -> None:
    lines = page(name).splitlines()
    shown: dict[str, dict[str, Any]] = {}
    for at, line in enumerate(lines):
        header = re.match(r"\| option \| default \| (.*) \|$", line)
        if not header:
            continue
        presets = re.findall(r"`([^`]+)`", header[1])
        for row in lines[at + 2 :]:
            if not row.startswith("|"):
                break
            option, *values = re.findall(r"`([^`]+)`", row)
            default, *changed = (tomllib.loads(f"value = {v}")["value"] for v in values)
            assert default == options_of(METHODS[name])[option]
            for preset, value in zip(presets, changed, strict=True):
                shown.setdefault(preset, {})[option] = value
    assert shown == {preset: dict(changes) for preset, changes in METHODS[name].presets.items()}


@pytest.mark.parametrize("name", METHODS)
def test_the_index_has_a_line_for_the_method(name: str) -> None:
    text = (ROOT / "docs" / "methods" / "README.md").read_text()
    (line,) = [line for line in text.splitlines() if line.startswith(f"| [`{name}`]")]
    *_, requests, presets, _ = (cell.strip() for cell in line.split("|"))
    assert f"]({PAGES[name]}.md)" in line
    assert re.findall(r"`([^`]+)`", presets) == list(METHODS[name].presets)
    source = inspect.getsource(METHODS[name].check)
    refuses = "RequestError" in source or "require_whole_clients" in source
    assert refuses == (requests != "client, several, samples")


def test_every_page_belongs_to_a_method() -> None:
    found = {path.stem for path in (ROOT / "docs" / "methods").glob("*.md")}
    assert found == {"README", *PAGES.values()}
