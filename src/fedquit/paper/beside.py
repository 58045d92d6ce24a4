# SPDX-License-Identifier: Apache-2.0
"""The paper's tables with our numbers beside its own, the ranking in both, and where they differ beyond the spread."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fedquit.errors import InputError
from fedquit.inference.findings import allowed
from fedquit.paper.numbers import TARGETS, Key, Paper, PaperCell, PaperTable
from fedquit.paper.records import FIVE, Records, Series
from fedquit.paper.settings import SETTINGS
from fedquit.report.tables import Cell, Line, Table
from fedquit.results.schema import MEASURES
from fedquit.results.words import DASH, count, fixed, scaled, signed

NOTES = "notes.toml"  # beside the records: what was tried where ours differs
BEYOND = "‡"
PAIRS = 5  # pairs of clients that the paper's means are over
_COSTS = {"bytes": "Sent", "flops": "Computing", "storage": "Storage"}
_LABELS = {"avg_gap": "Avg. gap", "rounds": "Rounds", **_COSTS}
_PHASES = {"unlearned": "Unlearned", "recovered": "Recovered", "total": "", "original": "", "retrained": ""}
_FIRST = {"original": 0, "retrain": 0}  # what the others are compared with


@dataclass(frozen=True)
class Difference:
    """Our mean beside a printed one.

    Attributes:
        cell: The paper's.
        part: `value` or `gap`.
        printed: The paper's number.
        deviation: The paper's own, over targets; None where it prints none, or one model serves all targets.
        ours: Our number over targets.
    """

    cell: PaperCell
    part: str
    printed: float
    deviation: float | None
    ours: Series

    @property
    def size(self) -> float:
        """Ours less the paper's."""
        return self.ours.mean - self.printed

    @property
    def allowed(self) -> float | None:
        """What the paper's deviation explains at a level of 5 %; None where it prints none, or one model for all."""
        if not self.deviation:
            return None
        theirs = PAIRS if self.cell.key.request == "pair" else TARGETS
        return allowed(self.deviation, self.ours.targets, theirs, rounding=0.5 * 10**-self.cell.printed.digits)

    @property
    def beyond(self) -> bool:
        """Whether ours differs by more than the paper's deviation explains."""
        return self.allowed is not None and abs(self.size) > self.allowed


def differences(paper: Paper, records: Records) -> list[Difference]:
    """Every number of the paper that has a record, once; costs are not among them."""
    found = []
    for cell in paper.by_key.values():
        if cell.key.measure in _COSTS:
            continue
        for part in ("value", "gap"):
            one = _difference(cell, part, records)
            if one:
                found.append(one)
    return found


def _difference(cell: PaperCell, part: str, records: Records) -> Difference | None:
    printed: float | None = getattr(cell.printed, part)
    ours = records.series(cell.key, part)
    if printed is None or ours is None:
        return None
    deviation = cell.printed.deviation if part == "value" else cell.printed.gap_deviation
    return Difference(cell, part, abs(printed) if part == "gap" else printed, deviation, ours)


# Notes


@dataclass(frozen=True)
class Note:
    """What was tried where a number differs, and other options of the method whose records are shown beside."""

    tried: str
    variants: tuple[str, ...] = ()


def load_notes(folder: Path) -> dict[str, Note]:
    """What was tried, by the words of a key: `cifar100-iid client pga unlearned test_acc`.

    Args:
        folder: Of the records; without `notes.toml` there are none.

    Raises:
        InputError: The file cannot be read.
    """
    path = folder / NOTES
    if not path.exists():
        return {}
    try:
        stored = tomllib.loads(path.read_text(encoding="utf-8"))
        return {
            str(cell): Note(str(note["tried"]), tuple(note.get("variants", ())))
            for note in stored["note"]
            for cell in note["cells"]
        }
    except (OSError, tomllib.TOMLDecodeError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path} is not a list of notes ({error}): each [[note]] has cells and tried.") from error


def tried(beyond: Sequence[Difference], notes: Mapping[str, Note], records: Records) -> list[str]:
    """For each difference what was tried, with the numbers of other options; "" where nothing is noted.

    Args:
        beyond: The differences.
        notes: By the words of a key.
        records: For the numbers of other options.
    """
    return [_tried(one, notes.get(" ".join(one.cell.key)), records) for one in beyond]


