# SPDX-License-Identifier: Apache-2.0
"""What runs left behind, read with care: older results lack some fields, and each of them is optional."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from fedquit.errors import StoreError
from fedquit.utils.names import each_named

SCHEMA = 1
OWN = "this request"  # among floors: that of the request itself, not the mean over a comparison
PHASES = {"original": "Original", "retrained": "Retrained", "unlearned": "Unlearned", "recovered": "Recovered"}
THRESHOLDS = {
    "mia_song_correctness": "Correctness",
    "mia_song_confidence": "Confidence",
    "mia_song_entropy": "Entropy",
    "mia_song_modified_entropy": "Modified entropy",
}
GAPS = {"retain_acc": "Retain", "forget_acc": "Forget", "mia_song_svc": "MIA Song", "mia_yeom": "MIA Yeom"}

Row = Mapping[str, Any]
_NEEDED: dict[str, type] = {"method": str, "phase": str, "request": int, "clients": list}


def load_results(folder: Path) -> dict[str, Any]:
    """What a run wrote into its folder."""
    path = folder / "results.json"
    try:
        results = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError) as error:
        raise StoreError(f"no results.json in {folder}: run `fedquit run RECIPE --out {folder}` first") from error
    except OSError as error:
        raise StoreError(f"cannot read {path} ({error.strerror}): make it readable and try again.") from error
    except (ValueError, RecursionError) as error:
        raise _damaged(path, str(error)) from error
    if not isinstance(results, dict):
        raise _damaged(path, "it is not an object")
    if results.get("schema") != SCHEMA:
        raise StoreError(
            f"{path} has schema {results.get('schema')!r} and this version of fedquit reads schema {SCHEMA} only: "
            "run the recipe again in another folder, or use the version that wrote it."
        )
    for key, kind in (("recipe", dict), ("versions", dict), ("rows", list)):
        if not isinstance(results.get(key), kind):
            raise _damaged(path, f"it has no usable {key}")
    for number, row in enumerate(results["rows"]):
        missing = [k for k, kind in _NEEDED.items() if not (isinstance(row, dict) and isinstance(row.get(k), kind))]
        if missing:
            raise _damaged(path, f"row {number} has no usable {missing[0]}")
    return results


def _damaged(path: Path, why: str) -> StoreError:
    return StoreError(f"{path} is damaged ({why}): delete it and run the same recipe in its folder again.")


@dataclass(frozen=True)
class Failed:
    """A method that did not come through, for whom, and why."""

    method: str
    where: str
    why: str


@dataclass(frozen=True)
class Pair:
    """By how much a method's gap exceeds that of the first method, over the same targets, with a 95 % interval."""

    mean: float
    low: float
    high: float
    units: int  # so many targets, or seeds of one target
    different: bool


@dataclass(frozen=True)
class Comparison:
    """What a comparison says beyond its runs."""

    folder: str
    first: str = ""  # the method that the others are paired with
    pairs: Mapping[str, Mapping[str, Pair]] = field(default_factory=dict)  # by method and measure
    many: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # by method: what needs many models
    failed: Sequence[Failed] = ()
    floors: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # by method, "" for all
    own_floors: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # by "seed-0/client-2"
    runs: Sequence[str] | None = None  # folders below its own; None: all that are there


@dataclass(frozen=True)
class Found:
    """All that a report is made of."""

    runs: Sequence[Run]
    comparisons: Sequence[Comparison] = ()


def opened(folders: Sequence[Path]) -> Found:
    """The runs in these folders; the folder of a comparison stands for all its runs, and for what it found out."""
    places: list[Path] = []
    comparisons = []
    for folder in folders:
        whole = (folder / "comparison.json").is_file() and not (folder / "results.json").exists()
        found = _comparison(folder) if whole else Comparison("")
        inside = _inside(folder, found) if whole else []
        comparisons += [found] if whole else []
        places += inside if inside or found.failed else [folder]
    return Found(_runs(places), comparisons)


def _inside(folder: Path, found: Comparison) -> list[Path]:
    if found.runs is not None:
        return [folder / run for run in found.runs]
    return sorted(path.parent for path in folder.glob("seed-*/client*-*/*/results.json"))


def _runs(folders: Sequence[Path]) -> list[Run]:
    found: dict[Path, Comparison] = {}
    runs = []
    for folder in folders:
        here = folder.resolve()
        top = here.parents[2] if len(here.parents) > 2 else here
        beside = here.parent.name.startswith(("client-", "clients-")) and here.parents[1].name.startswith("seed-")
        if beside and top not in found:
            found[top] = _comparison(top)
        name = "/".join(here.parts[-3:]) if beside else here.name
        floors = dict(found[top].floors) if beside else {}
        if beside and (own := found[top].own_floors.get("/".join(here.parts[-3:-1]))):
            floors[OWN] = own
        runs.append(Run(name, load_results(folder), floors))
    return runs


