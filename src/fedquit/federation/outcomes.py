# SPDX-License-Identifier: Apache-2.0
"""What `fedquit.run`, `fedquit.compare` and `fedquit.study` return."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from fedquit.core.local_layers import completed, separated
from fedquit.errors import InputError
from fedquit.report import write_report
from fedquit.results.comparison import Comparison
from fedquit.results.folders import RunResults
from fedquit.results.frames import data_frame, frame_of_table
from fedquit.results.schema import ACCURACIES, Row, number
from fedquit.results.short import PARTS, SHORT_COLUMNS, in_short, parts_of_gap, short_cells
from fedquit.results.study_folder import StudyStatus
from fedquit.results.summary import MethodSummary
from fedquit.results.words import fixed, holdout_verdict
from fedquit.utils.names import each_named, lookup

if TYPE_CHECKING:
    from fedquit.results.frames import DataFrame
    from fedquit.running.setup import Setup


@dataclass(frozen=True, eq=False)
class Folder:
    """Where results lie.

    Attributes:
        path: the folder.
        temporary: a folder that nobody named: it goes with this object.
    """

    path: Path
    temporary: Path | None = None

    def __post_init__(self) -> None:
        if self.temporary is not None:
            weakref.finalize(self, shutil.rmtree, self.temporary, ignore_errors=True)

    @staticmethod
    def at(out: Path | str | None) -> Folder:
        """The folder that a caller named, or else a temporary one."""
        if out is not None:
            return Folder(Path(out))
        temporary = Path(tempfile.mkdtemp(prefix="fedquit-"))
        return Folder(temporary / "results", temporary)

    def report(self, path: Path | str) -> Path:
        """Write the page over these results and return where it is."""
        place = Path(path)
        place = place if place.suffix else place / "report.html"
        place.parent.mkdir(parents=True, exist_ok=True)
        write_report([self.path], place)
        return place


@dataclass(frozen=True, eq=False)
class RunResult:
    """One run: the rows of every phase, and the model.

    Attributes:
        results: what `results.json` holds, request by request.
        params: the parameters of the recovered model after the last request to forget; where BatchNorm is local, with
            the layers of each client that stays, under names that begin with `client 0:` and so on.
        clients: the number of each client in the rows, by the name that it was given under; None where the recipe's
            data was used, whose clients have numbers already.
        setup: data, network and engine.
        place: where the files lie.
    """

    results: RunResults
    params: Mapping[str, Tensor] = field(repr=False)
    clients: Mapping[Any, int] | None = field(repr=False)
    setup: Setup = field(repr=False)
    place: Folder = field(repr=False)

    @property
    def rows(self) -> Sequence[Row]:
        """One for each phase of each request, with the fields of `results.json` as every view shows them."""
        return self.results.judged_rows

    @property
    def folder(self) -> Path:
        """Where `results.json` lies: the given folder, or a temporary one that lives as long as this result."""
        return self.place.path

    def row(self, phase: str, request: int = 0) -> Row:
        """The row of a phase, such as `recovered`, of a request; empty where there is none.

        Args:
            phase: `original`, `retrained`, `unlearned`, `recovered` or `natural`.
            request: its number, from 0.
        """
        matches = (row for row in self.rows if row["phase"] == phase and row["request"] == request)
        return next(matches, {})

    def model(self, client: object = None) -> nn.Module:
        """A new module with the recovered model's parameters; what is frozen is as in the federation.

        Args:
            client: whose model it is, by name or number, where BatchNorm is local: each client has its own.

        Raises:
            InputError: if BatchNorm is local and no client that has layers of its own is named.
        """
        shared, layers = separated(dict(self.params))
        if not layers:
            return self.setup.model.module(shared)
        number = (self.clients or {}).get(client, client)
        if not isinstance(number, int) or number not in layers:
            named = {number: name for name, number in (self.clients or {}).items()}
            known = ", ".join(repr(named.get(c, c)) for c in layers)
            raise InputError(f"BatchNorm is local, and each client has a model of its own: name one of {known}.")
        return self.setup.model.module(completed(self.setup.model, shared, layers[number]))

    def to_dict(self) -> dict[str, Any]:
        """What `results.json` holds."""
        return self.results.to_dict()

    def to_pandas(self) -> DataFrame:
        """A line for each row, with its plain fields as columns (needs pandas)."""
        return self.results.to_pandas()

    def report(self, path: Path | str) -> Path:
        """Write the page of the run and return where it is."""
        return self.place.report(path)

    def __str__(self) -> str:
        names = {key: key.removesuffix("_acc") for key in (*ACCURACIES, "holdout_acc")}
        shown = [key for key in names if any(number(row.get(key)) is not None for row in self.rows)]
        lines = [f"{'phase':<11}{'method':<12}" + "".join(f"{names[key]:>14}" for key in shown) + f"{'rounds':>8}"]
        for row in self.rows:
            levels = "".join(f"{fixed(number(row.get(key))):>14}" for key in shown)
            lines.append(f"{row['phase']:<11}{row['method']:<12}{levels}{row['rounds']:>8}")
        named = {number: name for name, number in (self.clients or {}).items()}
        for request in self.results.requests:
            who = [named.get(client, client) for client in request.row("unlearned").get("clients", [])]
            lines += [f"to be forgotten: {each_named('client', who)}"] if who else []
            for phase, name in (("recovered", request.method), ("natural", "natural, the control")):
                said = holdout_verdict(request.row(phase), in_full=True)
                lines += [f"{name}: {said}"] if said else []
        return "\n".join(lines)


@dataclass(frozen=True, eq=False)
class ComparisonResult:
    """Several methods over the same targets and seeds.

    Attributes:
        comparison: what `comparison.json` holds.
        runs: each with its rows.
        place: where the files lie.
    """

    comparison: Comparison
    runs: Sequence[RunResults] = field(repr=False)
    place: Folder = field(repr=False)

    @property
    def table(self) -> Sequence[MethodSummary]:
        """A line for Original, Retrain, Retrain with another seed, and each method."""
        return self.comparison.table

    @property
    def failed(self) -> Sequence[Mapping[str, Any]]:
        """For each run that did not come through, `method`, `target`, `seed` and `why`."""
        return self.comparison.failed

    @property
    def folder(self) -> Path:
        """Where `comparison.json` lies: the given folder, or a temporary one that lives as long as this result."""
        return self.place.path

    def line(self, method: str) -> MethodSummary:
        """The line of a method, of `original` or of `retrain`.

        Raises:
            UnknownNameError: for a method that was not compared.
        """
        named = {line.phase: line for line in self.table if line.phase != "recovered"}
        named |= {line.method: line for line in self.table}
        return lookup(named, method, "line of the comparison")

    def to_dict(self) -> dict[str, Any]:
        """What `comparison.json` holds."""
        return self.comparison.to_dict()

    def to_pandas(self) -> DataFrame:
        """A line for each line of the table (needs pandas)."""
        return self.comparison.to_pandas()

    def report(self, path: Path | str) -> Path:
        """Write the page of the comparison and return where it is."""
        return self.place.report(path)

    def __str__(self) -> str:
        return _table_text(self.table)


@dataclass(frozen=True, eq=False)
class StudyResult:
    """A study: a comparison for each of its settings.

    Attributes:
        status: what is done, missing and failed.
        stopped: whether its time was up before all was done; the same call goes on.
        comparisons: by setting, of what is done.
        place: where the files lie.
    """

    status: StudyStatus
    stopped: bool
    comparisons: Mapping[str, Comparison] = field(repr=False)
    place: Folder = field(repr=False)

    @property
    def folder(self) -> Path:
        """Where `study.json` lies: the given folder, or a temporary one that lives as long as this result."""
        return self.place.path

    def to_pandas(self) -> DataFrame:
        """A line for each line of each setting's table (needs pandas)."""
        frames = [frame_of_table(one.table, setting=name) for name, one in self.comparisons.items()]
        return data_frame([record for frame in frames for record in frame.to_dict("records")])

    def report(self, path: Path | str) -> Path:
        """Write the page of the study and return where it is."""
        return self.place.report(path)

    def __str__(self) -> str:
        status = self.status
        counts = f"{len(status.done)} units done, {len(status.missing)} missing, {len(status.failed)} failed"
        tables = [f"{name}\n{_table_text(one.table)}" for name, one in self.comparisons.items()]
        return "\n\n".join([counts, *tables])


