# SPDX-License-Identifier: Apache-2.0
"""Verdicts of a comparison: which values are judged, how a verdict is stored, and how it is printed.

The tests themselves are in `fedquit.inference`: of gaps to Retrain in `gaps`, of gaps that last in `durable`, of a
method against Natural in `leaving`.
Verdicts are computed once, when a comparison is built; every view reads them.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from fedquit.inference.durable import DURABLE_WORDS, Asked, DurableVerdict, Window, judge_durable, window_field
from fedquit.inference.gaps import (
    CANNOT_TELL,
    DIFFERS,
    EQUIVALENT,
    LEVEL,
    WORDS,
    ClientGap,
    GapSample,
    GapVerdict,
    Margin,
    client_gap,
    judge,
    together,
)
from fedquit.inference.leaving import LEAVING_WORDS, LeavingSample, LeavingVerdict, judge_leaving
from fedquit.inference.multiplicity import holm
from fedquit.results.path import AFTER, WINDOW, last_window, path_points
from fedquit.results.quantities import PairedDifference
from fedquit.results.requests import RequestRows
from fedquit.results.schema import AVERAGED, NATURAL, ON_PATH, RETAIN_PART, Row, number
from fedquit.results.words import signed

JUDGED = ("test_acc", "retain_acc", "forget_acc", "mia_song_svc", "mia_yeom", "backdoor_asr")
OVERALL = "avg_gap"  # the key of the verdict over the four measures of Avg. gap
HEADLINES = (OVERALL, "forget_acc")  # the verdict on the first of these that is there speaks for a method
PAIRED = (*JUDGED, OVERALL)  # in which each method is compared with the first one
OF_LEAVERS = ("forget_acc", "holdout_acc")  # the samples and the distribution of who leaves: what should change
RETRAIN_SEED = "retrain_seed"  # the field of a Retrain's row that names its own seed

MARKS = {DIFFERS: "≠", EQUIVALENT: "=", CANNOT_TELL: ""}

_Kind = TypeVar("_Kind", GapVerdict, LeavingVerdict)
BySeed = Mapping[int, Row]
Runs = Mapping[Any, BySeed]  # by target and seed, the row that is judged


def headline(verdicts: Mapping[str, GapVerdict]) -> GapVerdict | None:
    """The verdict that speaks for a method, or None where no test was made."""
    return next((verdicts[key] for key in HEADLINES if key in verdicts), None)


def judged(methods: Mapping[str, Runs], retrains: Runs, margin: Margin | None) -> dict[str, dict[str, GapVerdict]]:
    """The verdicts of each method by measure, corrected together over methods and measures.

    Args:
        methods: For each method, by target and seed of the run, its recovered row.
        retrains: By target and seed, the row of each Retrain with a seed that no run of the target uses.
        margin: Of the equivalence; None where none was fixed.

    Returns:
        By method and measure; `avg_gap` has the verdict over its four measures.
    """
    samples: dict[tuple[str, str], GapSample] = {}
    for method, runs in methods.items():
        for key in JUDGED:
            if any(number(row.get(key)) is not None for by_seed in runs.values() for row in by_seed.values()):
                samples[method, key] = gap_sample(runs, retrains, key)
    verdicts: dict[str, dict[str, GapVerdict]] = {method: {} for method in methods}
    for (method, key), verdict in judge(samples, margin).items():
        verdicts[method][key] = verdict
    for own in verdicts.values():
        four = [own[key] for key in AVERAGED.values() if key in own]
        if len(four) == len(AVERAGED):
            own[OVERALL] = together(four)
    return verdicts


def gap_sample(runs: Runs, retrains: Runs, key: str) -> GapSample:
    """The values of one method in one measure, beside those of Retrain.

    Targets that share a seed share an Original (or the initial weights of Retrain): they are not independent, and only
    the seeds that all of them have are kept, in one order. Where all have means over equally many last rounds, these
    are the values, as a single round wobbles.

    Args:
        runs: By target and seed of the run, the method's row.
        retrains: By target and seed, the rows of Retrain.
        key: Which measure.
    """
    measure, key = key, _judged_key(runs, retrains, key)
    ours = {target: _values(by_seed, key) for target, by_seed in runs.items()}
    theirs = {target: _values(retrains.get(target, {}), key) for target in runs}
    targets = [target for target in runs if ours[target] and theirs[target]]
    ours = {target: ours[target] for target in targets}
    theirs = {target: theirs[target] for target in targets}
    shared = _overlap(ours) or _overlap(theirs)
    if shared:
        ours = _in_all(ours)
        theirs = _in_all(theirs)
    method, retrain = [_array(ours[t]) for t in targets], [_array(theirs[t]) for t in targets]
    steps = [
        _step([*runs[t].values(), *retrains[t].values()], measure, key, np.concatenate([m, r]))
        for t, m, r in zip(targets, method, retrain, strict=True)
    ]
    return GapSample(method, retrain, shared, steps)


def _judged_key(runs: Runs, retrains: Runs, key: str) -> str:
    """The mean over the last rounds, where method and Retrain have it over equally many; else the last round alone."""
    both = [runs, {target: retrains.get(target, {}) for target in runs}]
    rows = [row for side in both for by_seed in side.values() for row in by_seed.values()]
    averaged = f"{key}_last"
    alike = len({number(row.get("last_rounds")) for row in rows}) == 1
    return averaged if rows and alike and all(number(row.get(averaged)) is not None for row in rows) else key


def _values(by_seed: BySeed, key: str) -> dict[int, float]:
    values = {seed: number(row.get(key)) for seed, row in sorted(by_seed.items())}
    return {seed: value for seed, value in values.items() if value is not None}


def _overlap(by_target: Mapping[Any, Mapping[int, float]]) -> bool:
    """Whether two targets have a seed in common."""
    seeds = [seed for values in by_target.values() for seed in values]
    return len(set(seeds)) < len(seeds)


def _in_all(by_target: Mapping[Any, Mapping[int, float]]) -> dict[Any, dict[int, float]]:
    common = set.intersection(*(set(values) for values in by_target.values()))
    return {target: {s: v for s, v in values.items() if s in common} for target, values in by_target.items()}


def _array(values: Mapping[int, float]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.array(list(values.values()), dtype=np.float64)


def single_clients(
    runs: Runs, retrains: Runs, names: Mapping[Any, str], key: str = "forget_acc"
) -> dict[str, ClientGap]:
    """The gap of each target by itself, against the spread of its own Retrains.

    Args:
        runs: By target and seed of the run, the method's row.
        retrains: By target and seed, the row of each Retrain with a seed that no run of the target uses.
        names: Of the targets, as "client 3".
        key: Which measure.

    Returns:
        By the name of the target; those with fewer than two Retrains are left out, and those whose Retrains coincide
        where nothing says of how many examples they are.
    """
    gaps: dict[str, ClientGap] = {}
    for target, by_seed in runs.items():
        sample = gap_sample({target: by_seed}, retrains, key)
        judged_alone = client_gap(sample.method[0], sample.retrain[0], step=sample.steps[0]) if sample.targets else None
        if judged_alone is not None:
            gaps[names[target]] = judged_alone
    return gaps


_SIZES = {"mia_song_svc": "forget_size", "mia_yeom": "forget_size", "backdoor_asr": "backdoor_images"}
_WHOLE = 0.001  # of an example: what may be missing to a whole number of right ones


def _step(rows: Iterable[Row], measure: str, key: str, values: np.ndarray[Any, Any]) -> float | None:
    """The step of a target's values in points, where its rows say of how many examples they are.

    The mean over k rounds of n examples has steps of 100/(k n) points if rounds move by themselves, and of 100/n if
    they move together: the coarsest grid in between that has all the values is taken. None where no such grid has them,
    as with means over several recoveries, and accuracies of the positions in sequences.

    Args:
        rows: Of the target.
        measure: Of `JUDGED` or `OF_LEAVERS`, or the field of a window.
        key: The field that the values are from.
        values: Of method and Retrain.
    """
    rows = list(rows)
    plain = measure.partition("_after_")[0]
    field = _SIZES.get(plain, f"{plain.removesuffix('_acc')}_size")
    sizes = {size for row in rows if (size := number(row.get(field)))}
    if len(sizes) != 1:
        return None
    size = sizes.pop()
    rounds = WINDOW if plain != measure else 1
    if key.endswith("_last"):
        rounds = max((int(number(row.get("last_rounds")) or 1) for row in rows), default=1)
    if plain == "retain_acc" and rounds > 1:
        size = min(size, RETAIN_PART)
    counts = values * size / 100
    for parts in range(1, rounds + 1):
        if np.abs(counts * parts - np.round(counts * parts)).max() <= _WHOLE:
            return 100 / (size * parts)
    return None


def read_clients(stored: object) -> dict[str, ClientGap]:
    """From JSON; a client of which a number is missing is left out."""
    gaps: dict[str, ClientGap] = {}
    for name, value in stored.items() if isinstance(stored, dict) else ():
        fields = (
            [number(value.get(spec.name)) for spec in dataclasses.fields(ClientGap)] if isinstance(value, dict) else []
        )
        known = [field for field in fields if field is not None]
        if len(known) == len(dataclasses.fields(ClientGap)):
            gaps[str(name)] = ClientGap(known[0], known[1], known[2], int(known[3]), int(known[4]))
    return gaps


def clients_outside(clients: Mapping[str, ClientGap]) -> str:
    """Which targets lie outside the prediction interval of another Retrain, as a clause; "" where none is judged."""
    if not clients:
        return ""
    out = [f"{name} {signed(client.gap)}" for name, client in clients.items() if client.outside]
    named = f" ({', '.join(out)})" if out else ""
    return f"{len(out)} of {len(clients)} targets lie outside where another Retrain would lie in 95 % of cases{named}"


def durable(methods: Mapping[str, Runs], retrains: Runs, margin: Margin | None) -> dict[str, DurableVerdict]:
    """Whether each method stays at Retrain after the recovery's stop, in both kinds of forgetting.

    Forget accuracy is judged, and hold-out accuracy where clients have a hold-out: a gap in the first is memory of the
    samples and knowledge of the client's distribution together, and the second has the knowledge alone. A window of
    five rounds after the stop is compared with the last five rounds of each Retrain's training.

    Args:
        methods: For each method, by target and seed of the run, its recovered row.
        retrains: By target and seed, the row of each Retrain with a seed that no run of the target uses.
        margin: Of the equivalence; None where none was fixed.

    Returns:
        By method; only those that were followed after the stop (`recover.follow`).
    """
    samples: dict[str, dict[Window, GapSample]] = {}
    for window in itertools.product(OF_LEAVERS, AFTER):
        key = window_field(window)
        golds = {
            target: {seed: _with_window(row, window) for seed, row in own.items()} for target, own in retrains.items()
        }
        for method, runs in methods.items():
            if all(number(row.get(key)) is not None for by_seed in runs.values() for row in by_seed.values()):
                samples.setdefault(method, {})[window] = gap_sample(runs, golds, key)
    names = {key: f"{ON_PATH[key].lower()} accuracy" for key in OF_LEAVERS}
    return judge_durable(samples, Asked(AFTER, names, margin))


def _with_window(retrain: Row, window: Window) -> Row:
    """A Retrain's row with its last five rounds under the name of a window."""
    return {**retrain, window_field(window): last_window(path_points(retrain.get("path")), window[0])}


