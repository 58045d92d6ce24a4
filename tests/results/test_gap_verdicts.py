# SPDX-License-Identifier: Apache-2.0
"""Verdicts in a comparison: from rows to `comparison.json` and back, with their error rate over whole studies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedquit.cli.runs import _print_paired
from fedquit.inference.gaps import ClientGap, Margin
from fedquit.results.comparison import Comparison, Outcome, build_comparison
from fedquit.results.path import durability, last_rounds, last_window
from fedquit.results.quantities import PairedDifference
from fedquit.results.requests import RequestRows
from fedquit.results.schema import AVERAGED
from fedquit.results.summary import MethodSummary
from fedquit.results.verdicts import (
    JUDGED,
    clients_outside,
    forget_gap,
    gap_sample,
    leaving_sample,
    leaving_sentence,
    legend,
    mark,
    open_question,
    single_clients,
)

MEASURES = ("test_acc", *AVERAGED.values())
LEVELS = np.array([75.0, 80.0, 60.0, 70.0, 55.0])  # of Retrain in these measures
SPREAD = np.array([0.5, 0.4, 2.0, 1.5, 2.5])  # its standard deviation over seeds


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bootstrap of pairs of methods takes the most time, and has no part in the verdicts."""
    monkeypatch.setattr("fedquit.results.gaps.RESAMPLES", 99)


def row(phase: str, values: Any, **more: Any) -> dict[str, Any]:
    return {"phase": phase, "rounds": 1, **dict(zip(MEASURES, map(float, values), strict=True)), **more}


def simulated(
    seed: int,
    *,
    targets: int = 5,
    runs: int = 1,
    retrains: int = 3,
    shift: float = 0.0,
    methods: tuple[str, ...] = ("null",),
    only: str = "",
    margin: Margin | None = None,
) -> Comparison:
    """A comparison of methods that are Retrain with another seed, but for a shift of the forget accuracy in points.

    All methods are shifted, or `only` one.

    Each target has levels of its own, and each measure a spread of its own; the measures of a model are correlated.
    """
    draw = np.random.default_rng(seed)

    def model(level: Any) -> Any:
        common = draw.normal()
        return level + SPREAD * (0.6 * common + 0.8 * draw.normal(size=len(MEASURES)))

    outcomes = []
    again: dict[Any, dict[str, Any]] = {}
    others: dict[Any, list[dict[str, Any]]] = {}
    for target in range(targets):
        level = LEVELS + draw.normal(0, 4, size=len(MEASURES))
        others[target] = [row("retrained again", model(level), retrain_seed=1000 * target + r) for r in range(retrains)]
        for j in range(runs):
            place = target + targets * j
            retrained = row("retrained", model(level))
            again[target, place] = others[target][j % retrains]
            for method in methods:
                reached = model(level)
                reached[MEASURES.index("forget_acc")] += shift if only in ("", method) else 0.0
                rows = [row("original", level + 20), retrained, row("unlearned", level - 30), row("recovered", reached)]
                folder = Path("out") / f"seed-{place}" / f"client-{target}" / method
                outcomes.append(Outcome(method, target, place, folder, tuple(rows)))
    given: dict[str, Any] = {"retrains": others, "margin": margin}
    return build_comparison({}, {}, methods, outcomes, again, Path("out"), **given)


def words(comparison: Comparison, method: str = "null") -> dict[str, str]:
    return {key: verdict.word for key, verdict in comparison.methods[method].verdicts.items()}


def test_a_retrain_in_the_place_of_a_method_is_called_different_in_at_most_19_of_200_studies() -> None:
    """5 % and three standard errors; a study counts if any of its measures is called different."""
    called = sum("differs" in words(simulated(seed)).values() for seed in range(200))
    assert called <= 19


def test_two_such_methods_in_as_few() -> None:
    studies = [simulated(1000 + seed, targets=6, methods=("null", "again")) for seed in range(100)]
    called = sum(
        "differs" in {**words(s), **{f"{k}2": w for k, w in words(s, "again").items()}}.values() for s in studies
    )
    assert called <= 11


