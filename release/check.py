# SPDX-License-Identifier: Apache-2.0
"""Refuse a release that is not ready: `make release-check` builds it and runs this on the files.

    python release/check.py dist/fedquit-X.tar.gz dist/fedquit-X-py3-none-any.whl

Each thing that is missing is one sentence; the exit code is 1 if there is one.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from email import message_from_string
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RELATIVE = re.compile(r"\]\((?!https?://|#|mailto:)[^)]*\)")
NEEDED = ("README.md", "CHANGELOG.md", "LICENSE", "CITATION.cff", "constraints.txt", "Makefile", "release/metadata.py")


def problems(sdist: Path, wheel: Path) -> Iterator[str]:
    """Everything that stands against releasing two files, a sentence each.

    Args:
        sdist: the source archive.
        wheel: the wheel.
    """
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (place,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        metadata = message_from_string(archive.read(place).decode())
    yield from of_version(str(metadata["Version"]), ROOT)
    if not metadata.get_all("Project-URL"):
        yield (
            "the metadata names no address of the project: write the public address of the repository into `address` "
            "under [tool.hatch.metadata.hooks.custom] of pyproject.toml, and build again."
        )
    page = re.sub(r"```.*?```|`[^`]*`", "", str(metadata.get_payload()), flags=re.DOTALL)
    for link in RELATIVE.findall(page):
        yield f"README.md has the link {link[1:]} on the index, where it leads nowhere: let release/metadata.py see it."
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    for name in tracked(ROOT):
        if name not in held and not name.startswith("."):
            yield f"{name} is not in {sdist.name}: add it to [tool.hatch.build.targets.sdist] of pyproject.toml."
    for name in NEEDED:
        if name not in held:
            yield f"{name} is not in {sdist.name}."


def of_version(version: str, root: Path) -> Iterator[str]:
    """Where the version is written otherwise, or has no dated entry in the changelog.

    Args:
        version: of the metadata.
        root: of the source tree.
    """
    cited = re.findall(r"^version: (\S+)$", (root / "CITATION.cff").read_text(), re.MULTILINE)
    if cited != [version]:
        yield f"CITATION.cff has the version {', '.join(cited) or 'none'}, and the package {version}: make them equal."
    changelog = (root / "CHANGELOG.md").read_text()
    if not re.search(rf"^## {re.escape(version)} \(\d{{4}}-\d\d-\d\d\)$", changelog, re.MULTILINE):
        yield f"CHANGELOG.md has no heading '## {version} (YYYY-MM-DD)': write what changed for users."


def tracked(root: Path) -> list[str]:
    """The files that git knows; none where there is no git."""
    done = subprocess.run(["git", "-C", str(root), "ls-files"], capture_output=True, text=True, check=False)
    return done.stdout.splitlines() if done.returncode == 0 else []


def main() -> None:
    """Print every problem; end with 1 if there is one."""
    sdist, wheel = map(Path, sys.argv[1:3])
    found = list(problems(sdist, wheel))
    for sentence in found:
        print(sentence, file=sys.stderr)
    if not found:
        print(f"{sdist.name} and {wheel.name} are ready.")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