def against_natural(
    methods: Mapping[str, Sequence[RequestRows]], margin: Margin | None
) -> dict[str, dict[str, LeavingVerdict]]:
    """The verdicts of each method against Natural at equal rounds, corrected together over methods and measures.

    Args:
        methods: By method, the requests that it served, with their controls.
        margin: Of the equivalence; None where none was fixed.

    Returns:
        By method and measure, for the measures that Natural has beside some run; nothing for Natural itself.
    """
    samples: dict[tuple[str, str], LeavingSample] = {}
    for method, requests in methods.items():
        for key in OF_LEAVERS if method != NATURAL else ():
            sample = leaving_sample(requests, key)
            if sample.runs:
                samples[method, key] = sample
    verdicts: dict[str, dict[str, LeavingVerdict]] = {}
    for (method, key), verdict in judge_leaving(samples, margin).items():
        verdicts.setdefault(method, {})[key] = verdict
    return verdicts


def leaving_sample(requests: Sequence[RequestRows], key: str) -> LeavingSample:
    """The differences of one method from Natural in one measure, by target and seed.

    Where every run has the means over the last rounds, these are compared, else the round of the recovery's stop. Of
    targets that share a seed, and so an Original, only the seeds that all of them have are kept, in one order.

    Args:
        requests: Of the method, with their controls.
        key: An accuracy of `schema.ON_PATH`.
    """
    averaged = f"{key}_last"
    both = [_natural_difference(request, averaged) for request in requests]
    measure = key if None in both else averaged
    by_target: dict[Any, dict[int, float]] = {}
    rows: dict[Any, list[Row]] = {}
    for place, request in enumerate(requests):
        difference = _natural_difference(request, measure)
        if difference is not None:
            seed = request.seed if isinstance(request.seed, int) else place
            by_target.setdefault(request.clients, {})[seed] = difference
            rows.setdefault(request.clients, []).append(request.row("recovered"))
    shared = _overlap(by_target)
    if shared:
        by_target = _in_all(by_target)
    differences = [_array(dict(sorted(own.items()))) for own in by_target.values()]
    steps = [_step(rows[t], key, measure, own) for t, own in zip(by_target, differences, strict=True)]
    return LeavingSample(differences, shared, steps)


