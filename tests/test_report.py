# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from html import escape, unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from fedquit.errors import StoreError
from fedquit.report import load_results, write_report

NOTE = "This is approximate unlearning: what is measured here is evidence that the data was forgotten, not proof."


def row(phase: str, method: str, request: int = 0, **changes: object) -> dict[str, Any]:
    base = {"original": 10.0, "retrained": 20.0, "unlearned": 30.0, "recovered": 40.0, "joined": 50.0}[phase]
    return {
        "method": method,
        "phase": phase,
        "request": request,
        "clients": [2],
        "samples": False,
        "seed": 0,
        "rounds": int(base) + 1,
        "seconds": base + 2.3,
        "test_acc": base + 3.4,
        "retain_acc": base + 4.5,
        "forget_acc": base + 5.6,
        "holdout_acc": base + 6.7,
        **changes,
    }


def forget(request: int = 0, **changes: object) -> list[dict[str, Any]]:
    points = [{"round": float(i), "test_acc": 33.4 + i, "forget_acc": 35.6 + i} for i in range(4)]
    return [
        row("original", "original", request, **changes),
        row("retrained", "retrain", request, **changes),
        row("unlearned", "fedquit", request, price_of_forgetting=0.274364, **changes),
        row("recovered", "fedquit", request, curve=points, runs=1, **changes),
    ]


def results(rows: list[dict[str, Any]] | None = None, title: str = "A client leaves") -> dict[str, Any]:
    recipe = {
        "title": title,
        "seed": 0,
        "data": {"name": "toy", "options": {"odd key": [1, "two"]}, "alpha": 0.1},
        "request": [{"kind": "forget", "clients": [2], "anew": False}],
        "method": {"name": "fedquit", "lr": 1e-05},
    }
    versions = {"fedquit": "0.1.0", "torch": "9.8.7"}
    return {"schema": 1, "recipe": recipe, "versions": versions, "rows": forget() if rows is None else rows}


