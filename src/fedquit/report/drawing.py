# SPDX-License-Identifier: Apache-2.0
"""Figures as SVG for the page, with its font, its colours, and ids of their own."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from markupsafe import Markup
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure


@dataclass(frozen=True)
class Drawn:
    """A figure of the page: its title, its SVG, the same in words for screen readers, and a line below."""

    title: str
    svg: Markup
    text: str
    caption: str = ""


# Placeholder colours, which `_for_the_page` replaces with the variables of the page's style sheet.
INK, SOFT, LINE, FORGET, TEST = "#0a0b01", "#0a0b02", "#0a0b03", "#0a0b04", "#0a0b05"
SERIES = tuple(f"#0a0c{i:02x}" for i in range(1, 9))
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))
MARKERS = "osD^vPX*"
_COLOURS = {
    INK: "var(--ink)",
    SOFT: "var(--soft)",
    LINE: "var(--line)",
    FORGET: "var(--accent)",
    TEST: "var(--quiet)",
    **{colour: f"var(--series{i})" for i, colour in enumerate(SERIES, 1)},
}
_STYLE: dict[Any, Any] = {
    "svg.hashsalt": "fedquit",
    "svg.fonttype": "none",
    "font.size": 12,
    "legend.fontsize": 11,
    "xtick.labelsize": 11,
    "ytick.labelsize": 11,
    "axes.labelsize": 11,
    "axes.titlesize": 11,
    "axes.titlecolor": INK,
    "axes.facecolor": "none",
    "xtick.major.pad": 6,
    "text.color": INK,
    "axes.labelcolor": SOFT,
    "axes.edgecolor": SOFT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": LINE,
    "grid.linewidth": 1,
    "xtick.color": SOFT,
    "xtick.labelcolor": INK,
    "ytick.color": SOFT,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "path.simplify_threshold": 0.2,
}


def style(i: int) -> dict[str, Any]:
    """The style of the i-th series: colour, dash and marker differ, so that it can be told without colour."""
    shifted = i + i // len(SERIES)  # the next eight have the same colours with other dashes and markers
    dash = DASHES[shifted % len(DASHES)]
    return {"color": SERIES[i % len(SERIES)], "linestyle": dash, "marker": MARKERS[shifted % len(MARKERS)]}


def draw(name: str, paint: Callable[[Figure], None], *, height: float = 3.5, legend: int = 2) -> Markup:
    """Draw a figure 5 inches wide.

    Args:
        name: The prefix of the ids in the SVG.
        paint: Draws on the empty figure.
        height: In inches.
        legend: The columns of the legend above; 0 for none.

    Returns:
        The SVG, for the page.
    """
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(_STYLE)
        figure = Figure(figsize=(5, height), layout="constrained")
        FigureCanvasSVG(figure)
        paint(figure)
        if legend:
            handles = {}
            for axes in figure.axes:
                for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
                    handles[label] = handle
            figure.legend(
                list(handles.values()),
                list(handles),
                loc="outside upper left",
                ncols=legend,
                handlelength=1.8 if legend < 3 else 1.6,
                columnspacing=1.6 if legend < 3 else 1.0,
                borderaxespad=0.2,
            )
        file = io.StringIO()
        figure.savefig(file, format="svg", facecolor="none", metadata={"Date": None, "Creator": None})
    return _for_the_page(name, file.getvalue())


def _for_the_page(name: str, svg: str) -> Markup:
    svg = svg[svg.index("<svg") :].strip()
    svg = re.sub(r"<(metadata|style)\b.*?</\1>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->", "", svg, flags=re.DOTALL)
    size = re.search(r'viewBox="([^"]*)"', svg)
    svg = re.sub(r"^<svg[^>]*>", f'<svg viewBox="{size[1] if size else ""}" aria-hidden="true" focusable="false">', svg)
    svg = svg.replace("xlink:href=", "href=")
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', svg))
    svg = re.sub(r' id="([^"]+)"', lambda m: f' id="{name}-{m[1]}"' if m[1] in used else "", svg)
    svg = re.sub(r"url\(#", f"url(#{name}-", svg).replace('href="#', f'href="#{name}-')
    svg = re.sub(r'font: ([\d.]+px) [^;"]*', r"font-size: \1", svg)
    svg = re.sub(r'font-family: [^;"]*;? ?', "", svg)
    svg = re.sub(r"<[^>]+>", lambda tag: re.sub(r"(\d+\.\d\d)\d+", r"\1", tag[0]), svg)  # numbers in words stay
    for placeholder, colour in _COLOURS.items():
        svg = svg.replace(placeholder, colour)
    return Markup(re.sub(r"\n\s*\n+", "\n", svg))  # safe: drawn here; matplotlib escapes the words
