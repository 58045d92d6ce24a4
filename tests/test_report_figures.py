# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import csv
import io
import json
import re
import shutil
import subprocess
from html import escape, unescape
from pathlib import Path
from typing import Any

import pytest
from markupsafe import Markup

from fedquit.errors import InputError, StoreError, UnknownNameError
from fedquit.report import ENDINGS, FORMATS, write_report
from fedquit.report.figures import _around, _AtV
from test_report import Outline, cells, forget, report, results, store, text_of

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
            "tpr_at_0.001": 0.002,
            "tpr_at_0.001_low": 0.0,
            "tpr_at_0.001_high": 0.01,
            "tpr_at_0.001_enough": False,
            "roc": {"fpr": FPR, "tpr": [f**0.8 if f > 1e-3 else 0.0 for f in FPR]},
            "entropy": {"edges": [0.0, 0.5, 1.0, 2.0], "forget": [1.0, 0.6, 0.2], "test": [0.4, 0.8, 0.4]},
            "auc": 0.5 + shift / 100,
            "auc_low": 0.45,
            "auc_high": 0.55,
            "holdout_verdict": "no trace",
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
    found = re.findall(r'<h4>([^<]*)</h4>\s*<figure role="img" aria-label="([^"]*)"', html)
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
    assert found[0] == ["Method", "Spent", "Test", "Retain", "Forget", "MIA Song", "MIA Yeom", "Avg. gap"]
    assert found[1] == ["fedquit"]
    assert [line[:2] for line in found[2:]] == [["5 %", "4.0 % 3 rounds"], ["50 %", "49.0 % 60 rounds"]]
    assert found[3][3] == "20.0 44.5"
    assert found[3][4] == "54.4 80.0", "the recovery goes on past Retrain's accuracy, and so does the gap"
    said = text_of(html).replace("\u00a0", " ")
    assert "within budgets of 5 %: 23.0/43.4, 10 %: 35.6/33.4" in said, "what was measured goes before the curve"
    assert "50 %: 80.0/43.4." in said
    assert [line[0] for line in cells(html) if line and line[0].startswith("Budget")] == [
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
        "5.00 1.00 to 9.00",
        "0.20 0.00 to 1.00 few",
        "0.500 0.450 to 0.550 no trace",
        "63.0",
        "20.0",
    ]


@pytest.mark.usefixtures("undrawn")
def test_the_bound_of_the_false_positive_rate_is_printed_beside_the_true_one(tmp_path: Path) -> None:
    found = full()
    found["rows"][3]["tpr_at_0.01_fpr_high"] = 0.036
    assert table(report(tmp_path, found), "What an attacker can tell")[-1][1] == "5.00 1.00 to 9.00 FPR up to 3.6 %"


@pytest.mark.usefixtures("undrawn")
def test_a_gap_without_a_verdict_stands_beside_the_spread_and_is_not_judged(tmp_path: Path) -> None:
    html = report(tmp_path, with_floor(full()))
    assert table(html, "Gaps to Retrain")[-1] == [
        "fedquit",
        "1",
        "20.0 43.4",
        "20.0 44.5 spread 25.0",
        "20.0 45.6 spread 1.0",
        "2.0 63.0 spread 0.5",
        "20.0 20.0 spread 30.0",
        "15.5 spread 14.1",
    ]
    assert "two Retrains differ by 1.0 points, and one request cannot tell a gap from chance" in text_of(html)
    assert "Whether a gap is more than chance was not tested." in text_of(html)