def store(folder: Path, content: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def report(tmp_path: Path, *contents: object) -> str:
    folders = [store(tmp_path / f"run-{i}", content) for i, content in enumerate(contents)]
    write_report(folders, tmp_path / "report.html")
    return (tmp_path / "report.html").read_text()


def text_of(html: str) -> str:
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", html)).split())


def cells(html: str) -> list[list[str]]:
    lines = re.findall(r"<tr\b[^>]*>(.*?)</tr>", html, flags=re.DOTALL)
    return [[text_of(c) for c in re.findall(r"<t[hd]\b.*?</t[hd]>", line, flags=re.DOTALL)] for line in lines]


class Outline(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.figures: list[dict[str, str | None]] = []
        self.headings: list[int] = []
        self.ids: list[str] = []
        self.targets: list[str] = []

    def note(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if tag == "figure":
            self.figures.append(found)
        if re.fullmatch(r"h[1-6]", tag):
            self.headings.append(int(tag[1]))
        self.ids += [i] if (i := found.get("id")) else []
        self.targets += (found.get("aria-labelledby") or "").split()
        for value in found.values():
            self.targets += re.findall(r"^#(.+)$", value or "") + re.findall(r"url\(#([^)]+)\)", value or "")

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.note(tag, attrs)
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.note(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_table_shows_every_number_of_every_row(tmp_path: Path) -> None:
    found = cells(report(tmp_path, results()).partition(">All numbers<")[2])
    assert found[1:] == [
        ["Original", "original", "2", "11", "12.3", "13.4", "14.5", "15.6", "16.7", "–"],
        ["Retrained", "retrain", "2", "21", "22.3", "23.4", "24.5", "25.6", "26.7", "–"],
        ["Unlearned", "fedquit", "2", "31", "32.3", "33.4", "34.5", "35.6", "36.7", "+10.0"],
        ["Recovered", "fedquit", "2", "41", "42.3", "43.4", "44.5", "45.6", "46.7", "+20.0"],
    ]


def entries(html: str) -> dict[str, str]:
    """What the verdict card says, by label."""
    card = html.partition('<div class="card">')[2].partition("</div>")[0]
    found = re.findall(r"<dt>(.*?)</dt>\s*<dd\b[^>]*>(.*?)</dd>", card, flags=re.DOTALL)
    return {unescape(label): text_of(said).replace("\u00a0", " ") for label, said in found}


def test_the_card_tells_what_was_asked_and_done_and_what_it_cost(tmp_path: Path) -> None:
    html = report(tmp_path, results())
    card = entries(html)
    assert list(card) == ["Asked", "Done", "Verdict", "Price", "Cost", "Cannot be told"]
    assert card["Asked"] == "Forget client 2."
    assert card["Done"] == (
        "fedquit; then 41 rounds of recovery, compared with Retrain. Accuracy on the data to forget: 15.6 % before, "
        "45.6 % now; Retrain, which never saw it, has 25.6 %."
    )
    assert card["Verdict"] == (
        "No verdict: nothing here was tested. The gap in forget accuracy to Retrain is 20.0 points. No test was made. "
        "The client’s kind of data: accuracy on its hold-out is 46.7 %, 20.0 points above Retrain’s."
    )
    assert card["Price"] == (
        "Unlearning raised the retained clients’ loss by 0.274. Accuracy after recovery: 44.5 % on the retained "
        "clients’ data (Retrain 24.5 %), 43.4 % on test data (Retrain 23.4 %)."
    )
    assert card["Cost"] == "74.6 s where it ran (Retrain 22.3 s)."
    assert card["Cannot be told"] == (
        "Whether a gap is more than chance: that takes several Retrains of each target (fedquit compare "
        "--retrain-seeds). "
        "Whether its samples are remembered: none of the clients’ data was held out (data.holdout)."
    )


def test_the_card_says_that_this_is_no_proof(tmp_path: Path) -> None:
    card = report(tmp_path, results()).partition('<div class="card">')[2].partition("</div>")[0]
    assert f'<p class="note">{NOTE}</p>' in card


def test_the_page_is_called_as_its_recipe_and_says_what_it_is_about(tmp_path: Path) -> None:
    content = results() | {"code": {"version": "0.1.0", "commit": "0123456789abcdef", "dirty": True}}
    content["recipe"]["data"] |= {"clients": 10, "partition": "lda", "holdout": 0.2}
    html = report(tmp_path, content, content)
    assert "<h1>A client leaves</h1>" in html
    about = dict(re.findall(r"<div><dt>(.*?)</dt><dd>(.*?)</dd></div>", html))
    assert about == {
        "Forgotten": "Client 2",
        "Seed": "0",
        "Data": "toy, 10 clients, lda 0.1, hold-out 0.2",
        "Code": "fedquit 0.1.0, commit 0123456789ab with uncommitted changes",
    }
    assert "<h1>A client leaves, and 1 more</h1>" in report(tmp_path, content, results(title="Another"))
    content["recipe"]["data"]["partition"] = "iid"
    assert ">toy, 10 clients, iid, hold-out 0.2</dd>" in report(tmp_path, content), "alpha is of lda alone"


@pytest.mark.parametrize(("accuracy", "warned"), [(18.9, True), (19.1, False), (None, False)])
def test_an_original_hardly_above_guessing_is_warned_about(
    tmp_path: Path, accuracy: float | None, warned: bool
) -> None:
    content = results() | {"clients": {"0": list(range(1, 11))}}  # ten classes: guessing is 10 %, a tenth above it 19 %
    content["rows"][0]["test_acc"] = accuracy
    html = report(tmp_path, content)
    assert ("Original is hardly trained" in html) == warned
    assert "hardly trained" not in report(tmp_path, results()), "how many classes there are is not known"
    once = results()
    once["recipe"]["train"] = {"rounds": 1}
    assert "Original is hardly trained: its test accuracy is 13.4\u00a0%." in report(tmp_path, once)


@pytest.mark.parametrize(
    ("price", "words"),
    [
        (-0.0121, "Unlearning lowered the retained clients’ loss by 0.012. "),
        (12345.678, "Unlearning raised the retained clients’ loss by 12346. "),
        (0.0001, "Unlearning did not change the retained clients’ loss. "),
        (None, "Accuracy after recovery: 44.5 %"),
        (float("nan"), "Accuracy after recovery: 44.5 %"),
    ],
)
def test_the_price_is_told_as_it_is(tmp_path: Path, price: float | None, words: str) -> None:
    rows = forget()
    rows[2]["price_of_forgetting"] = price
    assert entries(report(tmp_path, results(rows)))["Price"].startswith(words)


def test_of_many_requests_no_method_is_hidden(tmp_path: Path) -> None:
    closer = forget()
    closer[3] |= {"method": "pga", "forget_acc": 25.6, "rounds": 7}
    closer[2] |= {"method": "pga", "price_of_forgetting": -0.5}
    html = report(tmp_path, results(), results(closer), results(), results())
    card = entries(html)
    assert card["Done"] == (
        "2 methods: fedquit, pga; then 7 to 41 rounds of recovery, over up to 3 requests each, compared with Retrain. "
        "Accuracy on the data to forget: 15.6 % before, between 25.6 % (pga) and 45.6 % (fedquit) now; Retrain, which "
        "never saw it, has 25.6 %."
    )
    assert card["Verdict"].startswith(
        "No verdict: nothing here was tested. The gap in forget accuracy to Retrain is between 0.0 points (pga) and "
        "20.0 points (fedquit). No test was made."
    )
    assert "loss by between −0.500 (pga) and +0.274 (fedquit)" in card["Price"]
    assert NOTE in text_of(html)
    line = ["pga", "0.0", "25.6", "25.6", "35.6", "15.6", "43.4", "23.4", "7", "−0.500"]
    assert ["run-1", *line] in cells(html)
    assert 'href="#run2"' in html
    assert 'id="run2"' in html


def test_a_page_without_retrain_has_no_broken_sentence_and_no_empty_column(tmp_path: Path) -> None:
    rows = [one for one in forget() if one["phase"] != "retrained"]
    for one in rows:
        one |= {"auc": 0.62, "auc_low": 0.55, "auc_high": 0.69, "holdout_verdict": "remembered", "down_bytes": 2e6}
        one["holdout_reason"] = "AUC 0.620, 90 % interval 0.561 to 0.679"
    html = report(tmp_path, results(rows))
    said = text_of(html.partition("</style>")[2].partition("<script")[0]).replace("\u00a0", " ")
    for broken in ("not measured", "has no ", "Gap", "beside Retrain", "less Retrain’s", "None", "nan", "Retrained"):
        assert broken not in said, broken
    card = entries(html)
    assert card["Verdict"].startswith(
        "Its samples: remembered. They are still told from data of the same clients that never trained"
    )
    assert "never trained: AUC 0.620, 90 % interval 0.561 to 0.679; such a verdict errs in at most 5" in card["Verdict"]
    assert card["Cost"] == "4.0 MB sent, 74.6 s where it ran."
    assert card["Cannot be told"] == (
        "How close this is to a model that never saw the data: there is no Retrain to compare with."
    )
    assert all("–" not in line for line in cells(html)), "what nobody measured has no column"


def test_several_requests_and_clients_that_join_each_have_their_place(tmp_path: Path) -> None:
    later = forget(2, clients=[1, 4], samples=True)
    later[3]["runs"] = 3
    html = report(tmp_path, results([*forget(), row("joined", "fedquit", 1, clients=[7], forget_acc=None), *later]))
    said = text_of(html)
    for words in (
        "Request 1: forget client 2",
        "Request 2: client 7 joined",
        "Request 3: forget chosen samples of clients 1 and 4",
        "1, 4 (samples)",
        "mean of 3",
    ):
        assert words in said
    assert ["Joined", "fedquit", "7", "51", "52.3", "53.4", "54.5", "–", "56.7", "–"] in cells(html)
    assert html.count("<figure ") == 4


def test_what_was_not_measured_is_a_dash(tmp_path: Path) -> None:
    unknown = dict.fromkeys(("test_acc", "retain_acc", "forget_acc", "holdout_acc", "seconds"))
    html = report(tmp_path, results([one | unknown for one in forget()]))
    assert ["Recovered", "fedquit", "2", "41", "–", "–", "–", "–", "–", "–"] in cells(html)
    assert "None" not in html
    assert "nan" not in text_of(html)


def test_results_without_any_row_still_give_a_page(tmp_path: Path) -> None:
    assert "Nothing was to be forgotten" in report(tmp_path, results([]))


def test_a_recovery_that_was_not_needed_has_a_curve_of_one_point(tmp_path: Path) -> None:
    rows = forget()
    rows[3] |= {"rounds": 0, "curve": [{"round": 0.0, "test_acc": 33.4}]}
    html = report(tmp_path, results(rows))
    assert entries(html)["Done"].startswith("fedquit; then 0 rounds of recovery, compared with Retrain.")
    assert html.count("<figure ") == 2


def test_titles_and_names_are_escaped(tmp_path: Path) -> None:
    bad = "<script>alert('x')</script> & \"more\""
    content = results(title=bad)
    content["rows"][3]["method"] = content["recipe"]["method"]["name"] = bad
    content["versions"][bad] = bad
    html = report(tmp_path, content, content)
    assert html.count("<script") == 1, "the page's own, which sorts the tables"
    assert escape("<script>alert(") in html


def test_the_page_asks_for_nothing_from_elsewhere(tmp_path: Path) -> None:
    html = report(tmp_path, results(), results())
    assert not re.search(r"https?:|@import|<link|<img|\bsrc=|fetch\(|XMLHttp|import\(", html)
    assert re.findall(r"<script[^>]*>", html) == ["<script>"]
    assert set(re.findall(r'href="(.)', html)) == {"#"}


def test_the_recipe_reads_as_toml_and_the_versions_are_there(tmp_path: Path) -> None:
    html = report(tmp_path, results())
    recipe = re.search(r"<pre>(.*?)</pre>", html, flags=re.DOTALL)
    assert recipe
    assert tomllib.loads(unescape(recipe[1])) == results()["recipe"]
    assert "<dt>torch</dt><dd>9.8.7</dd>" in html


def test_the_page_is_well_formed_and_tells_its_figures_in_words(tmp_path: Path) -> None:
    outline = Outline()
    outline.feed(report(tmp_path, results([*forget(), *forget(1)]), results()))
    outline.close()
    assert outline.open == []
    assert len(outline.figures) == 6
    for figure in outline.figures:
        assert figure["role"] == "img"
        assert re.search(r"forget 25\.6\s%, test 23\.4\s%", figure["aria-label"] or "")
    assert outline.headings.count(1) == 1
    assert all(b - a <= 1 for a, b in zip([0, *outline.headings], outline.headings, strict=False))
    assert len(outline.ids) == len(set(outline.ids))
    assert set(outline.targets) <= set(outline.ids)


def test_figures_take_their_colours_and_font_from_the_page(tmp_path: Path) -> None:
    figures = "".join(re.findall(r"<figure.*?</figure>", report(tmp_path, results()), flags=re.DOTALL))
    assert "var(--accent)" in figures
    assert not re.search(r": #[0-9a-f]{6}|font-family", figures)
    assert ">45.6</text>" in figures


def test_the_same_runs_give_the_same_bytes(tmp_path: Path) -> None:
    folder = store(tmp_path / "run", results())
    write_report([folder], tmp_path / "a.html")
    code = "import sys, pathlib, fedquit.report as r; a, b = map(pathlib.Path, sys.argv[1:]); r.write_report([a], b)"
    subprocess.run(
        [sys.executable, "-c", code, folder, tmp_path / "b.html"], check=True, env=os.environ | {"TZ": "Asia/Tokyo"}
    )
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()


def test_a_folder_without_results_gives_a_sentence_that_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(StoreError) as caught:
        load_results(tmp_path / "x")
    assert (
        str(caught.value)
        == f"no results.json in {tmp_path / 'x'}: run `fedquit run RECIPE --out {tmp_path / 'x'}` first"
    )


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "\x00",
        "[" * 100_000,
        "[]",
        {"schema": 1},
        results() | {"rows": {}},
        results() | {"rows": [3]},
        results() | {"rows": [{"method": "fedquit"}]},
        results() | {"recipe": None},
    ],
)
def test_damaged_results_give_a_sentence(tmp_path: Path, content: object) -> None:
    with pytest.raises(StoreError, match=r"results\.json is damaged \(.*\): restore it from a backup, or run the same"):
        load_results(store(tmp_path, content))


@pytest.mark.parametrize("schema", [0, 2, "1", None])
def test_an_unknown_schema_gives_a_sentence(tmp_path: Path, schema: object) -> None:
    with pytest.raises(StoreError, match=rf"has schema {schema!r} and this version of fedquit reads schema 1 only"):
        load_results(store(tmp_path, results() | {"schema": schema}))


def test_a_report_over_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="at least one run"):
        write_report([], tmp_path / "report.html")


def test_a_failed_write_leaves_the_report_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, out = store(tmp_path / "run", results()), tmp_path / "out" / "report.html"
    write_report([folder], out)
    before = out.read_bytes()
    store(folder, results(title="Another title"))

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(StoreError, match=r"cannot write .*report\.html \(No space left on device\)"):
            write_report([folder], out)
    assert out.read_bytes() == before
    assert os.listdir(out.parent) == ["report.html"]  # noqa: PTH208 - names are enough
    write_report([folder], out)
    assert out.read_bytes() != before


def test_the_report_needs_no_torch() -> None:
    code = "import fedquit.report, sys; assert not {'torch', 'matplotlib.pyplot'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
