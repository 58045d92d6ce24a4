# SPDX-License-Identifier: Apache-2.0
"""The page in Markdown and in HTML, from the paper's numbers and our records; every number on it comes from these."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from fedquit.inference.findings import LEVEL
from fedquit.paper import beside, unasked
from fedquit.paper.findings import FAILS, HOLDS, OPEN, Finding, judge, load_claims
from fedquit.paper.numbers import Paper, PaperTable, load_paper
from fedquit.paper.records import Records, Source, load_records
from fedquit.paper.settings import SETTINGS
from fedquit.report.drawing import Drawn
from fedquit.report.tables import Cell, Line, Table
from fedquit.results.study_folder import UNITS
from fedquit.results.words import DASH, count, fixed

TITLE = "The paper's numbers, and ours"
DECIDED = {True: "yes", False: "no", None: "not printed"}


@dataclass(frozen=True)
class Part:
    """Some tables with what is said of them."""

    title: str = ""
    tables: Sequence[Table] = ()
    texts: Sequence[str] = ()
    figures: Sequence[Drawn] = ()
    folded: bool = False  # shown when somebody asks for it


@dataclass(frozen=True)
class Section:
    """A section of the page: a heading, sentences, and parts."""

    key: str
    title: str
    texts: Sequence[str]
    parts: Sequence[Part] = ()


@dataclass(frozen=True)
class PaperPage:
    """All that both pages show.

    Attributes:
        lead: What holds and what does not, in two sentences.
        facts: Records, machines and code.
        sections: In order.
    """

    lead: Sequence[str]
    facts: Sequence[tuple[str, str]]
    sections: Sequence[Section]

    @property
    def markdown(self) -> str:
        """The page of the documentation."""
        lines = [f"# {TITLE}", "", *_wrapped(_INTRODUCTION), "", *_wrapped(" ".join(self.lead))]
        for section in self.sections:
            lines += ["", f"## {section.title}"]
            for text in section.texts:
                lines += ["", *_wrapped(text)]
            for part in section.parts:
                lines += _part(part)
        return "\n".join(lines) + "\n"

    @property
    def html(self) -> str:
        """The same as a page that needs nothing but itself, in the style of the report."""
        environment = Environment(
            loader=PackageLoader("fedquit"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,
        )
        environment.filters["marked"] = _marked
        template = environment.get_template("paper.html.j2")
        return template.render(title=TITLE, lead=self.lead, facts=self.facts, sections=self.sections)


_INTRODUCTION = (
    "This page sets every number of FedQUIT's paper that we have a record of beside ours, for readers who want to know "
    "whether the implementation reproduces it. `fedquit paper results --out docs` makes it; no number is written by "
    "hand."
)


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 120, break_long_words=False, break_on_hyphens=False)


def _marked(text: str) -> Markup:
    """Words between backticks as code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))  # safe: escaped first


def build_page(folder: Path, *, smoke: bool = False) -> PaperPage:
    """The page over the records of a folder.

    Args:
        folder: Of records at any depth; its `notes.toml`, if there is one, says what was tried where ours differs.
        smoke: Whether the records are of recipes at their smallest size (`fedquit run --smoke`).

    Raises:
        StoreError: The folder is missing, or a record is damaged.
    """
    paper, records = load_paper(), load_records(folder, smoke=smoke)
    findings = [judge(claim, paper, records) for claim in load_claims()]
    found = beside.differences(paper, records)
    notes = beside.load_notes(folder)
    sections = [
        _findings(findings, found),
        *(_of_table(paper, table, records) for table in paper.tables),
        _differences(found, notes, records),
        *_unasked(records),
        _rules(),
        _sources(records),
        _commands(),
    ]
    lead = (_SMOKE, *_lead(findings, found)) if smoke else _lead(findings, found)
    return PaperPage(lead, _facts(paper, records), sections)


_SMOKE = "These are trials of recipes at their smallest size: their numbers mean nothing, and show that the pages work."


# What is said first