@pytest.mark.usefixtures("undrawn")
def test_the_floor_of_a_comparison_serves_its_runs(tmp_path: Path) -> None:
    for method in ("fedquit", "pga"):
        store(tmp_path / "cmp/seed-0/client-2" / method, full(method))
    line = {"method": "retrain again", "phase": "floor", "gaps": {"forget_acc": 21.0}}
    (tmp_path / "cmp/comparison.json").write_text(json.dumps({"schema": 1, "table": [line, 3]}))
    write_report([tmp_path / "cmp"], tmp_path / "r.html")
    html = (tmp_path / "r.html").read_text()
    assert [line[4] for line in table(html, "Gaps to Retrain")[3:]] == ["20.0 45.6 spread 21.0"] * 2
    assert "seed-0/client-2/pga" in html
    write_report([tmp_path / "cmp/seed-0/client-2/pga"], tmp_path / "r.html")
    assert "spread 21.0" in (tmp_path / "r.html").read_text(), "a run alone finds the comparison above it"


PAIR = {
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
        "−0.5 −2.0 to +1.0 no difference",
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
    found = table(comparison(tmp_path, TOGETHER | {"table": [line, other]}), "Over many models")
    assert found[0][:5] == ["Method", "Against Retrain", "KLoM, forget", "KLoM, retain", "U\u2011LiRA right (%)"]
    assert found[0][5:8] == ["Epsilon at least", "Exposed samples", "Forgetting quality (descriptive)"]
    assert found[0][8:] == ["LiRA, AUC", "RMIA finds at 1 % (%)", "RMIA finds at 0.1 % (%)"]
    assert found[1][1:4] == ["differs p 0.010", "2.50 by chance 1.25 p 0.125", "1.50 by chance 1.25 p 0.500"]
    assert found[1][4:6] == ["75.0 62.5 to 87.5", "0.50 at most 1.35 can be shown"]
    assert found[1][6:9] == ["3 of 100 over-unlearned 1", "0.40", "0.625 Retrain 0.500"]
    assert found[1][9:] == ["12.5 10.0 to 15.0 Retrain 1.0 (0.0 to 3.0)", "– too few outsiders for 0.1 %"]
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
    found = table(comparison(tmp_path, TOGETHER | {"table": [line]}), "Over many models")
    assert found == [["Method", "KLoM, forget", "LiRA finds at 1 % (%)"], ["fedquit", "2.50", "12.5 Retrain 2.0"]]


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
        ("no trace", "no trace of it shows against data of the same clients that never trained (AUC 0.500"),
        ("remembered", "it is still told from data of the same clients"),
        ("over-unlearned", "it is treated worse than data of the same clients"),
        ("forgotten within the margin", "its samples are told from data of the same clients that never trained by no"),
        ("cannot tell", "never trained cannot be said (AUC 0.500"),
        ("else", "whether that is chance was not measured"),
    ],
)
def test_the_holdout_tells_how_sure(tmp_path: Path, verdict: str, words: str) -> None:
    found = full()
    found["rows"][3]["holdout_verdict"] = verdict
    if verdict == "cannot tell":
        found["rows"][3]["holdout_reason"] = "blind: why"
        html = report(tmp_path, found)
        assert table(html, "What an attacker can tell")[-1][3].endswith("cannot tell: blind")
        assert "0.550): blind: why." in text_of(html)
    assert words in text_of(report(tmp_path, found))


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
    assert "Asked to forget 6 clients" in text_of(html)


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
    assert table(html, "Gaps to Retrain")[-1][4] == "20.0 ± 0.0 45.6 spread 15.0"


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
        ["fedquit", "2.0 53.0 spread 4.0"],
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
    assert html.count("<figure ") == 1 + 2 * 5
    assert "Mean over 4 requests" in html
    told = figures(html)
    assert "Recovered: forget 47.1 %, test 43.4 %." in told["Accuracy by phase"]
    assert html.count("<summary id=") == 8 + 1
    said = text_of(html).replace("\u00a0", " ")
    assert (
        "Asked to forget clients 0, 1, 2 and 3 (one by one, on average over 4 requests), of 2 methods “fedquit” came"
        in said
    )
    assert "the verdicts against data of the same clients that never trained are 4 × no trace" in said
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