def _natural_difference(request: RequestRows, key: str) -> float | None:
    """The method's measure less Natural's after as many rounds; None where one of the two is missing."""
    own = request.get("recovered", key)
    control = request.natural.get(f"natural_{key}")
    return None if own is None or control is None else own - control


def judged_pairs(pairs: Mapping[str, Mapping[str, PairedDifference]]) -> dict[str, dict[str, PairedDifference]]:
    """Each method against the first one, corrected together by Holm's rule over methods and judged measures.

    Args:
        pairs: By method and measure, each for itself.

    Returns:
        The same, with adjusted p-values; the adjusted value of a difference is at most 0.05 as well. Measures that are
        not judged have none.
    """
    family = [(method, key) for method, own in pairs.items() for key in own if key in PAIRED]
    alone = [pairs[method][key].p for method, key in family]
    adjusted = dict(zip(family, holm([1.0 if p is None else p for p in alone]), strict=True))
    judged_all: dict[str, dict[str, PairedDifference]] = {}
    for method, own in pairs.items():
        judged_all[method] = {}
        for key, pair in own.items():
            p = None if pair.p is None else adjusted.get((method, key))
            known = p is not None and p <= LEVEL
            judged_all[method][key] = dataclasses.replace(pair, p=p, different=pair.different and known)
    return judged_all