def _lead(findings: Sequence[Finding], found: Sequence[beside.Difference]) -> tuple[str, str]:
    """What holds and what does not, in two sentences."""
    words = [finding.word for finding in findings]
    measured = [finding for finding in findings if finding.measured]
    untold = [finding for finding in measured if finding.word == OPEN]
    as_stated = sum(finding.true == len(finding.claim.comparisons) for finding in untold)
    most = max((finding.targets[1] for finding in untold), default=0)
    judged = [one for one in found if one.allowed is not None]
    beyond = sum(one.beyond for one in judged)
    level = f"each at an error rate of {100 * LEVEL:g} % over the clients of one training"
    certain = sum(finding.word == HOLDS and finding.claim.counted for finding in findings)
    untested = f" ({certain} by counted costs, without a test)" if certain else ""
    decided = (
        f"Of {len(findings)} findings that FedQUIT's paper states, {words.count(HOLDS)} hold{untested} and "
        f"{words.count(FAILS)} {'does' if words.count(FAILS) == 1 else 'do'} not hold, {level}, and "
        f"{words.count(OPEN)} cannot be told"
        if words.count(OPEN) < len(words)
        else f"None of {len(findings)} findings that FedQUIT's paper states can be confirmed or refuted yet, {level}"
    )
    first = (
        f"{decided}: {len(untold)} of these {'has' if len(untold) == 1 else 'have'} a record, over at most "
        f"{count(most, 'client')}, and in {as_stated} every comparison is as stated."
    )
    where = Counter(SETTINGS[one.cell.key.setting].title for one in judged if one.beyond)
    listed = "; ".join(f"{number} in {title}" for title, number in where.most_common())
    second = (
        f"Of {len(judged)} printed means that have a record and a deviation, {len(judged) - beyond} agree with ours "
        f"within what the deviation over clients explains, and {beyond} do not" + (f" ({listed})." if listed else ".")
    )
    if not measured:
        first = f"None of the {len(findings)} findings that FedQUIT's paper states has a record yet."
    if not judged:
        second = "No printed mean with a deviation has a record yet."
    return first, second


def _facts(paper: Paper, records: Records) -> list[tuple[str, str]]:
    cells = paper.by_key
    known = sum(records.series(key) is not None for key in cells)
    devices = sorted({source.device for source in records.sources if source.device})
    settings = [SETTINGS[name].title for name in SETTINGS if any(key.setting == name for key in records.by_key)]
    return [
        ("Numbers with a record", f"{known} of {len(cells)}"),
        ("Settings", "; ".join(settings) or "none"),
        ("Machine", "; ".join(devices) or "not recorded"),
    ]


# Findings


def _findings(findings: Sequence[Finding], found: Sequence[beside.Difference]) -> Section:
    measured = [finding for finding in findings if finding.measured]
    lines = [
        Line(
            finding.claim.says,
            [
                Cell(SETTINGS[finding.claim.setting].title, words=True),
                Cell(finding.word, words=True),
                Cell(DECIDED[finding.printed], words=True),
                Cell(" ".join([finding.reason, *caveats(finding, found)]), words=True),
            ],
            note=finding.claim.how,
        )
        for finding in measured
    ]
    heads = ["Finding", "Setting", "In our records", "In the paper's own table", "Why"]
    caption = "What the paper states, and how it is decided"
    parts = [Part(tables=[Table("Findings with a record", caption, heads, lines)])] if lines else []
    parts += _without_record([finding for finding in findings if not finding.measured])
    text = (
        "A finding holds, does not hold, or cannot be told; the rule and its error rate are under “How it is decided”. "
        "The paper's own table may contradict the paper's words, which is shown as well."
    )
    return Section("findings", "What the paper states", [text], parts)


def caveats(finding: Finding, found: Sequence[beside.Difference]) -> Iterator[str]:
    """For a finding that does not hold, the numbers in it that are not reproduced: the fault may be ours."""
    sides = {(side.key, side.part) for one in finding.claim.comparisons for side in (one.less, one.more)}
    for one in found if finding.word == FAILS else ():
        if one.beyond and (one.cell.key, one.part) in sides:
            numbers = f"{fixed(one.ours.mean)} in place of {fixed(one.printed)} {beside.BEYOND}"
            yield f"Our {beside.name_of(one.cell.key.method)} is itself not the paper's: {numbers}."


def _without_record(findings: Sequence[Finding]) -> list[Part]:
    """The findings that nothing was run for, one line for all settings of a finding."""
    by_id: dict[str, list[Finding]] = {}
    for finding in findings:
        by_id.setdefault(finding.claim.id, []).append(finding)
    lines = []
    for same in by_id.values():
        settings = "; ".join(SETTINGS[finding.claim.setting].title for finding in same)
        printed = dict.fromkeys(DECIDED[finding.printed] for finding in same)
        cells = [Cell(settings, words=True), Cell(", ".join(printed), words=True)]
        lines.append(Line(same[0].claim.says, cells, note=same[0].claim.how))
    if not lines:
        return []
    heads = ["Finding", "Not run yet in", "In the paper's own table"]
    title = f"Findings without a record: {len(findings)}, which cannot be told yet"
    return [Part(title, [Table(title, "What the paper states, and how it will be decided", heads, lines)], folded=True)]


