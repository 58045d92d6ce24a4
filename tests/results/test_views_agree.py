# SPDX-License-Identifier: Apache-2.0
"""Random results, written as folders: every view prints the numbers of the one model, and the model is right."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from markupsafe import Markup
from rich.console import Console

from fedquit.cli.runs import budget_table, comparison_table
from fedquit.report import write_report
from fedquit.results.schema import AVERAGED, COMPARED
from fedquit.results.verdicts import JUDGED
from fedquit.results.words import DASH, fixed, share, times
from results.random_results import Study, studies, write_study
from test_report_figures import table

SHOWN = ("test_acc", "retain_acc", "forget_acc", "mia_song_svc", "mia_yeom")
IN_PAGE = ("forget_acc", "retain_acc", "mia_song_svc", "mia_yeom", "test_acc")  # in the order of its columns
NO_GAPS = ("Verdict", "Forget, Natural", "Own hold-out", "Sent", "Requests")
FORMATS = {"html": "r.html", "csv": "r.csv", "md": "r.md", "latex": "r.tex", "json": "r.json"}


@pytest.fixture(autouse=True, scope="module")
def quick() -> Iterator[None]:
    """Neither drawing nor many bootstrap samples: they take the most time, and no number of these views."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedquit.report.figures.draw", lambda *_, **__: Markup("<svg></svg>"))
        patch.setattr("fedquit.results.gaps.RESAMPLES", 99)
        yield


@settings(
    max_examples=12,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)
@given(study=studies())
def test_every_view_prints_the_numbers_of_the_one_model(study: Study) -> None:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "study"
        lines = write_study(study, out).table
        views = {}
        for name, file in FORMATS.items():
            write_report([out], out / file)
            views[name] = (out / file).read_text()
        stored = json.loads((out / "comparison.json").read_text())["table"]
    assert not any("seconds" in line for line in stored), "the same runs give the same table, however long they took"
    by_hand(study, stored)
    methods = [line for line in stored if line["phase"] == "recovered" and line["runs"]]
    terminal(lines, stored)
    html(views["html"], methods, next((line for line in stored if line["phase"] == "floor"), None))
    tables_of_text(views["md"], methods)
    tables_of_text(views["latex"].replace(r"$\pm$", "±").replace("--", DASH).replace(r"$\neq$", "≠"), methods)
    exported(json.loads(views["json"]), methods)
    csv_rows(views["csv"], methods)


# The model, worked out again from the rows alone


def by_hand(study: Study, stored: Sequence[dict[str, Any]]) -> None:
    lines = {line["method"]: line for line in stored}
    for method in study.methods:
        runs = [o for o in study.outcomes if o.method == method and not o.failure]
        line = lines[method]
        assert line["runs"] == len(runs)
        if not runs:
            continue
        gaps = {key: gaps_of([(o.at("recovered"), o.at("retrained")) for o in runs], key) for key in COMPARED}
        assert line["gaps"].keys() - {"forget_js"} == {key for key, sizes in gaps.items() if sizes}
        for key, sizes in gaps.items():
            if sizes:
                assert line["gaps"][key] == pytest.approx(statistics.fmean(sizes))
            if len(sizes) > 1:
                assert line["deviations"][key] == pytest.approx(statistics.stdev(sizes), abs=1e-9)
        four = [line["gaps"].get(key) for key in AVERAGED.values()]
        assert line["avg_gap"] == (None if None in four else pytest.approx(sum(four) / 4))
        costs_by_hand(line, runs)
        if study.again:
            pairs = [(study.retrain_again[o.place], o.at("retrained")) for o in runs]
            for key in COMPARED:
                sizes = gaps_of(pairs, key)
                assert line["spread"].get(key) == (pytest.approx(statistics.fmean(sizes)) if sizes else None)
        verdicts_by_hand(study, line, runs)
        budgets_by_hand(line, runs)
        tugs = [tug(o.at("recovered"), o.at("retrained")) for o in runs]
        known = [value for value in tugs if value is not None]
        assert line["tug_of_war"] == (pytest.approx(statistics.fmean(known)) if known else None)