def read_verdicts(stored: object) -> dict[str, GapVerdict]:
    """From JSON; a verdict without one of the three words is left out."""
    return _read(stored, GapVerdict, WORDS)


def read_leaving(stored: object) -> dict[str, LeavingVerdict]:
    """From JSON; a verdict without one of the three words is left out."""
    return _read(stored, LeavingVerdict, LEAVING_WORDS)


def read_durable(stored: object) -> DurableVerdict | None:
    """From JSON; None where it has none of the three words."""
    if not isinstance(stored, dict) or stored.get("word") not in DURABLE_WORDS:
        return None
    return DurableVerdict(
        word=str(stored["word"]),
        reason=_reason(stored),
        p=number(stored.get("p")),
        equivalence_p=number(stored.get("equivalence_p")),
        margin=number(stored.get("margin")),
        hypotheses=int(number(stored.get("hypotheses")) or 0),
        windows=read_verdicts(stored.get("windows")),
    )


def _read(stored: object, kind: type[_Kind], words: Sequence[str]) -> dict[str, _Kind]:
    verdicts: dict[str, _Kind] = {}
    for key, value in stored.items() if isinstance(stored, dict) else ():
        if not isinstance(value, dict) or value.get("word") not in words:
            continue
        fields: dict[str, Any] = {}
        for spec in dataclasses.fields(kind):
            if spec.name == "reason":
                fields[spec.name] = _reason(value)
            elif spec.name in ("word", "design"):
                fields[spec.name] = str(value.get(spec.name, ""))
            elif spec.name in ("targets", "runs", "retrains", "hypotheses"):
                fields[spec.name] = int(number(value.get(spec.name)) or 0)
            else:
                fields[spec.name] = number(value.get(spec.name))
        verdicts[str(key)] = kind(**fields)
    return verdicts


