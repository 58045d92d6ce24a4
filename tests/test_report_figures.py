# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import csv
import io
import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from markupsafe import Markup
from matplotlib.figure import Figure

from fedquit.errors import InputError, StoreError, UnknownNameError
from fedquit.inference.gaps import GapVerdict
from fedquit.report import ENDINGS, FORMATS, write_report
from fedquit.report.export import to_csv, to_json, to_md
from fedquit.report.figures import _PLOT, NUMBER, _around, _AtV, _number
from fedquit.results.folders import open_folders
from fedquit.results.verdicts import legend
from test_report import Outline, cells, entries, forget, report, results, store, text_of

FPR = [10 ** (-4 + i / 20) for i in range(81)]
FLOOR = {"retain_acc": 25.0, "forget_acc": 1.0, "mia_song_svc": 0.5, "mia_yeom": 30.0}


def full(
    method: str = "fedquit", client: int = 2, shift: float = 0.0, title: str = "A client leaves", **options: object
) -> dict[str, Any]:
    """Results with everything that a run can tell."""
    rows = forget(clients=[client])
    for i, row in enumerate(rows):
        row |= {
            "method": {"original": "original", "retrained": "retrain"}.get(row["phase"], method),
            "mia_song_svc": 60.0 + i + shift,
            "mia_yeom": 50.0 - i * 10 - shift,
            "exposed_against": "holdout",
            "tpr_at_0.01": 0.02 + i / 100,
            "tpr_at_0.01_low": 0.01,
            "tpr_at_0.01_high": 0.09,
            "tpr_at_0.01_enough": True,
            "tpr_at_0.01_fpr_high": 0.04,
            "tpr_at_0.001": 0.002,
            "tpr_at_0.001_low": 0.0,
            "tpr_at_0.001_high": 0.01,
            "tpr_at_0.001_enough": False,
            "tpr_at_0.001_fpr_high": 0.02,
            "roc": {"fpr": FPR, "tpr": [f**0.8 if f > 1e-3 else 0.0 for f in FPR]},
            "entropy": {"edges": [0.0, 0.5, 1.0, 2.0], "forget": [1.0, 0.6, 0.2], "test": [0.4, 0.8, 0.4]},
            "auc": 0.5 + shift / 100,
            "auc_low": 0.45,
            "auc_high": 0.55,
            "holdout_verdict": "forgotten within the margin",
            "holdout_reason": "90 % interval 0.46 to 0.54",
            "down_bytes": [9e6, 8e6, 1e5, 2e6][i],
            "up_bytes": [9e6, 8e6, 1e5, 2e6][i],
            "client_epochs": 10.0,
            "client_flops": [4e9, 3e9, 1e8, 2e9][i],
            "server_flops": 0,
            "server_storage_bytes": 82_344,
            "client_storage_bytes": 0,
        }
    rows[3]["forget_acc"] += shift
    for i, point in enumerate(rows[3]["curve"]):
        point["bytes"] = i * 1.5e6
    found = results(rows, title)
    found["recipe"]["method"] = {"name": method, **options}
    return found


def figures(html: str) -> dict[str, str]:
    """Titles and texts."""
    found = re.findall(r'<h[34]>([^<]*)</h[34]>\s*<figure role="img" aria-label="([^"]*)"', html)
    assert len(found) == html.count("<figure ")
    return {unescape(title): unescape(text).replace("\u00a0", " ") for title, text in found}


def table(html: str, title: str) -> list[list[str]]:
    """The cells of one table."""
    found = re.search(rf">{title}</h\d>.*?</table>", html, flags=re.DOTALL)
    assert found, title
    return [[cell.replace("\u00a0", " ") for cell in line] for line in cells(found[0])]


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes the most time."""
    monkeypatch.setattr("fedquit.report.figures.draw", lambda *_, **__: Markup("<svg></svg>"))


def lean(found: dict[str, Any]) -> dict[str, Any]:
    """Without what only its own figures need."""
    found["rows"] = [{k: v for k, v in row.items() if k not in ("roc", "entropy", "curve")} for row in found["rows"]]
    return found


def with_floor(found: dict[str, Any]) -> dict[str, Any]:
    found["rows"][3]["floor"] = FLOOR
    return found


def test_every_figure_of_one_run_tells_its_numbers(tmp_path: Path) -> None:
    html = report(tmp_path, full())
    told = figures(html)
    assert list(told) == [
        "Gap against cost",
        "Accuracy by phase",
        "Accuracy during recovery",
        "Accuracy against communication",
        "Forget data against hold-out data",
        "How uncertain the model is",
    ]
    assert "At 1.2 % of Retrain’s bytes: forget 35.6 %, test 33.4 %." in told["Accuracy against communication"]
    assert (
        "Recovered: 5.00 % (1.00 to 9.00) at 1 % FPR and 0.20 % (0.00 to 1.00) at 0.1 %"
        in (told["Forget data against hold-out data"])
    )
    assert "Original: forget 0.650, test 0.950." in told["How uncertain the model is"]
    said = text_of(html).replace("\u00a0", " ")
    assert "5 %: 35.6/33.4, 10 %: 35.6/33.4, 20 %: 37.6/35.4, 25 %: 37.6/35.4; it was over at 29.4 %" in said


def with_budgets(found: dict[str, Any]) -> dict[str, Any]:
    """Rows at 5 and 50 % of Retrain's bytes."""
    for share, rounds in ((0.05, 3), (0.5, 60)):
        at = {"phase": "budget", "budget": share, "budget_spent": share - 0.01}
        found["rows"].append(found["rows"][3] | at | {"rounds": rounds, "forget_acc": 20.0 + rounds, "curve": None})
    return found


def test_fixed_budgets_have_a_table_of_their_own(tmp_path: Path) -> None:
    html = report(tmp_path, with_budgets(with_floor(full())))
    found = table(html, "Fixed budgets")
    assert found[0] == ["Budget", "Spent", "Avg. gap", "Forget", "Retain", "MIA Song", "MIA Yeom", "Test"]
    assert found[1] == ["fedquit"]
    assert [line[:2] for line in found[2:]] == [["5 %", "4.0 % 3 rounds"], ["50 %", "49.0 % 60 rounds"]]
    assert found[3][4] == "20.0 44.5"
    assert found[3][3] == "54.4 80.0", "the recovery goes on past Retrain's accuracy, and so does the gap"
    said = text_of(html).replace("\u00a0", " ")
    assert "within budgets of 5 %: 23.0/43.4, 10 %: 35.6/33.4" in said, "what was measured goes before the curve"
    assert "50 %: 80.0/43.4." in said
    assert [line[0] for line in cells(html) if line and line[0].startswith("Budget ")] == [
        "Budget 5 %",
        "Budget 50 %",
    ]


@pytest.mark.usefixtures("undrawn")
def test_a_budget_that_does_not_pay_for_the_unlearning_is_out_of_reach(tmp_path: Path) -> None:
    dear = with_budgets(full("mode", client=1))
    dear["rows"][4]["budget_spent"] = 0.2
    html = report(tmp_path, dear)
    assert table(html, "Fixed budgets")[2][:3] == ["5 %", "20.0 % out of reach", "–"]
    assert "5 %: out of reach" in text_of(html).replace("\u00a0", " ")
    found = json.loads(written(tmp_path, "json", with_budgets(full()), full("pga")))
    assert found["summary"][0]["budgets"]["0.5"]["forget_acc"] == 80.0
    assert found["summary"][1]["budgets"] == {}


@pytest.mark.usefixtures("undrawn")
def test_the_cost_table_tells_the_phases_apart_and_the_share_of_retrain(tmp_path: Path) -> None:
    found = table(report(tmp_path, full()), "Costs")
    assert ["Retrain", "16.0 MB", "3.0 GFLOP", "82.3 kB", "0 B", "22.3 s"] in found
    assert ["Unlearning", "200 kB", "100 MFLOP", "82.3 kB", "0 B", "32.3 s"] in found
    assert ["Recovery", "4.0 MB", "2.0 GFLOP", "82.3 kB", "0 B", "42.3 s"] in found
    assert ["Share of Retrain", "26.2 %", "70.0 %", "100 %", "–", "335 %"] in found