def _table_text(table: Sequence[MethodSummary]) -> str:
    """The short table of the terminal with both parts of the gap, and below it the accuracies, gaps in parentheses."""
    rows: list[tuple[str, ...]] = [(*SHORT_COLUMNS[:-1], *PARTS, SHORT_COLUMNS[-1])]
    for line in in_short(table):
        *first, holdout = short_cells(line)
        rows.append((*first, *parts_of_gap(line), holdout))
    shown = [key for key in (*ACCURACIES, "holdout_acc") if any(key in line.means for line in table)]
    levels: list[tuple[str, ...]] = [("method", *(key.removesuffix("_acc") for key in shown))]
    for line in table:
        levels.append((line.method, *(_with_gap(line, key) for key in shown)))
    last = len(rows[0]) - 1
    return f"{_aligned(rows, left=(0, 1, last))}\n\n{_aligned(levels, left=(0,))}"


def _with_gap(line: MethodSummary, key: str) -> str:
    gap = f" ({line.gaps[key]:.1f})" if key in line.gaps else ""
    return f"{fixed(line.means.get(key))}{gap}"


def _aligned(rows: Sequence[Sequence[str]], left: Sequence[int]) -> str:
    """Rows of cells under one another, two spaces between columns; those not in `left` end at the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        sized = zip(row, widths, strict=True)
        cells = [cell.ljust(width) if n in left else cell.rjust(width) for n, (cell, width) in enumerate(sized)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
