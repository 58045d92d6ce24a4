# SPDX-License-Identifier: Apache-2.0
"""The numbers of FedQUIT's paper, cell by cell, from `numbers.toml`."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from typing import Any, NamedTuple

_NUMBER = r"[+-]?\d+(?:\.\d+)?(?:e\d+)?"
_PRINTED = re.compile(
    rf"(?P<value>{_NUMBER})(?:±(?P<deviation>{_NUMBER}))?"
    rf"(?:\((?:(?P<times>{_NUMBER})×|(?P<gap>{_NUMBER})(?:±(?P<gap_deviation>{_NUMBER}))?)\))?"
)
_ROWS = {"original": "original", "retrain": "retrained"}  # rows whose numbers belong to no unlearning: their phase
TARGETS = 10  # over which the paper's means are; of pairs, five


class Key(NamedTuple):
    """What a number is of.

    Attributes:
        setting: A recipe below `settings/`.
        request: `client`, `pair`, or `samples-` and the share of the client's samples.
        method: A method, with the options in which it is not the default: `fedquit teacher=flatten`.
        phase: `original`, `retrained`, `unlearned`, `recovered`, `total` (unlearning and recovery), `budget-0.5`.
        measure: A measure of `results.schema`, or `avg_gap`, `bytes`, `flops`, `storage`, `rounds`.
    """

    setting: str
    request: str
    method: str
    phase: str
    measure: str


@dataclass(frozen=True)
class Printed:
    """A cell of a table as the paper prints it; what it does not print is None.

    Attributes:
        value: The mean, in percent, points, bytes, FLOPs or rounds.
        deviation: Its standard deviation over targets.
        gap: The mean absolute gap to Retrain; with its sign at a fixed budget.
        gap_deviation: The standard deviation of the gap.
        times: Retrain's cost over this one.
        digits: After the decimal point.
    """

    value: float
    deviation: float | None = None
    gap: float | None = None
    gap_deviation: float | None = None
    times: float | None = None
    digits: int = 1

    @staticmethod
    def read(text: str) -> Printed:
        """From the text of a cell, such as `34.6(3.5±2.4)`, `51.0±1.4` or `3.08e09(52.6×)`."""
        match = _PRINTED.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not a number of the paper's tables.")
        parts = {name: float(part) for name, part in match.groupdict().items() if part is not None}
        digits = match["value"].partition(".")[2]
        return Printed(digits=len(digits) if digits.isdigit() else 0, **parts)


@dataclass(frozen=True)
class PaperCell:
    """A number of the paper: where it stands, what it is of, and how it is printed."""

    table: str
    row: str
    column: int
    key: Key
    printed: Printed


@dataclass(frozen=True)
class PaperTable:
    """A table of the paper: its label, our title of it, and its cells."""

    label: str
    title: str
    cells: Sequence[PaperCell]

    @cached_property
    def settings(self) -> list[str]:
        """The settings of its blocks, in the order of the table."""
        return list(dict.fromkeys(cell.key.setting for cell in self.cells))


@dataclass(frozen=True)
class Paper:
    """All tables of the paper."""

    tables: Sequence[PaperTable]

    @cached_property
    def by_key(self) -> dict[Key, PaperCell]:
        """Each number once: where it stands in several tables, the first, which has its deviation."""
        cells: dict[Key, PaperCell] = {}
        for table in self.tables:
            for cell in table.cells:
                cells.setdefault(cell.key, cell)
        return cells


def load_paper() -> Paper:
    """The numbers that come with the package."""
    stored = tomllib.loads(files("fedquit.paper").joinpath("numbers.toml").read_text(encoding="utf-8"))
    return Paper([_table(table) for table in stored["table"]])


def _table(stored: dict[str, Any]) -> PaperTable:
    cells = []
    for row in stored["rows"]:
        for column, (head, text) in enumerate(zip(stored["columns"], row["cells"], strict=True)):
            if text:
                key = _key(head, stored["request"], row.get("setting", ""), row["method"])
                cells.append(PaperCell(stored["label"], row["name"], column, key, Printed.read(text)))
    return PaperTable(stored["label"], stored["title"], cells)


def _key(head: str, request: str, setting: str, method: str) -> Key:
    *beside, phase, measure = head.split()
    return Key(beside[0] if beside else setting, request, method, _ROWS.get(method, phase), measure)