def verdicts_by_hand(study: Study, line: dict[str, Any], runs: Sequence[Any]) -> None:
    """Which measures are judged, from which sizes, and how far the signed gap lies on average over targets."""
    for key in JUDGED:
        values: dict[Any, dict[int, float]] = {}
        others: dict[Any, dict[int, float]] = {}
        for run in runs:
            if run.at("recovered").get(key) is not None:
                values.setdefault(run.target, {})[run.seed] = run.at("recovered")[key]
        for (target, seed), row in study.retrain_again.items():
            if row.get(key) is not None:
                others.setdefault(target, {})[seed] = row[key]
        assert (key in line["verdicts"]) == bool(values)
        if not values:
            continue
        verdict = line["verdicts"][key]
        both = [target for target in values if target in others]
        assert (verdict["word"] in ("differs", "cannot tell"), verdict["targets"]) == (True, len(both))
        if len(both) == 1:  # seeds of one target are all independent
            (target,) = both
            assert (verdict["runs"], verdict["retrains"]) == (len(values[target]), len(others[target]))
            gap = statistics.fmean(values[target].values()) - statistics.fmean(others[target].values())
            assert verdict["gap"] == pytest.approx(gap)
        elif both and study.seeds == 1:
            gaps = [values[target][0] - others[target][0] for target in both]
            assert verdict["gap"] == pytest.approx(statistics.fmean(gaps))
            assert verdict["reason"].startswith("cannot tell: one Retrain shows no spread")
    assert ("avg_gap" in line["verdicts"]) == all(key in line["verdicts"] for key in AVERAGED.values())


def gaps_of(pairs: Sequence[tuple[Any, Any]], key: str) -> list[float]:
    return [abs(a[key] - b[key]) for a, b in pairs if a.get(key) is not None and b.get(key) is not None]


def costs_by_hand(line: dict[str, Any], runs: Sequence[Any]) -> None:
    for kind, first, second in (
        ("bytes", "down_bytes", "up_bytes"),
        ("epochs", "client_epochs", "server_epochs"),
        ("flops", "client_flops", "server_flops"),
    ):
        if first not in runs[0].at("retrained") and second not in runs[0].at("retrained"):
            assert line[kind] is None
            continue
        spent, whole = 0.0, 0.0
        for run in runs:
            whole += run.at("retrained").get(first, 0) + run.at("retrained").get(second, 0)
            for phase in ("unlearned", "recovered"):
                spent += run.at(phase).get(first, 0) + run.at(phase).get(second, 0)
        assert line[kind] == pytest.approx(spent / len(runs)), "clients and server"
        assert line[f"{kind}_saved"] == (pytest.approx(whole / spent) if spent and whole else None)
        if kind == "bytes":
            assert line["bytes_percent"] == (pytest.approx(100 * spent / whole) if whole else None)


def budgets_by_hand(line: dict[str, Any], runs: Sequence[Any]) -> None:
    every = [(row, run.at("retrained")) for run in runs for row in run.rows if row["phase"] == "budget"]
    assert line["budgets"].keys() == {f"{row['budget']:g}" for row, _ in every}
    for name, stored in line["budgets"].items():
        asked = [(row, retrained) for row, retrained in every if f"{row['budget']:g}" == name]
        paid = [(row, retrained) for row, retrained in asked if row["budget_spent"] <= row["budget"] + 1e-9]
        assert (stored["runs"], stored["requests"]) == (len(paid), len(asked))
        assert stored["spent"] == pytest.approx(statistics.fmean(row["budget_spent"] for row, _ in paid or asked))
        for key in COMPARED:
            sizes = gaps_of(paid, key)
            assert stored.get(f"{key}_gap") == (pytest.approx(statistics.fmean(sizes)) if sizes else None)


def tug(row: Any, retrained: Any) -> float | None:
    keys = ("forget_acc", "retain_acc", "test_acc")
    if any(row.get(key) is None or retrained.get(key) is None for key in keys):
        return None
    return math.prod(1 - abs(float(row[key]) - float(retrained[key])) / 100 for key in keys)


# The views


def terminal(lines: Sequence[Any], stored: Sequence[dict[str, Any]]) -> None:
    printed = {row[0]: row[1:] for row in rendered(comparison_table("t", lines))}
    for line in stored:
        cells = printed[line["method"]]
        if not line["runs"]:
            assert cells[0] == "failed"
            continue
        assert cells[: len(SHOWN)] == [on_terminal(line, key) for key in SHOWN]
        mark = marked(line, "avg_gap")
        assert cells[-6] == ("" if line["avg_gap"] is None else f"{mark}{line['avg_gap']:.1f}")
        if line["phase"] == "recovered":
            saved = [times(line[f"{kind}_saved"], line[kind]) for kind in ("bytes", "epochs", "flops")]
            assert cells[-3:] == saved
    if any(line["budgets"] for line in stored):
        for row in rendered(budget_table(lines)):
            line = next(line for line in stored if line["method"] == row[0])
            for cell, budget in zip(
                row[1:], (line["budgets"][k] for k in sorted(line["budgets"], key=float)), strict=True
            ):
                gap = budget.get("avg_gap", budget.get("forget_acc_gap"))
                level = f"({budget['test_acc']:.1f})" if budget["runs"] else ""
                words = level if gap is None else f"{gap:.1f} {level}"
                assert cell == (words if budget["runs"] else "out of reach")