@pytest.mark.usefixtures("undrawn")
def test_what_an_attacker_can_tell_comes_with_intervals(tmp_path: Path) -> None:
    found = table(report(tmp_path, full()), "What an attacker can tell")
    assert found[-1] == [
        "Recovered",
        "5.00 1.00 to 9.00 FPR up to 4.0 %",
        "0.20 0.00 to 1.00 FPR up to 2.0 % few",
        "0.500 0.450 to 0.550 forgotten within the margin",
        "63.0",
        "20.0",
    ]


@pytest.mark.usefixtures("undrawn")
def test_the_bound_of_the_false_positive_rate_is_printed_beside_the_true_one(tmp_path: Path) -> None:
    found = full()
    found["rows"][3]["tpr_at_0.01_fpr_high"] = 0.036
    assert table(report(tmp_path, found), "What an attacker can tell")[-1][1] == "5.00 1.00 to 9.00 FPR up to 3.6 %"


@pytest.mark.usefixtures("undrawn")
def test_the_average_gap_and_the_forget_gap_lead_and_the_spread_has_a_line(tmp_path: Path) -> None:
    html = report(tmp_path, with_floor(full()))
    found = table(html, "Gaps to Retrain")
    assert found[0] == [
        *("Method", "Avg. gap", "Forget", "Retain", "MIA Song", "MIA Yeom", "Test", "Own hold-out", "Sent")
    ]
    assert found[3] == ["Retrain again", "14.1", "1.0", "25.0", "0.5", "30.0", "–", "–", "–"]
    assert found[4] == [
        *(
            "fedquit",
            "15.5",
            "20.0 45.6",
            "20.0 44.5",
            "2.0 63.0",
            "20.0 20.0",
            "20.0 43.4",
            "forgotten within the margin",
            "26.2 %",
        )
    ]
    gap = "The average gap to Retrain is 15.5 points (20.0 in forget accuracy); two Retrains differ by 14.1. No test"
    assert gap in text_of(html)


def verdict(word: str, **changes: object) -> dict[str, Any]:
    """A verdict as the results model stores it."""
    found = {"word": word, "gap": 15.5, "low": 12.0, "high": 19.0, "margin": 3.0, "p": 0.0123, "reason": ""}
    return found | {"equivalence_p": 0.034, "targets": 2, "runs": 2, "retrains": 3} | changes


def judged(folder: Path, *words: str, **changes: object) -> str:
    """The page over a comparison that stores verdicts."""
    methods = tuple(f"method_{i}" for i in range(len(words)))
    keys = ("avg_gap", "forget_acc")
    lines = [
        {"method": method, "phase": "recovered", "runs": 1}
        | {"verdicts": {key: verdict(word, **changes) for key in keys}}
        for method, word in zip(methods, words, strict=True)
    ]
    runs = [f"seed-0/client-2/{method}" for method in methods]
    return comparison(folder, {"schema": 1, "table": lines, "runs": runs}, methods)


def stored_leaving(word: str, difference: float) -> dict[str, Any]:
    """A verdict against Natural as the results model stores it."""
    return {"forget_acc": {"word": word, "reason": word, "difference": difference, "low": -3.0, "high": 4.0, "p": 0.01}}


@pytest.mark.usefixtures("undrawn")
def test_the_card_has_the_verdicts_against_leaving_and_after_the_stop(tmp_path: Path) -> None:
    kinds = [
        ("differs from leaving", -2.0, "not durable"),
        ("differs from leaving", 3.5, "cannot tell"),
        ("no benefit over leaving", 0.1, "durable"),
    ]
    table: list[dict[str, Any]] = [
        {"method": f"method_{i}", "phase": "recovered", "runs": 1}
        | {"leaving": stored_leaving(word, difference), "durable": {"word": lasts, "reason": f"{lasts}: why"}}
        for i, (word, difference, lasts) in enumerate(kinds)
    ]
    for several in (True, False):
        lines = table if several else table[:1]
        runs = [f"seed-0/client-2/{line['method']}" for line in lines]
        folder = tmp_path / str(several)
        html = comparison(folder, {"schema": 1, "table": lines, "runs": runs}, tuple(line["method"] for line in lines))
        said = entries(html)["Verdict"].replace("\u00a0", " ")
        if several:
            lower = (
                "Forget accuracy beside the control’s: differs from leaving, lower: method_0; differs from leaving, "
            )
            assert f"{lower}higher: method_1; no benefit over leaving: method_2." in said
            lasting = "In the rounds after the stop: not durable: method_0; cannot tell: method_1; durable: method_2."
            assert lasting in said
        else:
            own = (
                "Forget accuracy −2.0 points from Natural's at equal rounds (95 % interval −3.0 to +4.0): differs from"
            )
            assert own in said.replace("’", "'")
            assert said.endswith("After the stop, not durable: why.")


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    ("word", "mark", "said"),
    [
        ("differs", "≠", "It differs from Retrain: the average gap is 15.5 points"),
        ("equivalent", "=", "It is equivalent to Retrain within 3.0 points: the average gap is 15.5 points"),
        ("cannot tell", "", "Whether it differs from Retrain cannot be told: the average gap is 15.5 points"),
    ],
)
def test_verdicts_are_those_of_the_results(tmp_path: Path, word: str, mark: str, said: str) -> None:
    html = judged(tmp_path, word, reason=f"{word}: one Retrain for each target: three would tell")
    line = table(html, "Gaps to Retrain")[-1]
    assert line[:4] == ["method_0", word, f"{mark}15.5", f"{mark}20.0 45.6"]
    assert line[4] == "20.0 44.5", "no verdict on the retain accuracy is stored, and none is made up"
    grey = '<td role="cell" data-head="Forget" class="calm">'
    assert (grey in html) == (word != "differs"), "what shows no difference is grey"
    assert f"Gaps: {legend([{'avg_gap': GapVerdict(word, '', margin=3.0)}])}." in text_of(html)
    card = entries(html)
    p = {"differs": "p = 0.012, ", "equivalent": "p = 0.034, "}.get(word, "")
    assert card["Verdict"].startswith(f"{said} ({p}2 targets, 3 Retrains each).")
    assert (
        "Forget accuracy +15.5 points from the mean of 3 Retrains (95 % interval +12.0 to +19.0): " in card["Verdict"]
    )
    reason = "Whether it differs from Retrain: one Retrain for each target: three would tell."
    assert card.get("Cannot be told", "") == (reason if word == "cannot tell" else "")


@pytest.mark.usefixtures("undrawn")
def test_verdicts_over_all_runs_do_not_speak_for_some_of_them(tmp_path: Path) -> None:
    judged(tmp_path, "differs", "equivalent")
    write_report([tmp_path / "seed-0/client-2/method_0"], tmp_path / "alone.html")
    html = (tmp_path / "alone.html").read_text()
    assert table(html, "Gaps to Retrain")[0][1] == "Avg. gap", "without verdicts there is no column of them"
    assert "No test was made." in entries(html)["Verdict"]
    assert "that takes several Retrains of each target (fedquit compare --retrain-seeds)" in text_of(html)


@pytest.mark.usefixtures("undrawn")
def test_several_methods_are_listed_by_verdict_and_a_word_unknown_here_is_no_verdict(tmp_path: Path) -> None:
    html = judged(tmp_path, "differs", "equivalent", "differs", "perhaps")
    assert entries(html)["Verdict"].startswith(
        "Against Retrain (2 targets, 3 Retrains each): differs: method_0, method_2; equivalent: method_1."
    )
    assert [line[1] for line in table(html, "Gaps to Retrain")[3:]] == [
        "differs",
        "equivalent",
        "differs",
        "not tested",
    ]


