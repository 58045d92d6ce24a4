# SPDX-License-Identifier: Apache-2.0
"""FedQUIT's paper beside our records: every cell of its tables, every finding it states, and what it did not ask."""

from __future__ import annotations

from pathlib import Path

from fedquit.paper.page import build_page
from fedquit.utils.files import write_atomic

__all__ = ["build_page", "write_pages"]


def write_pages(records: Path, markdown: Path, html: Path, *, smoke: bool = False) -> None:
    """Write both pages, each whole or not at all.

    Args:
        records: The folder of the records.
        markdown: The file of the page in Markdown.
        html: The file of the page in HTML.
        smoke: Whether the records are of recipes at their smallest size (`fedquit run --smoke`).

    Raises:
        StoreError: A record cannot be read, or a file cannot be written.
    """
    page = build_page(records, smoke=smoke)
    write_atomic(markdown, page.markdown.encode())
    write_atomic(html, page.html.encode())