def rendered(made: Any) -> list[list[str]]:
    console = Console(width=400, file=io.StringIO(), record=True)
    columns = [[str(cell) for cell in column.cells] for column in made.columns]
    console.print(made)
    text = console.export_text()
    rows = [[cell.replace("\\[", "[") for cell in row] for row in zip(*columns, strict=True)]
    assert all(cell in text for row in rows for cell in row), "nothing is cut off"
    return rows


def marked(line: dict[str, Any], key: str) -> str:
    signs = {"differs": "≠", "equivalent": "=", "cannot tell": ""}
    return signs[line["verdicts"][key]["word"]] if key in line["verdicts"] else ""


def on_terminal(line: dict[str, Any], key: str) -> str:
    if key not in line["means"]:
        return ""
    level = f"{line['means'][key]:.1f}"
    if key not in line["gaps"]:
        return level
    mark = marked(line, key)
    deviation = f"±{line['deviations'][key]:.1f}" if key in line["deviations"] else ""
    return f"{level} ({mark}{line['gaps'][key]:.1f}{deviation})"


def in_short(counts: Sequence[tuple[str, float]]) -> str:
    """Verdicts that differ between requests, without what follows their word."""
    words: dict[str, float] = {}
    for verdict, n in counts:
        word = verdict.partition(":")[0].removesuffix(" within the margin")
        words[word] = words.get(word, 0) + n
    return ", ".join(f"{n:g} {word}" for word, n in words.items())


def html(page: str, methods: Sequence[dict[str, Any]], again: dict[str, Any] | None) -> None:
    if any(key in line["gaps"] for line in methods for key in AVERAGED.values()):
        gaps = table(page, "Gaps to Retrain")
        keys = [key for key in IN_PAGE if any(key in line["gaps"] for line in methods)]
        printed = {row[0]: row[1:] for row in gaps[1:]}
        for line in methods:
            average = in_page(line, "avg_gap", line["avg_gap"])
            cells = [in_page(line, key, line["gaps"].get(key), fixed(line["means"].get(key))) for key in keys]
            sent = share(line["bytes_percent"]).replace("\u00a0", " ")
            row = dict(zip(gaps[0][1:], printed[line["method"]], strict=True))
            verdicts = line["verdicts"]
            judged = next((verdicts[key]["word"] for key in ("avg_gap", "forget_acc") if key in verdicts), "not tested")
            assert row.pop("Verdict", "not tested") == judged
            counts = sorted(line["holdout_verdicts"].items(), key=lambda item: -item[1])
            said = in_short(counts) if len(counts) > 1 else "".join(dict(counts))
            assert row.pop("Own hold-out", DASH) == (said or DASH)
            natural = [fixed(line[kind].get("forget_acc")) for kind in ("natural_gaps", "natural")]
            assert row.pop("Forget, Natural", "– –") == " ".join(natural)
            assert row.pop("Requests", str(line["runs"])) == str(line["runs"])
            assert list(row.values()) == [average, *cells, sent]
        if again and any(key in again["gaps"] for key in keys):
            spreads = [fixed(again["avg_gap"]), *(fixed(again["gaps"].get(key)) for key in keys)]
            row = dict(zip(gaps[0][1:], printed["Retrain again"], strict=True))
            assert [row[head] for head in gaps[0] if head in row and head not in NO_GAPS] == spreads
    costs = table(page, "Costs")
    shares = {costs[i - 3][0]: row for i, row in enumerate(costs) if row[0] == "Share of Retrain"}
    for line in methods:
        row = dict(zip(costs[0], shares[line["method"]], strict=True))
        assert row["Communication"] == share(line["bytes_percent"]).replace("\u00a0", " ")
        if "Computing" in row and line["flops_saved"] is not None:
            assert row["Computing"] == share(line["computing_percent"]).replace("\u00a0", " ")
            assert line["computing_percent"] * line["flops_saved"] == pytest.approx(100)
    if any(line["tug_of_war"] is not None for line in methods):
        found = table(page, "Other distances to Retrain")
        at = found[0].index("Tug\u2011of\u2011War")
        tugs = {cells[0]: cells[at] for cells in found[1:]}
        for line in methods:
            cell = tugs[line["method"]]
            assert cell.split(" ")[0] == fixed(line["tug_of_war"], 3)
            if line["tug_of_war"] is not None and line["tug_of_war_spread"] is not None:
                assert f"spread {fixed(line['tug_of_war_spread'], 3)}" in cell
    budgets_in_page(page, methods)


def in_page(line: dict[str, Any], key: str, gap: float | None, level: str = "") -> str:
    words = [marked(line, key) + fixed(gap)]
    if key in line["deviations"]:
        words.append(f"± {fixed(line['deviations'][key])}")
    if level:
        words.append(level)
    return " ".join(words)