@pytest.mark.usefixtures("undrawn")
def test_alike_reasons_why_the_hold_outs_cannot_tell_stand_once(tmp_path: Path) -> None:
    runs = [lean(full(client=client)) for client in range(3)]
    for run, reason in zip(runs, ("blind: 0.51", "blind: 0.52", "hold-out too small: 9 samples"), strict=True):
        run["rows"][3] |= {"holdout_verdict": "cannot tell", "holdout_reason": reason}
    said = entries(report(tmp_path, *runs))["Cannot be told"]
    assert "remembered: blind: 0.51 (2 of 3 requests). Whether its samples" in said
    assert said.endswith("remembered: hold-out too small: 9 samples (1 of 3 requests).")


@pytest.mark.usefixtures("undrawn")
def test_natural_after_as_many_rounds_stands_beside_every_method(tmp_path: Path) -> None:
    found = full()
    found["rows"][3] |= {"natural_forget_acc": 44.4, "natural_test_acc": 33.3}
    heads = ["Forget", "Forget, Natural", "Forget, Retrain", "Hold-out", "Hold-out, Retrain"]
    heads += ["Test", "Test, Natural", "Test, Retrain"]
    html = report(tmp_path, found)
    assert table(html, "Beside Natural after as many rounds") == [
        ["Method", *heads],
        ["fedquit", "45.6", "44.4", "25.6", "46.7", "26.7", "43.4", "33.3", "23.4"],
    ]
    control = "Natural, which does not unlearn, has 44.4 % forget accuracy after as many rounds, fedquit 45.6 %."
    assert control in entries(html)["Verdict"]
    assert "Beside Natural" not in report(tmp_path, full())


@pytest.mark.usefixtures("undrawn")
def test_the_control_s_own_verdict_stands_on_the_card(tmp_path: Path) -> None:
    found = full()
    verdict = {"holdout_verdict": "remembered", "auc": 0.613, "auc_low": 0.581, "auc_high": 0.644}
    levels = {"forget_acc": 44.4, "holdout_acc": 40.0}
    found["rows"].append(found["rows"][3] | {"phase": "natural", "method": "natural", **levels, **verdict})
    found["rows"][0]["holdout_verdict"] = "remembered"
    found["rows"][3] |= {"natural_forget_acc": 44.4}
    html = report(tmp_path, found)
    own = [line[table(html, "Gaps to Retrain")[0].index("Own hold-out")] for line in table(html, "Gaps to Retrain")]
    gone = "forgotten within the margin"
    assert own[1:] == [gone, "remembered", gone], "Original shows whether the test sees anything"
    said = "fedquit 45.6 %; Natural’s samples: remembered (AUC 0.613)."
    assert said in entries(html)["Verdict"]
    assert entries(html)["Verdict"].startswith("Its samples: "), "the tested verdict comes before the untested gap"
    assert table(html, "What an attacker can tell")[-1][0] == "Natural"
    assert [line[0] for line in table(html, "What is left of the clients")] == [
        *("Method", "Original", "Natural", "fedquit")
    ]
    assert table(html, "All numbers")[-1][-1] == "+18.8", "the control has a gap, too"


@pytest.mark.usefixtures("undrawn")
def test_memory_of_samples_and_knowledge_of_the_distribution_are_told_apart(tmp_path: Path) -> None:
    found = full()
    levels = ((90.0, 70.0), (60.0, 58.0), (5.0, 5.0), (66.0, 61.5))
    for row, (forgotten, held_out) in zip(found["rows"], levels, strict=True):
        row |= {"forget_acc": forgotten, "holdout_acc": held_out}
    assert table(report(tmp_path, found), "What is left of the clients") == [
        ["Method", "Samples", "Distribution"],
        ["Original", "+18.0", "+12.0"],
        ["fedquit", "+2.5", "+3.5"],
    ]


@pytest.mark.usefixtures("undrawn")
def test_whether_forgetting_lasts_is_shown_where_training_went_on(tmp_path: Path) -> None:
    found = full()
    found["rows"][3] |= {"forget_acc_last": 41.0, "forget_acc_after_5": 46.0, "forget_acc_after_10": 47.0}
    assert table(report(tmp_path, found), "Does it last") == [
        ["Method", "At the stop", "+5", "+10", "Last rounds", "Retrain"],
        ["fedquit", "45.6", "46.0", "47.0", "41.0", "25.6"],
    ]
    assert "Does it last" not in report(tmp_path, full()), "no training followed the recovery"


def test_the_picture_that_decides_has_every_method_the_band_and_naturals_path(tmp_path: Path) -> None:
    path = [{"round": i, "phase": "recovery", "forget_acc": 60.0 - i, "bytes": i * 4e6} for i in range(3)]
    runs = [with_floor(lean(full(method, shift=shift))) for method, shift in (("fedquit", 0.0), ("pga", -8.0))]
    for run in runs:
        run["rows"].append(run["rows"][1] | {"phase": "natural", "method": "natural", "path": path})
    html = report(tmp_path, *runs)
    told = figures(html)["Gap against cost"]
    assert "fedquit: gap 20.0 points at 26.2 % of Retrain’s bytes. pga: gap 12.0 points" in told
    assert "Two Retrains differ by 1.0 points." in told
    assert "Natural ends at 32.4 points and 50.0 %." in told
    drawn = html.partition("Gap against cost")[2].partition("</svg>")[0]
    for label in ("Retrain again", "Natural by round", "Retrain", "1 fedquit", "2 pga", "1", "2"):
        assert f">{label}</text>" in drawn, label
    assert "Natural after 2 rounds: 58.0 %." in figures(html)["Forget accuracy, round by round"]


def test_paths_are_means_as_far_as_all_requests_go(tmp_path: Path) -> None:
    runs = [full(client=2), full(client=3), full("pga")]
    for run, rounds in zip(runs, (4, 3, 5), strict=True):
        kinds = ("forget_acc", "holdout_acc", "retain_acc", "test_acc")
        points = [{"round": i, **dict.fromkeys(kinds, 10.0 * rounds + i)} for i in range(rounds)]
        run["rows"][3]["path"] = points
    told = figures(report(tmp_path, *runs))
    for kind in ("Forget", "Hold-out", "Retain", "Test"):
        text = told[f"{kind} accuracy, round by round"]
        assert "fedquit after 2 rounds: 37.0 %. pga after 4 rounds: 54.0 %. Retrain: " in text, kind


def test_of_many_methods_none_is_left_out_of_the_paths_and_naturals_goes_on_beside_each(tmp_path: Path) -> None:
    path = [{"round": i, "forget_acc": 60.0 - i} for i in range(4)]
    runs = [lean(full(f"method_{i}")) for i in range(9)]
    for run in runs:
        run["rows"][3]["path"] = path[:3]
        run["rows"].append(run["rows"][1] | {"phase": "natural", "method": "natural", "path": path})
    html = report(tmp_path, *runs)
    text = figures(html)["Forget accuracy, round by round"]
    assert all(f"method_{i} after 2 rounds: 58.0 %." in text for i in range(9))
    assert "Natural after 3 rounds: 57.0 %." in text
    drawn = html.partition("<h3>Forget accuracy, round by round</h3>")[2].partition("</svg>")[0]
    assert [drawn.count(f">{label}</text>") for label in ("method_8", "the method", "Natural")] == [1, 1, 2]


