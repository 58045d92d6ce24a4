# SPDX-License-Identifier: Apache-2.0
"""The page of one forgotten model: what was asked, the verdict, the figures, and the rates that were tried."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined

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
    phases = {"before": result.before, "unlearned": result.unlearned, "recovered": result.recovered}
    shown = {name: evidence for name, evidence in phases.items() if evidence}
    code = code_version()
    evidence = result.evidence
    return {
        "answer": ANSWERS[result.verdict],
        "verdict": result.verdict,
        "reason": evidence.reason,
        "margin": evidence.null.trace.margin if evidence.null else None,
        "price": _price(result),
        "method": result.method,
        "lr": result.lr,
        "seconds": result.seconds,
        "notes": result.notes,
        "version": f"fedquit {code['version']}" + (f" at {str(code['commit'])[:7]}" if code.get("commit") else ""),
        "phases": list(shown),
        "rows": [
            (name, SETS[name], size, [one.accuracy[name] for one in shown.values()])
            for name, size in result.before.sizes.items()
        ],
        "aucs": [one.null.auc for one in shown.values() if one.null],
        "sweep": result.sweep,
    }


def _price(result: Forgotten) -> str:
    """What the model lost on data that it should keep."""
    before, after = result.before.accuracy, result.evidence.accuracy
    kept = [name for name in ("test", "retain") if name in before]
    return " ".join(
        f"{name.capitalize()} accuracy: {before[name]:.1f} % before, {after[name]:.1f} % now." for name in kept
    )
