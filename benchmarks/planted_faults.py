# SPDX-License-Identifier: Apache-2.0
"""Plant faults in a copy of the tree, one at a time, and see whether the tests named with each catch it.

    python benchmarks/planted_faults.py                   all faults of planted_faults.toml
    python benchmarks/planted_faults.py --only fedquit    those whose name holds a word
    python benchmarks/planted_faults.py --tree OTHER      with the sources and tests of another checkout
    python benchmarks/planted_faults.py --out FILE        also write the table as Markdown

It first sees that the named tests pass without any fault; otherwise a failure would prove nothing.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIST = Path(__file__).with_suffix(".toml")
LIMIT = 300.0  # seconds for the tests of one fault
PASSED, FAILED = 0, 1  # pytest's exit codes


class PlantError(Exception):
    """A fault that cannot be planted: its line has moved."""


@dataclass(frozen=True)
class Fault:
    """One changed piece of one line, and the test files that must notice."""

    name: str
    file: str  # below src/fedquit; a pattern where the line may stand in one of several files
    old: str
    new: str
    tests: tuple[str, ...]

    def located(self, tree: Path) -> Path:
        """The file with the line to break.

        Args:
            tree: A checkout.

        Raises:
            PlantError: If `old` does not occur exactly once in the files.
        """
        texts = {path: path.read_text(encoding="utf-8") for path in (tree / "src" / "fedquit").glob(self.file)}
        count = sum(text.count(self.old) for text in texts.values())
        if count != 1:
            raise PlantError(
                f"{self.name}: {self.old!r} occurs {count} times in src/fedquit/{self.file}, not once; "
                "name the line that does its work now in benchmarks/planted_faults.toml."
            )
        return next(path for path, text in texts.items() if self.old in text)

    def planted(self, text: str) -> str:
        """A file's text with the fault in it."""
        return text.replace(self.old, self.new)


def read_faults(path: Path = LIST) -> list[Fault]:
    """The list of faults."""
    entries = tomllib.loads(path.read_text(encoding="utf-8"))["fault"]
    return [Fault(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]


def run_tests(tree: Path, tests: Sequence[str], *, limit: float, stop_at_first: bool) -> tuple[int | None, str]:
    """Run test files in a tree, without the slow tests.

    Args:
        tree: A copy of the repository.
        tests: Test files, relative to it.
        limit: Seconds that they may take.
        stop_at_first: Whether the first failure is enough.

    Returns:
        pytest's exit code, None where the time limit was reached; and the end of what it printed.
    """
    present = [test for test in tests if (tree / test).exists()]
    options = [
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "not slow and not faults",
        "--no-header",
        "--tb=no",
        *["-x"] * stop_at_first,
    ]
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", *options, *present]
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=limit, check=False
        )
    except subprocess.TimeoutExpired:
        return None, f"no end within {limit:g} s"
    return done.returncode, done.stdout[-2000:]


def copied(tree: Path, folder: Path) -> Path:
    """A copy of what the tests need of a checkout."""
    leave = shutil.ignore_patterns(".git", ".venv*", "__pycache__", ".*_cache", ".hypothesis", "runs", "dist")
    return Path(shutil.copytree(tree, folder / "tree", ignore=leave))


def tried(fault: Fault, tree: Path) -> str:
    """Plant a fault, run its tests, and take it out again.

    Returns:
        "caught", "NOT CAUGHT", or why nothing could be said.
    """
    try:
        path = fault.located(tree)
    except PlantError as error:
        return f"NOT PLANTED: {error}"
    text = path.read_text(encoding="utf-8")
    path.write_text(fault.planted(text), encoding="utf-8")
    try:
        code, printed = run_tests(tree, fault.tests, limit=LIMIT, stop_at_first=True)
    finally:
        path.write_text(text, encoding="utf-8")
    if code in (FAILED, None):
        return "caught"
    return "NOT CAUGHT" if code == PASSED else f"NOT RUN: pytest ended with {code}\n{printed}"


def main() -> int:
    """Try all faults; the exit code is 1 if one was not caught."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a word in the names of the faults to try")
    parser.add_argument("--tree", type=Path, default=ROOT, help="the checkout whose sources and tests are used")
    parser.add_argument("--out", type=Path, help="a Markdown file for the table")
    given = parser.parse_args()
    faults = [fault for fault in read_faults() if given.only in fault.name]
    lines = ["| fault | file | tests | result |", "|---|---|---|---|"]
    with tempfile.TemporaryDirectory(prefix="planted-faults-") as folder:
        tree = copied(given.tree.resolve(), Path(folder))
        all_tests = sorted({test for fault in faults for test in fault.tests})
        code, printed = run_tests(tree, all_tests, limit=10 * LIMIT, stop_at_first=False)
        if code != PASSED:
            print(f"The tests fail without any fault, so that nothing can be said:\n{printed}")
            return 1
        results = []
        for fault in faults:
            began = time.monotonic()
            result = tried(fault, tree)
            results.append(result)
            print(f"{result:12} {time.monotonic() - began:6.1f} s  {fault.name}", flush=True)
            names = ", ".join(Path(test).name for test in fault.tests)
            lines.append(f"| {fault.name} | `{fault.file}` | {names} | {result} |")
    caught = results.count("caught")
    print(f"{caught} of {len(faults)} planted faults caught.")
    if given.out:
        given.out.write_text("\n".join([*lines, "", f"{caught} of {len(faults)} caught.", ""]), encoding="utf-8")
    return int(caught < len(faults))


if __name__ == "__main__":
    sys.exit(main())