def test_numbers_beside_points_that_lie_together_cover_neither_each_other_nor_a_point() -> None:
    figure = Figure()
    axes = figure.add_subplot()
    points = [(30.0 + i % 3, 5.0 + i % 4 / 10) for i in range(12)]
    _number(axes, points, (0.0, 100.0), 20.0, log=False)
    assert [text.get_text() for text in axes.texts] == [str(i) for i in range(1, 13)]
    scale = (_PLOT[0] / 100, _PLOT[1] / 20)
    centres = []
    for text, (x, y) in zip(axes.texts, points, strict=True):
        dx, dy = text.get_position()
        centres.append((x * scale[0] + dx, y * scale[1] + dy))
    for i, (x, y) in enumerate(centres):
        for other_x, other_y in centres[:i]:
            assert abs(x - other_x) >= NUMBER[0] or abs(y - other_y) >= NUMBER[1]
        for px, py in points:
            assert abs(x - px * scale[0]) >= NUMBER[0] / 2 + 4 or abs(y - py * scale[1]) >= NUMBER[1] / 2 + 4


def test_without_retrain_the_picture_is_the_trace_before_and_after(tmp_path: Path) -> None:
    found = full()
    found["rows"] = [row for row in found["rows"] if row["phase"] != "retrained"]
    found["rows"][0] |= {"auc": 0.646, "auc_low": 0.615, "auc_high": 0.676}
    found["rows"][2]["holdout_margin"] = 0.05
    control = {"phase": "natural", "method": "natural", "auc": 0.613, "auc_low": 0.581, "auc_high": 0.644}
    found["rows"].append(found["rows"][2] | control)
    html = report(tmp_path, found)
    told = figures(html)["Forget data against hold-out data, before and after"]
    assert "Original: 0.646 (0.615 to 0.676). fedquit: 0.500 (0.450 to 0.550). Natural: 0.613 (0.581" in told
    drawn = html.partition("before and after</h3>")[2].partition("</svg>")[0]
    assert ">margin</text>" in drawn
    assert "before and after</h3>" not in report(tmp_path, full()), "with Retrain, the gap against the cost decides"


SWEPT: dict[str, Any] = {
    "schema": 1,
    "rates": [
        {"lr": lr, "unlearned_acc": 9.0, "forget_acc": 40.0 + i, "holdout_acc": 39.0, "test_acc": 50.0}
        | {"auc": 0.6 - i / 20, "auc_low": 0.55, "auc_high": 0.65, "verdict": "remembered", "reason": "AUC 0.6"}
        | {"halves": [{"verdict": "forgotten within the margin", "reason": "AUC 0.5"}] * 2}
        for i, lr in enumerate((0.0, 1e-4, 1e-3))
    ],
    "chosen": 1e-3,
    "tried": 1e-3,
    "reason": "it is the smallest rate that one half calls forgotten, and the other confirms it",
}


def swept(folder: Path, stored: object) -> str:
    """The page over a sweep of two rates."""
    for lr in (1e-4, 1e-3):
        run = full(lr=lr)
        run["rows"] = [row for row in run["rows"] if row["phase"] != "retrained"]
        store(folder / f"lr-{lr:g}", run)
    if stored is not None:
        (folder / "sweep.json").write_text(json.dumps(stored))
    write_report([folder], folder / "r.html")
    return (folder / "r.html").read_text()


def test_a_sweep_has_a_page_that_names_the_rate(tmp_path: Path) -> None:
    html = swept(tmp_path / "sweep", SWEPT)
    card = entries(html)
    assert list(card) == [*("Asked", "Done", "Verdict", "Price at 0.001", "Cost at 0.001", "Cannot be told")]
    assert card["Asked"] == "Which unlearning rate forgets client 2?"
    assert card["Done"] == "fedquit with 2 rates: 0.0001, 0.001; then 41 rounds of recovery."
    assert card["Verdict"].startswith("Take lr = 0.001: it is the smallest rate that one half calls forgotten")
    gone = "forgotten within the margin"
    assert card["Verdict"].endswith(f"Rate by rate, against the whole hold-out: {gone}: 0.0001, 0.001.")
    assert "method" not in " ".join(card.values())
    assert table(html, "Rates")[1:] == [
        ["Before", gone, "–", "remembered", "0.600 0.550 to 0.650", "40.0", "39.0", "50.0", "9.0"],
        ["0.0001", gone, "–", "remembered", "0.550 0.550 to 0.650", "41.0", "39.0", "50.0", "9.0"],
        ["0.001 chosen", gone, gone, "remembered", "0.500 0.550 to 0.650", "42.0", "39.0", "50.0", "9.0"],
    ]
    assert "Rate 0.001: forget, unlearned 9.0 %, forget 42.0 %" in figures(html)["By unlearning rate"]
    assert ">0.0001</text>" in html, "the rates on the axis are not rounded"
    halves = [{"verdict": "forgotten within the margin", "reason": "AUC 0.5"}]
    halves.append({"verdict": "cannot tell", "reason": "hold-out too small: 30 samples"})
    rates = [rate | {"halves": halves, "reason": "why"} for rate in SWEPT["rates"]]
    asked = swept(tmp_path / "halves", SWEPT | {"rates": rates, "chosen": None, "tried": 1e-4})
    found = table(asked, "Rates")
    assert found[0][:5] == ["Rate", "One half", "Other half", "Whole hold-out", "AUC"]
    assert [line[2] for line in found[1:]] == ["–", "cannot tell: hold-out too small", "–"], (
        "only one rate is confirmed"
    )
    none = swept(tmp_path / "none", SWEPT | {"chosen": None, "reason": "try larger ones"})
    assert entries(none)["Verdict"].startswith("No rate can be named: try larger ones.")


@pytest.mark.usefixtures("undrawn")
def test_a_rate_that_an_earlier_rule_chose_is_not_taken(tmp_path: Path) -> None:
    rates = [{key: rate[key] for key in rate if key not in ("halves", "reason")} for rate in SWEPT["rates"]]
    older = {"schema": 1, "rates": rates, "chosen": 1e-3, "reason": "of the rates that leave no trace it is the best"}
    html = swept(tmp_path / "older", older)
    assert entries(html)["Verdict"].startswith("No rate can be named: not judged: an earlier version made this result")
    assert [line[1] for line in table(html, "Rates")[1:]] == ["not judged"] * 3
    assert "no trace" not in html


OLD_ROW = ("holdout_reason", "tpr_at_0.01_fpr_high", "tpr_at_0.001_fpr_high")  # what rows did not have


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("word", ["no trace", "remembered", "over-unlearned"])
def test_words_and_bounds_of_earlier_versions_are_not_shown(tmp_path: Path, word: str) -> None:
    """The former rule also cleared what Original remembers, and its bounds of the TPR covered in 28 to 75 %."""
    older = full()
    older["rows"] = [{key: row[key] for key in row if key not in OLD_ROW} for row in older["rows"]]
    for row in older["rows"]:
        row["holdout_verdict"] = word
    folder = store(tmp_path / "older", older)
    write_report([folder], tmp_path / "r.html")
    card = entries((tmp_path / "r.html").read_text())
    assert "Its samples: not judged (AUC 0.500, 95 % interval 0.450 to 0.550)." in card["Verdict"].replace(
        "\u00a0", " "
    )
    why = (
        "Whether its samples are remembered: an earlier version made this result, by a rule of unknown error rate; run"
    )
    assert why in card["Cannot be told"]
    views = open_folders([folder])
    for said in (to_csv(views), to_json(views), to_md(views)):
        assert word not in said
    shown = text_of((tmp_path / "r.html").read_text())
    assert word not in shown.replace("samples are remembered", ""), "but for the question"
    assert "not judged" in to_csv(views)
    assert "1.00 to 9.00" not in shown
    stored = json.loads((folder / "results.json").read_text())
    assert stored["rows"][3]["holdout_verdict"] == word, "what lies on disk is left alone"
    assert views.runs[0].to_dict()["rows"] == stored["rows"]
    rows = views.runs[0].judged_rows
    assert len(rows) == len(stored["rows"])
    assert {row["holdout_verdict"] for row in rows} == {"not judged"}
    pytest.importorskip("pandas")
    frame = views.runs[0].to_pandas()
    assert set(frame["holdout_verdict"]) == {"not judged"}
    assert "tpr_at_0.01_high" not in frame