def called_apart(comparison: Comparison) -> set[str]:
    """The methods that are called farther from Retrain than the first one, or nearer, in some measure."""
    lines = comparison.methods.items()
    return {method for method, line in lines if any(pair.different for pair in line.against_first.values())}


def test_equal_methods_are_called_farther_or_nearer_than_the_first_in_at_most_11_of_100_studies() -> None:
    """5 % and three standard errors for any of four pairs in any measure; each pair by itself would err far more."""
    equal = ("first", "a", "b", "c", "d")
    studies = [simulated(8000 + seed, targets=6, methods=equal) for seed in range(100)]
    assert sum(bool(called_apart(study)) for study in studies) <= 11
    alone = [
        any(line.against_first[key].low > 0 or line.against_first[key].high < 0 for key in MEASURES)
        for study in studies
        for line in study.methods.values()
        if line.against_first
    ]
    assert np.mean(alone) > 0.11, "the intervals are for themselves"


def test_a_method_that_is_farther_than_the_first_is_found() -> None:
    studies = [
        simulated(9000 + seed, targets=8, methods=("first", "far"), shift=12.0, only="far") for seed in range(20)
    ]
    assert sum("far" in called_apart(study) for study in studies) >= 18


def test_a_method_that_is_off_is_found_in_the_measure_in_which_it_is() -> None:
    """By three standard deviations of Retrain: most often, and not in the others."""
    studies = [words(simulated(2000 + seed, targets=6, shift=6.0)) for seed in range(40)]
    assert sum(study["forget_acc"] == "differs" for study in studies) >= 30
    assert sum(study["avg_gap"] == "differs" for study in studies) >= 30
    assert sum(study["test_acc"] == "differs" for study in studies) <= 6


def test_with_a_margin_a_null_method_is_equivalent_and_one_at_the_margin_is_not() -> None:
    margin = Margin(5.0)
    alike = [words(simulated(3000 + seed, targets=8, margin=margin)) for seed in range(40)]
    assert sum(study["forget_acc"] == "equivalent" for study in alike) >= 30
    assert sum(study["avg_gap"] == "equivalent" for study in alike) >= 25
    apart = [words(simulated(4000 + seed, targets=8, shift=5.0, margin=margin)) for seed in range(40)]
    assert sum(study["forget_acc"] == "equivalent" for study in apart) <= 7
    without = words(simulated(3000, targets=8))
    assert "equivalent" not in without.values()


def test_a_verdict_is_stored_and_read_back_with_what_it_rests_on() -> None:
    comparison = simulated(1, margin=Margin(2.0))
    stored = json.loads(json.dumps(comparison.to_dict()))
    assert stored["margin"] == "2"
    assert len(stored["retrains"]) == 15
    assert stored["retrains"][3]["clients"] == [1]
    assert stored["retrains"][3]["seed"] == 1000
    assert stored["retrains"][0].keys() == {"clients", "seed", *MEASURES}
    read = Comparison.read("out", stored)
    assert read.methods["null"].verdicts == comparison.methods["null"].verdicts
    assert read.to_dict() == comparison.to_dict()
    verdict = read.methods["null"].verdicts["forget_acc"]
    assert (verdict.targets, verdict.runs, verdict.retrains, verdict.hypotheses) == (5, 1, 3, 5)
    assert (verdict.design, verdict.margin) == ("own", 2.0)
    gaps = []
    for target in range(5):
        retrains = [r["forget_acc"] for r in stored["retrains"] if r["clients"] == [target]]
        gaps.append(float(np.mean(retrains)))
    means = comparison.methods["null"].means["forget_acc"]
    assert verdict.gap == pytest.approx(means - np.mean(gaps))


