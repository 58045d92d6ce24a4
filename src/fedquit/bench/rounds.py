# SPDX-License-Identifier: Apache-2.0
"""How long a round of training takes: our engines, a plain loop and other frameworks, on the same work in one run.

The ways take turns, a few rounds each, so that whatever else the machine does hits all of them alike. A ratio is that
of two ways in the same turn; its spread is over the turns.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from fedquit.bench.measure import Bench, Figure, chosen_device, machine
from fedquit.bench.peers import PEERS, require
from fedquit.bench.settings import Setting, Way, chosen_setting, digits, engine, plain, text, tokens, transformer
from fedquit.engine import Precision, choose
from fedquit.errors import InputError
from fedquit.utils.names import lookup

APART = 5.0  # points between the highest and the lowest final accuracy
TITLE = "A round of training"
SETTINGS: dict[str, Callable[[torch.device, int], Setting]] = {
    "digits": lambda device, steps: digits(device),
    "cifar": chosen_setting,
    "text": lambda device, steps: text(device),
    "transformer": transformer,
    "gpt": partial(tokens, kind="gpt"),
    "bert": partial(tokens, kind="bert"),
}
WARM_UP = 110  # rounds on the small setting: by then our engine has written down its steps, full batches and last ones


def measured(
    device: str = "cpu",
    *,
    peers: Sequence[str] = (),
    only: str = "",
    turns: int = 7,
    rounds: int = 5,
    steps: int = 10,
    large: bool = True,
    tell: Callable[[Bench], None] = lambda bench: None,
) -> Bench:
    """All figures of a round on this device; `tell` gets all so far after each setting."""
    if min(turns, rounds, steps) < 1:
        raise InputError("a benchmark needs at least one turn, round and step: give 1 or more.")
    at = chosen_device(device)
    names = _names(device, only, large)
    if peers and not (device == "cpu" and {"digits", "cifar"}.issuperset(names)):
        raise InputError("other frameworks train the digits and the ResNet-18, on a CPU: leave --peers out here.")
    for name in peers:
        require(lookup(PEERS, name, "peer"))
    where = machine(at)
    if peers:
        where["beside"] = ", ".join(PEERS[name].title for name in peers)
    figures: list[Figure] = []
    for name in names:
        figures += _figures(name, at, peers, turns, rounds, steps)
        tell(Bench(TITLE, list(figures), where))
    return Bench(TITLE, figures, where)


def _names(device: str, only: str, large: bool) -> Sequence[str]:
    """The digits (on a CPU), the ResNet-18, and the others (on a GPU); or the one that is asked for."""
    if only:
        lookup(SETTINGS, only, "setting")
        return (only,)
    larger = ("cifar",) if device == "cpu" else ("cifar", "text", "transformer")
    return (*(("digits",) if device == "cpu" else ()), *(larger if large else ()))


def _figures(
    name: str, device: torch.device, peers: Sequence[str], turns: int, rounds: int, steps: int
) -> list[Figure]:
    setting = SETTINGS[name](device, steps)
    ways = {**own_ways(setting), **{n: PEERS[n].build(setting) for n in peers}}
    if name == "digits":
        return compare_ways(setting, ways, turns, rounds, WARM_UP)
    return compare_ways(setting, ways, min(turns, 3), 1, 2 if device.type == "cuda" else 1)


def own_ways(setting: Setting) -> dict[str, Way]:
    """The plain loop with one thread and with all, and our engines."""
    cores = torch.get_num_threads()
    precision: Precision = "bf16" if setting.device.type == "cuda" else "float32"
    name = choose("auto", setting.model, setting.data, setting.start).name
    ways: dict[str, Way] = {"plain loop, 1 thread": plain(setting, 1)}
    if cores > 1 and setting.device.type == "cpu":
        ways[f"plain loop, {cores} threads"] = plain(setting, cores)
    ways["sequential engine"] = engine(setting, "sequential", 1 if name == "stacked" else cores)
    ways[f"auto engine ({name})"] = engine(setting, "auto", cores, precision)
    torch.set_num_threads(cores)
    return ways


def compare_ways(setting: Setting, ways: Mapping[str, Way], turns: int, rounds: int, warm_up: int) -> list[Figure]:
    """Seconds a round, how many times the best plain loop's speed, and that all learn alike."""
    first = {name: way.rounds(warm_up)[0] for name, way in ways.items()}  # as many for all, so that all learn as much
    took: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(turns):
        for name, way in ways.items():
            took[name].append(statistics.median(way.rounds(rounds)) * setting.whole)
    loops = [name for name in ways if name.startswith("plain")]
    best = min(loops, key=lambda name: statistics.median(took[name]))
    figures = [
        Figure(f"{setting.title}: {n}", "s a round", tuple(t), setting.limit if _is_auto(n) else None, setting.note)
        for n, t in took.items()
    ]
    for name in ways:
        if name not in loops:
            ratio = tuple(a / b for a, b in zip(took[best], took[name], strict=True))
            figures.append(Figure(f"{setting.title}: {name}, times as fast as the {best}", "x", ratio))
    beginning = tuple(seconds for name, seconds in first.items() if _is_auto(name))
    figures.append(Figure(f"{setting.title}: the first round, auto engine", "s", beginning, setting.first_limit))
    known = {name: setting.accuracy(way.params) for name, way in ways.items() if way.params}
    said = ", ".join(f"{name} {value:.1f} %" for name, value in known.items())
    apart = max(known.values()) - min(known.values())
    figures.append(Figure(f"{setting.title}: final accuracies lie apart", "points", (apart,), APART, said))
    return figures


def _is_auto(way: str) -> bool:
    return way.startswith("auto")


def drawn(bench: Bench, file: Path) -> None:
    """A bar for each way, in seconds a round, with its spread."""
    from matplotlib.figure import Figure as Canvas

    bars = [f for f in bench.figures if f.unit == "s a round"]
    settings = list(dict.fromkeys(f.name.split(": ")[0] for f in bars))
    canvas = Canvas(figsize=(9, 1.2 + 0.45 * len(bars)), layout="constrained")
    for axes, title in zip(canvas.subplots(len(settings), 1, squeeze=False)[:, 0], settings, strict=True):
        own = [f for f in bars if f.name.startswith(f"{title}: ")]
        labels = [f.name.removeprefix(f"{title}: ") for f in own]
        spread = [[f.value - min(f.repeats) for f in own], [max(f.repeats) - f.value for f in own]]
        axes.barh(labels, [f.value for f in own], xerr=spread, color="#4477aa", capsize=3)
        axes.invert_yaxis()
        axes.set_xlabel("seconds a round" + (f" ({own[0].note})" if own[0].note else ""))
        axes.set_title(title, loc="left")
    canvas.savefig(file, dpi=120)
