# SPDX-License-Identifier: Apache-2.0
"""The committed page and README say what the records say; the pages show what is there and name what is missing."""

from __future__ import annotations

import dataclasses
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedquit.cli import app
from fedquit.errors import InputError
from fedquit.paper.beside import Difference, differences, load_notes
from fedquit.paper.findings import FAILS, HOLDS, OPEN, judge, load_claims
from fedquit.paper.numbers import Key, load_paper
from fedquit.paper.page import PaperPage, build_page, caveats
from fedquit.paper.records import Measured, Records, Series, Source, load_records
from fedquit.paper.settings import method_of
from fedquit.paper.unasked import Group, groups_of, samples_or_classes, what_it_costs, what_lasts
from fedquit.results.summary import MethodSummary

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"
UNIT = "studies/paper-1-cifar100-lda/units/cifar100-lda/seed-0/client-0/fedquit/results.json"


@pytest.fixture(scope="module")
def page() -> PaperPage:
    return build_page(RESULTS)


def test_the_committed_page_is_what_the_records_give(page: PaperPage) -> None:
    assert (ROOT / "docs" / "reproduction.md").read_text(encoding="utf-8") == page.markdown


def test_the_readme_says_what_holds_and_what_does_not_in_the_words_of_the_page(page: PaperPage) -> None:
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    first_screen = readme[:3000]
    for sentence in page.lead:
        assert sentence in first_screen


def test_the_lead_says_what_the_error_rate_is_of_and_what_was_not_tested(page: PaperPage) -> None:
    paper, records = load_paper(), load_records(RESULTS)
    findings = [judge(claim, paper, records) for claim in load_claims()]
    counted = [finding for finding in findings if finding.word == HOLDS and finding.claim.counted]
    assert f"({len(counted)} by counted costs, without a test)" in page.lead[0]
    assert "each at an error rate of 5 % over the clients of one training" in page.lead[0]


def test_a_refuted_finding_says_which_of_its_numbers_are_not_the_papers(page: PaperPage) -> None:
    paper, records = load_paper(), load_records(RESULTS)
    claim = next(one for one in load_claims() if "FedOSD leaves a slightly higher test accuracy" in one.says)
    finding = dataclasses.replace(judge(claim, paper, records), word=FAILS)
    said = list(caveats(finding, differences(paper, records)))
    assert said == ["Our FedOSD is itself not the paper's: 38.8 in place of 49.5 ‡."]
    assert list(caveats(dataclasses.replace(finding, word=HOLDS), differences(paper, records))) == []
    refuted = [line for line in page.markdown.splitlines() if "| does not hold |" in line]
    named = "is itself not the paper's"
    assert page.markdown.count(named) == sum(named in line for line in refuted)


def test_every_difference_beyond_the_spread_has_a_note(page: PaperPage) -> None:
    notes = load_notes(RESULTS)
    beyond = [one for one in differences(load_paper(), load_records(RESULTS)) if one.beyond]
    assert [" ".join(one.cell.key) for one in beyond if " ".join(one.cell.key) not in notes] == []
    assert "nothing yet" not in page.markdown


def test_a_note_names_cells_of_the_paper_and_holds_no_number_of_its_own() -> None:
    known = {" ".join(key) for key in load_paper().by_key}
    for cell, note in load_notes(RESULTS).items():
        assert cell in known
        assert not re.search(r"\d+\.\d", note.tried)


def test_notes_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    assert load_notes(tmp_path) == {}
    (tmp_path / "notes.toml").write_text('[[note]]\ntried = "x"\n')
    with pytest.raises(InputError, match=r"notes\.toml is not a list of notes"):
        load_notes(tmp_path)