def _comparison(folder: Path) -> Comparison:
    """What a comparison wrote; what cannot be read is left out."""
    name = folder.resolve().name
    try:
        found = json.loads((folder / "comparison.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return Comparison(name)
    if not isinstance(found, dict):
        return Comparison(name)
    table = found.get("table")
    lines = [line for line in table if isinstance(line, dict)] if isinstance(table, list) else []
    runs = found.get("runs")
    return Comparison(
        name,
        str(found.get("first") or ""),
        {str(line.get("method")): pairs for line in lines if (pairs := _pairs(line.get("against_first")))},
        {str(line.get("method")): many for line in lines if (many := _numbers(line.get("references")))},
        [f for one in _listed(found.get("failed")) if (f := _failed(one))],
        _floors(found, lines),
        _own_floors(found.get("floors")),
        [r for r in runs if isinstance(r, str)] if isinstance(runs, list) else None,
    )


def _listed(found: object) -> list[Any]:
    return found if isinstance(found, list) else []


def _failed(one: object) -> Failed | None:
    if not isinstance(one, dict):
        return None
    target = one.get("target", [])
    who = each_named("client", target if isinstance(target, list) else [target])
    where = ", ".join(word for word, key in ((who, "target"), (f"seed {one.get('seed')}", "seed")) if key in one)
    return Failed(str(one.get("method")), where, str(one.get("why")))


def _pairs(found: object) -> dict[str, Pair]:
    pairs = {}
    for key, one in found.items() if isinstance(found, dict) else ():
        if not isinstance(one, dict):
            continue
        mean, low, high = (number(one.get(k)) for k in ("mean", "low", "high"))
        if mean is not None and low is not None and high is not None:
            units = int(number(one.get("units")) or 0)
            pairs[str(key)] = Pair(mean, low, high, units, one.get("different") is True)
    return pairs


def _numbers(found: object) -> dict[str, Any]:
    """The numbers of an object, what it says with yes or no, and those of the objects in it."""
    values = found.items() if isinstance(found, dict) else ()
    known = {str(k): _numbers(v) if isinstance(v, dict) else v if isinstance(v, bool) else number(v) for k, v in values}
    return {k: v for k, v in known.items() if v is not None}


def _floors(found: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """The noise floor by method ("" for all), where a comparison measured one."""
    floors = {"": _floor(found.get("floor"))}
    for line in lines:
        if line.get("phase") == "floor":  # Retrain against Retrain with another seed
            floors[""] = _floor(line.get("gaps"))
        else:
            floors[str(line.get("method"))] = _floor(line.get("floor"))
    return {name: floor for name, floor in floors.items() if floor}


def _own_floors(found: object) -> dict[str, dict[str, float]]:
    """The noise floor of each target and seed, by the folder in which its runs lie."""
    return {str(k): floor for k, v in found.items() if (floor := _floor(v))} if isinstance(found, dict) else {}


def _floor(found: object) -> dict[str, float]:
    """Measure by measure: a number, or an object with one under `value` or `mean`."""
    floor = {}
    for key, value in found.items() if isinstance(found, dict) else ():
        inner = value.get("value", value.get("mean")) if isinstance(value, dict) else value
        if (size := number(inner)) is not None:
            floor[str(key)] = abs(size)
    return floor


class Run:
    """One run: its rows, request by request."""

    def __init__(
        self, folder: str, results: Mapping[str, Any], floors: Mapping[str, Mapping[str, float]] | None = None
    ) -> None:
        self.folder = folder
        self.recipe: Mapping[str, Any] = results["recipe"]
        self.versions: Mapping[str, Any] = results["versions"]
        self.rows: Sequence[Row] = results["rows"]
        self.clients: object = results.get("clients")
        title = self.recipe.get("title")
        self.name = title if isinstance(title, str) and title.strip() else folder
        self.parts = [
            Part(n, list(rows), floors or {}) for n, rows in groupby(self.rows, key=lambda row: int(row["request"]))
        ]
        self.requests = [part for part in self.parts if part.forgets]

    @property
    def options(self) -> Mapping[str, Any]:
        """The settings of the method."""
        found = self.recipe.get("method")
        return found if isinstance(found, dict) else {}

    @property
    def seed(self) -> object:
        """The seed of the recipe."""
        return self.recipe.get("seed")


@dataclass(frozen=True)
class Part:
    """The rows of one request, or of clients that joined."""

    number: int
    rows: Sequence[Row]
    floors: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    over: int = 1  # so many requests were averaged

    @cached_property
    def _by_phase(self) -> dict[str, Row]:
        return {row["phase"]: row for row in reversed(self.rows)}

    @property
    def forgets(self) -> bool:
        """Whether this is a request to forget."""
        return any(phase in self._by_phase for phase in PHASES)

    def row(self, phase: str) -> Row:
        """The row of a phase, or an empty one."""
        return self._by_phase.get(phase, {})

    def get(self, phase: str, key: str) -> float | None:
        """A number, where the phase has one."""
        return number(self.row(phase).get(key))

    def gap(self, phase: str, key: str = "forget_acc") -> float | None:
        """How far a measure lies above Retrain's, in points."""
        return minus(self.get(phase, key), self.get("retrained", key))

    @cached_property
    def budgets(self) -> dict[float, Part]:
        """What each share of Retrain's bytes paid for, as if the recovery had ended there."""
        found = {}
        for row in self.rows:
            if row["phase"] == "budget" and (budget := number(row.get("budget"))) is not None:
                others = [self._by_phase[phase] for phase in PHASES if phase in self._by_phase and phase != "recovered"]
                found[budget] = replace(self, rows=[*others, {**row, "phase": "recovered"}])
        return found

    @property
    def method(self) -> str:
        """The unlearning method."""
        return next(
            (str(row["method"]) for row in self.rows if row["phase"] in ("unlearned", "recovered")), "the method"
        )

    @property
    def floor(self) -> dict[str, float]:
        """How far two Retrains lie apart, measure by measure, where somebody measured it."""
        found: dict[str, float] = {}
        for row in self.rows:
            found |= _floor(row.get("floor"))
        return found or dict(self.floors.get(OWN) or self.floors.get(self.method) or self.floors.get("") or {})

    def doubt(self, key: str) -> float | None:
        """The least gap that one request alone makes a difference: two Retrains of its own may lie close by chance."""
        known = [f for f in (self.floor.get(key), self.floors.get("", {}).get(key)) if f is not None]
        return max(known, default=None)

    @property
    def who(self) -> str:
        """Whom it is about, in short."""
        clients = self.rows[0]["clients"]
        return self._of(f"{len(clients)} clients") if len(clients) > 5 else self.target

    @property
    def target(self) -> str:
        """Whom it is about, each by name: two targets of as many clients are two."""
        return self._of(each_named("client", self.rows[0]["clients"]))

    def _of(self, some: str) -> str:
        return f"chosen samples of {some}" if self.rows[0].get("samples") else some

    @property
    def title(self) -> str:
        """A heading."""
        return f"Forget {self.who}" if self.forgets else f"{self.who[:1].upper()}{self.who[1:]} joined"

    @property
    def curve(self) -> list[Mapping[str, Any]]:
        """The points of the recovery."""
        found = self.row("recovered").get("curve")
        points = found if isinstance(found, list) else []
        return [p for p in points if isinstance(p, dict) and number(p.get("round")) is not None]

    def cost(self, phase: str, kind: str) -> float | None:
        """`bytes`, `flops`, `epochs` or a field of the row."""
        fields = {"bytes": ("down_bytes", "up_bytes"), "flops": ("client_flops", "server_flops")}.get(kind, (kind,))
        if kind == "epochs":
            fields = ("client_epochs", "server_epochs")
        known = [v for name in fields if (v := self.get(phase, name)) is not None]
        return sum(known) if known else None

    def whole(self, kind: str) -> float | None:
        """The cost of unlearning and recovery together; storage is the larger of the two."""
        known = [v for phase in ("unlearned", "recovered") if (v := self.cost(phase, kind)) is not None]
        if not known:
            return None
        return max(known) if kind.endswith("storage_bytes") else sum(known)

    def share(self, kind: str) -> float | None:
        """The cost in percent of Retrain's."""
        spent, gold = self.whole(kind), self.cost("retrained", kind)
        return None if spent is None or not gold else 100 * spent / gold

    @property
    def work(self) -> float | None:
        """The computing in percent of Retrain's: by FLOPs, or by epochs where nobody counted FLOPs."""
        by_flops = self.share("flops")
        return self.share("epochs") if by_flops is None else by_flops

    def at_bytes(self) -> list[tuple[float, Mapping[str, Any]]]:
        """The points of the recovery, by all that was sent until then in percent of what Retrain sends."""
        gold, before = self.cost("retrained", "bytes"), self.cost("unlearned", "bytes") or 0.0
        if not gold:
            return []
        return [(100 * (before + sent) / gold, p) for p in self.curve if (sent := number(p.get("bytes"))) is not None]


def affords(bought: Part) -> bool:
    """Whether a budget pays at least for the unlearning."""
    asked, spent = bought.get("recovered", "budget"), bought.get("recovered", "budget_spent")
    return asked is None or spent is None or spent <= asked + 1e-9


def mean_part(parts: Sequence[Part]) -> Part:
    """The same phases over several requests: means of the numbers, curves and densities."""
    rows = []
    for phase in PHASES:
        mine = [row for part in parts if (row := part.row(phase))]
        if mine:
            rows.append(_mean_row(mine))
    for budget in sorted({b for part in parts for b in part.budgets}):
        bought = [part.budgets[budget].row("recovered") for part in parts if budget in part.budgets]
        rows.append({**_mean_row(bought), "phase": "budget"})
    return Part(0, rows, parts[0].floors, over=len(parts))


def _mean_row(rows: Sequence[Row]) -> Row:
    first = rows[0]
    every = dict.fromkeys(k for row in rows for k in row)
    keys = [k for k in every if k not in ("request", "seed", "runs") and not k.endswith(("_low", "_high", "_enough"))]
    found: dict[str, Any] = {k: first[k] for k in _NEEDED}
    for key in keys:
        values = [v for row in rows if (v := number(row.get(key))) is not None]
        if values:
            found[key] = statistics.fmean(values)
    against = {row.get("exposed_against") for row in rows}
    found["exposed_against"] = against.pop() if len(against) == 1 else None
    found["roc"] = _mean_roc([r for row in rows if (r := roc_of(row))])
    found["entropy"] = _mean_density([d for row in rows if (d := density_of(row, "entropy"))])
    found["curve"] = _mean_curve([row["curve"] for row in rows if isinstance(row.get("curve"), list)])
    return found


def _mean_roc(rocs: Sequence[dict[str, list[float]]]) -> dict[str, list[float]]:
    same = [r for r in rocs if r["fpr"] == rocs[0]["fpr"]]
    if not same:
        return {}
    return {"fpr": same[0]["fpr"], "tpr": [statistics.fmean(t) for t in zip(*(r["tpr"] for r in same), strict=True)]}


def _mean_density(found: Sequence[dict[str, list[float]]], bins: int = 40) -> dict[str, list[float]]:
    """Over the same bins, each of which takes the mass that falls into it."""
    names = [n for n in found[0] if n != "edges" and all(n in d for d in found)] if found else []
    if not names:
        return {}
    top = max(d["edges"][-1] for d in found)
    low = min(d["edges"][0] for d in found)
    edges = [low + (top - low) * i / bins for i in range(bins + 1)]
    mean: dict[str, list[float]] = {"edges": edges}
    for name in names:
        below = [[_mass_below(d["edges"], d[name], e) for e in edges] for d in found]
        masses = [statistics.fmean(b[i + 1] - b[i] for b in below) for i in range(bins)]
        mean[name] = [m * bins / (top - low) for m in masses]
    return mean


def _mass_below(edges: Sequence[float], density: Sequence[float], at: float) -> float:
    cut = zip(edges, edges[1:], density, strict=False)
    return sum(h * (min(b, at) - a) for a, b, h in cut if a < at)


def _mean_curve(curves: Sequence[Sequence[Any]]) -> list[dict[str, float]]:
    """Round by round; a recovery that was over sooner stays where it ended."""
    usable = [[p for p in c if isinstance(p, dict) and number(p.get("round")) is not None] for c in curves]
    usable = [c for c in usable if c]
    mean = []
    for i in range(max(map(len, usable), default=0)):
        points = [c[min(i, len(c) - 1)] for c in usable]
        keys = [k for k in points[0] if all(number(p.get(k)) is not None for p in points)]
        longest = max(usable, key=len)
        mean.append({k: statistics.fmean(p[k] for p in points) for k in keys} | {"round": float(longest[i]["round"])})
    return mean


def roc_of(row: Row) -> dict[str, list[float]] | None:
    """The ROC of a row, where it is whole."""
    found = row.get("roc")
    if not isinstance(found, dict):
        return None
    fpr, tpr = numbers(found.get("fpr")), numbers(found.get("tpr"))
    return {"fpr": fpr, "tpr": tpr} if fpr and tpr and len(fpr) == len(tpr) else None


def density_of(row: Row, key: str) -> dict[str, list[float]] | None:
    """Densities over common edges, where they are whole."""
    found = row.get(key)
    if not isinstance(found, dict):
        return None
    edges = numbers(found.get("edges"))
    if not edges or len(edges) < 2 or edges[-1] <= edges[0]:
        return None
    known = {k: d for k, v in found.items() if k != "edges" and (d := numbers(v)) and len(d) == len(edges) - 1}
    return {"edges": edges, **known} if known else None


def numbers(value: object) -> list[float] | None:
    """A list of finite numbers."""
    if not isinstance(value, list):
        return None
    known = [v for x in value if (v := number(x)) is not None]
    return known if len(known) == len(value) else None


def number(value: object) -> float | None:
    """A finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def minus(a: float | None, b: float | None) -> float | None:
    """The difference, where both are known."""
    return None if a is None or b is None else a - b


def mean(values: Iterable[float | None]) -> float | None:
    """Of what is known."""
    known = [v for v in values if v is not None]
    return statistics.fmean(known) if known else None
