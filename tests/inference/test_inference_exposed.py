# SPDX-License-Identifier: Apache-2.0
"""Samples that one model gives away: the share of wrong names and the error of the count, with fixed seeds."""

from __future__ import annotations

import math
import sys

import numpy as np
import numpy.typing as npt
import pytest

from fedquit.inference.exposed import conformal_p, exposed_samples, most_above
from fedquit.inference.multiplicity import benjamini_hochberg

Floats = npt.NDArray[np.float64]


def tolerance(rate: float, studies: int) -> float:
    """Three Monte-Carlo standard errors."""
    return 3 * math.sqrt(rate * (1 - rate) / studies)


def population(draw: np.random.Generator, size: int) -> Floats:
    """Scores without any memory: a fifth of the samples is hard, as where labels are wrong."""
    hard = draw.random(size) < 0.2
    return np.where(hard, draw.normal(-4, 1.5, size), draw.normal(3, 1.5, size))


def remembered(
    draw: np.random.Generator, m: int, n: int, *, kind: str = "", rise: float = 0.0, share: float = 0.25
) -> tuple[Floats, Floats, npt.NDArray[np.bool_]]:
    """Forgotten samples, hold-out samples, and which of the former are exposed: the hardest, the easiest, or any."""
    plain = population(draw, m + n)
    forget, holdout = plain[:m].copy(), plain[m:]
    order = {"hard": forget, "easy": -forget, "any": draw.random(m)}.get(kind)
    exposed = np.zeros(m, dtype=bool)
    if order is not None:
        exposed[np.argsort(order)[: int(share * m)]] = True
    forget[exposed] += rise
    return forget, holdout, exposed


def test_a_model_that_remembers_nothing_names_a_sample_in_at_most_five_percent() -> None:
    draw, studies = np.random.default_rng(70), 1000
    any_named, counted = [], []
    for _ in range(studies):
        found = exposed_samples(*remembered(draw, 300, 100)[:2])
        any_named.append(bool(found.named.any()))
        counted.append(found.at_least > 0)
    assert np.mean(any_named) <= 0.05 + tolerance(0.05, studies)
    assert np.mean(counted) <= 0.05 + tolerance(0.05, studies)


@pytest.mark.parametrize("kind", ["hard", "easy", "any"])
@pytest.mark.parametrize("rise", [4.0, 12.0])
def test_wrong_names_and_too_high_counts_are_rare_whichever_samples_are_remembered(kind: str, rise: float) -> None:
    """Five percent of the names on average, and of the counts, though hard and easy samples differ by seven points."""
    draw, studies = np.random.default_rng(71), 300
    wrong, too_high = [], []
    for _ in range(studies):
        forget, holdout, exposed = remembered(draw, 300, 150, kind=kind, rise=rise)
        found = exposed_samples(forget, holdout)
        names = int(found.named.sum())
        wrong.append(int((found.named & ~exposed).sum()) / max(1, names))
        too_high.append(found.at_least > int(exposed.sum()))
    assert np.mean(wrong) <= 0.05 + 3 * float(np.std(wrong)) / math.sqrt(studies)
    assert np.mean(too_high) <= 0.05 + tolerance(0.05, studies)


def test_what_is_found_where_a_quarter_is_remembered() -> None:
    """Far above the hold-out the samples are named; raised among the easy ones they are counted, and not named."""
    draw = np.random.default_rng(72)
    far, near = [], []
    for _ in range(100):
        forget, holdout, exposed = remembered(draw, 1600, 400, kind="any", rise=12.0)
        found = exposed_samples(forget, holdout)
        far.append((int((found.named & exposed).sum()) / int(exposed.sum()), found.at_least))
        forget, holdout, _ = remembered(draw, 1600, 400, kind="hard", rise=7.0, share=0.2)
        found = exposed_samples(forget, holdout)
        near.append((int(found.named.sum()), found.at_least))
    assert np.mean(far, axis=0) == pytest.approx([0.97, 358], rel=0.03), "of 400 exposed samples"
    assert np.mean(near, axis=0)[0] <= 5
    assert np.mean(near, axis=0)[1] >= 50, "of 320 exposed samples"


def test_conformal_p_values_count_the_hold_out_above_and_equal() -> None:
    p = conformal_p(np.array([5.0, 2.0, 1.0, 0.0]), np.array([1.0, 2.0, 3.0]))
    assert p.tolist() == [0.25, 0.75, 1.0, 1.0]


def test_the_benjamini_hochberg_rule_by_hand() -> None:
    assert benjamini_hochberg([0.04, 0.01, 0.5, 0.03]).tolist() == [False, True, False, False]
    assert benjamini_hochberg([0.02, 0.01, 0.5, 0.03]).tolist() == [True, True, False, True]
    assert benjamini_hochberg([0.2, 0.3]).tolist() == [False, False]
    assert benjamini_hochberg([]).tolist() == []


def test_the_largest_number_above_a_hold_out_score_is_exceeded_as_rarely_as_it_says() -> None:
    draw, studies = np.random.default_rng(73), 4000
    labels = draw.permuted(np.tile(np.arange(60) < 40, (studies, 1)), axis=1)  # True: forgotten; the highest first
    for rank in (1, 5, 10):
        at = np.argmax(np.cumsum(~labels, axis=1) == rank, axis=1)  # where the hold-out score of this rank lies
        above = at - (rank - 1)
        most = most_above(40, 20, rank, 0.05)
        assert (above > most).mean() <= 0.05 + tolerance(0.05, studies)
        assert (above > most - 1).mean() > 0.05 - tolerance(0.05, studies), "the smallest such number"
    assert most_above(10, 1, 1, 0.05) == 10, "one hold-out sample bounds nothing"


def main() -> None:
    """Print the table of docs/evaluation.md: 500 studies of each kind, with means over them."""
    cases: list[tuple[int, int, str, float, float]] = [(300, 100, "", 0.0, 0.0), (1600, 400, "", 0.0, 0.0)]
    cases += [(1600, 400, kind, rise, 0.25) for kind in ("any", "hard", "easy") for rise in (4.0, 12.0)]
    cases.append((1600, 400, "hard", 7.0, 0.2))
    sys.stdout.write(
        "| m, n | exposed samples | wrong names | count too high | named | counted |\n|---|---|---|---|---|---|" + "\n"
    )
    for m, n, kind, rise, share in cases:
        draw = np.random.default_rng(74)
        studies = []
        for _ in range(500):
            forget, holdout, exposed = remembered(draw, m, n, kind=kind, rise=rise, share=share)
            found = exposed_samples(forget, holdout)
            names = int(found.named.sum())
            wrong = int((found.named & ~exposed).sum()) / max(1, names)
            studies.append((wrong, found.at_least > exposed.sum(), names, found.at_least))
        wrong_names, too_high, named, counted = np.mean(studies, axis=0)
        who = {"any": "any ones", "hard": "the hardest", "easy": "the easiest"}
        which = f"{int(share * m)}: {who[kind]}, raised by {rise:g}" if kind else "none"
        rates = f"{100 * wrong_names:.1f} % | {100 * too_high:.1f} %"
        sys.stdout.write(f"| {m}, {n} | {which} | {rates} | {named:.0f} | {counted:.0f} |" + "\n")


if __name__ == "__main__":
    main()