def _tried(one: Difference, note: Note | None, records: Records) -> str:
    if note is None:
        return ""
    numbers = []
    for method in note.variants:
        series = records.series(one.cell.key._replace(method=method), one.part)
        numbers += [f"{name_of(method)} {fixed(series.mean)}"] if series else []
    return note.tried + (f" With other options: {'; '.join(numbers)}." if numbers else "")


def numbered(said: Sequence[str]) -> dict[str, int]:
    """A number for each text, in order."""
    texts = dict.fromkeys(text for text in said if text)
    return {text: number for number, text in enumerate(texts, 1)}


def beyond_the_spread(beyond: Sequence[Difference], said: Sequence[str]) -> Table:
    """What differs by more than the paper's deviation explains, with the number of the note on what was tried.

    Args:
        beyond: The differences.
        said: For each what was tried.
    """
    notes = numbered(said)
    lines = [
        Line(
            what_it_is(one.cell.key, one.part),
            [
                Cell(_with(one.printed, one.deviation, min(one.cell.printed.digits, 1))),
                Cell(fixed(one.ours.mean)),
                Cell(signed(one.size)),
                Cell(f"±{fixed(one.allowed)}"),
                Cell(str(one.ours.targets)),
                Cell(f"note {notes[text]}" if text else "nothing yet", words=True),
            ],
        )
        for one, text in zip(beyond, said, strict=True)
    ]
    return Table(
        "Beyond the spread",
        "Means that lie further from the paper's than its deviation over clients explains",
        ["Number", "Paper", "Ours", "Difference", "Explained", "Targets", "Tried"],
        lines,
    )


def what_it_is(key: Key, part: str = "value") -> str:
    """A number in words."""
    setting = SETTINGS[key.setting].title
    request = {"client": "", "pair": ", two clients"}.get(key.request, f", {key.request.replace('-', ' ')}")
    phase = {"retrained": "", "original": ""}.get(key.phase, f", {key.phase}")
    measure = _LABELS.get(key.measure) or MEASURES[key.measure].label
    gap = " gap" if part == "gap" else ""
    return f"{setting}{request}: {name_of(key.method)}{phase}, {_lowered(measure)}{gap}"


def _lowered(label: str) -> str:
    """Within a phrase: a word begins small, an abbreviation stays."""
    return label if label[1:2].isupper() else f"{label[:1].lower()}{label[1:]}"


_METHODS = {
    "original": "Original",
    "retrain": "Retrain",
    "federaser": "FedEraser",
    "pga": "PGA",
    "mode": "MoDe",
    "fedau": "FedAU",
    "not": "NoT",
    "fedosd": "FedOSD",
    "fedquit": "FedQUIT",
    "natural": "Natural",
}


def name_of(method: str) -> str:
    """A method as the paper calls it, with the options in which it differs."""
    name, _, options = method.partition(" ")
    return _METHODS.get(name, name) + (f" ({options.replace(' ', ', ')})" if options else "")


# Tables


def block_tables(paper: Paper, table: PaperTable, setting: str, records: Records) -> list[Table]:
    """One setting of a table of the paper, as far as there are records: accuracies, then gaps and costs.

    Args:
        paper: With the tables before this one.
        table: Of the paper.
        setting: One of its settings.
        records: Ours.

    Returns:
        Empty where the table adds no record to those before it, but for Original and Retrain.
    """
    rows = _rows(table, setting)
    shown = {name: cells for name, cells in rows.items() if _has_record(cells, records)}
    cells = [cell for row in shown.values() for cell in row]
    if not any(_adds(cell, paper, records) for cell in cells):
        return []
    phases = {cell.key.phase for cell in cells} & {"unlearned", "recovered"}
    accuracies = _columns(cells, lambda cell: cell.key.measure in (*FIVE, "rounds"))
    gaps = _columns(cells, lambda cell: cell.printed.gap is not None or cell.key.measure == "avg_gap")
    costs = _columns(cells, _comparable_cost)
    title = SETTINGS[setting].title
    several = len(phases) > 1
    none: dict[int, Key] = {}
    beside_levels, beside_gaps = (none, costs) if gaps else (costs, none)
    made = [
        Table(
            title,
            "Ours, then the paper's ± its deviation and the difference, in percent",
            ["Model", "Targets", *_heads(accuracies, several=several), *_heads(beside_levels)],
            [_line(name, row, accuracies, beside_levels, "value", records) for name, row in shown.items()]
            + (_natural(accuracies, beside_levels, records) if phases == {"recovered"} else []),
        ),
        Table(
            f"{title}: gaps and costs" if costs else f"{title}: gaps",
            "Mean absolute gaps to Retrain in points"
            + ("; costs as times cheaper than Retrain, or in bytes" if costs else ""),
            ["Model", "Targets", *_heads(gaps, several=several), *_heads(beside_gaps)],
            [_line(name, row, gaps, beside_gaps, "gap", records) for name, row in shown.items()],
        ),
    ]
    return [filled for one in made if (filled := _filled(one))]


