# SPDX-License-Identifier: Apache-2.0
"""Try a wheel on every Python that the package names: `make test-pythons`, which is no part of regular CI.

    python release/pythons.py WHEEL [--pythons 3.11,3.12,3.13] [--folder build/pythons]

Each Python gets an environment of its own, with the versions of constraints.txt. There the wheel is installed and
checked, the code of the documentation's first page runs, and so does the demo. A Python that this machine does not have
is named in one sentence, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 1800  # seconds for one command
BLOCK = re.compile(r"```python\n(# first\.py\n.*?)```", re.DOTALL)


class Refused(Exception):
    """Something is missing; the sentence says what to do."""


def named_pythons() -> list[str]:
    """The versions in the classifiers of pyproject.toml, as 3.11."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [found.group(1) for one in project["classifiers"] if (found := re.search(r":: (3\.\d+)$", one))]


def interpreter(version: str) -> Path:
    """An interpreter of a version: on the PATH, from pyenv, or from uv.

    Raises:
        Refused: if there is none.
    """
    for candidate in _candidates(version):
        asked = [str(candidate), "-c", "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"]
        try:
            done = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=False)
        except OSError:
            continue
        if done.returncode == 0 and done.stdout.strip() == version:
            return candidate
    raise Refused(
        f"there is no Python {version} here: install it (by `uv python install {version}`, pyenv or your system's "
        "packages), or leave it out with --pythons."
    )


def _candidates(version: str) -> Iterator[Path]:
    on_path = shutil.which(f"python{version}")
    if on_path:
        yield Path(on_path)
    of_pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    yield from sorted(of_pyenv.glob(f"{version}.*/bin/python"))
    uv = shutil.which("uv")
    if uv:
        found = subprocess.run([uv, "python", "find", version], capture_output=True, text=True, check=False)
        if found.returncode == 0:
            yield Path(found.stdout.strip())


def first_page() -> str:
    """The code of the documentation's first page."""
    (code,) = BLOCK.findall((ROOT / "README.md").read_text())
    return str(code)


def call(*words: str | Path, cwd: Path) -> str:
    """Run a command without this process's packages, and return what it prints.

    Raises:
        Refused: if it fails.
    """
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME")}
    command = [str(word) for word in words]
    clean.setdefault("OMP_NUM_THREADS", "1")  # more threads than free cores wait for each other
    done = subprocess.run(command, cwd=cwd, env=clean, capture_output=True, text=True, timeout=LIMIT, check=False)
    if done.returncode != 0:
        raise Refused(f"`{' '.join(command)}` failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def tried(wheel: Path, python: Path, folder: Path) -> dict[str, float]:
    """Install a wheel with one interpreter and use it; the seconds of each part.

    Args:
        wheel: the file.
        python: the interpreter.
        folder: of the environment; made anew.
    """
    seconds: dict[str, float] = {}

    def timed(name: str, *words: str | Path) -> str:
        began = time.monotonic()
        printed = call(*words, cwd=folder)
        seconds[name] = round(time.monotonic() - began, 1)
        return printed

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    own = folder / "env" / "bin"
    timed("venv", python, "-m", "venv", "env")
    pip = (own / "python", "-m", "pip", "--disable-pip-version-check")
    timed("install", *pip, "install", "--quiet", "-c", ROOT / "constraints.txt", wheel)
    timed("pip check", *pip, "check")
    timed("--version", own / "fedquit", "--version")
    timed("doctor", own / "fedquit", "doctor")
    (folder / "first.py").write_text(first_page())
    if "forgotten within the margin" not in timed("first page", own / "python", "first.py"):
        raise Refused("the code of the first page ran, and its verdict is not 'forgotten within the margin'.")
    timed("demo", own / "fedquit", "demo")
    return seconds


def main() -> None:
    """Try a wheel on each Python; end with 1 if one is missing or fails."""
    parser = argparse.ArgumentParser(description="Try a wheel on several versions of Python.")
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--pythons", default=",".join(named_pythons()), help="versions, such as 3.12,3.13")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "pythons")
    given = parser.parse_args()
    failed = False
    for version in given.pythons.split(","):
        try:
            python = interpreter(version)
            seconds = tried(given.wheel.resolve(), python, given.folder.resolve() / version)
        except (Refused, subprocess.TimeoutExpired) as error:
            failed = True
            print(f"{version}: {error}", file=sys.stderr, flush=True)
            continue
        parts = ", ".join(f"{name} {each:g} s" for name, each in seconds.items())
        print(f"{version}: works ({python}): {parts}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