@pytest.mark.usefixtures("undrawn")
def test_a_sweep_without_its_file_still_has_a_page_and_a_damaged_file_is_named(tmp_path: Path) -> None:
    older = swept(tmp_path / "older", None)
    assert [line[0] for line in table(older, "Without Retrain")] == [
        "Method",
        "fedquit, lr=0.0001",
        "fedquit, lr=0.001",
    ]
    with pytest.raises(StoreError, match=r"sweep\.json is damaged \(it has no usable rates\): restore it"):
        swept(tmp_path / "damaged", {"schema": 1})


@pytest.mark.usefixtures("undrawn")
def test_the_floor_of_a_comparison_serves_its_runs(tmp_path: Path) -> None:
    for method in ("fedquit", "pga"):
        store(tmp_path / "cmp/seed-0/client-2" / method, full(method))
    line = {"method": "retrain again", "phase": "floor", "gaps": {"forget_acc": 21.0}}
    (tmp_path / "cmp/comparison.json").write_text(json.dumps({"schema": 1, "table": [line, 3]}))
    write_report([tmp_path / "cmp"], tmp_path / "r.html")
    html = (tmp_path / "r.html").read_text()
    found = table(html, "Gaps to Retrain")
    assert found[3][:3] == ["Retrain again", "–", "21.0"]
    assert [line[2] for line in found[4:]] == ["20.0 45.6"] * 2, "the spread of two Retrains is no verdict"
    assert "seed-0/client-2/pga" in html
    write_report([tmp_path / "cmp/seed-0/client-2/pga"], tmp_path / "r.html")
    alone = table((tmp_path / "r.html").read_text(), "Gaps to Retrain")
    assert alone[3][:3] == ["Retrain again", "–", "21.0"], "a run alone finds the comparison above it"


PAIR = {
    "p": 0.01,
    "mean": 3.0,
    "low": 1.0,
    "high": 5.0,
    "bootstrap_low": 1.2,
    "bootstrap_high": 4.4,
    "units": 3,
    "different": True,
}
MANY = {
    "models": 8.0,
    "klom": 2.5,
    "forgetting_quality": 0.4,
    "ulira_accuracy": 0.75,
    "lira_auc": 0.625,
    "lira_auc_floor": 0.5,
    "rmia_finds": {
        "at_1": {"value": 0.125, "low": 0.1, "high": 0.15, "enough": True},
        "at_tenth": {"value": 0.05, "low": 0.0, "high": 0.2, "enough": False},
    },
    "rmia_finds_floor": {"at_1": {"value": 0.01, "low": 0.0, "high": 0.03, "enough": True}},
    "halves": {"klom": {"method": 4.5, "retrain": 3.25, "farthest": 3.5, "different": True}},
}
TESTED = {
    "ulira": {"value": 0.75, "low": 0.625, "high": 0.875, "models": 4},
    "epsilon_bound": {"value": 0.5, "ceiling": 1.35, "attack": "mean"},
    "exposed": {"samples": 100, "remembered": 3, "over_unlearned": 1},
    "tests": {
        "forget": {"klom": 2.5, "klom_by_chance": 1.25, "klom_p": 0.125, "p_holm": 0.01, "word": "differs"},
        "retain": {"klom": 1.5, "klom_by_chance": 1.25, "klom_p": 0.5, "p_holm": 0.5, "word": "cannot tell"},
    },
}
TOGETHER: dict[str, Any] = {
    "schema": 1,
    "first": "fedquit",
    "table": [
        {"method": "fedquit", "phase": "recovered", "against_first": {}, "references": MANY},
        {
            "method": "pga",
            "phase": "recovered",
            "against_first": {
                "forget_acc": PAIR,
                "avg_gap": PAIR | {"mean": -0.5, "low": -2.0, "high": 1.0, "different": False},
                "retain_acc": PAIR | {"mean": -3.0, "low": -5.0, "high": -1.0},
                "mia_yeom": "?",
            },
        },
        3,
    ],
    "failed": [
        {"method": "fukd", "target": 2, "seed": 0, "why": "it needs <data>"},
        {"method": "fukd", "target": 3, "seed": 0, "why": "it needs <data>"},
        {"method": "fused", "target": 3, "seed": 0, "why": "no"},
        None,
    ],
    "runs": ["seed-0/client-2/fedquit", "seed-0/client-2/pga"],
}


def comparison(folder: Path, found: object, methods: tuple[str, ...] = ("fedquit", "pga", "left_over")) -> str:
    """The page over a comparison; `left_over` is a run of an earlier one in the same folder."""
    for method in methods:
        store(folder / "seed-0/client-2" / method, lean(full(method)))
    (folder / "comparison.json").write_text(json.dumps(found))
    write_report([folder], folder / "r.html")
    return (folder / "r.html").read_text()


@pytest.mark.usefixtures("undrawn")
def test_a_comparison_tells_its_pairs_and_calls_a_difference_one(tmp_path: Path) -> None:
    html = comparison(tmp_path, TOGETHER)
    found = table(html, "Compared pairwise, target by target")
    assert found[0] == ["Method", "Avg. gap", "Retain", "Forget"]
    assert found[1] == [
        "pga",
        "−0.5 −2.0 to +1.0 cannot tell",
        "−3.0 −5.0 to −1.0 nearer",
        "+3.0 +1.0 to +5.0 farther",
    ]
    said = text_of(html).replace("\u00a0", " ")
    assert "The method’s gap to Retrain less that of fedquit, in points, with 95 % intervals" in said
    assert "Two or three targets make wide intervals" in said
    assert "left_over" not in html, "a comparison names its own runs"


@pytest.mark.usefixtures("undrawn")
def test_a_comparison_tells_what_many_models_say_beside_retrain(tmp_path: Path) -> None:
    line = {"method": "fedquit", "phase": "recovered", "references": MANY | TESTED}
    needy = {"models": 4.0, "tests": {"forget": {"word": "cannot tell", "p_holm": 0.06, "models_needed": 5.0}}}
    other = {"method": "pga", "phase": "recovered", "references": needy}
    html = comparison(tmp_path, TOGETHER | {"table": [line, other]})
    found = table(html, "Over many models")
    assert found[0][:5] == ["Method", "Against Retrain", "KLoM, forget", "KLoM, retain", "U\u2011LiRA right (%)"]
    assert found[0][5:] == ["Epsilon at least", "Exposed samples", "Forgetting quality (descriptive)"]
    assert found[1][1:4] == ["differs p 0.010", "2.50 by chance 1.25 p 0.125", "1.50 by chance 1.25 p 0.500"]
    assert found[1][4:6] == ["75.0 62.5 to 87.5", "0.50 at most 1.35 can be shown"]
    assert found[1][6:] == ["3 of 100 over-unlearned 1", "0.40"]
    members = table(html, "Members found over many models")
    assert members[0][1:] == ["LiRA, AUC", "RMIA finds at 1 % (%)", "RMIA finds at 0.1 % (%)"]
    assert members[1][1:3] == ["0.625 Retrain 0.500", "12.5 10.0 to 15.0 Retrain 1.0 (0.0 to 3.0)"]
    assert members[1][3] == "– too few outsiders for 0.1 %"
    assert found[2][1] == "cannot tell p 0.060 take 5 models"


@pytest.mark.usefixtures("undrawn")
def test_of_an_older_comparison_the_verdict_of_halves_is_not_shown(tmp_path: Path) -> None:
    found = table(comparison(tmp_path, TOGETHER), "Over many models")
    assert found[0][1:3] == ["KLoM, forget", "U\u2011LiRA right (%)"]
    assert found[1][1:3] == ["2.50", "75.0"]


