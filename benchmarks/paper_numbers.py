# SPDX-License-Identifier: Apache-2.0
"""Copy every number of the results tables of FedQUIT's paper into `src/fedquit/paper/numbers.toml`.

    python benchmarks/paper_numbers.py PAPER.tex > src/fedquit/paper/numbers.toml

The numbers stand in the file as they are printed, without the commands of LaTeX; `fedquit.paper.numbers` reads them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

IID, LDA, MIT, CUB = "cifar100-iid", "cifar100-lda", "cifar100-lda-mit-b0", "cub200-lda"
ACCURACIES = ("test_acc", "retain_acc", "forget_acc")
FIVE = (*ACCURACIES, "mia_song_svc", "mia_yeom")
UNLEARNED = [f"unlearned {key}" for key in ACCURACIES]
RECOVERED = [f"recovered {key}" for key in ACCURACIES]
ROUNDS = "recovered rounds"
COSTS = ("total bytes", "total flops")
METHODS = {
    "Original": "original",
    "Retrain": "retrain",
    "FedEraser": "federaser",
    "PGA": "pga",
    "MoDe": "mode",
    "MoDE": "mode",
    "FedAU": "fedau",
    "NoT": "not",
    "FedOSD": "fedosd",
    "FedQUIT": "fedquit",
    "FedQUIT (tau=1.0)": "fedquit",
    "Random": "fedquit teacher=random",
    "Incompetent": "fedquit teacher=incompetent",
    "Flatten": "fedquit teacher=flatten",
    "Flatten (tau to infinity)": "fedquit teacher=flatten",
    "Probability Ladder": "fedquit teacher=probability_ladder",
    "Logit Ladder": "fedquit teacher=logit_ladder",
    "TopK (K=5)": "fedquit teacher=topk",
    "tau=4.0": "fedquit tau=4",
    "tau=3.0": "fedquit tau=3",
    "tau=2.0": "fedquit tau=2",
    "tau=1.5": "fedquit tau=1.5",
}


@dataclass(frozen=True)
class Layout:
    """How one table is printed.

    Attributes:
        label: Of the table in the paper.
        title: Of ours.
        columns: Of the numbers, each `phase measure`, or `setting phase measure` where the settings stand side by side.
        settings: Of the blocks of rows, from the top; one for all rows where the table has no column for it.
        lead: Cells of a row before its numbers; the last of them names the method.
        request: What is asked to be forgotten.
    """

    label: str
    title: str
    columns: Sequence[str]
    settings: Sequence[str]
    lead: int = 1
    request: str = "client"


LAYOUTS = (
    Layout(
        "table:full_results",
        "After recovery",
        [*(f"recovered {key}" for key in (*FIVE, "avg_gap")), *COSTS, "total storage"],
        [IID, LDA, "cifar10-lda", CUB, "cifar100-lda-100-clients", "cub200-lda-100-clients"],
        lead=2,
    ),
    Layout(
        "table:fixed_budget_50",
        "At half of Retrain's bytes",
        [f"{setting} budget-0.5 {key}" for setting in (IID, LDA) for key in ACCURACIES],
        [""],
        lead=2,
    ),
    Layout(
        "tab:mini_table_after_unlearning",
        "After unlearning",
        [f"{setting} unlearned {key}" for setting in (IID, LDA, MIT, CUB) for key in ("test_acc", "bytes", "flops")],
        [""],
    ),
    Layout(
        "table:sample_unlearning_main",
        "One hundredth of a client's samples, of its rarest classes",
        [f"{phase} {key}" for key in ACCURACIES for phase in ("unlearned", "recovered")] + [*COSTS],
        [LDA],
        request="samples-0.01",
    ),
    Layout(
        "table:multiple_unlearning_after_rec",
        "Two clients at once",
        [*(f"recovered {key}" for key in FIVE if key != "retain_acc"), *COSTS],
        [LDA, MIT],
        lead=2,
        request="pair",
    ),
    Layout(
        "table:lstm",
        "Next-character prediction",
        [*UNLEARNED, *RECOVERED, *COSTS],
        ["shakespeare"],
    ),
    Layout("table:ablation_teacher", "Teachers", [*UNLEARNED, ROUNDS, *RECOVERED], [IID, LDA], lead=2),
    Layout("table:ablation_temperature", "Temperatures", [*UNLEARNED, ROUNDS, *RECOVERED], [IID, LDA], lead=2),
)


@dataclass(frozen=True)
class Row:
    """A row of a table: the paper's name of it, the setting of its block, and its cells without LaTeX."""

    name: str
    setting: str
    cells: list[str] = field(default_factory=list)


