# SPDX-License-Identifier: Apache-2.0
"""The page of one forgotten model: what was asked, the verdict, the figures, and the rates that were tried."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from fedquit.report.card import Entry
from fedquit.report.tables import Cell, Line, Table
from fedquit.results.words import fixed
from fedquit.utils.files import write_atomic
from fedquit.utils.version import code_version

if TYPE_CHECKING:
    from fedquit.single.forgetting import Forgotten

SETS = {
    "forget": "to be forgotten",
    "holdout": "hold-out: the same kind, never trained on",
    "retain": "retained",
    "test": "test",
}
ANSWERS = {
    "forgotten within the margin": "Forgotten within the margin",
    "remembered": "Still remembered",
    "over-unlearned": "Over-unlearned: treated worse than data never seen, which gives it away as well",
    "cannot tell": "Cannot tell",
}

HOW_TO_READ = (
    "The AUC is the chance that the model is surer of a sample to be forgotten than of a hold-out sample; a model that "
    "never saw the data has one half. The verdict calls it forgotten if its 90 % interval lies within 0.5 ± "
    "{margin:g}, the highest scores are not those of forgotten samples, and the same test catches the model before."
)
WITHOUT = (
    "Without a hold-out nothing can be told about what the model remembers: give data of the same kind that was never "
    "trained on."
)


def write_page(result: Forgotten, path: Path) -> Path:
    """Write the page; a folder gets `report.html`.

    Args:
        result: of `fedquit.forget`.
        path: a file that ends with .html, or a folder.
    """
    place = path if path.suffix == ".html" else path / "report.html"
    place.parent.mkdir(parents=True, exist_ok=True)
    environment = Environment(
        loader=PackageLoader("fedquit"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    write_atomic(place, environment.get_template("single.html.j2").render(**_content(result)).encode())
    return place


def _content(result: Forgotten) -> dict[str, Any]:
    code = code_version()
    evidence = result.evidence
    commit = f" at {str(code['commit'])[:7]}" if code.get("commit") else ""
    facts = [("Method", result.method)]
    facts += [] if result.lr is None else [("lr", f"{result.lr:g}")]
    facts += [("Time", f"{result.seconds:.1f} s"), ("Made by", f"fedquit {code['version']}{commit}")]
    entries = [Entry("Verdict", (ANSWERS[result.verdict], f"{evidence.reason[:1].upper()}{evidence.reason[1:]}."))]
    price = _price(result)
    entries += [Entry("Price", (price,))] if price else []
    return {
        "answer": ANSWERS[result.verdict],
        "facts": facts,
        "notes": result.notes,
        "card": entries,
        "tables": [_accuracies(result), *([_rates(result)] if result.sweep else [])],
    }


def _accuracies(result: Forgotten) -> Table:
    """Each set before and after, and the AUC of forget against hold-out data."""
    phases = {"before": result.before, "unlearned": result.unlearned, "recovered": result.recovered}
    shown = {name: evidence for name, evidence in phases.items() if evidence}
    lines = []
    for name, size in result.before.sizes.items():
        levels = [Cell(fixed(one.accuracy[name])) for one in shown.values()]
        lines.append(Line(SETS[name], [Cell(f"{size:,}"), *levels]))
    nulls = [one.null for one in shown.values() if one.null]
    note = WITHOUT
    if nulls:
        cells = [Cell(f"{null.auc.value:.3f}", (f"{null.auc.low:.3f} to {null.auc.high:.3f}",)) for null in nulls]
        lines.append(Line("AUC, forget against hold-out", [Cell(""), *cells], note="95 % interval"))
        note = HOW_TO_READ.format(margin=nulls[-1].trace.margin)
    return Table("Accuracy", "In percent", ["data", "examples", *shown], lines, note)


def _rates(result: Forgotten) -> Table:
    """What each rate that was tried did, after its recovery."""
    sweep = result.sweep
    assert sweep is not None
    lines = []
    for rate in sweep.candidates:
        levels = [rate.unlearned_acc, rate.forget_acc, rate.holdout_acc]
        cells = [*(Cell(fixed(level)) for level in levels), Cell(f"{rate.auc:.3f}"), Cell(rate.verdict, words=True)]
        lines.append(Line(f"{rate.lr:g}", cells, note="taken" if rate.lr == result.lr else ""))
    heads = ["lr", "forget after unlearning", "forget", "hold-out", "AUC", "verdict"]
    said = f"lr {result.lr:g} was taken: {sweep.reason}."
    return Table("Rates that were tried", "Accuracies in percent, after the recovery", heads, lines, said)


def _price(result: Forgotten) -> str:
    """What the model lost on data that it should keep."""
    before, after = result.before.accuracy, result.evidence.accuracy
    kept = [name for name in ("test", "retain") if name in before]
    return " ".join(
        f"{name.capitalize()} accuracy: {before[name]:.1f} % before, {after[name]:.1f} % now." for name in kept
    )