CHROMIUM = next((p for n in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(n))), None)
QUIET = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --virtual-time-budget=2000 "
    "--enable-logging=stderr"
)
MEASURE = """
document.body.dataset.found = JSON.stringify([...document.querySelectorAll("iframe")].map(frame => {
  const page = frame.contentDocument, wide = page.documentElement.scrollWidth;
  const least = Math.min(...[...page.querySelectorAll("figure text")].map(t => t.getBoundingClientRect().height));
  const inside = [...page.querySelectorAll(".scroll")].filter(s => s.scrollWidth > s.clientWidth).length;
  const all = [...page.querySelectorAll("figure")];
  const seen = all.filter(f => f.querySelector("svg").getBoundingClientRect().height > 150).length;
  const out = all.filter(f => {
    const card = f.parentElement.getBoundingClientRect();
    return [...f.querySelectorAll("text")].some(t => {
      const at = t.getBoundingClientRect();
      return at.left < card.left || at.right > card.right || at.top < card.top || at.bottom > card.bottom;
    });
  }).map(f => f.getAttribute("aria-label").slice(0, 40));
  const ink = new Set([...page.querySelectorAll("figure path")].map(p => getComputedStyle(p).fill)).size;
  const dark = frame.contentWindow.matchMedia("(prefers-color-scheme: dark)").matches;
  return {wide, least, inside, seen, out, ink, dark};
}));
"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Few runs with everything, and many runs of two methods."""
    tmp_path = tmp_path_factory.mktemp("pages")
    long = results(forget(clients=list(range(40))), title="<b> & " + "unbreakable" * 20)
    few = [full(teacher="fixed", v=1.0), full(teacher="fixed", v=2.0), full("a_rather_long_name_of_a_method" * 2), long]
    few = [one | {"clients": {str(c): [c, 3, 9 - c] for c in range(10)}} for one in few]
    few[0]["rows"][0]["true_logits"] = {"edges": [-2.0, 0.0, 2.0], "density": [0.1, 0.4]}
    many = [with_floor(full(f"method_{i % 2}", i % 3, float(i))) for i in range(7)]
    return [report(tmp_path / "few", *few), report(tmp_path / "many", *many), comparison(tmp_path / "all", TOGETHER)]


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium to render with")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_shows_every_figure_without_errors_or_overflow(tmp_path: Path, scheme: str, pages: list[str]) -> None:
    assert CHROMIUM
    frames = "".join(
        f'<iframe style="width:{wide}px;height:800px;border:0" '
        f'srcdoc="{escape(html.replace("<details>", "<details open>"))}"></iframe>'
        for html in pages
        for wide in (390, 1280)
    )
    (tmp_path / "frame.html").write_text(
        f"<!doctype html><meta charset=utf-8><body>{frames}"
        f"<script>addEventListener('load', () => {{{MEASURE}}})</script>"
    )
    colours = ["--blink-settings=preferredColorScheme=0"] if scheme == "dark" else []
    where = [f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", (tmp_path / "frame.html").as_uri()]
    done = subprocess.run(
        [CHROMIUM, *QUIET.split(), *colours, *where], check=True, capture_output=True, text=True, timeout=60
    )
    assert not re.findall(r".*CONSOLE.*", done.stderr)
    found = re.search(r'data-found="([^"]*)"', done.stdout)
    assert found, done.stdout[:2000]
    measured = json.loads(unescape(found[1]))
    assert {at["dark"] for at in measured} == {scheme == "dark"}
    for at, wide, html in zip(measured, (390, 1280) * 3, [page for page in pages for _ in range(2)], strict=True):
        assert at["wide"] <= wide
        assert at["least"] >= 10  # pixels: the figures' words can still be read
        assert at["seen"] == html.count("<figure ")
        assert at["out"] == []
        assert at["ink"] >= 3  # the page's colours are known to the figures
    assert measured[0]["inside"] >= 6  # the tables scroll by themselves