def _reason(stored: Mapping[str, Any]) -> str:
    """The sentence of a stored verdict; earlier versions wrote a small p-value in another way."""
    return str(stored.get("reason", "")).replace("p = below 0.001", "p < 0.001")


def mark(verdicts: Mapping[str, GapVerdict], key: str) -> str:
    """The sign of a verdict for a cell of a table; "" where nothing can be told.

    Args:
        verdicts: Of one method.
        key: A measure, or `avg_gap`.
    """
    return MARKS[verdicts[key].word] if key in verdicts else ""


def legend(each: Iterable[Mapping[str, GapVerdict]]) -> str:
    """What the marks mean, as a clause.

    Args:
        each: The verdicts of each method.
    """
    margins = {verdict.margin for own in each for verdict in own.values() if verdict.margin is not None}
    within = f"±{margins.pop():g} points" if len(margins) == 1 else "the margin"
    return (
        f"≠ differs from Retrain, = equivalent within {within}, unmarked: cannot tell; the chance of any false ≠ is at "
        "most 5 %, and so is that of any false ="
    )


def open_question(each: Iterable[Mapping[str, GapVerdict] | Mapping[str, LeavingVerdict]]) -> str:
    """Why something cannot be told and which sizes would tell, as a clause; "" where all is told.

    Args:
        each: The verdicts of each method; the forget accuracy speaks first.
    """
    unknown = [(key, verdict) for own in each for key, verdict in own.items() if verdict.word == CANNOT_TELL]
    unknown.sort(key=lambda item: item[0] != "forget_acc")
    return unknown[0][1].reason if unknown else ""


def forget_gap(verdict: GapVerdict) -> str:
    """The signed gap in forget accuracy with its interval, and the verdict, as a clause.

    Args:
        verdict: On the forget accuracy, from at least one run and one Retrain.
    """
    gap = f"forget accuracy {signed(verdict.gap)} points from the mean of {verdict.retrains} Retrains"
    known = verdict.low is not None and verdict.high is not None
    interval = f" (95 % interval {signed(verdict.low)} to {signed(verdict.high)})" if known else ""
    return f"{gap}{interval}: {CANNOT_TELL if verdict.word == CANNOT_TELL else verdict.reason}"


def leaving_sentence(verdict: LeavingVerdict, key: str = "forget_acc") -> str:
    """The difference from Natural with its interval, and the verdict, as a clause.

    Args:
        verdict: On a measure.
        key: Which one.
    """
    size = f"{ON_PATH[key].lower()} accuracy {signed(verdict.difference)} points from Natural's at equal rounds"
    known = verdict.low is not None and verdict.high is not None
    interval = f" (95 % interval {signed(verdict.low)} to {signed(verdict.high)})" if known else ""
    return f"{size}{interval}: {CANNOT_TELL if verdict.word == CANNOT_TELL else verdict.reason}"


def retrain_table(retrains: Runs, clients: Mapping[Any, Sequence[int]]) -> list[dict[str, Any]]:
    """What is stored of the Retrains that the verdicts rest on: clients, seed and the judged measures of each.

    Args:
        retrains: By target and seed, the rows of Retrain.
        clients: Of each target.
    """
    table = []
    for target, by_seed in retrains.items():
        for seed, row in sorted(by_seed.items()):
            keys = (*JUDGED, *(f"{key}_last" for key in JUDGED), "last_rounds")
            measures = {key: value for key in keys if (value := number(row.get(key))) is not None}
            table.append({"clients": list(clients[target]), "seed": seed, **measures})
    return table