def budgets_in_page(page: str, methods: Sequence[dict[str, Any]]) -> None:
    if not any(line["budgets"] for line in methods):
        return
    rows = table(page, "Fixed budgets")
    order = [row[0] for row in rows if len(row) == 1]
    expected = []
    for line in sorted(methods, key=lambda line: order.index(line["method"])):
        expected.append([line["method"]])
        for name, budget in sorted(line["budgets"].items(), key=lambda item: float(item[0])):
            spent = share(100 * budget["spent"]).replace("\u00a0", " ")
            if not budget["runs"]:
                expected.append([f"{100 * float(name):g} %", f"{spent} out of reach"])
                continue
            gaps = [fixed(budget.get(f"{key}_gap")) for key in IN_PAGE]
            levels = [fixed(budget.get(key)) for key in IN_PAGE]
            cells = [f"{gap} {level}" for gap, level in zip(gaps, levels, strict=True)]
            expected.append([f"{100 * float(name):g} %", spent, fixed(budget.get("avg_gap")), *cells])
    assert len(rows) == len(expected) + 1
    for row, wanted in zip(rows[1:], expected, strict=True):
        if len(wanted) == 2:
            assert row[:2] == wanted
        elif len(wanted) > 2:
            assert row[0] == wanted[0]
            assert row[1].startswith(wanted[1])
            assert row[2:] == wanted[2:]
        else:
            assert row == wanted


def tables_of_text(text: str, methods: Sequence[dict[str, Any]]) -> None:
    """Markdown and LaTeX print the same cells."""
    for line in methods:
        cells = [in_text(line, key) for key in SHOWN]
        average = marked(line, "avg_gap") + fixed(line["avg_gap"])
        shares = [fixed(line[k]) for k in ("recovery_rounds", "bytes_percent", "computing_percent")]
        wanted = [str(line["runs"]), *cells, average, *shares]
        rows = [re.split(r" (?:\||&) ", row.strip(" |\\")) for row in text.splitlines()]
        assert wanted in [row[1:] for row in rows], (wanted, rows)


def in_text(line: dict[str, Any], key: str) -> str:
    level = fixed(line["means"].get(key))
    if key not in line["gaps"]:
        return level
    deviation = f" ± {fixed(line['deviations'][key])}" if key in line["deviations"] else ""
    return f"{level} ({marked(line, key)}{fixed(line['gaps'][key])}{deviation})"


def exported(found: dict[str, Any], methods: Sequence[dict[str, Any]]) -> None:
    summaries = {summary["method"]: summary for summary in found["summary"]}
    assert summaries.keys() == {line["method"] for line in methods}
    same = ("avg_gap", "recovery_rounds", "bytes", "flops", "epochs", "tug_of_war", "tug_of_war_mia")
    for line in methods:
        summary = summaries[line["method"]]
        assert {key: summary[key] for key in same} == {key: line[key] for key in same}
        assert summary["communication_percent"] == line["bytes_percent"]
        assert summary["computation_percent"] == line["computing_percent"]
        assert summary["verdicts"] == line["verdicts"]
        for key in SHOWN:
            assert summary[key] == line["means"].get(key)
            assert summary[f"{key}_gap"] == line["gaps"].get(key)
            assert summary[f"{key}_gap_std"] == line["deviations"].get(key)
            assert summary[f"{key}_floor"] == line["spread"].get(key)
        assert summary["budgets"].keys() == line["budgets"].keys()
        for name, budget in line["budgets"].items():
            assert summary["budgets"][name]["requests"] == budget["runs"]
            assert summary["budgets"][name]["avg_gap"] == budget.get("avg_gap")
            assert summary["budgets"][name]["spent"] == budget["spent"]
    (comparison,) = found["comparisons"]
    pairs = {line["method"]: line["against_first"] for line in methods if line["against_first"]}
    assert comparison["pairs"] == pairs


def csv_rows(text: str, methods: Sequence[dict[str, Any]]) -> None:
    rows = list(csv.DictReader(io.StringIO(text, newline="")))
    for line in methods:
        recovered = [row for row in rows if row["method"] == line["method"] and row["phase"] == "recovered"]
        worked = [row for row in rows if row["method"] == line["method"] and row["phase"] in ("unlearned", "recovered")]
        assert len(recovered) == line["runs"]
        for key, verdict in line["verdicts"].items():
            assert {row[f"{key}_verdict"] for row in recovered} == {verdict["word"]}
        for key in SHOWN:
            sizes = [abs(float(row[f"{key}_gap"])) for row in recovered if row.get(f"{key}_gap")]
            assert line["gaps"].get(key) == (pytest.approx(statistics.fmean(sizes)) if sizes else None)
        for kind in ("bytes", "flops", "epochs"):
            spent = [float(row[kind]) for row in worked if row.get(kind)]
            assert line[kind] == (pytest.approx(sum(spent) / len(recovered)) if spent else None)