def test_damaged_verdicts_count_as_none_and_older_files_stay_readable() -> None:
    old = {
        "method": "m",
        "phase": "recovered",
        "runs": 2,
        "inside_floor": ["forget_acc"],
        "spread": {"forget_acc": 2.0},
    }
    line = MethodSummary.read(old)
    assert line.verdicts == {}
    assert line.spread == {"forget_acc": 2.0}
    assert line.to_dict()["inside_floor"] == ["forget_acc"], "what an older version wrote is kept"
    wrong = {"a": {"word": "?"}, "b": 3, "c": {"word": "differs", "p": "x", "targets": None}}
    known = MethodSummary.read({**old, "verdicts": wrong}).verdicts
    assert list(known) == ["c"]
    assert (known["c"].p, known["c"].targets, known["c"].reason) == (None, 0, "")
    assert MethodSummary.read({**old, "verdicts": [1]}).verdicts == {}


def shared(seeds: int, shift: float = 0.0) -> Comparison:
    """Two targets with the same seeds, as a comparison without `--retrain-seeds` has them."""
    draw = np.random.default_rng(7)
    outcomes = []
    again: dict[Any, dict[str, Any]] = {}
    for seed in range(seeds):
        for target in (0, 1):
            values = {phase: row(phase, LEVELS + draw.normal(size=5)) for phase in ("retrained", "recovered", "x")}
            values["recovered"]["forget_acc"] += shift
            again[target, seed] = {**values["x"], "phase": "retrained again", "retrain_seed": seed + 1000}
            rows = [{"phase": "unlearned"}, values["retrained"], values["recovered"]]
            outcomes.append(Outcome("m", target, seed, Path(f"out/seed-{seed}/client-{target}/m"), tuple(rows)))
    return build_comparison({}, {}, ["m"], outcomes, again, Path("out"))


def test_targets_with_the_same_seeds_are_known_to_share_an_original() -> None:
    verdict = shared(3).methods["m"].verdicts["forget_acc"]
    assert (verdict.word, verdict.design, verdict.runs, verdict.retrains) == ("cannot tell", "shared", 3, 3)
    assert "the targets share an Original, so that only whole seeds count" in verdict.reason
    assert (verdict.low, verdict.high, verdict.equivalence_p) == (None, None, None)
    found = shared(6, shift=30.0).methods["m"].verdicts
    assert found["forget_acc"].word == "differs", "six seeds of both have 462 arrangements"
    assert found["test_acc"].word == "cannot tell"


def test_one_seed_cannot_tell_and_says_what_would() -> None:
    verdicts = shared(1, shift=50.0).methods["m"].verdicts
    assert {verdict.word for verdict in verdicts.values()} == {"cannot tell"}
    assert verdicts["forget_acc"].reason == (
        "cannot tell: one Retrain shows no spread; a difference can be shown with 4 targets with 3 Retrains each or "
        "3 targets with 4 Retrains each"
    )
    assert open_question([verdicts]) == verdicts["forget_acc"].reason


def test_a_gap_is_told_with_its_interval_and_the_verdict() -> None:
    verdict = simulated(2000, targets=6, shift=30.0).methods["null"].verdicts["forget_acc"]
    assert verdict.low is not None
    assert verdict.high is not None
    assert verdict.p is not None
    assert forget_gap(verdict) == (
        f"forget accuracy +{verdict.gap:.1f} points from the mean of 3 Retrains (95 % interval +{verdict.low:.1f} to "
        f"+{verdict.high:.1f}): differs from Retrain (p = {verdict.p:.3f})"
    )
    unknown = shared(3).methods["m"].verdicts["forget_acc"]
    assert forget_gap(unknown).endswith(" points from the mean of 3 Retrains: cannot tell")


def test_marks_and_their_legend() -> None:
    comparison = simulated(2000, targets=6, shift=30.0, margin=Margin(2.5))
    verdicts = comparison.methods["null"].verdicts
    assert mark(verdicts, "forget_acc") == "≠"
    assert mark(verdicts, "backdoor_asr") == mark({}, "forget_acc") == ""
    assert "= equivalent within ±2.5 points" in legend([verdicts])
    assert "= equivalent within the margin" in legend([{}])
    assert set(verdicts) == {*JUDGED, "avg_gap"} - {"backdoor_asr"}