@pytest.mark.usefixtures("undrawn")
def test_of_an_older_comparison_the_floor_from_fewer_models_is_not_shown(tmp_path: Path) -> None:
    older = {"models": 8.0, "klom": 2.5, "klom_floor": 1.25, "lira_tpr_at_1": 0.125, "lira_tpr_at_1_floor": 0.02}
    line = {"method": "fedquit", "phase": "recovered", "references": older | {"halves": 3, "rmia_finds": "?"}}
    html = comparison(tmp_path, TOGETHER | {"table": [line]})
    assert table(html, "Over many models") == [["Method", "KLoM, forget"], ["fedquit", "2.50"]]
    found = table(html, "Members found over many models")
    assert found == [["Method", "LiRA finds at 1 % (%)"], ["fedquit", "12.5 Retrain 2.0"]]


@pytest.mark.usefixtures("undrawn")
def test_a_comparison_tells_what_failed_for_whom_and_why(tmp_path: Path) -> None:
    said = text_of(comparison(tmp_path, TOGETHER))
    assert "fukd (client 2, seed 0; client 3, seed 0) : it needs <data> fused (client 3, seed 0) : no" in said
    only = comparison(tmp_path, TOGETHER | {"runs": [], "table": []})
    assert "No run came through" in only
    assert "it needs &lt;data&gt;" in only


@pytest.mark.usefixtures("undrawn")
def test_one_target_is_said_to_be_too_few_to_compare(tmp_path: Path) -> None:
    alone = comparison(tmp_path, {"schema": 1, "first": "fedquit", "table": [], "runs": TOGETHER["runs"]})
    assert "Over one target and one seed, methods cannot be compared pairwise" in alone
    lone = comparison(tmp_path, {"schema": 1, "first": "fedquit", "table": [], "runs": TOGETHER["runs"][:1]})
    assert "cannot be compared" not in lone


@pytest.mark.usefixtures("undrawn")
def test_of_an_older_comparison_that_names_no_runs_all_are_shown(tmp_path: Path) -> None:
    html = comparison(tmp_path, {"schema": 1, "table": [{"against_first": 3}]})
    assert "The comparison" not in html
    assert "left_over" in html


def test_the_other_formats_keep_what_a_comparison_says(tmp_path: Path) -> None:
    comparison(tmp_path, TOGETHER)
    write_report([tmp_path], tmp_path / "r.json", "json")
    (found,) = json.loads((tmp_path / "r.json").read_text())["comparisons"]
    assert found["pairs"]["pga"]["forget_acc"]["low"] == 1.0
    assert found["many"]["fedquit"]["klom"] == 2.5
    assert [f["method"] for f in found["failed"]] == ["fukd", "fukd", "fused"]


@pytest.mark.usefixtures("undrawn")
def test_other_distances_are_told_beside_what_retrain_gets(tmp_path: Path) -> None:
    apart = full()
    apart["rows"][1]["leakage_auc"] = 0.6
    apart["rows"][3] |= {"leakage_auc": 0.75, "forget_js": 0.02, "relearn_ratio": 0.5, "floor": {"forget_js": 0.03}}
    found = table(report(tmp_path, apart), "Other distances to Retrain")
    assert found[0] == [
        "Method",
        "Tug\u2011of\u2011War",
        "Tug\u2011of\u2011War, MIA",
        "JS divergence",
        "Two snapshots, AUC",
        "Relearning, × Retrain",
    ]
    assert found[1][1:] == ["0.512", "0.512", "0.020 spread 0.030", "0.750 Retrain 0.600", "0.500"]
    plain = table(report(tmp_path, with_floor(full())), "Other distances to Retrain")
    assert plain[0] == ["Method", "Tug\u2011of\u2011War", "Tug\u2011of\u2011War, MIA"]
    assert plain[1] == ["fedquit", "0.512", "0.512"], "0.8³; the floor of the test accuracy is not known"
    floor = with_floor(full())
    floor["rows"][3]["floor"] = {"forget_acc": 10.0, "retain_acc": 10.0, "test_acc": 60.0}
    told = table(report(tmp_path, floor), "Other distances to Retrain")[1]
    assert told[1] == "0.512 spread 0.324"


def leaks(share: float, *, enough: bool = True) -> dict[str, Any]:
    """What two snapshots give away: `share` of the forgotten at both rates; `enough` outsiders for the lower one."""
    found: dict[str, Any] = {"leakage_auc": 0.75, "leakage_against": "holdout"}
    for rate, whether in (("0.01", True), ("0.001", enough)):
        key = f"leakage_tpr_at_{rate}"
        found |= {key: share, f"{key}_low": share / 2, f"{key}_high": 2 * share, f"{key}_enough": whether}
        found[f"{key}_fpr_high"] = 0.04
    return found


@pytest.mark.usefixtures("undrawn")
def test_two_snapshots_tell_whom_they_find_and_the_outsiders_by_name(tmp_path: Path) -> None:
    apart = full()
    apart["rows"][1] |= leaks(0.1)
    apart["rows"][3] |= leaks(0.25)
    found = table(report(tmp_path, apart), "Other distances to Retrain")
    rates = [f"Two snapshots, TPR at {fpr} % FPR (%)" for fpr in ("1", "0.1")]
    assert found[0][3:] == ["Two snapshots, AUC", *rates]
    assert found[1][3] == "0.750 Retrain 0.750 against hold-out data"
    assert found[1][4:] == ["25.0 12.5 to 50.0 Retrain 10.0 (5.0 to 20.0)"] * 2
    other = full()
    other["rows"][3] |= leaks(0.5, enough=False) | {"leakage_against": "test"}
    together = table(report(tmp_path, apart, other), "Other distances to Retrain")[1]
    assert together[3] == "0.750 Retrain 0.750 against hold-out data and test data"
    assert together[4].startswith("37.5 18.8 to 75.0"), "the mean of both requests"
    assert together[5] == "– too few outsiders for 0.1 %", "one of them has too few"


@pytest.mark.usefixtures("undrawn")
def test_a_backdoor_is_shown_where_there_is_one(tmp_path: Path) -> None:
    planted = full()
    for row, asr in zip(planted["rows"], (97.5, 3.0, 50.0, 4.0), strict=True):
        row["backdoor_asr"] = asr
    found = table(report(tmp_path, planted), "What an attacker can tell")
    assert found[0][-1] == "Backdoor works"
    assert [line[-1] for line in found[1:]] == ["97.5", "3.0", "50.0", "4.0"]


def test_a_recovery_dearer_than_retrain_is_drawn_on_a_log_axis(tmp_path: Path) -> None:
    dear = full()
    for i, point in enumerate(dear["rows"][3]["curve"]):
        point["bytes"] = i * 3e7
    told = figures(report(tmp_path, dear))["Accuracy against communication"]
    assert "At 564 % of Retrain’s bytes: forget 38.6 %, test 36.4 %." in told
    dear["rows"][2] |= {"down_bytes": 0, "up_bytes": 0}
    assert "At 0.0 % of Retrain’s bytes" in figures(report(tmp_path, dear))["Accuracy against communication"]


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    ("verdict", "words"),
    [
        ("remembered", "Its samples: remembered. They are still told from data of the same clients"),
        ("forgotten within the margin", "Its samples: forgotten within the margin. They are treated like data of the"),
        ("over-unlearned", "Its samples: over-unlearned. They are treated worse than data of the same clients"),
        ("cannot tell", "Whether its samples are remembered: 40 hold-out samples are too few."),
        ("else", "Whether its samples are remembered: none of the clients’ data was held out"),
    ],
)
def test_the_holdout_tells_how_sure(tmp_path: Path, verdict: str, words: str) -> None:
    found = full()
    found["rows"][3] |= {"holdout_verdict": verdict, "holdout_reason": "40 hold-out samples are too few"}
    said = text_of(report(tmp_path, found)).replace("\u00a0", " ")
    assert words in said
    sure = "never trained: 40 hold-out samples are too few; such a verdict errs in at most 5 % of cases."
    assert (sure in said) == (verdict in ("remembered", "forgotten within the margin")), "over-unlearned says more"


