# SPDX-License-Identifier: Apache-2.0
"""The documentation site: links lead to pages of the site, and a page that is nowhere in the menu is an error."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import fedquit

ROOT = Path(__file__).parents[1]
pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="needs the extra docs"),
    pytest.mark.skipif(not (ROOT / "mkdocs.yml").exists(), reason="needs a checkout"),
]


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "docs/site_hooks.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["site_hooks"] = module
    spec.loader.exec_module(module)
    return module


def shown(hooks: ModuleType, page: str, markdown: str) -> Any:
    return hooks.on_page_markdown(markdown, SimpleNamespace(file=SimpleNamespace(src_uri=page)), None, None)


@pytest.mark.parametrize(
    ("page", "written", "in_the_site"),
    [
        ("index.md", "[x](docs/flower.md#the-demo)", "[x](flower.md#the-demo)"),
        ("flower.md", "[x](../SECURITY.md)", "[x](security.md)"),
        ("methods/pga.md", "[x](../choosing-lr.md)", "[x](../choosing-lr.md)"),
        ("methods/pga.md", "[`x`](../../src/fedquit/methods/pga.py)", "`x`"),
        ("flower.md", "`a[0](no.md)`", "`a[0](no.md)`"),
        ("flower.md", "```\n[x](no.md)\n```", "```\n[x](no.md)\n```"),
        ("flower.md", "[x](https://example.org/no.md)", "[x](https://example.org/no.md)"),
    ],
)
def test_links_lead_to_pages_of_the_site(hooks: ModuleType, page: str, written: str, in_the_site: str) -> None:
    assert shown(hooks, page, written) == in_the_site


def test_a_link_to_nothing_is_an_error(hooks: ModuleType) -> None:
    from mkdocs.exceptions import PluginError

    with pytest.raises(PluginError, match=r"docs/flower.md has a link to no.md, which is not there"):
        shown(hooks, "flower.md", "[x](no.md)")


def test_the_reference_has_every_stable_name(hooks: ModuleType) -> None:
    assert "fedquit" in hooks.stable_packages()
    assert "fedquit.core" in hooks.stable_packages()
    assert hooks.stable_names("fedquit") == fedquit.__all__
