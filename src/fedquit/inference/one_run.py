# SPDX-License-Identifier: Apache-2.0
"""The one-run audit: a lower bound on epsilon from the canaries of a single training.

Steinke, Nasr, Jagielski: Privacy Auditing with One (1) Training Run (2023). Before the training a fair coin for each of
m canaries decides whether it enters the client's data. Afterwards the k canaries with the highest scores are guessed to
have been in, the k with the lowest to have been out: r = 2k guesses, of which v are correct. A pipeline that is
(epsilon, delta)-indistinguishable in each canary's presence lets W ~ Binomial(r, 1 / (1 + exp(-epsilon))) guesses be
correct at best, up to what delta adds; with too many correct guesses that epsilon is refuted.

The audited pipeline is training, unlearning and recovery together. Retrain does not depend on the coins: for it
epsilon = 0, and the number of correct guesses is Binomial(r, 1/2). Too many correct guesses mean that the canaries are
remembered; too few, that they are treated worse than data that was never trained on, which gives them away as well.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from fedquit.errors import InputError
from fedquit.inference.multiplicity import holm

CONFIDENCE = 0.95  # of all that is said about one model
DELTA = 1e-5
LEAST_GUESSES = 4  # k: with fewer, even all guesses right would refute nothing for two kinds of canaries
SHARE = 10  # a tenth of the canaries is guessed in, a tenth out, unless k is given
_LARGEST = 64.0  # epsilon: expit of it is 1 in float64
_HALVINGS = 60  # of that range, until its width is below float64's precision

Verdict = Literal["remembered", "over-unlearned", "not detected", "blind"]


@dataclass(frozen=True)
class Tally:
    """How an attack did on the canaries of one kind.

    Attributes:
        canaries: m, those in and those out together.
        guesses: r = 2k.
        correct: v, of the guesses.

    Raises:
        InputError: unless 0 <= correct <= guesses <= canaries, with at least one guess.
    """

    canaries: int
    guesses: int
    correct: int

    def __post_init__(self) -> None:
        if not (0 <= self.correct <= self.guesses <= self.canaries and self.guesses > 0):
            raise InputError(
                f"{self.correct} correct of {self.guesses} guesses on {self.canaries} canaries is impossible: "
                "each must be at most the next, with at least one guess."
            )


@dataclass(frozen=True)
class OneRunAudit:
    """What the guesses on the canaries of one kind say about one model.

    Attributes:
        tally: canaries, guesses and correct guesses.
        delta: of the statement about epsilon.
        confidence: of all statements about this model together.
        epsilon_low: the lower bound on epsilon, 0 where there is none.
        gain_high: an upper bound on what this attack gains, as an epsilon: ln(u / (1 - u)), at least 0, with Clopper
            and Pearson's upper bound u on its share of correct guesses; infinite where every guess was correct.
        p: of the hypothesis that the model does not depend on the coins, in both directions, corrected by Holm's
            method where there are several kinds of canaries.
        verdict: `remembered`, `over-unlearned`, `not detected`, or `blind` where Original is not caught either.
        sentence: the verdict in words.
    """

    tally: Tally
    delta: float
    confidence: float
    epsilon_low: float
    gain_high: float
    p: float
    verdict: Verdict
    sentence: str


def default_guesses(canaries: int) -> int:
    """The k to take where none is given: a tenth of the canaries. It must be fixed before the scores are known."""
    return max(1, canaries // SHARE)


def count_correct(scores: npt.ArrayLike, included: npt.ArrayLike, k: int) -> Tally:
    """Guess "in" for the k highest scores and "out" for the k lowest.

    Args:
        scores: one number for each canary, (m,); higher means more likely trained on. Canaries must come in an order
            that does not depend on the coins: of equal scores, the first counts as the higher.
        included: whether each canary entered the training data, (m,).
        k: guesses of each kind, chosen before the scores were known.

    Returns:
        m canaries, 2k guesses, and how many of them are correct.
    """
    values = np.asarray(scores, dtype=np.float64)
    coins = np.asarray(included, dtype=bool)
    if values.ndim != 1 or values.shape != coins.shape:
        raise InputError(f"scores {values.shape} and coins {coins.shape} must be two lists of the same length.")
    if not bool(np.isfinite(values).all()):
        raise InputError("the score of a canary is not finite: look at the model that gave it.")
    if not 0 < 2 * k <= len(values):
        raise InputError(f"{k} guesses in and {k} out do not fit {len(values)} canaries: take at most half of them.")
    order = np.argsort(-values, kind="stable")
    correct = int(coins[order[:k]].sum()) + int((~coins[order[-k:]]).sum())
    return Tally(len(values), 2 * k, correct)


def p_value(tally: Tally, epsilon: float, delta: float = DELTA) -> float:
    """The largest chance of so many correct guesses under (epsilon, delta)-indistinguishability.

    With W ~ Binomial(r, 1 / (1 + exp(-epsilon))):
    min{1, P[W >= v] + 2 m delta max over 1 <= i <= v of P[v - i <= W <= v - 1] / i}.
    """
    from scipy.special import betainc, expit
    from scipy.stats import binom

    r, v = tally.guesses, tally.correct
    q = float(expit(epsilon))
    if v == 0:
        return 1.0
    tail = float(betainc(v, r - v + 1, q))  # P[W >= v]
    if delta == 0:
        return min(1.0, tail)
    below = np.cumsum(binom.pmf(np.arange(v - 1, -1, -1), r, q))  # P[v - i <= W <= v - 1] for i = 1, ..., v
    excess = float((below / np.arange(1, v + 1)).max())
    return min(1.0, tail + 2 * tally.canaries * delta * excess)


def epsilon_lower_bound(tally: Tally, delta: float = DELTA, level: float = 1 - CONFIDENCE) -> float:
    """The largest epsilon that so many correct guesses refute; 0 where they refute none.

    Args:
        tally: the guesses.
        delta: of the statement.
        level: the chance that the bound lies above the true epsilon, at most.
    """
    if p_value(tally, 0.0, delta) >= level:
        return 0.0
    low, high = 0.0, _LARGEST
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if p_value(tally, middle, delta) < level:
            low = middle
        else:
            high = middle
    return low


def gain_upper_bound(tally: Tally, level: float = 1 - CONFIDENCE) -> float:
    """At most what this attack gains, as an epsilon: max{0, ln(u / (1 - u))} with Clopper and Pearson's upper bound u.

    It takes the guesses for independent, and says nothing about other attacks.

    Args:
        tally: the guesses.
        level: the chance that the attack gains more.
    """
    from scipy.stats import beta

    r, v = tally.guesses, tally.correct
    if v == r:
        return math.inf
    u = float(beta.ppf(1 - level, v + 1, r - v))
    return max(0.0, math.log(u / (1 - u)))


def p_of_retrain(tally: Tally) -> float:
    """The chance of a number of correct guesses as far from half, where the model does not depend on the coins."""
    from scipy.stats import binom

    many = float(binom.sf(tally.correct - 1, tally.guesses, 0.5))
    few = float(binom.cdf(tally.correct, tally.guesses, 0.5))
    return min(1.0, 2 * min(many, few))


def audit(
    tallies: Mapping[str, Tally], delta: float = DELTA, original: Mapping[str, Tally] | None = None
) -> dict[str, OneRunAudit]:
    """Judge one model by its canaries.

    Remembered and over-unlearned are tested at 2.5 % each, and several kinds of canaries share the 5 %: the verdicts by
    Holm's method, the bounds on epsilon in equal parts. So everything that is said about this model holds together with
    95 % confidence. Each audited model is a statement of its own.

    Args:
        tallies: the guesses on each kind of canaries, such as `natural` and `mislabelled`.
        delta: of the statements about epsilon.
        original: the guesses on the same canaries under Original, which remembers them all; None where this model is
            Original. Where Original is not caught, a model that is not caught either says nothing.

    Returns:
        The audit by kind of canaries.
    """
    level = (1 - CONFIDENCE) / max(1, len(tallies))
    corrected = holm([p_of_retrain(tally) for tally in tallies.values()])
    caught = (
        {kind: judged.verdict == "remembered" for kind, judged in audit(original, delta).items()} if original else {}
    )
    audits = {}
    for (kind, tally), p in zip(tallies.items(), corrected, strict=True):
        reversed_tally = Tally(tally.canaries, tally.guesses, tally.guesses - tally.correct)
        directions = (tally, reversed_tally)
        epsilon_low = max(epsilon_lower_bound(guesses, delta, level / 2) for guesses in directions)
        gain_high = gain_upper_bound(tally, level)
        verdict = _verdict(tally, p, sees=caught.get(kind, False))
        sentence = _sentence(verdict, tally, p, epsilon_low, gain_high, delta)
        audits[kind] = OneRunAudit(tally, delta, CONFIDENCE, epsilon_low, gain_high, p, verdict, sentence)
    return audits


def _verdict(tally: Tally, p: float, *, sees: bool) -> Verdict:
    """The word for a corrected p-value; without a caught Original (`sees`) nothing follows from silence."""
    if p <= 1 - CONFIDENCE:
        return "remembered" if 2 * tally.correct > tally.guesses else "over-unlearned"
    return "not detected" if sees else "blind"


def _sentence(verdict: Verdict, tally: Tally, p: float, epsilon_low: float, gain_high: float, delta: float) -> str:
    sure = f"With {CONFIDENCE:.0%} confidence".replace("%", " %")
    guesses = f"{tally.correct} of {tally.guesses} guesses correct"
    refuted = f"this pipeline is not ({epsilon_low:.2f}, {delta:g})-indistinguishable in a canary's presence"
    unbounded = f"the model depends on which canaries were trained on, as Retrain does not (p = {p:.2g})"
    found = refuted if epsilon_low > 0 else unbounded
    if verdict == "remembered":
        return f"{sure} {found}: {guesses}."
    if verdict == "over-unlearned":
        return f"{sure} {found}: {guesses}, because canaries that were trained on score lower than those left out."
    if verdict == "blind":
        return (
            f"The audit is blind: it does not catch Original, and {tally.correct} correct guesses of {tally.guesses} "
            "say nothing; take more canaries, or another kind of them."
        )
    gain = f"this attack gains at most {gain_high:.2f}"
    return f"No memory of the canaries is detected: {guesses}, so {sure[0].lower()}{sure[1:]} {gain}. That is no proof."
