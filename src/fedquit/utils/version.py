# SPDX-License-Identifier: Apache-2.0
"""Which code is running: the version of the package, and the commit where it is imported from a git checkout."""

from __future__ import annotations

import subprocess
from functools import cache
from importlib import import_module
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
PATIENCE = 10.0  # seconds that git may take


def package_version() -> str:
    """The version of the package."""
    return str(import_module("fedquit").__version__)


@cache
def code_version() -> dict[str, str | bool]:
    """The version, and from a checkout the commit and whether files differ from it; asked once for each process.

    Returns:
        `version`; from a checkout also `commit` (40 hex digits), and `dirty` where git is there to tell.
    """
    code: dict[str, str | bool] = {"version": package_version()}
    root = PACKAGE.parents[1]
    commit = _commit(root)
    if commit:
        code["commit"] = commit
        dirty = _dirty(root)
        if dirty is not None:
            code["dirty"] = dirty
    return code


def _commit(root: Path) -> str:
    """The commit that is checked out at `root`, read without git; "" where it is no checkout of this package."""
    if root / "src" / "fedquit" != PACKAGE:  # installed, perhaps below a checkout of something else
        return ""
    try:
        git = root / ".git"
        if git.is_file():  # a worktree: the file names its folder
            git = root / git.read_text().partition("gitdir:")[2].strip()
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref:"):
            return _checked(head)
        shared = git / "commondir"
        common = git / shared.read_text().strip() if shared.exists() else git
        return _branch([git, common], head.partition("ref:")[2].strip())
    except (OSError, ValueError):
        return ""


def _branch(folders: list[Path], name: str) -> str:
    """The commit of a branch: from a file of its own, or from `packed-refs`."""
    for folder in folders:
        if (folder / name).is_file():
            return _checked((folder / name).read_text().strip())
    for line in (folders[-1] / "packed-refs").read_text().splitlines():
        commit, _, branch = line.partition(" ")
        if branch == name:
            return _checked(commit)
    return ""


def _checked(commit: str) -> str:
    """Itself if it is the name of a commit (SHA-1 or SHA-256)."""
    int(commit, 16)
    return commit if len(commit) in (40, 64) else ""


def _dirty(root: Path) -> bool | None:
    """Whether files of the package differ from the commit; None where git cannot tell."""
    words = ["git", "-C", str(root), "--no-optional-locks", "status", "--porcelain", "--", "src/fedquit"]
    try:
        done = subprocess.run(words, capture_output=True, timeout=PATIENCE, check=False, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return None
    return bool(done.stdout.strip()) if done.returncode == 0 else None