@pytest.mark.usefixtures("undrawn")
def test_of_many_methods_the_largest_group_is_counted_and_the_others_are_named(tmp_path: Path) -> None:
    runs = [lean(full(f"method_{i}", client)) for i in range(9) for client in (0, 1)]
    for i, run in enumerate(runs):
        word = "remembered" if i > 3 else ("forgotten within the margin", "cannot tell")[i % 2]
        run["rows"][3] |= {"holdout_verdict": word, "holdout_reason": "hold-out too small: 9 samples"}
    html = report(tmp_path, *runs)
    assert (
        "own hold-out: forgotten within the margin for some requests, cannot tell for the others: method_0 (1 of 2), "
        "method_1 (1 of 2); remembered: the other 7 methods." in entries(html)["Verdict"]
    )
    assert entries(html)["Done"].startswith("9 methods; then 41 rounds of recovery, over 2 requests each")
    own = table(html, "Gaps to Retrain")[0].index("Own hold-out")
    assert table(html, "Gaps to Retrain")[-9][own] == "1 forgotten, 1 cannot tell"
    for run in runs:
        run["rows"][3]["holdout_verdict"] = "remembered"
    assert "own hold-out: remembered: all 9 methods." in entries(report(tmp_path, *runs))["Verdict"]


def test_the_radar_draws_one_polygon_for_each_method(tmp_path: Path) -> None:
    html = report(tmp_path, lean(full()), lean(full("pga", shift=4.0)), lean(full("a_$b$")))
    told = figures(html)["Gaps and costs at a glance"]
    costs = "communication 26.2 %, computation 70.0 %."
    gaps = "forget gap 20.0 points, retain gap 20.0 points, MIA Song gap 2.0 points, MIA Yeom gap 20.0 points"
    assert f"fedquit: {gaps}, {costs}" in told
    assert "pga: forget gap 24.0 points" in told
    assert ">a_$b$</text>" in html
    assert "Gaps and costs at a glance" not in figures(report(tmp_path, lean(full())))


@pytest.mark.usefixtures("undrawn")
def test_runs_of_one_method_that_differ_in_a_setting_are_not_averaged(tmp_path: Path) -> None:
    html = report(tmp_path, full(lr=0.1), full(lr=0.2), full("pga"))
    assert [line[0] for line in table(html, "Gaps to Retrain")[3:]] == ["fedquit, lr=0.1", "fedquit, lr=0.2", "pga"]


@pytest.mark.usefixtures("undrawn")
def test_each_group_has_its_line_however_large_it_is(tmp_path: Path) -> None:
    found = [full(), full(shift=-25.0)]
    for one, first in zip(found, (0, 6), strict=True):
        for row in one["rows"]:
            row["clients"] = list(range(first, first + 6))
    html = report(tmp_path, *found)
    lines = [line[0] for line in table(html, "Client by client")[1:]]
    assert lines == ["Clients 0, 1, 2, 3, 4 and 5", "Clients 6, 7, 8, 9, 10 and 11"]
    assert entries(html)["Asked"] == "Forget 12 clients, in groups."


@pytest.mark.usefixtures("undrawn")
def test_each_client_has_its_line_where_a_method_served_several(tmp_path: Path) -> None:
    html = report(tmp_path, full(), full(client=3, shift=-25.0), full("pga"))
    assert table(html, "Client by client") == [
        ["Forgotten", "Retrain (%)", "fedquit", "pga"],
        ["Client 2", "25.6", "+20.0", "+20.0"],
        ["Client 3", "25.6", "−5.0", "–"],
    ]


def test_the_gap_is_drawn_against_v(tmp_path: Path) -> None:
    runs = [lean(full(teacher="fixed", v=v, shift=-v)) for v in (-1.0, 0.0)]
    html = report(tmp_path, *runs)
    assert "v -1: +21.0 points after 41 rounds. v 0: +20.0 points" in figures(html)["Gap in forget accuracy by v"]
    assert "The density of Original’s true-class logits is not in these results." in html
    runs[0]["rows"][0]["true_logits"] = {"edges": [-2.0, 0.0, 2.0], "density": [0.1, 0.4]}
    assert "The grey area is the density of Original’s true-class logits." in report(tmp_path, *runs)
    assert "Gap in forget accuracy by v" not in figures(report(tmp_path, lean(full(teacher="fixed", v=1.0))))


def test_an_extreme_v_stands_at_the_edge_and_other_teachers_are_levels(tmp_path: Path) -> None:
    runs = [lean(full(teacher="fixed", v=v)) for v in (-100.0, -5.0, 0.0, 5.0)]
    runs[1]["rows"][0]["true_logits"] = {"edges": [-8.0, 0.0, 8.0], "density": [0.1, 0.4]}
    runs += [lean(full(teacher="min", shift=3.0)), lean(full(teacher="entropy", shift=-2.0))]
    html = report(tmp_path, *runs)
    told = figures(html)["Gap in forget accuracy by v"]
    assert "v -100: +20.0 points" in told
    assert "Teacher with the least logit: +23.0 points. Teacher with v*: +18.0 points." in told
    assert "Triangles at the edge: v -100, far outside." in html
    near = [_AtV(v, 0.0, 1.0, "") for v in (-100.0, -5.0, 5.0)]
    assert _around(near, [-8.0, 0.0, 8.0]) == (-8.0, 8.0), "the logits keep their width"
    assert _around(near, []) == (-100.0, 5.0)
    assert _around(near[:1], [-8.0, 0.0, 8.0]) == (-8.0, 8.0), "none of them is near"


@pytest.mark.usefixtures("undrawn")
def test_single_clients_are_not_judged_and_older_comparisons_keep_their_spreads(tmp_path: Path) -> None:
    for client in (2, 3):
        store(tmp_path / f"cmp/seed-0/client-{client}/fedquit", lean(full(client=client)))
    line = {"method": "retrain again", "phase": "floor", "gaps": {"forget_acc": 15.0}}
    floors = {"seed-0/client-2": {"forget_acc": 29.0}, "seed-0/client-3": {"forget_acc": 1.0}}
    (tmp_path / "cmp/comparison.json").write_text(json.dumps({"schema": 1, "table": [line], "floors": floors}))
    write_report([tmp_path / "cmp"], tmp_path / "r.html")
    html = (tmp_path / "r.html").read_text()
    assert table(html, "Client by client")[1:] == [
        ["Client 2", "25.6", "+20.0"],
        ["Client 3", "25.6", "+20.0"],
    ]
    found = table(html, "Gaps to Retrain")
    assert found[3][:3] == ["Retrain again", "–", "15.0"]
    assert found[4][2] == "20.0 ± 0.0 45.6"


@pytest.mark.usefixtures("undrawn")
def test_seeds_on_either_side_of_retrain_do_not_make_up_for_each_other(tmp_path: Path) -> None:
    runs = [lean(full(shift=shift)) for shift in (-5.0, -35.0)] + [lean(full(client=3))]  # +15 and -15 points
    for run in runs:
        run["rows"][3]["floor"] = {"forget_acc": 2.0}
    assert table(report(tmp_path, *runs), "Client by client")[1] == ["Client 2", "25.6", "0.0"]


@pytest.mark.usefixtures("undrawn")
def test_song_s_thresholds_have_gaps_and_floors_and_a_bound_is_called_one(tmp_path: Path) -> None:
    found = full()
    for i, row in enumerate(found["rows"]):
        row["mia_song_entropy"] = 50.0 + i
    found["rows"][3] |= {"floor": {"mia_song_entropy": 4.0}, "relearn_ratio": 3.0, "relearn_bound": "at least"}
    html = report(tmp_path, found)
    rows = table(html, "Attacks with a threshold for each class")
    assert rows[0] == ["Method", "Entropy"]
    assert rows[1:] == [
        ["Retrain", "– 51.0"],
        ["Original", "1.0 50.0"],
        ["fedquit", "2.0 53.0"],
    ]
    assert table(html, "Other distances to Retrain")[1][-1] == "≥ 3.000 a bound"


