# SPDX-License-Identifier: Apache-2.0
"""The command that sets records beside FedQUIT's paper."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fedquit.cli.screen import AsJson

NAME = "reproduction"  # of both files


def paper(
    records: Annotated[Path, typer.Argument(help="A folder with runs, comparisons and studies, at any depth.")],
    out: Annotated[Path | None, typer.Option(help="The folder of both pages; else that of the records.")] = None,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="Try the pages out on records of `fedquit run --smoke`.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Set your records beside the tables and findings of FedQUIT's paper: a page in Markdown and one in HTML."""
    from fedquit.paper import write_pages

    folder = out or records
    markdown, html = folder / f"{NAME}.md", folder / f"{NAME}.html"
    write_pages(records, markdown, html, smoke=smoke)
    if as_json:
        typer.echo(json.dumps({"markdown": str(markdown), "html": str(html)}))
    else:
        typer.echo(f"Markdown: {markdown}\nPage: {html}")