@pytest.mark.parametrize(("rounds", "judged"), [(10, 51.0), (7, 60.0)])
def test_means_over_the_last_rounds_are_judged_where_both_have_equally_many(rounds: int, judged: float) -> None:
    method = {0: {0: {"forget_acc": 60.0, "forget_acc_last": 51.0, "last_rounds": rounds}}}
    retrains = {0: {7: {"forget_acc": 50.0, "forget_acc_last": 52.0, "last_rounds": 10}, 8: {"forget_acc": 49.0}}}
    retrains[0][8] |= {"forget_acc_last": 53.0, "last_rounds": 10}
    sample = gap_sample(method, retrains, "forget_acc")
    assert sample.method[0].tolist() == [judged]
    assert sample.retrain[0].tolist() == ([52.0, 53.0] if judged == 51.0 else [50.0, 49.0])
    del retrains[0][8]["forget_acc_last"]
    assert gap_sample(method, retrains, "forget_acc").method[0].tolist() == [60.0]


def controlled(
    seed: int, *, targets: int = 8, effect: float = 0.0, margin: Margin | None = None, methods: tuple[str, ...] = ("m",)
) -> Comparison:
    """A comparison whose methods continue from their Originals as Natural does, but for an effect in points.

    Each run has ten rounds after the request; the forget accuracy wobbles from round to round.
    """
    draw = np.random.default_rng(seed)
    outcomes = []
    again: dict[Any, dict[str, Any]] = {}
    controls: dict[Any, list[dict[str, Any]]] = {}
    for target in range(targets):
        original = LEVELS + draw.normal(0, 4, size=len(MEASURES))

        def path(level: float) -> list[dict[str, Any]]:
            mean = level + draw.normal(0, 2.0)
            rounds = [{"round": r, "phase": "recovery", "forget_acc": mean + draw.normal()} for r in range(1, 11)]
            return [{"round": 0, "phase": "original", "forget_acc": level}, *rounds]

        retrained = row("retrained", original - 10)
        again[target, target] = {**row("retrained again", original - 10), "retrain_seed": 1000 + target}
        controls[target, target] = path(original[2])
        for method in methods:
            own = path(original[2] + effect)
            values = {**row("recovered", original), **last_rounds(own), "rounds": 10, "path": own}
            values["forget_acc"] = own[-1]["forget_acc"]
            rows = [row("original", original), retrained, {**row("unlearned", original), "rounds": 0}, values]
            folder = Path("out") / f"seed-{target}" / f"client-{target}" / method
            outcomes.append(Outcome(method, target, target, folder, tuple(rows)))
    return build_comparison({}, {}, methods, outcomes, again, Path("out"), controls=controls, margin=margin)


def test_a_method_that_is_natural_differs_from_leaving_in_at_most_19_of_200_studies() -> None:
    """5 % and three standard errors."""
    verdicts = [controlled(5000 + seed).methods["m"].leaving["forget_acc"] for seed in range(200)]
    assert sum(verdict.word == "differs from leaving" for verdict in verdicts) <= 19