def _heads(columns: Mapping[int, Key], *, several: bool = False) -> list[str]:
    return [_head(key, several=several) for key in columns.values()]


def _adds(cell: PaperCell, paper: Paper, records: Records) -> bool:
    """Whether a cell has a record, and stands in no table before."""
    first = paper.by_key[cell.key].table == cell.table
    return first and cell.key.method not in _FIRST and records.series(cell.key) is not None


def _filled(table: Table) -> Table | None:
    """The columns and lines in which there is a number; None where only Original and Retrain have any."""
    lines = [line for line in table.lines if any(cell.text != DASH for cell in line.cells[1:])]
    kept = [i for i in range(len(table.heads) - 1) if any(line.cells[i].text != DASH for line in lines)]
    heads = [table.heads[0], *(table.heads[i + 1] for i in kept)]
    lines = [replace(line, cells=[line.cells[i] for i in kept]) for line in lines]
    return replace(table, heads=heads, lines=lines) if any(not line.reference for line in lines) else None


def _rows(table: PaperTable, setting: str) -> dict[str, list[PaperCell]]:
    rows: dict[str, list[PaperCell]] = {}
    for cell in table.cells:
        if cell.key.setting == setting:
            rows.setdefault(cell.row, []).append(cell)
    return rows


def _has_record(cells: Sequence[PaperCell], records: Records) -> bool:
    return any(records.series(cell.key) for cell in cells)


def _columns(cells: Sequence[PaperCell], wanted: Callable[[PaperCell], bool]) -> dict[int, Key]:
    """The columns of the table that some cell is wanted of, with a key of it."""
    columns: dict[int, Key] = {}
    for cell in cells:
        if wanted(cell) and (cell.column not in columns or columns[cell.column].method in _FIRST):
            columns[cell.column] = cell.key
    return dict(sorted(columns.items()))


def _comparable_cost(cell: PaperCell) -> bool:
    """FLOPs are counted in another way than the paper's, so that only their ratio to Retrain's can be compared."""
    if cell.key.measure == "flops":
        return cell.printed.times is not None and cell.key.method not in _FIRST
    return cell.key.measure in _COSTS


def _head(key: Key, *, several: bool) -> str:
    measure = _LABELS.get(key.measure) or MEASURES[key.measure].label
    phase = _PHASES.get(key.phase, "") if several and key.measure != "rounds" else ""
    return f"{phase} {_lowered(measure)}" if phase else measure


def _line(
    name: str,
    row: Sequence[PaperCell],
    columns: Mapping[int, Key],
    costs: Mapping[int, Key],
    part: str,
    records: Records,
) -> Line:
    """A row of the paper with our numbers.

    Args:
        name: Of the row.
        row: Its cells.
        columns: Of accuracies or gaps.
        costs: Columns of costs.
        part: `value` for accuracies, `gap` for gaps.
        records: Ours.
    """
    by_column = {cell.column: cell for cell in row}
    counted = [series for cell in row if (series := records.series(cell.key))]
    cells = [_cell(by_column.get(column), part, records) for column in columns]
    cells += [_cost_cell(by_column.get(column), records) for column in costs]
    return Line(name, [Cell(_over(counted)), *cells], reference=row[0].key.method in _FIRST)


def _over(series: Sequence[Series]) -> str:
    """How many targets, and seeds where there are several."""
    counts = sorted({one.targets for one in series})
    seeds = max((one.seeds for one in series), default=1)
    targets = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]}–{counts[-1]}"
    return f"{targets}, {seeds} seeds" if seeds > 1 else targets


