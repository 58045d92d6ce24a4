# SPDX-License-Identifier: Apache-2.0
"""What a user gets who installs the wheel into an empty environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from fedquit import __version__
from fedquit.running.recipe import packaged
from fedquit.studies.plan import packaged_studies

ROOT = Path(__file__).parent.parent
BESIDE = ("original", "retrain", "fedquit", "natural")
OWN_METHOD = '''
from dataclasses import dataclass

from fedquit.core import Federation, Method, Request, State, Trained


@dataclass(frozen=True)
class Halve(Method):
    """Shrink the last layer, and let ordinary training follow."""

    factor: float = 0.5

    def unlearn(self, fed: Federation, state: State, trained: Trained, request: Request) -> State:
        last = list(state.params)[-2:]
        return state.next({n: self.factor * p if n in last else p for n, p in state.params.items()})
'''


def call(*command: str | Path, cwd: Path, **environment: str) -> str:
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, env=clean | environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    call(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, ROOT, cwd=ROOT)
    (found,) = out.glob("*.whl")
    return found


@pytest.mark.slow
def test_the_wheel_holds_data_recipes_template_and_types(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    for name in ("py.typed", "data/fashion_mnist_mini.npz", "recipes/demo.toml", "templates/report.html.j2"):
        assert f"fedquit/{name}" in names
    for study in packaged_studies():
        assert f"fedquit/study_files/{study}.toml" in names
    for recipe in packaged():
        assert f"fedquit/recipes/{recipe}.toml" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not any("test" in name.split("/")[0] for name in names)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_version_demo_and_check_work_from_the_wheel_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", ROOT / "constraints.txt")
    call(*pip, wheel, cwd=tmp_path)
    assert call(tmp_path / "env" / "bin" / "fedquit", "--version", cwd=tmp_path) == f"fedquit {__version__}\n"
    call(tmp_path / "env" / "bin" / "fedquit", "demo", cwd=tmp_path, OMP_NUM_THREADS="1")
    results = json.loads((tmp_path / "runs" / "demo" / "results.json").read_text())
    by_phase = {row["phase"]: row for row in results["rows"]}
    assert by_phase["original"]["forget_acc"] > by_phase["retrained"]["forget_acc"] + 15
    assert by_phase["natural"]["rounds"] == by_phase["unlearned"]["rounds"] + by_phase["recovered"]["rounds"]
    assert by_phase["recovered"]["natural_forget_acc"] == pytest.approx(by_phase["natural"]["forget_acc"])
    assert (tmp_path / "runs" / "demo" / "report.html").stat().st_size > 10_000
    call(python, "-m", "pip", "check", cwd=tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "my_own.py").write_text(OWN_METHOD)
    check = (tmp_path / "env" / "bin" / "fedquit", "check", "my_own:Halve", "--json")
    report = json.loads(call(*check, cwd=tmp_path, PYTHONPATH=str(tmp_path / "mine"), OMP_NUM_THREADS="1"))
    verdicts = {part["name"]: part["status"] for part in report["parts"]}
    assert verdicts.pop("flower") == "skipped", "the extra is not installed"
    assert verdicts.pop("behaviour") == "shown"
    assert set(verdicts.values()) == {"kept"}
    assert {line["method"] for line in report["behaviour"]} == {*BESIDE, "my_own:Halve"}


def test_the_tree_runs_uninstalled(tmp_path: Path) -> None:
    printed = call(sys.executable, "-m", "fedquit", "--version", cwd=tmp_path, PYTHONPATH=str(ROOT / "src"))
    assert printed == f"fedquit {__version__}\n"