def test_a_method_is_judged_against_natural_at_equal_rounds() -> None:
    comparison = controlled(1, effect=-12.0, margin=Margin(3.0), methods=("m", "natural"))
    verdict = comparison.methods["m"].leaving["forget_acc"]
    assert (verdict.word, verdict.targets, verdict.runs, verdict.hypotheses) == ("differs from leaving", 8, 1, 1)
    assert comparison.methods["natural"].leaving == {}, "the control is not judged against itself"
    differences = []
    for outcome in comparison.methods["m"].last, comparison.methods["m"].natural_last:
        differences.append(outcome["forget_acc"])
    assert verdict.difference == pytest.approx(differences[0] - differences[1]), "means over the last ten rounds"
    assert leaving_sentence(verdict) == (
        f"forget accuracy −{-differences[0] + differences[1]:.1f} points from Natural's at equal rounds (95 % interval "
        f"−{-(verdict.low or 0):.1f} to −{-(verdict.high or 0):.1f}): differs from leaving (p = 0.008)"
    )
    alike = controlled(2, margin=Margin(5.0)).methods["m"].leaving["forget_acc"]
    assert alike.word == "no benefit over leaving"
    unknown = controlled(2).methods["m"].leaving
    assert unknown["forget_acc"].word == "cannot tell"
    assert leaving_sentence(unknown["forget_acc"]).endswith(": cannot tell")
    assert "no benefit over leaving” needs a margin" in open_question([unknown])


def test_a_verdict_against_natural_is_stored_and_read_back() -> None:
    comparison = controlled(3, margin=Margin(3.0))
    read = Comparison.read("out", json.loads(json.dumps(comparison.to_dict())))
    assert read.methods["m"].leaving == comparison.methods["m"].leaving
    assert MethodSummary.read({"method": "m", "leaving": {"forget_acc": {"word": "better"}}}).leaving == {}
    assert MethodSummary.read({"method": "m"}).leaving == {}


def test_targets_with_the_same_seeds_are_compared_with_natural_by_whole_seeds() -> None:
    def request(target: int, seed: int, **more: Any) -> RequestRows:
        values = {"forget_acc": 50.0 + seed, "natural_forget_acc": 40.0 + target, **more}
        return RequestRows(0, [{"phase": "recovered", "clients": [target], "seed": seed, "rounds": 1, **values}])

    requests = [request(target, seed) for target in (0, 1) for seed in (2, 1, 0)]
    sample = leaving_sample(requests, "forget_acc")
    assert sample.shared
    assert [own.tolist() for own in sample.differences] == [[10.0, 11.0, 12.0], [9.0, 10.0, 11.0]], "in order of seeds"
    fewer = leaving_sample(requests[:-1], "forget_acc")
    assert [own.tolist() for own in fewer.differences] == [[11.0, 12.0], [10.0, 11.0]], "seeds that all targets have"
    own = leaving_sample([request(0, 0), request(1, 1)], "forget_acc")
    assert not own.shared
    mixed = [request(0, 0, forget_acc_last=1.0, natural_forget_acc_last=9.0), request(1, 1)]
    assert leaving_sample(mixed, "forget_acc").differences[0].tolist() == [10.0], "one run has no last rounds"
    averaged = leaving_sample(mixed[:1], "forget_acc")
    assert averaged.differences[0].tolist() == [-8.0]
    assert leaving_sample(requests, "holdout_acc").runs == 0


def followed(
    seed: int, *, back: float = 0.0, rounds: int = 20, margin: Margin | None = None, key: str = "forget_acc"
) -> Comparison:
    """A null method one of whose accuracies comes back by some points in the last five of twenty rounds."""
    draw = np.random.default_rng(seed)
    outcomes = []
    again: dict[Any, dict[str, Any]] = {}
    others: dict[Any, list[dict[str, Any]]] = {}
    for target in range(6):
        level = 60 + draw.normal(0, 4)

        def path(phase: str, number: int, *, level: float = level) -> list[dict[str, Any]]:
            mean = level + draw.normal(0, 1.5)
            other = mean - 8 + draw.normal()
            wobble = draw.normal(size=(number, 2))
            return [
                {"round": r, "phase": phase, "forget_acc": mean + one, "holdout_acc": other + two}
                for r, (one, two) in enumerate(wobble.tolist(), 1)
            ]

        others[target] = [
            {**row("retrained again", LEVELS), "path": path("training", 10), "retrain_seed": 1000 * target + r}
            for r in range(3)
        ]
        again[target, target] = others[target][0]
        own = path("followed", rounds)
        for point in own[-5:]:
            point[key] += back
        recovered = {**row("recovered", LEVELS), "path": own, **durability(own)}
        rows = (row("retrained", LEVELS), row("unlearned", LEVELS), recovered)
        outcomes.append(Outcome("m", target, target, Path(f"out/seed-{target}/client-{target}/m"), rows))
    return build_comparison({}, {}, ["m"], outcomes, again, Path("out"), retrains=others, margin=margin)