def plain(cell: str) -> str:
    """A cell as it is printed, without the commands of LaTeX and without spaces."""
    text = re.sub(r"\$\^(\\dag|\*)\$", "", cell)  # marks beside a method's name
    text = text.replace(r"\pm", "±").replace(r"\times", "×")
    text = re.sub(r"\\(major|textbf|underline|text)\b", "", text)
    text = re.sub(r"\\textcolor\{red\}", "", text)
    text = re.sub(r"[${}_^\s]", "", text)
    return "" if set(text) <= {"-"} else text


def named(cell: str) -> str:
    """The name of a row, as the paper prints it."""
    text = re.sub(r"\$\^(\\dag|\*)\$", "", cell)
    text = text.replace(r"\rightarrow", " to ").replace(r"\infty", "infinity").replace(r"\tau", "tau")
    text = re.sub(r"\\(major|textbf)\b", "", text)
    return re.sub(r"\s*=\s*", "=", " ".join(re.sub(r"[${}]", "", text).split()))


def table_of(tex: str, label: str) -> str:
    """The body of a table: what stands between its first rule and its last."""
    tables = re.findall(r"\\begin\{table\*?\}.*?\\end\{table\*?\}", tex, re.S)
    (whole,) = (table for table in tables if f"label{{{label}}}" in table)
    return str(whole[whole.index(r"\midrule") : whole.index(r"\bottomrule")])


def rows_of(tex: str, layout: Layout) -> Iterator[Row]:
    """The rows of a table, from the top."""
    first = ""
    block = -1
    for line in table_of(tex, layout.label).split("\\\\"):
        cells = re.sub(r"\\(midrule|cmidrule\S*)", "", line).split("&")
        if len(cells) < len(layout.columns):
            continue  # a part of a cell with several lines
        name = named(cells[layout.lead - 1])
        first = first or name
        block += name == first  # every block of rows begins with the same one
        setting = layout.settings[block if len(layout.settings) > 1 else 0]
        yield Row(name, setting, [plain(cell) for cell in cells[layout.lead :]])


def extracted(tex: str) -> str:
    """The whole file."""
    lines = [
        "# SPDX-License-Identifier: Apache-2.0",
        "# The results tables of FedQUIT's paper (Mora, Valerio, Bellavista, Passarella), as printed:",
        "# a value ± its deviation over targets, its gap to Retrain ± the deviation, how many times cheaper it is.",
        "# Made by benchmarks/paper_numbers.py; a column is `phase measure`, or `setting phase measure`.",
    ]
    for layout in LAYOUTS:
        lines += ["", "[[table]]", f'label = "{layout.label}"', f'title = "{layout.title}"']
        lines += [f'request = "{layout.request}"']
        lines += ["columns = [" + ", ".join(f'"{column}"' for column in layout.columns) + "]", "rows = ["]
        for row in rows_of(tex, layout):
            cells = ", ".join(f'"{cell}"' for cell in row.cells)
            setting = f'setting = "{row.setting}", ' if row.setting else ""
            lines.append(f'  {{ {setting}method = "{METHODS[row.name]}", name = "{row.name}", cells = [{cells}] }},')
        lines.append("]")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(extracted(Path(sys.argv[1]).read_text(encoding="utf-8")))