@pytest.mark.parametrize(
    "clients",
    [
        {"2": [5, 0, 7], "3": {"0": 4}},
        [{"client": 2, "labels": {"0": 5, "2": 7}}, {"client": 3, "labels": [4]}],
    ],
)
def test_label_histograms_are_drawn_where_they_are(tmp_path: Path, clients: object) -> None:
    told = figures(report(tmp_path, full() | {"clients": clients}))["Labels by client"]
    assert "Client 2 (leaving): 12 samples, 7 of label 2, 5 of label 0." in told
    assert "Client 3: 4 samples, 4 of label 0." in told


def test_many_runs_are_shown_as_means_and_folded_away(tmp_path: Path) -> None:
    runs = [full(method, client, shift=client) for method in ("fedquit", "pga") for client in range(4)]
    runs[0]["rows"][3]["curve"] = runs[0]["rows"][3]["curve"][:2]
    runs[0]["rows"][3]["entropy"]["edges"] = [0.0, 1.0, 2.0, 4.0]
    html = report(tmp_path, *runs)
    assert html.count("<figure ") == 4 + 2 * 5
    assert "Mean over 4 requests" in html
    told = figures(html)
    assert "Recovered: forget 47.1 %, test 43.4 %." in told["Accuracy by phase"]
    assert html.count("<summary id=") == 8 + 1
    card = entries(html)
    assert card["Asked"] == "Forget clients 0, 1, 2 and 3, one by one."
    assert (
        "The samples, against the clients’ own hold-out: forgotten within the margin: fedquit, pga." in card["Verdict"]
    )
    outline = Outline()
    outline.feed(html)
    assert len(outline.ids) == len(set(outline.ids))
    assert set(outline.targets) <= set(outline.ids)
    assert all(b - a <= 1 for a, b in zip([0, *outline.headings], outline.headings, strict=False))


@pytest.mark.parametrize(
    "damage",
    [
        {"roc": {"fpr": [0.1], "tpr": []}, "entropy": {"edges": [0.0]}, "curve": [3, {"round": None}]},
        {"roc": {"fpr": 3, "tpr": ["x"]}, "entropy": {"edges": [1.0, 1.0], "forget": [1.0]}, "curve": None},
        {"roc": None, "entropy": [], "curve": {}, "floor": [1], "auc": "x", "down_bytes": None, "up_bytes": True},
        {"entropy": {"edges": [0.0, 1.0], "forget": [float("nan")]}, "floor": {"forget_acc": "?"}},
    ],
)
@pytest.mark.parametrize("times", [1, 7])
def test_what_is_missing_or_damaged_is_left_out(tmp_path: Path, damage: dict[str, Any], times: int) -> None:
    found = full() | {"clients": [7, {"labels": "x"}]}
    found["rows"] = [row | damage for row in found["rows"]]
    html = report(tmp_path, *[found] * times)
    assert "How uncertain the model is" not in html
    assert "nan" not in text_of(html.partition("</style>")[2])


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("clients", [[4], {"4": "x"}, 3, {"4": {"labels": None}}])
def test_odd_label_histograms_are_left_out(tmp_path: Path, clients: object) -> None:
    assert "Labels by client" not in report(tmp_path, full() | {"clients": clients})


def written(tmp_path: Path, format: str, *contents: object) -> str:
    folders = [store(tmp_path / f"run-{i}", content) for i, content in enumerate(contents)]
    write_report(folders, tmp_path / "table", format)
    return (tmp_path / "table").read_text()


def test_csv_holds_every_row(tmp_path: Path) -> None:
    odd = full('a,"b"\nc')
    odd["rows"][0]["extra"] = 7
    found = list(csv.DictReader(io.StringIO(written(tmp_path, "csv", full(), odd), newline="")))
    assert len(found) == 8
    assert found[3]["forget_acc"] == "45.6"
    assert found[3]["run"] == "run-0"
    assert found[7]["method"] == 'a,"b"\nc'
    assert [row["extra"] for row in found] == ["", "", "", "", "7", "", "", ""]
    assert not {"roc", "entropy", "curve"} & set(found[0])


def test_json_holds_both_tables(tmp_path: Path) -> None:
    found = json.loads(written(tmp_path, "json", with_floor(full()), full("pga")))
    assert [line["method"] for line in found["summary"]] == ["fedquit", "pga"]
    assert found["summary"][0]["avg_gap"] == pytest.approx((20 + 20 + 2 + 20) / 4)
    assert found["summary"][0]["forget_acc_floor"] == 1.0
    assert found["summary"][1]["forget_acc_floor"] is None
    assert len(found["rows"]) == 8


def test_markdown_and_latex_hold_the_summary(tmp_path: Path) -> None:
    md = written(tmp_path, "md", with_floor(full()), full("p|g_a", client=1), full("p|g_a", shift=2.0)).splitlines()
    assert md[2].startswith("| Original | 2 | 13.4 (10.0) | 14.5 (10.0) | 15.6 (10.0) |")
    assert md[3].startswith("| Retrain | 2 | 23.4 | 24.5 | 25.6 |")
    assert md[4] == "| Retrain again | 2 | – | (25.0) | (1.0) | (0.5) | (30.0) | 14.1 | – | – | – |"
    gaps = "43.4 (20.0) | 44.5 (20.0) | 45.6 (20.0) | 63.0 (2.0) | 20.0 (20.0) | 15.5"
    assert md[5] == f"| fedquit | 1 | {gaps} | 41.0 | 26.2 | 70.0 |"
    assert md[6].startswith(r"| p\|g_a | 2 | 43.4 (20.0 ± 0.0) | 44.5 (20.0 ± 0.0) | 46.6 (21.0 ± 1.4) |")
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in md[:7]} == {12}
    tex = written(tmp_path, "latex", with_floor(full()), full("p_g&a"), full("p_g&a"))
    assert r"  p\_g\&a & 2 & 43.4 (20.0 $\pm$ 0.0) & 44.5 (20.0 $\pm$ 0.0) &" in tex
    assert tex.endswith("\\bottomrule\n\\end{tabular}\n")


@pytest.mark.parametrize("format", sorted(FORMATS))
def test_results_without_rows_or_retrain_do_in_every_format(tmp_path: Path, format: str) -> None:
    lone = full()
    lone["rows"] = [row for row in lone["rows"] if row["phase"] != "retrained"]
    assert written(tmp_path, format, results([]), lone)


@pytest.mark.parametrize("format", sorted(FORMATS))
def test_the_ending_of_the_file_tells_the_format(tmp_path: Path, format: str) -> None:
    asked = written(tmp_path, format, lean(full()))
    out = tmp_path / f"table{ENDINGS[format].upper()}"
    write_report([tmp_path / "run-0"], out)
    assert out.read_text() == asked


def test_a_file_that_promises_another_format_is_refused(tmp_path: Path) -> None:
    folder = store(tmp_path / "run", lean(full()))
    with pytest.raises(InputError, match=r"ends in \.md, and the format asked for is latex: let it end in \.tex"):
        write_report([folder], tmp_path / "x.md", "latex")
    with pytest.raises(InputError, match=r"ends in none of \.html, \.csv, .*: rename it, or give the format"):
        write_report([folder], tmp_path / "x.pdf")
    write_report([folder], tmp_path / "x.txt", "md")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("x")] == ["x.txt"]


def test_an_unknown_format_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="unknown format 'markdown': choose one of csv, html"):
        write_report([tmp_path], tmp_path / "x", "markdown")
    with pytest.raises(UnknownNameError, match="unknown format 'latx': did you mean 'latex'"):
        write_report([tmp_path], tmp_path / "x", "latx")
    with pytest.raises(StoreError, match=r"no results\.json"):
        write_report([tmp_path], tmp_path / "x", "csv")
    assert not (tmp_path / "x").exists()