class Pieces(HTMLParser):
    """The ids, headings and text of a page, and whether its tags close in order."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.ids += [value for name, value in attrs if name == "id" and value]
        if tag not in ("meta", "br", "use", "path", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("use", "path"):
            assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.ids += [value for name, value in attrs if name == "id" and value]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_html_page_says_the_same_stands_alone_and_is_whole(page: PaperPage) -> None:
    html = page.html
    pieces = Pieces()
    pieces.feed(html)
    assert pieces.open == []
    assert len(pieces.ids) == len(set(pieces.ids))
    assert not re.search(r'(src|href)="(?!#)', html)
    for section in page.sections:
        assert section.title in pieces.text
    for sentence in page.lead:
        assert sentence in pieces.text
    assert "`" not in pieces.text.split("for (const table")[0]
    assert html == page.html


def test_the_command_writes_both_pages_beside_the_records(tmp_path: Path) -> None:
    record = json.loads((RESULTS / UNIT).read_text())
    (tmp_path / "run.json").write_text(json.dumps(record))
    done = CliRunner().invoke(app, ["paper", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "reproduction.md" in done.output
    written = (tmp_path / "reproduction.md").read_text()
    test_acc = next(row["test_acc"] for row in record["rows"] if row["phase"] == "recovered")
    assert f"| FedQUIT | 1 | {test_acc:.1f} (52.0 ± 0.5, {test_acc - 52.0:+.1f}) |" in written
    assert "<h1>The paper&#39;s numbers, and ours</h1>" in (tmp_path / "reproduction.html").read_text()


def test_an_empty_folder_says_what_is_missing_in_a_sentence_each(tmp_path: Path) -> None:
    text = " ".join(build_page(tmp_path).markdown.split())
    assert "has a record yet" in text
    for missing in ("rounds after the stop", "the bytes of several methods", "has a hold-out"):
        assert missing in text
    assert "| FedQUIT |" not in text


# Differences


def difference(mean: float, targets: int, *, deviation: float | None = 1.0) -> Difference:
    cell = load_paper().by_key[Key("cifar100-lda", "client", "fedquit", "unlearned", "test_acc")]
    printed = dataclasses.replace(cell.printed, value=45.2, deviation=deviation)
    ours = Series({(i,): mean for i in range(targets)}, 1)
    return Difference(dataclasses.replace(cell, printed=printed), "value", 45.2, deviation, ours)


def test_a_difference_is_beyond_the_spread_by_the_rule_of_two_means() -> None:
    """t(0.975, 9) = 2.262: with two targets 2.262 * sqrt(1/2 + 1/10) = 1.752, and 0.05 for rounding."""
    assert difference(45.2, 2).allowed == pytest.approx(1.802, abs=1e-3)
    assert not difference(46.9, 2).beyond
    assert difference(47.1, 2).beyond
    assert difference(43.3, 2).beyond
    assert difference(46.9, 10).beyond


def test_a_mean_without_a_deviation_or_with_one_of_zero_is_not_judged() -> None:
    assert difference(90.0, 2, deviation=None).allowed is None
    assert not difference(90.0, 2, deviation=0.0).beyond


def test_gaps_at_a_budget_are_compared_by_their_size() -> None:
    key = Key("cifar100-iid", "client", "federaser", "budget-0.5", "forget_acc")
    record = Records([Measured(key, (0,), 0, 45.0, Source("x"), gap=12.0)])
    (gap,) = (one for one in differences(load_paper(), record) if one.part == "gap")
    assert gap.printed == 12.6
    assert gap.size == pytest.approx(-0.6)


# What the paper did not ask


def summary(method: str, **fields: object) -> MethodSummary:
    return dataclasses.replace(MethodSummary(method, "recovered", runs=2), **fields)  # type: ignore[arg-type]


def test_what_lasts_parts_the_closed_gap_into_time_and_method() -> None:
    original = dataclasses.replace(MethodSummary("original", "original"), gaps={"forget_acc": 20.0})
    line = summary(
        "fedquit", on_path_gaps={"forget_acc": 3.0}, natural_gaps={"forget_acc": 14.0}, rounds_from_request=21.0
    )
    table = what_lasts(Group("Toy", 2, [line], original, {"fedquit": {5: (4.0, 12.0)}}))
    assert table
    assert table.heads == ["Method", "Rounds", "Gap", "Natural's", "By time", "By the method", "+5"]
    assert [cell.text for cell in table.lines[0].cells] == ["21", "3.0", "14.0", "+6.0", "+11.0", "4.0"]
    assert table.lines[0].cells[-1].notes == ("Natural 12.0",)
    assert what_lasts(Group("Toy", 2, [summary("fedquit")])) is None


def test_the_front_holds_the_methods_that_no_other_beats_in_gap_and_cost() -> None:
    lines = [
        summary("cheap", bytes_percent=1.0, gaps={"forget_acc": 9.0}),
        summary("middle", bytes_percent=5.0, gaps={"forget_acc": 3.0}),
        summary("beaten", bytes_percent=6.0, gaps={"forget_acc": 4.0}),
        summary("dear", bytes_percent=50.0, gaps={"forget_acc": 1.0}),
        summary("uncounted", gaps={"forget_acc": 0.0}),
    ]
    shown = what_it_costs(Group("Toy", 2, lines))
    assert shown
    table, drawn = shown
    assert {line.head: line.cells[-1].text for line in table.lines} == {
        "cheap": "yes",
        "middle": "yes",
        "beaten": "no",
        "dear": "yes",
    }
    assert "middle: 3.0 points" in drawn.text
    assert what_it_costs(Group("Toy", 2, lines[:1])) is None


def test_samples_and_distribution_add_up() -> None:
    line = summary("fedquit", sample_memory=1.5, distribution_knowledge=-0.5, holdout_verdicts={"remembered": 2.0})
    table = samples_or_classes(Group("Toy", 2, [line]))
    assert table
    assert [cell.text for cell in table.lines[0].cells] == ["+1.5", "−0.5", "+1.0", "remembered 2"]
    assert samples_or_classes(Group("Toy", 2, [summary("fedquit")])) is None


def test_the_recorded_comparison_fills_all_three() -> None:
    group = next(group for group in groups_of(load_records(RESULTS)) if "every method" in group.title)
    assert group.targets == 4
    lasting, costs, kinds = what_lasts(group), what_it_costs(group), samples_or_classes(group)
    assert lasting
    assert costs
    assert kinds
    assert len(lasting.lines) >= 16
    assert any(line.head == "Original" and line.reference for line in kinds.lines)


def test_a_retrain_with_a_hold_out_is_beside_no_number_of_the_paper() -> None:
    records = load_records(RESULTS)
    bundles = [name for name in records.left_out if name.startswith("references/cifar100-lda0.1-holdout/")]
    assert bundles
    assert all("hold out 20 %" in records.left_out[name] for name in bundles)
    retrained = records.series(Key("cifar100-lda", "client", "retrain", "retrained", "test_acc"))
    assert retrained is not None
    assert retrained.seeds == 1


def test_original_and_retrain_alone_are_counted_once_with_the_runs_that_they_serve() -> None:
    runs = load_records(RESULTS).runs["cifar100-lda"]
    assert all(request.row("recovered") for run in runs for request in run.requests)


def test_how_a_history_is_stored_makes_no_other_method() -> None:
    assert method_of({"name": "federaser", "store": "bfloat16"}, "cifar100-lda") == "federaser"
    assert method_of({"name": "federaser", "interval": 2}, "cifar100-lda") == "federaser interval=2"


def test_the_lead_counts_records_of_findings_that_cannot_be_told_alone(page: PaperPage) -> None:
    paper, records = load_paper(), load_records(RESULTS)
    untold = [one for one in (judge(claim, paper, records) for claim in load_claims()) if one.word == OPEN]
    recorded = [one for one in untold if one.measured]
    as_stated = sum(one.true == len(one.claim.comparisons) for one in recorded)
    said = re.search(r"(\d+) cannot be told: (\d+) of these have a record.* in (\d+) every", page.lead[0])
    assert said is not None
    assert [int(number) for number in said.groups()] == [len(untold), len(recorded), as_stated]


def test_a_method_over_fewer_clients_is_neither_ranked_nor_on_the_front(page: PaperPage) -> None:
    ranked = [
        text for text in page.markdown.replace("\n", " ").split("By average gap") if "FedEraser (1 target)" in text
    ]
    assert ranked
    assert all("FedEraser" not in text.partition("Over fewer targets")[0] for text in ranked)
    (line,) = [line for line in page.markdown.splitlines() if line.startswith("| federaser store=bfloat16 | 1 |")]
    assert line.endswith("| no |")
