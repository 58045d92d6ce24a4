# SPDX-License-Identifier: Apache-2.0
"""Error rates and power of the tests over many models, on simulated phi: the table of docs/evaluation.md.

    python benchmarks/many_models.py [--studies 1000]

phi of model i on example j is a_i + e_ij: a_i is what the model says of everything (standard deviation 0.5), and e_ij
a standard normal. There are 100 forgotten examples and 100 examples of control data.
"""

from __future__ import annotations

import argparse
import math

import numpy as np

from fedquit.audit.attacks.lira import ulira, ulira_by_model
from fedquit.audit.metrics.forgetting_quality import forgetting_quality
from fedquit.inference.models import (
    Floats,
    epsilon_bound,
    permutation_test,
    sample_exposure,
    student_over_models,
)

EXAMPLES = 100
SIZES = ((4, 4), (3, 4), (2, 5), (1, 19), (8, 8), (16, 16))
EFFECTS: dict[str, dict[str, float]] = {
    "equal": {},
    "shift by 0.5": {"shift": 0.5},
    "shift by 1": {"shift": 1.0},
    "shift by 1 on a fifth": {"shift": 1.0, "share": 0.2},
    "spread by 1.3": {"spread": 1.3},
}
Four = tuple[Floats, Floats, Floats, Floats]


def drawn(
    rng: np.random.Generator,
    unlearned: int,
    retrained: int,
    shift: float = 0.0,
    share: float = 1.0,
    spread: float = 1.0,
) -> Four:
    """Scores phi of both kinds of model on the forget data, and of both on the control data."""
    effects = [0.5 * rng.normal(size=(count, 1)) for count in (unlearned, retrained)]
    u = effects[0] + spread * rng.normal(size=(unlearned, EXAMPLES))
    u[:, : round(share * EXAMPLES)] += shift
    o = effects[1] + rng.normal(size=(retrained, EXAMPLES))
    controls = [effect + rng.normal(size=(len(effect), EXAMPLES)) for effect in effects]
    return u, o, controls[0], controls[1]


def permutation_tests(studies: int) -> None:
    """Print how often each p-value is at most 5 %."""
    print("| models | truth | differs | shift alone | KLoM alone | a sample is named |")
    print("|---|---|---|---|---|---|")
    for sizes in SIZES:
        for words, effect in EFFECTS.items():
            rng = np.random.default_rng(1)
            repeats = studies if words == "equal" else max(studies // 5, 50)
            hits = np.zeros(4)
            for _ in range(repeats):
                phis = drawn(rng, sizes[0], sizes[1], **effect)
                test = permutation_test(*phis, draws=199)
                exposure = sample_exposure(*phis, draws=199)
                hits += [test.p <= 0.05, test.shift_p <= 0.05, test.klom_p <= 0.05, exposure.p.min() <= 0.05]
            print(f"| {sizes[0]} + {sizes[1]} | {words} | " + " | ".join(f"{x:.3f}" for x in hits / repeats) + " |")


def intervals_of_ulira(studies: int) -> None:
    """Print how often intervals around U-LiRA's accuracy cover 0.5 where the kinds are equal."""
    print("\n| models | Student, half of the models scored | Student, each left out | binomial |\n|---|---|---|---|")
    for count in (8, 16, 32):
        rng = np.random.default_rng(2)
        covered = np.zeros(3)
        for _ in range(studies):
            u, o, _, _ = drawn(rng, count, count)
            halves = ulira_by_model(u, o)
            duel = ulira(u, o)
            pairs = 0.5 + (np.sign(duel.unlearned) - np.sign(duel.never)).mean(1) / 4
            binomial = abs(duel.accuracy.mean() - 0.5) <= 1.96 * 0.5 / math.sqrt(2 * u.size)
            covered += [*(_covers(values, 0.5) for values in (halves, pairs)), binomial]
        print(f"| {count} | " + " | ".join(f"{x:.3f}" for x in covered / studies) + " |")


def _covers(values: Floats, truth: float) -> bool:
    interval = student_over_models(values)
    return interval.low <= truth <= interval.high


def bounds_on_epsilon(studies: int) -> None:
    """Print how often the bound is above 0, its median and its ceiling, and the competition's median epsilon."""
    print("\n| models of a kind | truth | bound above 0 | median | ceiling | competition, median |")
    print("|---|---|---|---|---|---|")
    for count in (12, 16, 32, 64, 128):
        for shift in (0.0, 0.5):
            rng = np.random.default_rng(3)
            bounds = [epsilon_bound(*drawn(rng, count, count, shift)) for _ in range(max(studies // 5, 50))]
            values = np.array([bound.value for bound in bounds])
            u, o, _, _ = drawn(rng, count, count, shift)
            competition = float(np.median(forgetting_quality(u, o).epsilon))
            numbers = (float((values > 0).mean()), float(np.median(values)), bounds[0].ceiling, competition)
            truth = f"shift by {shift:g}" if shift else "equal"
            print(f"| {count} | {truth} | " + " | ".join(f"{x:.2f}" for x in numbers) + " |")


def main() -> None:
    """Print the three tables."""
    parser = argparse.ArgumentParser(description="Error rates of the tests over many models.")
    parser.add_argument("--studies", type=int, default=1000, help="simulated studies where the kinds are equal")
    studies = parser.parse_args().studies
    permutation_tests(studies)
    intervals_of_ulira(studies)
    bounds_on_epsilon(studies)


if __name__ == "__main__":
    main()
