# SPDX-License-Identifier: Apache-2.0
"""Make the documentation site from the pages as they are: mkdocs runs these hooks.

Pages that lie outside of docs (README.md and others) become pages of the site, and the API reference is written from
the names in `__all__` of the stable packages. A link to a page leads to that page of the site; a link to code or data,
which the site does not hold, becomes its text. A link to nothing is an error.
"""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
OTHER_PAGES = {  # of the repository, by their name in the site
    "index.md": "README.md",
    "security.md": "SECURITY.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "benchmarks.md": "benchmarks/README.md",
    "recorded-references.md": "results/references/README.md",
}
LINK = re.compile(r"(?<!!)\[((?:[^\]\[`]|`[^`]*`)*)\]\(([^)\s]+)\)|`[^`]*`")  # or code, which stays as it is
FENCE = re.compile(r"^(```|~~~)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List the methods and the packages, so that none is forgotten in the menu."""
    config.nav = [_listed(entry) for entry in config.nav or []]
    return config


def _listed(entry: dict[str, Any]) -> dict[str, Any]:
    ((title, value),) = entry.items()
    if value == "methods/":
        names = sorted(path.stem for path in (ROOT / "docs/methods").glob("*.md") if path.stem != "README")
        return {title: ["methods/README.md", *(f"methods/{name}.md" for name in names)]}
    if isinstance(value, list):
        return {title: [each for inner in value for each in _packages(inner)]}
    return entry


def _packages(entry: dict[str, Any]) -> list[dict[str, Any]]:
    if list(entry.values()) != ["reference/"]:
        return [entry]
    return [{name: f"reference/{name}.md"} for name in stable_packages()]


def stable_packages() -> list[str]:
    """The packages that docs/api.md names as stable."""
    stable, _, _ = (ROOT / "docs/api.md").read_text().partition("## What is not stable")
    return re.findall(r"^\| `(fedquit[\w.]*)` \|", stable, re.MULTILINE)


def stable_names(package: str) -> list[str]:
    """The names in `__all__` of a package."""
    source = ROOT / "src" / Path(*package.split(".")) / "__init__.py"
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            return [str(name) for name in ast.literal_eval(node.value)]
    raise PluginError(f"{source} has no __all__, and docs/api.md calls {package} stable")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside of docs, and the API reference."""
    for name, source in OTHER_PAGES.items():
        files.append(File.generated(config, name, content=(ROOT / source).read_text()))
    for package in stable_packages():
        names = [name for name in stable_names(package) if name != "__version__"]
        parts = [
            f"# {package}\n",
            f"::: {package}\n    options:\n      members: false\n      show_root_heading: false\n",
        ]
        parts += [f"::: {package}.{name}\n" for name in names]
        files.append(File.generated(config, f"reference/{package}.md", content="\n".join(parts)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let the links of a page lead to pages of the site."""
    name = page.file.src_uri
    source = PurePosixPath(OTHER_PAGES.get(name, f"docs/{name}"))
    lines = []
    in_code = False
    for line in markdown.splitlines():
        in_code ^= bool(FENCE.match(line.lstrip()))
        lines.append(line if in_code else LINK.sub(lambda match: _link(match, source, name), line))
    return "\n".join(lines)


def _link(match: re.Match[str], source: PurePosixPath, page: str) -> str:
    text, address = match.groups()
    if address is None or "://" in address or address.startswith(("#", "mailto:")):
        return match.group()
    target, hash_sign, anchor = address.partition("#")
    there = PurePosixPath(os.path.normpath(source.parent / target))
    if not (ROOT / there).exists():
        raise PluginError(f"{source} has a link to {address}, which is not there")
    in_site = {source: name for name, source in OTHER_PAGES.items()}.get(str(there))
    if in_site is None and there.parts[0] == "docs" and there.suffix == ".md":
        in_site = str(there.relative_to("docs"))
    if in_site is None:
        return text
    return f"[{text}]({os.path.relpath(in_site, PurePosixPath(page).parent)}{hash_sign}{anchor})"