def test_durability_is_judged_in_windows_of_five_rounds_of_method_and_retrain() -> None:
    comparison = followed(1, back=15.0, margin=Margin(4.0))
    verdict = comparison.methods["m"].durable
    assert verdict is not None
    assert verdict.word == "not durable"
    assert "forget accuracy differs from Retrain's 20 rounds after the stop" in verdict.reason
    before = verdict.windows["forget_acc_after_10"].gap
    assert verdict.windows["forget_acc_after_20"].gap == pytest.approx((before or 0.0) + 15.0, abs=2.0)
    known = followed(1, back=15.0, key="holdout_acc").methods["m"].durable
    assert known is not None
    assert "hold-out accuracy differs from Retrain's 20 rounds after the stop" in known.reason
    stored = json.loads(json.dumps(comparison.to_dict()))
    read = Comparison.read("out", stored).methods["m"]
    assert read.durable == verdict
    assert read.to_dict() == comparison.methods["m"].to_dict()
    assert MethodSummary.read({"method": "m", "durable": {"word": "lasts"}}).durable is None
    lasting = followed(4, margin=Margin(5.0)).methods["m"].durable
    assert lasting is not None
    assert lasting.word == "durable"


def test_a_null_method_is_called_not_durable_in_at_most_11_of_100_studies() -> None:
    """5 % and three standard errors."""
    verdicts = [followed(6000 + seed).methods["m"].durable for seed in range(100)]
    assert sum(verdict is not None and verdict.word == "not durable" for verdict in verdicts) <= 11


def test_durability_needs_the_whole_path_and_retrains_last_rounds() -> None:
    short = followed(3, rounds=10, margin=Margin(5.0)).methods["m"].durable
    assert short is not None
    assert short.word == "cannot tell"
    assert "set recover.follow = 20" in short.reason
    assert simulated(0).methods["null"].durable is None, "nothing was followed"
    assert last_window([{"forget_acc": float(i)} for i in range(10)], "forget_acc") == 7.0
    assert last_window([{"forget_acc": 1.0}] * 4, "forget_acc") is None


def test_single_clients_are_judged_by_the_spread_of_their_own_retrains() -> None:
    comparison = simulated(9, targets=3, retrains=10)
    clients = comparison.methods["null"].clients
    assert list(clients) == ["client 0", "client 1", "client 2"]
    for target, client in enumerate(clients.values()):
        own = [r["forget_acc"] for r in comparison.retrains if r["clients"] == [target]]
        plain = 2.373 * float(np.std(own, ddof=1))  # t(0.975, 9) √(1 + 1/10)
        assert plain - 1e-3 <= client.high <= 1.1 * plain, "with what the step adds"
        assert client.low == pytest.approx(-client.high)
        assert (client.runs, client.retrains) == (1, 10)
    assert sum(client.gap for client in clients.values()) / 3 == pytest.approx(
        comparison.methods["null"].verdicts["forget_acc"].gap
    )
    off = simulated(9, targets=3, retrains=10, shift=30.0).methods["null"].clients
    assert all(client.outside for client in off.values())
    gap = f"+{off['client 0'].gap:.1f}"
    assert clients_outside(off).startswith(
        f"3 of 3 targets lie outside where another Retrain would lie in 95 % of cases (client 0 {gap}, client 1"
    )
    read = Comparison.read("out", json.loads(json.dumps(comparison.to_dict())))
    assert read.methods["null"].clients == clients
    assert MethodSummary.read({"method": "m", "clients": {"client 0": {"gap": 1}, "b": 2}}).clients == {}
    assert clients_outside({}) == ""
    assert simulated(9, targets=3, retrains=1).methods["null"].clients == {}, "one Retrain shows no spread"


