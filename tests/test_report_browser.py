# SPDX-License-Identifier: Apache-2.0
"""The report in Chromium, on a phone, a desktop and paper, light and dark: can everybody read and use it?"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from browser import CHROMIUM, Browser
from fedquit.report import write_report
from test_report import forget, report, results, store
from test_report_figures import (
    MANY,
    PAIR,
    SWEPT,
    TESTED,
    full,
    stored_leaving,
    swept,
    verdict,
    with_budgets,
    with_floor,
)

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium to render with")

PAPER = 703  # pixels: A4 less its margins
PAGES = ("few", "many", "comparison", "seventeen", "production", "sweep")
VIEWS = [
    *((width, scheme, "screen") for width in (390, 1280) for scheme in ("light", "dark")),
    (PAPER, "light", "print"),
    (PAPER, "dark", "print"),
]
METHODS = ("fedquit", "pga", "natural", "fedosd")
SEVENTEEN = (*METHODS, "bad_teacher", *(f"method_{i}" for i in range(12)))


AUDITED = (
    "With 95 % confidence this pipeline is not (0.52, 1e-05)-indistinguishable in a canary's presence: 31 of 40 "
    "guesses correct."
)


def few(folder: Path) -> None:
    """Long names, a strange title, many clients, and settings of one method."""
    long = results(forget(clients=list(range(40))), title="<b> & " + "unbreakable" * 20)
    runs = [
        full(teacher="fixed", v=1.0),
        full(teacher="fixed", v=2.0),
        full("a_rather_long_name_of_a_method" * 2),
        long,
    ]
    runs = [one | {"clients": {str(c): [c, 3, 9 - c] for c in range(10)}} for one in runs]
    for row in runs[0]["rows"]:
        audit = {"guesses": 40, "correct": 31, "epsilon_low": 0.52, "p": 0.001, "verdict": "remembered"}
        row |= {f"canary_natural_{key}": value for key, value in (audit | {"sentence": AUDITED}).items()}
    control = {"phase": "natural", "method": "natural", "holdout_verdict": "remembered"}
    runs[0]["rows"].append(runs[0]["rows"][3] | control)
    runs[0]["rows"][0]["true_logits"] = {"edges": [-2.0, 0.0, 2.0], "density": [0.1, 0.4]}
    report(folder, *runs)


def many(folder: Path) -> None:
    """Ten methods over two clients, whose runs are folded away; some have budgets."""
    runs = [with_floor(full(f"method_{i % 10}", i // 10, float(i % 7))) for i in range(20)]
    for run in runs:
        for row in run["rows"]:
            row |= {"roc": None, "entropy": None, "curve": None}
    report(folder, *runs[10:], *map(with_budgets, runs[:10]))


BLIND = "blind: the same test does not catch Original (the lower bound of its AUC is 0.512, not above 0.55)"
TOO_FEW = (
    "cannot tell: the smallest p with 2 targets and 3 Retrains is 0.062, and 24 tests together need 0.0021; a "
    "difference can be shown with 5 targets with 3 Retrains each or 2 targets with 9 Retrains each"
)


def compared(folder: Path, methods: tuple[str, ...] = METHODS) -> None:
    """Some methods over two targets, with verdicts, a control, pairs and many models.

    Args:
        folder: Of the comparison.
        methods: Their names.
    """
    words = ("cannot tell", "differs", "differs", "equivalent")
    traces = ("cannot tell", "remembered", "forgotten within the margin", "over-unlearned")
    keys = ("avg_gap", "forget_acc", "retain_acc", "mia_song_svc", "mia_yeom", "test_acc")
    table: list[dict[str, Any]] = []
    for i, method in enumerate(methods):
        word = words[i] if i < len(words) else "differs"
        for client in (0, 1):
            trace = traces[i + client * (i == 0)] if i < len(traces) else "remembered"
            shift = client - 4.0 * i % 16
            run = with_floor(full(method, client, shift=shift, title="Ten clients: the largest one leaves"))
            path = [{"round": r, "forget_acc": 60.0 - r, "test_acc": 40.0 + r, "bytes": r * 1e6} for r in range(5)]
            run["rows"][3] |= {
                "holdout_verdict": trace,
                "holdout_reason": BLIND,
                "natural_forget_acc": 63.3,
                "path": path,
            }
            store(folder / f"seed-0/client-{client}" / method, run)
        pairs = {} if not i else dict.fromkeys(keys, PAIR)
        line = {"method": method, "phase": "recovered", "runs": 2, "against_first": pairs, "references": MANY | TESTED}
        line |= {"leaving": stored_leaving("differs from leaving" if i % 5 else "no benefit over leaving", 4.0 - i)}
        line |= {"durable": {"word": "not durable" if i % 4 else "cannot tell", "reason": TOO_FEW}}
        table.append(line | {"verdicts": {key: verdict(word, reason=TOO_FEW) for key in keys}})
    runs = [f"seed-0/client-{client}/{method}" for method in methods for client in (0, 1)]
    content = {"schema": 1, "first": "fedquit", "table": table, "runs": runs}
    failed = [{"method": "fukd", "target": 2, "seed": 0, "why": "it needs public data"}]
    (folder / "comparison.json").write_text(json.dumps(content | {"failed": failed}))
    write_report([folder], folder / "report.html")


def production(folder: Path) -> None:
    """A run without Retrain, of a model that is hardly trained."""
    run = full() | {"clients": {"0": list(range(1, 11))}}
    run["rows"] = [row for row in run["rows"] if row["phase"] != "retrained"]
    report(folder, run)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {name: tmp_path_factory.mktemp(name) for name in PAGES}
    makers: dict[str, Callable[[Path], None]] = {
        "few": few,
        "many": many,
        "comparison": compared,
        "seventeen": lambda folder: compared(folder, SEVENTEEN),
        "production": production,
    }
    for name, make in makers.items():
        make(folders[name])
    halves = [{"verdict": "forgotten within the margin", "reason": "why"}, {"verdict": "cannot tell", "reason": BLIND}]
    rates = [rate | {"halves": halves, "reason": BLIND} for rate in SWEPT["rates"]]
    page = swept(folders["sweep"], SWEPT | {"rates": rates, "tried": 1e-3})
    (folders["sweep"] / "report.html").write_text(page)
    return {name: folder / "report.html" for name, folder in folders.items()}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as one:
        yield one


OVERFLOWING = """
(() => {
  const wide = document.documentElement.clientWidth;
  const out = [];
  if (document.documentElement.scrollWidth > wide) out.push("the page: " + document.documentElement.scrollWidth);
  for (const one of document.querySelectorAll("body *:not(script):not(svg *)")) {
    const at = one.getBoundingClientRect();
    if (!at.width && !at.height) continue;
    const name = one.tagName + "." + one.className + " " + one.textContent.trim().slice(0, 30);
    if (at.left < -0.5 || at.right > wide + 0.5) out.push(name + ": " + at.left + " to " + at.right);
    else if (one.tagName !== "svg" && one.clientWidth && one.scrollWidth > one.clientWidth + 1)
      out.push(name + " scrolls");
  }
  for (const table of document.querySelectorAll("table")) {
    const box = table.closest(".box").getBoundingClientRect(), at = table.getBoundingClientRect();
    if (at.width && at.right > box.right + 0.5) out.push("a table: " + table.caption.textContent);
    for (const cell of table.querySelectorAll("th, td")) {
      const row = cell.parentElement.getBoundingClientRect(), own = cell.getBoundingClientRect();
      if (own.right > row.right + 0.5) out.push("a cell: " + cell.textContent);
    }
  }
  for (const text of document.querySelectorAll("figure text")) {
    const card = text.closest(".figure").getBoundingClientRect(), at = text.getBoundingClientRect();
    if (at.left < card.left || at.right > card.right || at.top < card.top || at.bottom > card.bottom)
      out.push("in a figure: " + text.textContent);
  }
  return out;
})()
"""


@pytest.mark.parametrize("name", PAGES)
def test_nothing_overflows_at_any_width_nor_on_paper(name: str, pages: dict[str, Path], browser: Browser) -> None:
    browser.open(pages[name])
    for width in (390, 768, 1280, 1440, 1920):
        browser.shape(width=width)
        assert browser.run(OVERFLOWING) == [], width
    browser.shape(width=PAPER, media="print")
    assert browser.run(OVERFLOWING) == [], "paper"


def test_an_element_that_is_too_wide_is_noticed(pages: dict[str, Path], browser: Browser) -> None:
    browser.open(pages["production"])
    browser.run("document.querySelector('td').style.paddingLeft = '2000px'")
    assert browser.run(OVERFLOWING)


@pytest.mark.parametrize("name", PAGES)
def test_tables_are_tables_on_paper_and_cards_on_a_phone(name: str, pages: dict[str, Path], browser: Browser) -> None:
    shown = "[...document.querySelectorAll('thead')].map(head => getComputedStyle(head).display)"
    browser.open(pages[name], width=PAPER, media="print")
    assert set(browser.run(shown)) == {"table-header-group"}
    browser.shape(width=1280)
    assert set(browser.run(shown)) == {"table-header-group"}
    browser.shape(width=390)
    assert set(browser.run(shown)) == {"none"}
    label = "getComputedStyle(document.querySelector('tbody td:not(.nothing)'), '::before').content"
    assert browser.run(label).strip('"') == browser.run("document.querySelector('tbody td:not(.nothing)').dataset.head")


CONTRAST = """
(() => {
  const parse = colour => (colour.match(/[\\d.]+/g) || []).map(Number);
  const linear = v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => .2126 * linear(r / 255) + .7152 * linear(g / 255) + .0722 * linear(b / 255);
  const ratio = (a, b) => {
    const [dark, bright] = [light(a), light(b)].sort((x, y) => x - y);
    return (bright + .05) / (dark + .05);
  };
  const behind = one => {
    for (let at = one; at; at = at.parentElement) {
      const [r, g, b, a] = parse(getComputedStyle(at).backgroundColor);
      if (a === undefined || a > .99) return [r, g, b];
      if (a > 0) throw new Error("a background that is half transparent: " + at.className);
    }
    return [255, 255, 255];
  };
  const poor = [];
  for (const one of document.querySelectorAll("body *:not(script)")) {
    const own = [...one.childNodes].some(node => node.nodeType === 3 && node.textContent.trim());
    const at = one.getBoundingClientRect();
    if (!own || !at.width || getComputedStyle(one).visibility === "hidden") continue;
    const style = getComputedStyle(one);
    const colour = parse(one.closest("svg") ? style.fill : style.color);
    const size = parseFloat(style.fontSize), large = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
    const has = ratio(colour, behind(one.closest("svg") ? one.closest(".figure") : one));
    const words = one.textContent.trim().slice(0, 30);
    if (has < (large ? 3 : 4.5)) poor.push(one.tagName + " " + words + " " + has.toFixed(2));
  }
  const card = document.querySelector(".figure, .card");
  for (const name of ["accent", "quiet", ...[1, 2, 3, 4, 5, 6, 7, 8].map(i => "series" + i)]) {
    const probe = document.createElement("i");
    probe.style.color = `var(--${name})`;
    card.append(probe);
    const has = ratio(parse(getComputedStyle(probe).color), behind(card));
    if (has < 3) poor.push(name + " in figures " + has.toFixed(2));
    probe.remove();
  }
  return poor;
})()
"""


_HEADS_OVER_VALUES = """
[...document.querySelectorAll("tbody td")].filter(cell => {
    const style = getComputedStyle(cell);
    return style.display === "grid" && style.whiteSpace !== "normal";
}).map(cell => cell.dataset.head)
"""


@pytest.mark.parametrize("name", PAGES)
def test_on_a_phone_a_long_heading_never_runs_over_its_value(
    name: str, pages: dict[str, Path], browser: Browser
) -> None:
    browser.open(pages[name], width=390)
    assert browser.run(_HEADS_OVER_VALUES) == []


@pytest.mark.parametrize("name", PAGES)
def test_words_and_lines_stand_out_from_what_is_behind_them(
    name: str, pages: dict[str, Path], browser: Browser
) -> None:
    browser.open(pages[name])
    for width, scheme, media in VIEWS:
        browser.shape(width=width, scheme=scheme, media=media)
        background = browser.run("getComputedStyle(document.body).backgroundColor")
        dark = scheme == "dark" and media == "screen"
        assert (background == "rgb(18, 23, 26)") == dark, "paper is white, whatever the reader prefers on the screen"
        assert browser.run(CONTRAST) == [], (width, scheme, media)


def test_pale_words_are_noticed(pages: dict[str, Path], browser: Browser) -> None:
    browser.open(pages["production"])
    browser.run("document.documentElement.style.setProperty('--soft', '#999999')")
    assert browser.run(CONTRAST)


@pytest.mark.parametrize("name", PAGES)
def test_a_screen_reader_is_told_what_everything_is(name: str, pages: dict[str, Path], browser: Browser) -> None:
    browser.open(pages[name])
    assert browser.run("document.documentElement.lang") == "en"
    assert browser.run("document.title").endswith("· Unlearning report")
    levels = browser.run("[...document.querySelectorAll('h1, h2, h3, h4')].map(head => +head.tagName[1])")
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in zip([0, *levels], levels, strict=False)), levels
    for width in (390, 1280):
        browser.shape(width=width)
        told = browser.names()
        roles = [role for role, _ in told]
        assert [(role, text) for role, text in told if role in NAMED and not text.strip()] == []
        assert roles.count("image") == browser.run("document.querySelectorAll('figure').length")
        tables = browser.run("document.querySelectorAll('table').length")
        assert roles.count("table") == tables, "they stay tables where they are drawn as cards"
        assert roles.count("row") >= browser.run("document.querySelectorAll('tbody tr').length")


NAMED = ("image", "table", "button", "link", "heading", "region", "columnheader", "rowheader", "DisclosureTriangle")

FOCUSABLE = (
    "[...document.querySelectorAll('a[href], button, summary')].filter(one => one.getBoundingClientRect().width)"
)


@pytest.mark.parametrize(("name", "width"), [("comparison", 1280), ("comparison", 390), ("sweep", 1280)])
def test_the_keyboard_reaches_everything_in_order_and_shows_where_it_is(
    name: str, width: int, pages: dict[str, Path], browser: Browser
) -> None:
    browser.open(pages[name], width=width)
    browser.run(f"{FOCUSABLE}.forEach((one, i) => one.dataset.at = i)")
    count = browser.run(f"{FOCUSABLE}.length")
    assert count
    reached = []
    for _ in range(count):
        browser.press("Tab", 9)
        where = "[+(document.activeElement.dataset.at ?? -1), getComputedStyle(document.activeElement).outlineStyle]"
        reached.append(browser.run(where))
    assert reached == [[i, "solid"] for i in range(count)]


def test_a_table_sorts_by_a_pressed_heading_and_says_so(pages: dict[str, Path], browser: Browser) -> None:
    browser.open(pages["comparison"])
    first = "document.querySelector('table.sortable')"
    methods = f"[...{first}.querySelectorAll('tbody th')].map(head => head.textContent.trim())"
    above = ["Retrain", "Original", "Retrain again"]
    assert browser.run(methods) == [*above, *METHODS]
    browser.run(f"{first}.querySelectorAll('thead button')[3].focus()")  # the forget gap
    browser.press("Enter", 13)
    assert browser.run(f"{first}.querySelectorAll('thead th')[3].ariaSort") == "ascending"
    assert browser.run(methods) == [*above, "fedosd", "natural", "pga", "fedquit"]
    browser.press("Enter", 13)
    assert browser.run(f"{first}.querySelectorAll('thead th')[3].ariaSort") == "descending"
    assert browser.run(methods) == [*above, "fedquit", "pga", "natural", "fedosd"]
    browser.run(f"{first}.querySelectorAll('thead button')[0].click()")
    assert browser.run(methods) == [*above, "fedosd", "fedquit", "natural", "pga"]
    assert browser.run(f"[...{first}.querySelectorAll('[aria-sort]')].length") == 1


def test_a_link_opens_the_run_that_is_folded_away(pages: dict[str, Path], browser: Browser) -> None:
    browser.open(pages["many"])
    browser.run("document.getElementById('run7').closest('details').open = false")
    browser.run(
        "new Promise(done => { addEventListener('hashchange', () => setTimeout(done)); location.hash = 'run7'; })"
    )
    assert browser.run("document.getElementById('run7').closest('details').open") is True


@pytest.mark.parametrize("name", PAGES)
def test_a_page_asks_for_no_network_and_has_no_error(name: str, pages: dict[str, Path], browser: Browser) -> None:
    browser.open(pages[name])
    asked = [e["params"]["request"]["url"] for e in browser.events if e.get("method") == "Network.requestWillBeSent"]
    assert asked == [pages[name].resolve().as_uri()]
    assert [
        e for e in browser.events if e.get("method") in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled")
    ] == []


def sheets(browser: Browser) -> int:
    """How many sheets of paper the open page takes."""
    return len(re.findall(rb"/Type\s*/Page\b(?!s)", browser.printed()))


@pytest.mark.parametrize("name", ["comparison", "seventeen", "production", "sweep"])
def test_what_decides_fits_one_printed_page(name: str, pages: dict[str, Path], browser: Browser) -> None:
    browser.open(pages[name], width=PAPER, media="print")
    assert browser.run("getComputedStyle(document.querySelector('.first + .run')).breakBefore") == "page"
    assert sheets(browser) > 1, "the rest follows"
    browser.run("document.querySelectorAll('.first ~ *').forEach(one => one.remove())")
    assert sheets(browser) == 1


LINES_OF_NAMES = """
[...document.querySelectorAll("tbody th")].filter(head => !head.textContent.trim().includes(" ")).filter(head => {
  const text = document.createRange();
  const name = [...head.childNodes].find(node => node.nodeType === 3 && node.data.trim());
  if (!name) return false;
  text.selectNodeContents(name);
  return new Set([...text.getClientRects()].map(line => line.top)).size > 1;
}).map(head => head.textContent.trim())
"""


@pytest.mark.parametrize("name", ["comparison", "seventeen"])
def test_the_name_of_a_method_is_never_broken(name: str, pages: dict[str, Path], browser: Browser) -> None:
    browser.open(pages[name], width=PAPER, media="print")
    assert browser.run(LINES_OF_NAMES) == [], "paper"
    for width in (390, 1280):
        browser.shape(width=width)
        assert browser.run(LINES_OF_NAMES) == [], width
    assert "bad_teacher" in SEVENTEEN
    narrow = "min-width: 0; width: 2rem; display: block; white-space: normal; overflow-wrap: anywhere"
    browser.run(f"document.querySelectorAll('tbody th').forEach(head => head.style.cssText = '{narrow}')")
    assert browser.run(LINES_OF_NAMES), "a broken name is noticed"


def test_a_long_card_leaves_no_printed_page_empty(pages: dict[str, Path], browser: Browser) -> None:
    browser.open(pages["comparison"], width=PAPER, media="print")
    browser.run("document.querySelectorAll('.first ~ *').forEach(one => one.remove())")
    browser.run("document.querySelector('.card dd:last-child').append(' and so on with more words'.repeat(45))")
    assert sheets(browser) == 2, "the card begins below the title, and only the table goes on the next page"


def test_a_long_table_goes_on_over_the_next_printed_page(pages: dict[str, Path], browser: Browser) -> None:
    browser.open(pages["production"], width=PAPER, media="print")
    browser.run("document.querySelectorAll('.first ~ *').forEach(one => one.remove())")
    browser.run("""{
      const body = document.querySelector('table').tBodies[0];
      for (let i = 0; i < 80; i++) body.append(body.rows[0].cloneNode(true));
    }""")
    assert sheets(browser) == 3


@pytest.mark.parametrize("name", PAGES)
def test_every_figure_is_drawn_and_its_words_can_be_read(name: str, pages: dict[str, Path], browser: Browser) -> None:
    browser.open(pages[name])
    heights = "[...document.querySelectorAll('{}')].map(one => one.getBoundingClientRect().height)"
    for width in (390, 1280):
        browser.shape(width=width)
        assert all(height > 80 for height in browser.run(heights.format("figure svg"))), width
        assert all(height >= 9 for height in browser.run(heights.format("figure text"))), width
