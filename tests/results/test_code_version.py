# SPDX-License-Identifier: Apache-2.0
"""Every result names the code that made it: the version, and the commit where it runs from a checkout."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

import fedquit
from fedquit.cli import main
from fedquit.utils import version
from fedquit.utils.version import code_version

GIT = shutil.which("git")
needs_git = pytest.mark.skipif(GIT is None, reason="git is not installed")


def git(folder: Path, *words: str) -> str:
    own = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *own, *words], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    root = tmp_path / "checkout"
    (root / "src" / "fedquit").mkdir(parents=True)
    (root / "src" / "fedquit" / "a.py").write_text("a = 1\n")
    git(root, "init", "-q", "-b", "main")
    git(root, "add", ".")
    git(root, "commit", "-q", "-m", "first")
    return root


def asked_in(root: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str | bool]:
    monkeypatch.setattr(version, "PACKAGE", root / "src" / "fedquit")
    return code_version.__wrapped__()


@needs_git
def test_a_checkout_names_its_commit_and_whether_files_differ(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = git(checkout, "rev-parse", "HEAD")
    clean = {"version": fedquit.__version__, "commit": commit, "dirty": False}
    assert asked_in(checkout, monkeypatch) == clean
    (checkout / "notes.txt").write_text("not of the package")
    assert asked_in(checkout, monkeypatch) == clean
    (checkout / "src" / "fedquit" / "a.py").write_text("a = 2\n")
    assert asked_in(checkout, monkeypatch) == clean | {"dirty": True}


@needs_git
@pytest.mark.parametrize("kind", ["packed", "detached", "worktree"])
def test_the_commit_is_read_from_every_kind_of_checkout(
    kind: str, checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit, root = git(checkout, "rev-parse", "HEAD"), checkout
    if kind == "packed":
        git(checkout, "pack-refs", "--all")
    elif kind == "detached":
        git(checkout, "checkout", "-q", "--detach")
    else:
        root = tmp_path / "beside"
        git(checkout, "worktree", "add", "-q", "-b", "other", str(root))
    monkeypatch.setenv("PATH", str(tmp_path))  # without git
    assert asked_in(root, monkeypatch) == {"version": fedquit.__version__, "commit": commit}


@pytest.mark.parametrize("head", [None, "", "ref: refs/heads/gone", "not a commit", "abc"])
def test_what_is_no_checkout_gives_the_version_alone(
    head: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "src" / "fedquit").mkdir(parents=True)
    if head is not None:
        (tmp_path / ".git").mkdir()
        (tmp_path / ".git" / "HEAD").write_text(head)
    assert asked_in(tmp_path, monkeypatch) == {"version": fedquit.__version__}


def test_an_installed_package_does_not_take_the_commit_of_the_project_around_it(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = checkout / "lib" / "fedquit"
    installed.mkdir(parents=True)
    monkeypatch.setattr(version, "PACKAGE", installed)
    assert code_version.__wrapped__() == {"version": fedquit.__version__}


def test_runs_and_comparisons_store_it_and_the_report_shows_the_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "r.toml").write_text(
        '[data]\nname = "synthetic"\npartition = "iid"\nclients = 3\n[train]\nrounds = 1\n'
    )
    monkeypatch.chdir(tmp_path)
    code = {"version": "9.9", "commit": "c" * 40, "dirty": True}
    for user in ("fedquit.running.runner", "fedquit.studies.comparison"):
        monkeypatch.setattr(f"{user}.code_version", lambda: dict(code))
    monkeypatch.setattr(
        "sys.argv",
        ["fedquit", "compare", "r.toml", "--methods", "natural", "--targets", "0", "--jobs", "1", "--out", "c"],
    )
    with pytest.raises(SystemExit):
        main()
    for path in ("c/comparison.json", "c/seed-0/client-0/natural/results.json"):
        assert json.loads((tmp_path / path).read_text())["code"] == code
    assert f"<dt>commit</dt><dd>{'c' * 40} with uncommitted changes</dd>" in (tmp_path / "c/report.html").read_text()