def test_single_clients_whose_retrains_coincide_are_judged_by_the_number_of_their_examples() -> None:
    retrains = {0: {seed: {"forget_acc": 50.0} for seed in (7, 8, 9)}}

    def judged_alone(accuracy: float, **size: int) -> ClientGap | None:
        runs = {0: {0: {"forget_acc": accuracy, **size}}}
        return single_clients(runs, retrains, {0: "client 0"}).get("client 0")

    of_hundred = judged_alone(51.0, forget_size=100)
    assert of_hundred is not None
    assert of_hundred.high == pytest.approx(1.934, abs=1e-3), "t(0.975, 2) √(4/3 · 1/12) + 1/2 steps of one point"
    assert not of_hundred.outside, "one example more"
    of_thousand = judged_alone(51.0, forget_size=1000)
    assert of_thousand is not None
    assert of_thousand.outside, "ten examples more"
    assert judged_alone(51.0) is judged_alone(50.0) is None, "nothing shows a step"


def test_the_step_of_a_mean_over_rounds_is_the_coarsest_that_has_all_values() -> None:
    def row(value: float, **others: float) -> dict[str, float]:
        own = {"forget_acc": round(value / 5) * 5.0, "forget_acc_last": value, "last_rounds": 10, "forget_size": 20}
        return {**own, **others}

    def step(*values: float, key: str = "forget_acc", **others: float) -> float | None:
        runs = {0: {0: row(values[0], **others)}}
        golds = {0: {seed: row(value, **others) for seed, value in enumerate(values[1:], 7)}}
        return gap_sample(runs, golds, key).steps[0]

    assert step(60.0, 51.0, 51.5, 50.5) == pytest.approx(0.5), "100 / (10 · 20)"
    assert step(60.0, 52.5, 50.0, 50.0) == pytest.approx(2.5)
    assert step(60.0, 50.0, 50.0, 50.0) == pytest.approx(5.0), "the rounds move together"
    assert step(60.03, 50.0, 50.0, 50.0) is None, "no mean of ten rounds of twenty examples"
    assert step(60.0, 50.0, forget_size=0) is None, "older results"
    path = {"retain_acc": 100.0, "retain_acc_last": 100.0, "retain_size": 50_000}
    assert step(60.0, 50.0, key="retain_acc", **path) == pytest.approx(0.01), "10,000 of them after every round"
    assert step(60.0, 50.0, key="mia_yeom", mia_yeom=35.0) == pytest.approx(5.0)
    assert step(60.0, 50.0, key="forget_acc_after_20", forget_acc_after_20=51.0) == pytest.approx(1.0), "five rounds"


def test_a_single_client_of_a_null_method_lies_outside_in_about_five_percent() -> None:
    outside = [c.outside for seed in range(60) for c in simulated(7000 + seed).methods["null"].clients.values()]
    assert np.mean(outside) == pytest.approx(0.05, abs=3 * (0.05 * 0.95 / len(outside)) ** 0.5)


def test_a_pair_of_methods_that_is_not_told_apart_is_open_and_not_equal(capsys: pytest.CaptureFixture[str]) -> None:
    def line(method: str, mean: float, *, different: bool) -> MethodSummary:
        pair = PairedDifference(mean, mean - 1, mean + 1, None, None, units=5, different=different)
        return MethodSummary(method, "recovered", runs=5, against_first={"forget_acc": pair})

    first = MethodSummary("first", "recovered", runs=5)
    lines = [line("a", 3.0, different=True), line("b", -3.0, different=True), line("c", 0.5, different=False)]
    _print_paired([first, *lines])
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "a: forget gap +3.0 points against first's (95 % interval +2.0 to +4.0): farther from Retrain"
    assert said[1].endswith(": nearer to Retrain")
    assert said[2].endswith("(95 % interval -0.5 to +1.5): cannot tell")
