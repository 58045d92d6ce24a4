# SPDX-License-Identifier: Apache-2.0
"""One HTML page over one or more runs: two plain sentences, the figures, every number, and the recipe behind them.

The page needs nothing but itself: no network, no script. Figures are SVG whose colours are the page's own, so that they
follow it into the dark. The same runs give the same bytes. The tables also come as CSV, Markdown, LaTeX and JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from fedquit.errors import InputError, StoreError
from fedquit.report.export import to_csv, to_json, to_latex, to_md
from fedquit.report.page import page
from fedquit.report.reading import Found, load_results, opened
from fedquit.utils.files import write_atomic
from fedquit.utils.names import lookup

__all__ = ["ENDINGS", "FORMATS", "load_results", "write_report"]

FORMATS: dict[str, Callable[[Found], str]] = {
    "html": page,
    "csv": to_csv,
    "md": to_md,
    "latex": to_latex,
    "json": to_json,
}
ENDINGS = {"html": ".html", "csv": ".csv", "md": ".md", "latex": ".tex", "json": ".json"}  # of the files, by format


def write_report(folders: Sequence[Path], out: Path, format: str | None = None) -> None:
    """Write one file over these runs, whole or not at all.

    The folder of a comparison stands for all its runs, and adds what it found out: paired comparisons, what needs many
    models, and what failed. `html` is the page; `csv` holds every row, `md` and `latex` the table with the gaps to
    Retrain, `json` all of it. Unless it is given, the ending of the file tells the format.
    """
    make = lookup(FORMATS, _format_for(out, format), "format")
    if not folders:
        raise StoreError("a report needs at least one run: name its folder.")
    write_atomic(out, make(opened(folders)).encode())


def _format_for(out: Path, asked: str | None) -> str:
    """What is asked for, unless the name of the file promises another format; without an ending, the page."""
    ending = out.suffix.lower()
    told = next((name for name, known in ENDINGS.items() if known == ending), None)
    if asked in FORMATS and told not in (asked, None):
        raise InputError(
            f"{out} ends in {ending}, and the format asked for is {asked}: "
            f"let it end in {ENDINGS[asked]}, or leave the format out."
        )
    if asked is None and told is None and ending:
        raise InputError(f"{out} ends in none of {', '.join(ENDINGS.values())}: rename it, or give the format.")
    return asked or told or "html"