def _cell(cell: PaperCell | None, part: str, records: Records) -> Cell:
    """Our number with the paper's and the difference, or the paper's alone."""
    if cell is None:
        return Cell(DASH)
    if cell.key.measure == "avg_gap":
        part = "value"
    one = _difference(cell, part, records)
    if one is None:
        return Cell(DASH)
    mark = f" {BEYOND}" if one.beyond else ""
    notes = (_with(one.printed, one.deviation, min(cell.printed.digits, 1)), f"{signed(one.size)}{mark}")
    return Cell(fixed(one.ours.mean), notes, plain=one.allowed is not None and not one.beyond)


def _with(value: float, deviation: float | None, digits: int) -> str:
    return fixed(value, digits) + (f" ± {fixed(deviation, digits)}" if deviation is not None else "")


def _cost_cell(cell: PaperCell | None, records: Records) -> Cell:
    if cell is None:
        return Cell(DASH)
    printed, key = cell.printed, cell.key
    times = records.series(key, "times")
    if printed.times is not None and times and key.method not in _FIRST and key.measure != "storage":
        return Cell(f"{times.mean:.1f}×", (f"{printed.times:g}×",))
    spent = records.series(key)
    if spent is None or key.measure == "flops":
        return Cell(DASH)
    return Cell(scaled(spent.mean, "B"), (scaled(printed.value, "B"),))


def _natural(columns: Mapping[int, Key], costs: Mapping[int, Key], records: Records) -> list[Line]:
    """The control, which the paper does not have: no unlearning, training goes on without the client."""
    series = [records.series(key._replace(method="natural", phase="recovered")) for key in columns.values()]
    known = [one for one in series if one]
    cells = [Cell(fixed(one.mean) if one else DASH) for one in (*series, *(None for _ in costs))]
    return [Line("Natural", [Cell(_over(known)), *cells], note="not in the paper")] if known else []


def not_run(table: PaperTable, setting: str, records: Records) -> list[str]:
    """The rows of one setting of a table that have no record."""
    return [name for name, cells in _rows(table, setting).items() if not _has_record(cells, records)]


# Rankings


def rankings(table: PaperTable, setting: str, records: Records) -> Iterator[str]:
    """The order of the methods in the paper and in our records, over the methods that both have."""
    scales = [
        ("recovered", "avg_gap", "value", "average gap"),
        ("recovered", "forget_acc", "gap", "forget gap"),
        ("budget-0.5", "forget_acc", "gap", "forget gap"),
    ]
    for phase, measure, part, words in scales:
        yield from _ranking(table, setting, records, phase, measure, part, f"{words}, smallest first")
    yield from _ranking(
        table, setting, records, "unlearned", "test_acc", "value", "test accuracy after unlearning, highest first"
    )


def _ranking(
    table: PaperTable, setting: str, records: Records, phase: str, measure: str, part: str, words: str
) -> Iterator[str]:
    cells = [cell for cell in table.cells if cell.key[0] == setting and cell.key[3:] == (phase, measure)]
    known = [one for cell in cells if (one := _difference(cell, part, records))]
    every = set().union(*(one.ours.by_target for one in known))
    both = [
        one for one in known if every == set(one.ours.by_target)
    ]  # of other clients a mean tells nothing of the order
    if len(both) < 2:
        return
    fewer = [f"{one.cell.row} ({count(one.ours.targets, 'target')})" for one in known if one not in both]
    left_out = f" Over fewer targets, and not ranked: {', '.join(fewer)}." if fewer else ""
    down = part == "value" and measure == "test_acc"
    theirs = sorted(both, key=lambda one: one.printed, reverse=down)
    ours = sorted(both, key=lambda one: one.ours.mean, reverse=down)
    listed = [
        ", ".join(f"{one.cell.row} {fixed(number)}" for one, number in ranked)
        for ranked in (
            [(one, one.printed) for one in theirs],
            [(one, one.ours.mean) for one in ours],
        )
    ]
    same = " The order is the same." if [one.cell.row for one in theirs] == [one.cell.row for one in ours] else ""
    yield f"By {words}: the paper {listed[0]}; ours {listed[1]}.{same}{left_out}"
