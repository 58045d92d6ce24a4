# SPDX-License-Identifier: Apache-2.0
"""The paper's cost columns, cell by cell: those that its own accounting reproduces, and those that contradict it.

The rounds of recovery are not printed: the bytes imply them, as a mean over ten targets (five pairs for two clients),
and the same rounds must then give the FLOPs and both ratios.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

from fedquit.errors import InputError, UnknownNameError
from fedquit.running.paper_costs import FEDOSD_ROUNDS, SETTINGS, Bill, Setting, bill, budget, printed, times_cheaper

PAPER = Path(__file__).parents[2] / "shared" / "paper" / "fedquit.tex"
COLUMNS = ("bytes", "bytes x", "flops", "flops x", "storage", "storage x")

# table: setting, method, rounds of recovery, then its columns; "." is a cell of WRONG, "-" one that is not there.
ROWS = {
    "main": """
        cifar100-iid  retrain     0      1.62e11  1.0   1.35e15  1.0   4.49e7   1.0
        cifar100-iid  federaser   0      1.62e11  1.0   6.75e14  2.0   8.98e10  0.0005
        cifar100-iid  pga        12.1    9.86e9  16.4   8.54e13 15.8   4.94e8   0.0909
        cifar100-iid  mode        4.5    1.75e10  9.3   1.46e14  9.3   8.98e7   0.5
        cifar100-iid  fedau       3.3    2.67e9  60.8   2.23e13 60.6   4.49e7   1.0
        cifar100-iid  not         6.5    5.25e9  30.9   4.39e13 30.8   4.49e7   1.0
        cifar100-iid  fedosd      3.0    1.05e10 15.4   8.78e13 15.4   8.98e7   0.5
        cifar100-iid  fedquit    10.0    8.17e9  19.8   6.82e13 19.8   4.49e7   1.0
        cifar100      retrain     0      1.62e11  1.0   1.35e15  1.0   4.49e7   1.0
        cifar100      federaser   0      1.62e11  1.0   6.75e14  2.0   8.98e10  0.0005
        cifar100      pga         7.0    5.74e9  28.2   5.10e13 26.5   4.94e8   0.09
        cifar100      mode       10.0    2.19e10  7.4   1.83e14  7.4   8.98e7   0.5
        cifar100      fedau      16.0    1.29e10 12.5   1.08e14 12.5   4.49e7   1.0
        cifar100      not        12.8    1.03e10 15.7   8.64e13 15.6   4.49e7   1.0
        cifar100      fedosd      2.0    9.69e9  16.7   8.10e13 16.7   8.98e7   0.5
        cifar100      fedquit     3.7    3.08e9  52.6   2.57e13 52.5   4.49e7   1.0
        cifar10       retrain     0      1.62e11  1.0   1.35e15  1.0   4.49e7   1.0
        cifar10       pga        11.5    9.38e9  17.3   8.14e13 16.6   4.94e8   0.09
        cifar10       mode       12.6    2.40e10  6.7   2.01e14  6.7   8.98e7   0.5
        cifar10       fedau       6.4    5.17e9  31.3   4.32e13 31.2   4.49e7   1.0
        cifar10       not        16.9    1.37e10 11.9   1.14e14 11.8   4.49e7   1.0
        cifar10       fedosd      3.0    1.05e10 15.4   8.78e13 15.4   8.98e7   0.5
        cifar10       fedquit     3.8    3.16e9  51.3   2.64e13 51.1   4.49e7   1.0
        cub200        retrain     0      1.19e10  1.0   3.82e15  1.0   1.33e7   1.0
        cub200        pga        11.9    2.87e9   4.1   9.53e14  4.0   1.46e8   0.0909
        cub200        mode       10.8    6.67e9   1.8   2.14e15  1.8   2.66e7   0.5
        cub200        fedau      26.3    6.29e9   1.9   2.01e15  1.9   1.33e7   1.0
        cub200        not        10.0    2.39e9   5.0   7.65e14  5.0   1.33e7   1.0
        cub200        fedosd      6.0    3.82e9   3.1   1.22e15  3.1   2.66e7   0.5
        cub200        fedquit     9.1    2.20e9   5.4   7.05e14  5.4   1.33e7   1.0
        cifar100-100  retrain     0      5.39e11  1.0   4.50e14  1.0   4.49e7   1.0
        cifar100-100  mode      103      1.07e11  5.0   8.92e13  5.0   8.98e7   0.5
        cifar100-100  fedau      40      3.59e10 15.0   3.00e13 15.0   4.49e7   1.0
        cifar100-100  not        50      4.49e10 12.0   3.75e13 12.0   4.49e7   1.0
        cifar100-100  fedosd      4      1.26e10 42.9   1.05e13 42.9   8.98e7   0.5
        cifar100-100  fedquit     8      7.27e9  74.1   6.08e12 74.1   4.49e7   1.0
        cub200-100    retrain     0      5.31e10  1.0   2.04e14  1.0   1.33e7   1.0
        cub200-100    mode      103      3.16e10  1.7   1.21e14  1.7   2.66e7   0.5
        cub200-100    fedau      30      7.97e9   6.7   3.06e13  6.7   1.33e7   1.0
        cub200-100    not        16      4.25e9  12.5   1.63e13 12.5   1.33e7   1.0
        cub200-100    fedosd      6      4.25e9  12.5   1.63e13 12.5   2.66e7   0.5
        cub200-100    fedquit     3      8.23e8  64.5   3.16e12 64.5   1.33e7   1.0
    """,
    "post-unlearning": """
        cifar100-iid  retrain     0      1.62e11  -     .
        cifar100-iid  pga         0      8.98e7   -     3.75e12
        cifar100-iid  mode        0      1.38e10  -     1.16e14
        cifar100-iid  fedau       0      8.21e7   -     1.84e12
        cifar100-iid  not         0      0        -     0
        cifar100-iid  fedosd      0      8.08e9   -     6.75e13
        cifar100-iid  fedquit     0      8.98e7   -     7.50e11
        cifar100      retrain     0      1.62e11  -     .
        cifar100      pga         0      8.98e7   -     3.75e12
        cifar100      mode        0      1.38e10  -     1.16e14
        cifar100      fedau       0      8.21e7   -     1.84e12
        cifar100      not         0      0        -     0
        cifar100      fedosd      0      8.08e9   -     6.75e13
        cifar100      fedquit     0      8.98e7   -     7.50e11
        cifar100-mit  retrain     0      1.19e10  -     3.82e15
        cifar100-mit  pga         0      2.66e7   -     4.25e13
        cifar100-mit  mode        0      4.09e9   -     1.31e15
        cifar100-mit  fedau       0      1.03e7   -     .
        cifar100-mit  not         0      0        -     0
        cifar100-mit  fedosd      0      2.39e9   -     7.65e14
        cifar100-mit  fedquit     0      2.66e7   -     8.50e12
        cub200        retrain     0      1.19e10  -     3.82e15
        cub200        pga         0      2.66e7   -     4.25e13
        cub200        mode        0      4.09e9   -     1.31e15
        cub200        fedau       0      .        -     .
        cub200        not         0      0        -     0
        cub200        fedosd      0      2.39e9   -     7.65e14
        cub200        fedquit     0      2.66e7   -     8.50e12
    """,
    "samples": """
        cifar100      retrain     0      1.80e11  -     .
        cifar100      mode        0      .        -     .
        cifar100      fedau       6      5.39e9   -     .
        cifar100      not         8      7.18e9   -     .
        cifar100      fedosd      0      .        -     .
        cifar100      fedquit     1      9.87e8   -     7.51e12
    """,
    "two clients": """
        cifar100      retrain     0      1.44e11  -     1.20e15  -
        cifar100      mode        5.8    1.74e10  8.3   .        .
        cifar100      fedau      11.0    7.90e9  18.2   6.60e13 18.2
        cifar100      not         6.6    4.74e9  30.4   3.96e13 30.3
        cifar100      fedquit     3.0    2.33e9  61.7   1.95e13 61.5
        cifar100-mit  retrain     0      1.06e10  -     3.40e15  -
        cifar100-mit  mode        8.2    .        .     .        .
        cifar100-mit  fedau      15.0    3.19e9   3.3   1.02e15  3.3
        cifar100-mit  not         3.2    6.80e8  15.6   2.18e14 15.6
        cifar100-mit  fedquit     2.0    4.78e8  22.2   1.53e14 22.2
    """,
    "lstm": """
        shakespeare   original    0      5.36e9   -     1.26e15  -
        shakespeare   retrain     0      5.36e9   -     1.26e15  -
        shakespeare   mode       88.0    2.79e9   1.92  6.57e14  1.92
        shakespeare   fedau     176.0    4.72e9   1.14  1.11e15  1.14
        shakespeare   not       240.0    6.43e9   0.83  1.52e15  0.83
        shakespeare   fedosd     86.1    2.57e9   2.09  6.07e14  2.08
        shakespeare   fedquit    16.9    4.56e8  11.75  1.07e14 11.78
    """,
}
LEAVING = {"two clients": 2}
SAMPLES = {"samples": 0.01}


class Cell(NamedTuple):
    table: str
    setting: str
    method: str
    column: str
    value: str  # as printed
    rounds: float  # of recovery

    def __repr__(self) -> str:
        return f"{self.table}-{self.setting}-{self.method}-{self.column}"


class Wrong(NamedTuple):
    cell: Cell
    gives: str  # what the accounting gives instead
    reading: float | None  # what would have given the printed digits, where something does
    why: str


def listed() -> list[tuple[Cell, bool]]:
    """Every cell of `ROWS`, and whether it is left to WRONG."""
    found = []
    for table, text in ROWS.items():
        for line in text.split("\n"):
            if words := line.split():
                setting, method, rounds, *values = words
                for column, value in zip(COLUMNS, values, strict=False):
                    if value != "-":
                        found.append((Cell(table, setting, method, column, value, float(rounds)), value == "."))
    return found


RIGHT = [cell for cell, wrong in listed() if not wrong]
BUDGET = "8.10e10"  # the caption of the table of fixed budgets: half of Retrain's bytes

F, MIT_F, TRIP = 7.5e11, 8.5e12, 2 * 4 * 11_220_132  # FLOPs of a client's epoch, bytes of its participation
NINE = "nine clients are charged, though all ten go on where only samples leave, as the bytes have it"
BELOW = "less than the method's own unlearning, which other tables charge: only the recovery is left"
MANTISSA = "the digits of the bytes beside it; the main table has 1.35e15"
TEN_ROUNDS = "ten rounds are charged where the bytes, and the ResNet's FLOPs, have all rounds of training"
FEWER = "the FLOPs have fewer rounds of recovery than the bytes beside them"


def wrong(table: str, setting: str, method: str, column: str, rounds: float, *cells: object) -> Wrong:
    value, gives, reading, why = cells
    assert isinstance(reading, float | None)
    return Wrong(Cell(table, setting, method, column, str(value), rounds), str(gives), reading, str(why))


WRONG = [
    wrong("post-unlearning", "cifar100-iid", "retrain", "flops", 0, "1.62e15", "1.35e15", None, MANTISSA),
    wrong("post-unlearning", "cifar100", "retrain", "flops", 0, "1.62e15", "1.35e15", None, MANTISSA),
    wrong(
        *("post-unlearning", "cifar100-mit", "fedau", "flops", 0, "4.61e10", "2.30e11"),
        *(4.0 * 25_600 * 5_000 * 9 * 10, TEN_ROUNDS),
    ),
    wrong(
        *("post-unlearning", "cub200", "fedau", "bytes", 0, "1.03e7", "2.06e7"),
        *(50.0 * 2 * 4 * 25_700, "a head for 100 classes, where CUB-200 has 200"),
    ),
    wrong(
        *("post-unlearning", "cub200", "fedau", "flops", 0, "4.61e10", "4.61e11"),
        *(4.0 * 25_600 * 5_000 * 9 * 10, TEN_ROUNDS + "; and a head for 100 classes"),
    ),
    wrong("samples", "cifar100", "retrain", "flops", 0, "1.35e15", "1.50e15", 200 * 9 * F, NINE),
    wrong("samples", "cifar100", "fedau", "flops", 6, "4.05e13", "4.50e13", 6 * 9 * F, NINE),
    wrong("samples", "cifar100", "not", "flops", 8, "5.41e13", "6.00e13", None, NINE + "; that would be 5.40e13"),
    wrong("samples", "cifar100", "mode", "bytes", 0, "6.19e9", "1.44e10", 6.9 * 10 * TRIP, BELOW),
    wrong("samples", "cifar100", "mode", "flops", 0, "5.18e13", "1.20e14", 69 * F, BELOW),
    wrong("samples", "cifar100", "fedosd", "bytes", 0, "4.04e9", "8.98e9", 4.5 * 10 * TRIP, BELOW),
    wrong("samples", "cifar100", "fedosd", "flops", 0, "3.38e13", "7.50e13", 45 * F, BELOW),
    wrong("two clients", "cifar100", "mode", "flops", 5.8, "1.36e14", "1.46e14", (148 + 4.2 * 8) * F, FEWER),
    wrong("two clients", "cifar100", "mode", "flops x", 5.8, "8.8", "8.2", 1.2e15 / ((148 + 4.2 * 8) * F), FEWER),
    wrong("two clients", "cifar100-mit", "mode", "bytes", 8.2, "5.68e9", "5.67e9", None, "the mean of no five counts"),
    wrong("two clients", "cifar100-mit", "mode", "bytes x", 8.2, "1.8", "1.9", None, "1.06e10 / 5.68e9 is 1.87"),
    wrong("two clients", "cifar100-mit", "mode", "flops", 8.2, "1.69e15", "1.82e15", (148 + 6.4 * 8) * MIT_F, FEWER),
    wrong(
        *("two clients", "cifar100-mit", "mode", "flops x", 8.2, "2.0", "1.9"),
        *(3.4e15 / ((148 + 6.4 * 8) * MIT_F), FEWER),
    ),
]


def charged(cell: Cell, method: str | None = None) -> Bill:
    leaving, samples = LEAVING.get(cell.table, 1), SAMPLES.get(cell.table, 0.0)
    rounds = 0.0 if method else cell.rounds
    return bill(method or cell.method, SETTINGS[cell.setting], rounds, leaving=leaving, samples=samples)


def amount(cell: Cell, found: Bill) -> float:
    if cell.column.startswith("storage"):
        return found.storage_bytes
    charge = found.unlearning if cell.table == "post-unlearning" else found.total
    return charge.bytes if cell.column.startswith("bytes") else charge.flops


def predicted(cell: Cell) -> str:
    """What the accounting prints in the place of a cell."""
    cost = amount(cell, charged(cell))
    if not cell.column.endswith("x"):
        return printed(cost)
    retrain = amount(cell, charged(cell, "retrain"))
    if cell.column == "storage x":
        return like(retrain / cost, cell.value)
    if cell.table == "lstm":
        cost = float(printed(cost))  # this table alone divides one printed number by another
    return like(times_cheaper(retrain, cost), cell.value)


def like(value: float, text: str) -> str:
    """With as many digits as were printed."""
    return printed(value) if "e" in text else f"{value:.{len(text.partition('.')[2])}f}"


@pytest.mark.parametrize("cell", RIGHT, ids=repr)
def test_a_cell_to_its_printed_digits(cell: Cell) -> None:
    assert predicted(cell) == cell.value


@pytest.mark.parametrize("wrong", WRONG, ids=lambda w: repr(w.cell))
def test_a_cell_that_contradicts_the_paper_s_other_cells(wrong: Wrong) -> None:
    assert predicted(wrong.cell) == wrong.gives != wrong.cell.value
    assert wrong.why
    if wrong.reading is not None:
        assert like(wrong.reading, wrong.cell.value) == wrong.cell.value


def test_the_fixed_budget() -> None:
    assert printed(budget(SETTINGS["cifar100"], 0.5)) == printed(budget(SETTINGS["cifar100-iid"], 0.5)) == BUDGET
    assert printed(0.5 * bill("retrain", SETTINGS["cifar100"]).total.bytes) == "8.08e10"  # half of the exact bytes


def test_every_cell_is_listed_once() -> None:
    cells = [*RIGHT, *(w.cell for w in WRONG)]
    places = Counter(c[:4] for c in cells)
    assert set(places.values()) == {1}
    assert {c[:4] for c, left in listed() if left} == {w.cell[:4] for w in WRONG}
    by_table = Counter(c.table for c in cells)
    assert by_table == {"main": 252, "post-unlearning": 56, "samples": 12, "two clients": 36, "lstm": 24}
    assert (len(RIGHT), len(WRONG), len(cells) + 1) == (362, 18, 381)  # and the budget


def test_the_rounds_are_means_over_ten_targets_or_five_pairs() -> None:
    for cell in RIGHT:
        targets = 5 if cell.table == "two clients" else 10
        assert cell.rounds * targets == pytest.approx(round(cell.rounds * targets))


def test_no_other_rounds_would_do() -> None:
    """Each recovered row pins its rounds to a fifth of a round, or to half a percent where they are many."""
    rows = {c[:3]: [d for d in RIGHT if d[:3] == c[:3]] for c in RIGHT if c.rounds}
    assert len(rows) == 34 + 3 + 7 + 5
    for cells in rows.values():
        off = max(0.2, cells[0].rounds / 200)
        for sign in (-1, 1):
            assert any(predicted(c._replace(rounds=c.rounds + sign * off)) != c.value for c in cells), cells


def test_the_ablation_prints_the_same_rounds_for_fedquit() -> None:
    rounds = {c.setting: c.rounds for c in RIGHT if c.table == "main" and c.method == "fedquit"}
    assert (rounds["cifar100-iid"], rounds["cifar100"]) == (10.0, 3.7)


# Where the cells agree with one another, but on a premise that something else contradicts.


def test_cub200_has_600_examples_for_each_of_ten_clients_and_not_5000() -> None:
    """The setting with 100 clients has 60; with 600, all FLOPs of the other are 8.3 times lower."""
    s, s100 = SETTINGS["cub200"], SETTINGS["cub200-100"]
    assert s.epoch_flops / s100.epoch_flops == pytest.approx(83.3, abs=0.1)
    real = Setting(10, 10, 50, s.model_bytes, 600 * 1.7e9)
    assert printed(bill("retrain", real).total.flops) == "4.59e14"
    assert printed(bill("fedquit", real, 9.1).total.flops) == "8.46e13"


def test_fedosd_needs_the_leaving_client_too() -> None:
    """Ten clients in each of its ten rounds: 100 client-epochs, where the tables have 90."""
    s = SETTINGS["cifar100"]
    assert bill("fedosd", s).unlearning.flops == 90 * F
    assert printed(FEDOSD_ROUNDS * s.clients * F) == "7.50e13"


def test_an_lstm_for_65_characters_has_more_bytes_than_the_table() -> None:
    """Embedding 128, 256 units with one bias, 65 characters: 0.15 % more than the columns allow."""
    size = 65 * 128 + 4 * 256 * (128 + 256 + 1) + (256 + 1) * 65
    assert size == 419_265
    trip = 2 * 4 * size
    assert [printed(n * trip) for n in (1600, 240 * 8, 96.1 * 8, 1 + 16.9 * 8)] == [
        *("5.37e9", "6.44e9", "2.58e9", "4.57e8"),  # Retrain, NoT, FedOSD and FedQUIT: printed is one less in each
    ]


@pytest.mark.parametrize(("field", "least", "most"), [("bytes", 1_674_370, 1_674_680), ("flops", 7.8907e11, 7.8928e11)])
def test_the_lstm_s_constants_are_fitted_and_the_fit_is_narrow(field: str, least: float, most: float) -> None:
    """With these rounds, no constants but these print the table."""
    cells = [c for c in RIGHT if c.table == "lstm" and c.column == field]
    now = SETTINGS["shakespeare"].model_bytes if field == "bytes" else SETTINGS["shakespeare"].epoch_flops

    def fits(constant: float) -> bool:
        return all(printed(amount(c, charged(c)) * constant / now) == c.value for c in cells)

    assert fits(least)
    assert fits(now)
    assert fits(most)
    assert not fits(least * 0.9998)
    assert not fits(most * 1.0002)


def test_the_charges_by_hand() -> None:
    s = SETTINGS["cifar100"]
    participations = {
        m: bill(m, s).unlearning.bytes / TRIP for m in ("fedquit", "pga", "mode", "fedosd", "not", "federaser")
    }
    assert participations == {"fedquit": 1, "pga": 1, "mode": 154, "fedosd": 90, "not": 0, "federaser": 1800}
    assert bill("mode", s, leaving=2).unlearning.flops == 148 * F
    assert bill("fedquit", s, leaving=3).unlearning.flops == 3 * F
    both = bill("fedquit", s, 2)
    assert (both.unlearning.flops, both.recovery.flops, both.total.flops) == (F, 18 * F, 19 * F)
    aside = bill("fedau", s, 2)
    assert aside.unlearning.bytes > 0
    assert aside.total == aside.recovery


def test_what_cannot_be_charged_is_refused() -> None:
    s = SETTINGS["cifar100"]
    with pytest.raises(UnknownNameError, match="fedquit"):
        bill("fedquti", s)
    with pytest.raises(InputError, match="no recovery"):
        bill("retrain", s, 3)
    for options in ({"leaving": 10}, {"leaving": 0}, {"samples": 1.0}, {"recovery_rounds": -1}):
        with pytest.raises(InputError, match="at least one client"):
            bill("fedquit", s, **options)


def test_it_needs_no_torch() -> None:
    script = "import sys, fedquit.running.paper_costs; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


# The list above against the paper's source.

LABELS = {
    "main": ("table:full_results", "cifar100-iid cifar100 cifar10 cub200 cifar100-100 cub200-100"),
    "post-unlearning": ("tab:mini_table_after_unlearning", "cifar100-iid cifar100 cifar100-mit cub200"),
    "samples": ("table:sample_unlearning_main", "cifar100"),
    "two clients": ("table:multiple_unlearning_after_rec", "cifar100 cifar100-mit"),
    "lstm": ("table:lstm", "shakespeare"),
}
NAMES = ("original", "retrain", "federaser", "pga", "mode", "fedau", "not", "fedosd", "fedquit")


def bare(text: str) -> str:
    """Without commands, mathematics and white space: `\\major{$5.39$e$^{11}$ (1.0$\\times$)}` is `5.39e11(1.0x)`."""
    text = text.replace(r"\times", "x").replace("×", "x")
    text = re.sub(r"\\[a-zA-Z]+|\^\\dag|\^\*|[${}^\s]", "", text)
    return re.sub(r"(\d)e0(\d)", r"\1e\2", text)


def in_the_paper(table: str, source: str) -> dict[tuple[str, str], list[str]]:
    """The cost cells of a table, by setting and method, in the order of the columns."""
    label, settings = LABELS[table]
    end = source.index(rf"\label{{{label}}}")
    body = source[source.rindex(r"\begin{tabular}", 0, end) : end].partition(r"\end{tabular}")[0]
    groups = iter(settings.split())
    found: dict[tuple[str, str], list[str]] = {}
    setting = "" if table == "post-unlearning" else next(groups)
    seen_retrain = False
    for line in body.split(r"\\"):
        cells = [bare(re.sub(r"\$\^(\\dag|\*)\$", "", c)) for c in re.sub(r"\\midrule", "", line).split("&")]
        at = next((i for i, c in enumerate(cells[:2]) if c.lower() in NAMES), None)
        if at is None:
            continue
        method, rest = cells[at].lower(), cells[at + 1 :]
        if table == "post-unlearning":
            found |= {(s, method): rest[3 * i + 1 : 3 * i + 3] for i, s in enumerate(settings.split())}
            continue
        if method == "original" and seen_retrain:
            setting, seen_retrain = next(groups), False
        seen_retrain |= method == "retrain"
        costs = [c for c in rest if re.match(r"\d\.\d\de\d", c)]
        if costs:
            found[setting, method] = [part.rstrip("x)") for c in costs for part in c.split("(")]
    return found


@pytest.mark.skipif(not PAPER.exists(), reason="the paper's source is not beside this repository")
@pytest.mark.parametrize("table", LABELS)
def test_the_list_is_the_paper_s(table: str) -> None:
    mine: dict[tuple[str, str], dict[str, str]] = {}
    for cell in [*RIGHT, *(w.cell for w in WRONG)]:
        if cell.table == table:
            mine.setdefault((cell.setting, cell.method), {})[cell.column] = cell.value
    ordered = {row: [cells[c] for c in COLUMNS if c in cells] for row, cells in mine.items()}
    assert in_the_paper(table, PAPER.read_text()) == ordered


@pytest.mark.skipif(not PAPER.exists(), reason="the paper's source is not beside this repository")
def test_the_budget_is_the_paper_s() -> None:
    assert BUDGET in bare(PAPER.read_text())