# The paper's tables


def _of_table(paper: Paper, table: PaperTable, records: Records) -> Section:
    parts = []
    missing = []
    for setting in table.settings:
        tables = beside.block_tables(paper, table, setting, records)
        absent = beside.not_run(table, setting, records)
        if not tables:
            missing.append(SETTINGS[setting].title)
            continue
        texts = list(beside.rankings(table, setting, records))
        texts += [f"Not run yet: {', '.join(absent)}."] if absent else []
        parts.append(Part(SETTINGS[setting].title, tables, texts))
    cells = [cell for cell in table.cells if records.series(cell.key)]
    texts = [f"{len(cells)} of the table's {len(table.cells)} numbers have a record (`{table.label}`)."]
    but = ", but for rows of the tables above" if cells and not parts else ""
    texts += [f"Not run yet{but}: {'; '.join(missing)}."] if missing else []
    return Section(table.label.replace(":", "-"), table.title, texts, parts)


def _differences(found: Sequence[beside.Difference], notes: Mapping[str, beside.Note], records: Records) -> Section:
    judged = [one for one in found if one.allowed is not None]
    beyond = [one for one in found if one.beyond]
    tried = beside.tried(beyond, notes, records)
    text = (
        f"{len(judged)} means were judged. At 5 % each, about {LEVEL * len(judged):.0f} of them would differ by chance "
        f"alone; {len(beyond)} do, marked {beside.BEYOND} in the tables."
        if judged
        else "No mean could be judged yet."
    )
    parts = [Part(tables=[beside.beyond_the_spread(beyond, tried)])] if beyond else []
    listed = [f"Note {number}. {said}" for said, number in beside.numbered(tried).items()]
    parts += [Part("What was tried", texts=listed)] if listed else []
    return Section("differences", "Where ours differs", [text], parts)


# What the paper did not ask


def _unasked(records: Records) -> list[Section]:
    groups = unasked.groups_of(records)
    lasting = [Part(table.title, [table]) for group in groups if (table := unasked.what_lasts(group))]
    kinds = [Part(table.title, [table]) for group in groups if (table := unasked.samples_or_classes(group))]
    costs = [
        Part(one[0].title, [one[0]], figures=[one[1]]) for group in groups if (one := unasked.what_it_costs(group))
    ]
    known = {unasked.LASTS: lasting, unasked.COSTS: costs, unasked.KINDS: kinds}
    own = {unasked.LASTS: _followed(records), unasked.COSTS: True, unasked.KINDS: _held_out(records)}
    sections = []
    for title, parts in known.items():
        texts = [_QUESTIONS[title]]
        texts += [] if parts and own[title] else [unasked.MISSING[title]]
        sections.append(Section(title.lower().replace(" ", "-"), title, texts, parts))
    return sections


_QUESTIONS = {
    unasked.LASTS: "How much of each method's forgetting is the method's, and how much is time's?",
    unasked.COSTS: "Which methods give the smallest gap for what they send?",
    unasked.KINDS: "Is it the client's samples that are forgotten, or what the model knows of its distribution?",
}


def _followed(records: Records) -> bool:
    runs = [run for some in records.runs.values() for run in some]
    return any(request.get("recovered", "forget_acc_after_5") is not None for run in runs for request in run.requests)


def _held_out(records: Records) -> bool:
    runs = [run for some in records.runs.values() for run in some]
    return any(request.get("recovered", "holdout_acc") is not None for run in runs for request in run.requests)


# How it was made


