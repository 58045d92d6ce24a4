# SPDX-License-Identifier: Apache-2.0
"""The apps of docs/flower-app.md, before and after its diffs."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = (Path(__file__).parent.parent.parent / "docs" / "flower-app.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
DIFFS = re.findall(r"```diff\n(.*?)```", PAGE, re.DOTALL)
(PROJECT,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
Files = dict[str, str]


def side(diff: str, sign: str) -> str:
    """A file before (`-`) or after (`+`) a diff."""
    lines = [line[1:] for line in diff.splitlines() if not line or line[0] in (" ", sign)]
    return "\n".join(lines) + "\n"


def quickstart(sign: str) -> Files:
    """The first app."""
    return {"task": PYTHON[0], "client_app": side(DIFFS[0], sign), "server_app": side(DIFFS[1], sign)}


def fine_tuning(sign: str) -> Files:
    """The second one."""
    return {"task": PYTHON[1], "client_app": side(DIFFS[2], sign), "server_app": side(DIFFS[3], sign)}


def keeping() -> Files:
    """The first app with a server that keeps its model, and serves what comes after its last round."""
    return {**quickstart("+"), "server_app": PYTHON[2]}


def write_app(folder: Path, files: Files) -> None:
    """The modules of an app as files in a new folder."""
    folder.mkdir()
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
