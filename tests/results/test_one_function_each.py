# SPDX-License-Identifier: Apache-2.0
"""Each derived quantity and each rule stands in one function: change that function, and every view changes."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from markupsafe import Markup
from rich.console import Console

from fedquit.cli import runs as command
from fedquit.inference.gaps import GapVerdict
from fedquit.report import write_report
from fedquit.results import averages, gaps, quantities, references, summary, tug_of_war, verdicts, words
from fedquit.results.gaps import Gap, Paired
from fedquit.results.intervals import Interval
from fedquit.results.quantities import PairedDifference
from fedquit.results.requests import RequestRows
from results.random_results import Study, fill, write_study

VIEWS = {"html": "r.html", "csv": "r.csv", "md": "r.md", "latex": "r.tex", "json": "r.json"}
ALL = frozenset({"terminal", "comparison.json", *VIEWS})
TABLES = ALL - {"csv"}  # CSV has rows, not lines of methods


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedquit.report.figures.draw", lambda *_, **__: Markup("<svg></svg>"))
    monkeypatch.setattr(gaps, "RESAMPLES", 99)


@pytest.fixture
def study() -> Study:
    """Two methods, three targets, two seeds, budgets, and Retrain with another seed."""
    study = Study(
        methods=("fedquit", "fukd"),
        targets=(0, 1, 7),
        seeds=2,
        failed=frozenset(),
        absent=frozenset(),
        unmeasured=frozenset(),
        budgets=(0.25, 0.5),
        again=True,
        numbers=5,
    )
    fill(study)
    return study


def views(study: Study, out: Path) -> dict[str, str]:
    """What each view prints over the same study."""
    comparison = write_study(study, out)
    printed = {"comparison.json": (out / "comparison.json").read_text()}
    for name, file in VIEWS.items():
        write_report([out], out / file)
        printed[name] = (out / file).read_text()
    with pytest.MonkeyPatch.context() as patch:
        screen = Console(width=300, file=io.StringIO())
        patch.setattr(command, "screen", screen)
        command._print_comparison(type("Recipe", (), {"title": "t"})(), comparison.table, Path("out"))
        assert isinstance(screen.file, io.StringIO)
        printed["terminal"] = screen.file.getvalue()
    return printed


def plus(number: float | None, more: float = 1.0) -> float | None:
    return None if number is None else number + more


QUANTITIES: dict[str, tuple[Any, str, Callable[[Any], Any], frozenset[str]]] = {
    "gap to Retrain": (gaps, "signed_gap", lambda gap: plus(gap, 3.0), ALL),
    "mean absolute gap": (quantities, "absolute_gap", lambda gap: gap and Gap(gap.per_target + 3.0), TABLES),
    "average gap": (quantities, "average_gap", lambda size: plus(size, 3.0), ALL),
    "Retrain-vs-Retrain spread": (quantities, "spread", lambda size: plus(size, 500.0), TABLES - {"terminal"}),
    "memory of the samples": (
        quantities,
        "sample_memory",
        lambda points: plus(points, 3.0),
        frozenset({"terminal", "comparison.json", "csv", "json"}),
    ),
    "knowledge of the distribution": (
        quantities,
        "distribution_knowledge",
        lambda points: plus(points, 3.0),
        frozenset({"terminal", "comparison.json", "csv", "json"}),
    ),
    "cost, clients and server": (quantities, "cost", lambda amount: amount and 7 * amount + 10**6, ALL),
    "cost of a request": (quantities, "total_cost", lambda amount: amount and 3 * amount, TABLES),
    "share of Retrain's cost": (quantities, "cost_share", lambda share: plus(share, 50.0), TABLES),
    "how many times cheaper": (
        quantities,
        "times_cheaper",
        lambda ratio: plus(ratio, 50.0),
        frozenset({"terminal", "comparison.json"}),
    ),
    "computing": (
        quantities,
        "computing_share",
        lambda share: plus(share, 50.0),
        frozenset({"comparison.json", "html", "md", "latex", "json"}),
    ),
    "what a budget spent": (
        quantities,
        "budget_spent",
        lambda share: plus(share, 0.5),
        frozenset({"comparison.json", "html", "json"}),
    ),
    "Tug-of-War": (tug_of_war, "tug_of_war", lambda value: value / 2, frozenset({"comparison.json", "html", "json"})),
    "mean over requests": (summary, "mean", lambda value: plus(value, 1.0), TABLES),
    "difference of two methods": (
        quantities,
        "paired_difference",
        lambda pair: pair and replace(pair, mean=pair.mean + 9.0, different=not pair.different),
        frozenset({"terminal", "comparison.json", "html", "json"}),
    ),
    "line of a method": (
        summary,
        "summarise",
        lambda line: replace(line, avg_gap=plus(line.avg_gap, 5.0)),
        TABLES - {"comparison.json", "terminal"},
    ),
}
RULES: dict[str, tuple[Any, str, Callable[[Any], Any], frozenset[str]]] = {
    "whether a gap differs from Retrain": (
        verdicts,
        "judge",
        lambda all_: {key: replace(verdict, word="differs", p=0.01) for key, verdict in all_.items()},
        ALL,
    ),
    "a budget must pay for the unlearning": (
        quantities,
        "affordable",
        lambda rule: not rule,
        frozenset({"terminal", "comparison.json", "html", "json"}),
    ),
}


def test_a_difference_over_many_models_has_one_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    test = {"p": 0.03, "models": 8, "runs": 1, "permutations": 2000}
    evidence = [{"tests": dict.fromkeys(references.SETS, test)}]
    assert references.judged_together(evidence)[0]["tests"]["forget"]["word"] == "differs"
    monkeypatch.setattr(references, "verdict", lambda _: "cannot tell")
    assert references.judged_together(evidence)[0]["tests"]["forget"]["word"] == "cannot tell"


@pytest.mark.parametrize("name", [*QUANTITIES, *RULES])
def test_changing_the_one_function_changes_every_view(
    name: str, study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, function, change, seen_in = (QUANTITIES | RULES)[name]
    before = views(study, tmp_path / "before" / "study")
    real = getattr(module, function)
    monkeypatch.setattr(module, function, lambda *given, **named: change(real(*given, **named)))
    after = views(study, tmp_path / "after" / "study")
    assert {view for view in before if before[view] != after[view]} >= seen_in


def test_the_verdict_marks_every_table(study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def judged(samples: Any, margin: Any) -> Any:
        return {key: GapVerdict("equivalent", "equivalent: why", margin=2.0) for key in samples}

    before = views(study, tmp_path / "before" / "study")
    monkeypatch.setattr(verdicts, "judge", judged)
    after = views(study, tmp_path / "after" / "study")
    stored = json.loads(after["comparison.json"])["table"][-1]["verdicts"]
    assert stored["avg_gap"]["word"] == stored["forget_acc"]["word"] == "equivalent"
    for view in ("terminal", "md", "latex", "html"):
        assert "(=" not in before[view]
        assert "(=" in after[view] or ">=" in after[view]
        assert "equivalent within ±2 points" in after[view]
    assert {view for view in before if before[view] != after[view]} == ALL


def test_every_quantity_of_the_page_is_named_here() -> None:
    """The table at the top of `quantities` and this file name the same functions."""
    documented = {word for line in (quantities.__doc__ or "").splitlines() for word in line.split("`")[1::2]}
    named = {function for module, function, *_ in (QUANTITIES | RULES).values() if module is quantities}
    assert named <= documented | {"paired_difference"}
    assert documented - named == {"request_gap", "tug_of_war", "spread_tug_of_war", "natural_distance"}
    for function in documented:
        assert callable(getattr(quantities, function))


def test_paired_differences_have_one_rule() -> None:
    inside, outside = Interval(1.0, -1.0, 3.0), Interval(1.0, 0.5, 3.0)
    assert Paired(outside, outside, p=0.01).different
    assert not Paired(outside, outside, p=0.06).different
    assert not Paired(outside, inside, p=0.01).different
    assert not Paired(inside, outside, p=0.01).different
    stored = {"mean": 1.0, "low": 0.5, "high": 3.0, "units": 4, "different": True, "p": 0.01}
    assert PairedDifference.read(stored) == PairedDifference(1.0, 0.5, 3.0, None, None, 4, different=True, p=0.01)
    older = {key: value for key, value in stored.items() if key != "p"}
    assert PairedDifference.read(older) == PairedDifference(1.0, 0.5, 3.0, None, None, 4, different=False)
    assert PairedDifference.read({**stored, "low": None}) is None
    assert PairedDifference.read("?") is None


def test_the_mean_is_over_what_was_measured() -> None:
    assert averages.mean([1.0, None, 3.0]) == 2.0
    assert averages.mean([None]) is None


def of_phases(**accuracies: tuple[float, float | None]) -> RequestRows:
    """A request with the forget and the hold-out accuracy of each phase."""
    rows = []
    for phase, (forget, holdout) in accuracies.items():
        row = {"phase": phase, "method": "m", "clients": [0], "request": 0, "forget_acc": forget}
        rows.append({**row, "holdout_acc": holdout})
    return RequestRows(0, rows)


def test_the_gap_in_forget_accuracy_is_memory_of_samples_and_knowledge_of_the_distribution() -> None:
    request = of_phases(original=(90.0, 80.0), retrained=(58.0, 60.0), recovered=(64.0, 63.0))
    assert quantities.sample_memory(request, "original") == 12.0
    assert quantities.distribution_knowledge(request, "original") == 20.0
    assert quantities.request_gap(request, "original") == 32.0
    assert quantities.sample_memory(request, "recovered") == 3.0
    assert quantities.distribution_knowledge(request, "recovered") == 3.0
    assert quantities.sample_memory(request, "retrained") is None, "it is the reference"
    assert quantities.distribution_knowledge(request, "retrained") is None
    alone = of_phases(recovered=(64.0, 63.0))
    assert quantities.sample_memory(alone, "recovered") == 1.0, "without a Retrain, forget less hold-out accuracy"
    assert quantities.distribution_knowledge(alone, "recovered") is None
    bare = of_phases(retrained=(58.0, None), recovered=(64.0, None))
    assert quantities.sample_memory(bare, "recovered") is None
    assert quantities.distribution_knowledge(bare, "recovered") is None


def test_a_verdict_is_printed_as_it_is_stored() -> None:
    row = {"holdout_verdict": "cannot tell", "holdout_reason": "blind: the same test does not catch Original"}
    assert words.holdout_verdict(row) == "cannot tell: blind"
    assert words.holdout_verdict(row, in_full=True) == "cannot tell: blind: the same test does not catch Original"
    forgotten = {"holdout_verdict": "forgotten within the margin", "holdout_reason": "AUC 0.5; tail untested: few"}
    assert words.holdout_verdict(forgotten) == "forgotten within the margin"
    older = {"holdout_verdict": "no trace"}
    assert words.holdout_verdict(older) == "not judged"
    assert words.holdout_verdict(older, in_full=True) == f"not judged: {words.JUDGE_ANEW}"
    assert words.holdout_verdict({}) == ""


def test_the_verdicts_of_a_method_are_counted_in_every_view(study: Study, tmp_path: Path) -> None:
    printed = views(study, tmp_path / "study")
    counts = json.loads(printed["comparison.json"])["table"][-1]["holdout_verdicts"]
    assert sum(counts.values()) == 6
    said = ", ".join(f"{number:g} × {verdict}" for verdict, number in counts.items())
    assert said in printed["terminal"]
    assert json.loads(printed["json"])["summary"][-1]["holdout_verdicts"] == counts
    assert "hold-out too small" in printed["csv"]


def test_a_run_prints_what_is_left_of_its_clients(tmp_path: Path) -> None:
    request = of_phases(original=(90.0, 80.0), retrained=(58.0, 60.0), recovered=(64.0, 63.0))
    rows = [{**row, "holdout_verdict": "cannot tell", "holdout_reason": "blind: why"} for row in request.rows]
    screen = Console(width=120, file=io.StringIO())
    screen.print(command.trace_table([RequestRows(0, rows)]))
    assert isinstance(screen.file, io.StringIO)
    lines = [line.split() for line in screen.file.getvalue().splitlines()]
    assert ["original", "0", "+12.0", "+20.0", "cannot", "tell:", "blind:", "why"] in lines
    assert ["recovered", "0", "+3.0", "+3.0", "cannot", "tell:", "blind:", "why"] in lines
    assert command.trace_table([request]).row_count == 0, "without a hold-out there is no table"


def test_a_share_is_a_ratio_of_sums_and_needs_both() -> None:
    def request(spent: int | None, whole: int) -> Any:
        phases: Iterator[tuple[str, int | None]] = iter((("retrained", whole), ("unlearned", spent), ("recovered", 0)))
        rows = [{"phase": phase, "down_bytes": amount, "up_bytes": 0} for phase, amount in phases]
        return RequestRows(0, [{**row, "method": "m", "clients": [0], "request": 0} for row in rows])

    assert quantities.cost_share([request(10, 100), request(90, 300)], "bytes") == 25.0
    assert quantities.times_cheaper([request(10, 100), request(90, 300)], "bytes") == 4.0
    assert quantities.cost_share([request(10, 0)], "bytes") is None
    assert quantities.times_cheaper([request(0, 100)], "bytes") is None, "free"
    assert quantities.cost_share([request(0, 100)], "bytes") == 0.0