_RULES = {
    "Means": """
        Ours are over the targets (clients that leave) that were run, seeds of one target averaged first. The paper's
        are over ten clients, over five pairs where two leave. A gap is to the Retrain of the same record, whose test
        accuracy ended the recovery. Where several records have the same number, one with more of the paper's five
        measures comes before one with fewer, then one that names the commit of its code.""",
    "Differences": """
        Ours less the paper's. It is beyond the spread where it exceeds t(0.975, 9) · s · √(1/n + 1/10) and the
        rounding, with the paper's own deviation s and our n targets: by chance at most LEVEL of the means are. Means
        without a printed deviation, or with one of 0 because one model serves all clients, are not judged. Training
        noise that moves all clients of one Original together is no part of the paper's deviation.""",
    "Findings": """
        A finding is a list of comparisons of which all, or the number stated, must be true. Each comparison is tested
        over targets by the signs of its differences, “at least u of k” of them by Benjamini and Heller's rule. A false
        finding is called true, and a true one false, with a chance of at most LEVEL each; everything else cannot be
        told. That is the error rate of targets under one Original: another Original could move all targets together.
        Five targets are the least that can tell. Numbers that are counted, such as the bytes of an unlearning, are
        decided by one record.""",
    "Costs": """
        Ours are what the meter of a run counts (docs/costs.md), the paper's are computed from formulas. FLOPs are
        counted in another way, so that only their ratio to Retrain's is compared. Where FedEraser's history was stored
        in bfloat16 (`store`), it takes half of the paper's bytes.""",
}


def _rules() -> Section:
    parts = []
    for title, text in _RULES.items():
        said = " ".join(text.split()).replace("LEVEL", f"{100 * LEVEL:g} %")
        parts.append(Part(title, texts=[said]))
    return Section("rules", "How it is decided", [], parts)


def _sources(records: Records) -> Section:
    by_made: dict[tuple[str, str, str], list[Source]] = {}
    for source in records.sources:
        of_study, units, _ = source.file.partition(f"/{UNITS}/")
        folder = of_study if units else source.file.rpartition("/")[0]
        by_made.setdefault((folder, source.code, source.device), []).append(source)
    lines = [
        Line(folder or ".", [Cell(str(len(same))), Cell(code or DASH, words=True), Cell(device or DASH, words=True)])
        for (folder, code, device), same in by_made.items()
    ]
    table = Table("Records", "By folder below that of the records", ["Folder", "Files", "Code", "Machine"], lines)
    because: dict[str, list[str]] = {}
    for file, why in records.left_out.items():
        because.setdefault(why, []).append(file)
    listed = "; ".join(f"{_few(same)}, because {why}" for why, same in because.items())
    texts = [f"Beside no number of the paper: {listed}."] if listed else []
    parts = [Part(tables=[table])] if lines else []
    return Section("records", "The records", texts, parts)


def _few(files: Sequence[str], most: int = 3) -> str:
    """The first files by name, and how many more there are."""
    more = f" and {len(files) - most} more" if len(files) > most else ""
    return ", ".join(files[:most]) + more


def _commands() -> Section:
    texts = [
        "`fedquit data get cifar100` fetches the data; `fedquit study run paper-1-cifar100-lda --out DIR "
        "--partition-dir PARTITIONS --retrain-from results/references` runs every method beside the recorded Retrains, "
        "in as many sittings as it takes; `fedquit paper DIR` sets its runs beside the paper. The partition files are "
        "the authors'; "
        "`fedquit list studies` names the other tables.",
    ]
    return Section("repeat", "How to repeat it", texts)


# Markdown


def _part(part: Part) -> Iterator[str]:
    if part.folded:
        yield from ("", "<details>", f"<summary>{part.title}</summary>")
    elif part.title:
        yield from ("", f"### {part.title}")
    for table in part.tables:
        yield ""
        yield from _markdown(table, titled=table.title != part.title)
    for text in part.texts:
        yield ""
        yield from _wrapped(text)
    if part.folded:
        yield from ("", "</details>")


def _markdown(table: Table, *, titled: bool) -> Iterator[str]:
    caption = table.caption.rstrip(".")
    yield from _wrapped(f"**{table.title}.** {caption}." if titled else f"{caption}.")
    yield ""
    words = [index == 0 or table.words_in(index) for index in range(len(table.heads))]
    yield "| " + " | ".join(table.heads) + " |"
    yield "|" + "|".join("---" if left else "---:" for left in words) + "|"
    for line in table.lines:
        head = line.head + (f" *{line.note}*" if line.note else "")
        yield "| " + " | ".join([head, *(_cell(cell) for cell in line.cells)]) + " |"
    if table.note:
        yield ""
        yield from _wrapped(table.note)


def _cell(cell: Cell) -> str:
    text = "" if cell.text == DASH else cell.text
    notes = ", ".join(cell.notes)
    return f"{text} ({notes})" if notes else text
