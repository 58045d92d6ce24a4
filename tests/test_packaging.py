# SPDX-License-Identifier: Apache-2.0
"""What a user gets from an index: the page, the sdist with its tests, and the wheel in an empty environment."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from email import message_from_string
from pathlib import Path
from types import ModuleType

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


def loaded(name: str) -> ModuleType:
    """A module of the folder release, which is no package."""
    if not (ROOT / "release").exists():
        pytest.skip("needs a checkout")
    spec = importlib.util.spec_from_file_location(f"release_{name}", ROOT / "release" / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist, and the wheel that is made from it."""
    out = tmp_path_factory.mktemp("dist")
    call(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT, cwd=ROOT)
    (sdist,) = out.glob("*.tar.gz")
    (wheel,) = out.glob("*.whl")
    return sdist, wheel


@pytest.fixture(scope="module")
def wheel(dist: tuple[Path, Path]) -> Path:
    return dist[1]


# ---- what an index shows


@pytest.mark.parametrize(
    ("written", "without", "with_address"),
    [
        ("see [docs/a.md](docs/a.md#b).", "see docs/a.md.", "see [docs/a.md](https://h.org/f/blob/v1.2/docs/a.md#b)."),
        ("![plot](docs/p.png)", "plot", "![plot](https://h.org/f/raw/v1.2/docs/p.png)"),
        ("[`demo.toml`](src/d.toml)", "`demo.toml`", "[`demo.toml`](https://h.org/f/blob/v1.2/src/d.toml)"),
        ("[x](https://a.org)", "[x](https://a.org)", "[x](https://a.org)"),
        ("[x](#here)", "[x](#here)", "[x](#here)"),
        ("`a[0](b)`", "`a[0](b)`", "`a[0](b)`"),
        ("```\n[x](y)\n```", "```\n[x](y)\n```", "```\n[x](y)\n```"),
        ("git clone <this repository>", "git clone <this repository>", "git clone https://h.org/f"),
        (
            "pip install .    # in a clone of this repository; x",
            "pip install .    # in a clone of this repository; x",
            "pip install fedquit    # x",
        ),
    ],
)
def test_links_lead_somewhere_on_an_index(written: str, without: str, with_address: str) -> None:
    page = loaded("metadata").for_an_index
    assert page(written, "", "1.2") == f"{without}\n"
    assert page(written, "https://h.org/f", "1.2") == f"{with_address}\n"


def test_every_relative_link_of_the_readme_leads_to_a_file_and_none_is_left_on_an_index() -> None:
    hook = loaded("metadata")
    text = (ROOT / "README.md").read_text()
    relative = loaded("check").RELATIVE
    targets = [link[2:-1].partition("#")[0] for link in relative.findall(text)]
    assert len(targets) > 10
    assert all((ROOT / target).exists() for target in targets)
    assert all(words in text for words in (hook.CLONE, hook.INSTALL[0]))
    for address in ("", "https://h.org/f"):
        assert not relative.findall(hook.for_an_index(text, address, "1.2"))


def test_the_project_s_addresses_are_made_from_one_and_there_are_none_without_it() -> None:
    hook = loaded("metadata")
    assert hook.project_urls("", "1.2") == {}
    urls = hook.project_urls("https://h.org/f", "1.2")
    assert urls["Homepage"] == "https://h.org/f"
    assert all(url.startswith("https://h.org/f") for url in urls.values())
    assert hook.version(ROOT) == __version__


def test_the_version_is_the_same_everywhere_and_the_changelog_has_an_entry_with_its_date(tmp_path: Path) -> None:
    check = loaded("check")
    assert list(check.of_version(__version__, ROOT)) == []
    (tmp_path / "CITATION.cff").write_text("version: 0.0.9\n")
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n## {__version__}\n")
    found = list(check.of_version(__version__, tmp_path))
    assert found[0].startswith("CITATION.cff has the version 0.0.9")
    assert found[1].startswith(f"CHANGELOG.md has no heading '## {__version__} (YYYY-MM-DD)'")


def test_a_python_that_is_not_here_is_named_in_one_sentence(tmp_path: Path) -> None:
    pythons = loaded("pythons")
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert here in pythons.named_pythons()
    wanted = [sys.executable, str(ROOT / "release" / "pythons.py"), "no.whl", "--pythons", "3.99"]
    done = subprocess.run(wanted, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 1
    assert re.fullmatch(r"3\.99: there is no Python 3\.99 here: install it .*--pythons\.\n", done.stderr)


def test_the_code_of_the_first_page_runs_and_prints_what_the_page_shows(tmp_path: Path) -> None:
    code = loaded("pythons").first_page()
    (tmp_path / "first.py").write_text(code)
    environment = {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    printed = call(sys.executable, "first.py", cwd=tmp_path, **environment)
    (shown,) = re.findall(r"```\n(accuracy %.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert "\nOMP_NUM_THREADS=1 python first.py\n```" in (ROOT / "README.md").read_text(), (
        "the threads of these figures"
    )
    ours_in_words, shown_in_words = (re.sub(r"[\d.,]+| +", " ", text).split() for text in (printed, shown))
    assert ours_in_words == shown_in_words, "the page shows every line"
    for ours, page in zip(printed.splitlines()[1:5], shown.splitlines()[1:5], strict=True):
        found, written = ([float(n.replace(",", "")) for n in re.findall(r"[\d.,]+", line)] for line in (ours, page))
        assert found == pytest.approx(written, abs=6.0), "another processor rounds otherwise"
    assert "\nforgotten within the margin: AUC" in printed
    assert (tmp_path / "report.html").stat().st_size > 1000
    assert (tmp_path / "forgotten.pt").exists()


# ---- the files


@pytest.mark.slow
def test_a_build_is_complete_and_lacks_for_a_release_nothing_but_an_address(dist: tuple[Path, Path]) -> None:
    sdist, wheel = dist
    found = list(loaded("check").problems(sdist, wheel))
    assert [sentence for sentence in found if "names no address of the project" not in sentence] == []
    assert len(found) == 1, "once there is an address, `make release-check` is content, and this line goes"
    with zipfile.ZipFile(wheel) as archive:
        (place,) = [name for name in archive.namelist() if name.endswith("METADATA")]
        metadata = message_from_string(archive.read(place).decode())
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert str(metadata.get_payload()).startswith("# fedquit\n")


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
def test_the_sdist_installs_into_an_empty_environment_where_its_tests_version_demo_and_check_work(
    dist: tuple[Path, Path], tmp_path: Path
) -> None:
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", ROOT / "constraints.txt")
    call(*pip, dist[0], "hypothesis", "pytest", "pytest-timeout", "pytest-xdist", cwd=tmp_path)
    with tarfile.open(dist[0]) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.glob("fedquit-*")
    smoke = ("tests/test_smoke.py", "-k", "command_line or made_up or few or partition", "-p", "no:cacheprovider")
    call(python, "-m", "pytest", "-q", "-n", "0", *smoke, cwd=source, OMP_NUM_THREADS="1")
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
