# SPDX-License-Identifier: Apache-2.0
"""One HTML page over one or more runs: a verdict card, the figures, every number, and the recipe behind them.

The page needs nothing but itself: no network; its own small script sorts the tables. Figures are SVG in the colours of
the page, light or dark. The same runs give the same bytes. The tables also come as CSV, Markdown, LaTeX and JSON. All
of these are views of `fedquit.results`, which holds the numbers and the verdicts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from fedquit.errors import InputError, StoreError
from fedquit.report.export import to_csv, to_json, to_latex, to_md
from fedquit.report.page import page
from fedquit.results.bundles import read_bundle, with_retrains
from fedquit.results.folders import COMPARISON, RESULTS, ResultSet, load_results, open_folders
from fedquit.utils.files import write_atomic
from fedquit.utils.names import lookup

__all__ = ["ENDINGS", "FORMATS", "load_results", "write_report"]

FORMATS: dict[str, Callable[[ResultSet], str]] = {
    "html": page,
    "csv": to_csv,
    "md": to_md,
    "latex": to_latex,
    "json": to_json,
}
ENDINGS = {"html": ".html", "csv": ".csv", "md": ".md", "latex": ".tex", "json": ".json"}  # of the files, by format


def write_report(
    folders: Sequence[Path], out: Path, format: str | None = None, retrain_from: Path | None = None
) -> None:
    """Write one file over these runs, whole or not at all.

    Args:
        folders: Of runs and comparisons; a comparison stands for all its runs, and adds paired differences, what needs
            many models, and what failed.
        out: The file; what was there before stays until the new one is whole.
        format: `html` for the page, `csv` for every row, `md` and `latex` for the table with the gaps to Retrain,
            `json` for all of it; else as the file ends.
        retrain_from: A folder of reference bundles, which give a Retrain to the runs that have none.

    Raises:
        StoreError: A folder cannot be read, or the file cannot be written.
    """
    make = lookup(FORMATS, _format_for(out, format), "format")
    if out.name in (RESULTS, COMPARISON):
        raise InputError(f"{out} is the name under which results are stored: choose another name for the report.")
    if not folders:
        raise StoreError("a report needs at least one run: name its folder.")
    results = open_folders(folders)
    if retrain_from:
        results = with_retrains(results, read_bundle(retrain_from))
    write_atomic(out, make(results).encode())


def _format_for(out: Path, asked: str | None) -> str:
    """The format asked for, unless the file's ending promises another one; without an ending, the page."""
    ending = out.suffix.lower()
    promised = next((name for name, known in ENDINGS.items() if known == ending), None)
    if asked in FORMATS and promised not in (asked, None):
        raise InputError(
            f"{out} ends in {ending}, and the format asked for is {asked}: "
            f"let it end in {ENDINGS[asked]}, or leave the format out."
        )
    if asked is None and promised is None and ending:
        raise InputError(f"{out} ends in none of {', '.join(ENDINGS.values())}: rename it, or give the format.")
    return asked or promised or "html"
