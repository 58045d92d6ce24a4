# SPDX-License-Identifier: Apache-2.0
"""What a package index shows: README.md with links that lead somewhere, and the addresses of the project.

Hatchling runs this hook for every build. The public address of the repository is in one place, `address` under
`[tool.hatch.metadata.hooks.custom]` of pyproject.toml. While it is empty there are no project URLs, and a link of
README.md to a file of the repository becomes its text; `make release-check` refuses to release such a build.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(!?)\[((?:[^\]\[`]|`[^`]*`)*)\]\(([^)\s]+)\)|`[^`]*`")  # or code, which stays as it is
FENCE = re.compile(r"^\s*(```|~~~)")
CLONE = "<this repository>"
INSTALL = ("pip install .    # in a clone of this repository; ", "pip install fedquit    # ")
VERSION = re.compile(r'^__version__ = "([^"]+)"$', re.MULTILINE)


class IndexMetadata(MetadataHookInterface):
    """Fills `readme` and `urls` of the project's metadata."""

    def update(self, metadata: dict[str, Any]) -> None:
        root = Path(self.root)
        address = str(self.config.get("address", "")).rstrip("/")
        text = (root / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": for_an_index(text, address, version(root)),
        }
        metadata["urls"] = project_urls(address, version(root))


def version(root: Path) -> str:
    """The version of the package in a source tree."""
    (written,) = VERSION.findall((root / "src" / "fedquit" / "__init__.py").read_text(encoding="utf-8"))
    return str(written)


def project_urls(address: str, version: str) -> dict[str, str]:
    """The addresses of the project; none without an address of the repository.

    Args:
        address: of the repository, without a slash at its end.
        version: whose tag is `v` and the version.
    """
    if not address:
        return {}
    return {
        "Homepage": address,
        "Documentation": f"{address}/tree/v{version}/docs",
        "Changelog": f"{address}/blob/v{version}/CHANGELOG.md",
        "Issues": f"{address}/issues",
    }


def for_an_index(markdown: str, address: str, version: str) -> str:
    """README.md as a page outside of the repository.

    Args:
        markdown: the page.
        address: of the repository; "" where it has none: links to files become their text.
        version: whose files the links lead to.
    """
    lines = []
    in_code = False
    for line in markdown.splitlines():
        in_code ^= bool(FENCE.match(line))
        lines.append(line if in_code else LINK.sub(lambda match: _link(match, address, version), line))
    page = "\n".join(lines) + "\n"
    return page.replace(CLONE, address).replace(*INSTALL) if address else page


def _link(match: re.Match[str], address: str, version: str) -> str:
    image, text, target = match.groups()
    if target is None or "://" in target or target.startswith(("#", "mailto:")):
        return match.group()
    if not address:
        return str(text)
    return f"{image}[{text}]({address}/{'raw' if image else 'blob'}/v{version}/{target})"
