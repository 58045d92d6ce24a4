# SPDX-License-Identifier: Apache-2.0
"""Many models of two kinds, unlearned ones and Retrains: does one procedure differ from the other, and by how much?

The unit is a model, not an example: the examples of one model share its seed, so that models x examples are far fewer
independent trials than they look. Every function takes phi (`fedquit.audit.scores`) as `(models, examples)`.

- `permutation_test`: exact test over the models' labels, of the shift of phi and of KLoM, and of both together.
- `student_over_models`: the mean of one number for each model, with Student's interval.
- `epsilon_bound`: a lower bound on epsilon with 95 % confidence (Jagielski, Ullman, Oprea: Auditing Differentially
  Private Machine Learning, NeurIPS 2020).
- `sample_exposure`: for each example how far the two kinds lie apart, with an interval over models.

Unlearned models and Retrains must have different seeds: a shared initialisation makes them alike for a reason that has
nothing to do with unlearning.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

from fedquit.errors import InputError

Floats = npt.NDArray[np.float64]
Words = Literal["differs", "cannot tell"]

LEVEL = 0.05  # of the tests; confidence is 1 - LEVEL
ENUMERATED = 5_000  # up to so many assignments of labels are all tried; of more, some are drawn
DRAWS = 1_999  # random assignments otherwise, beside the observed one
SIZES = "4 + 4, 3 + 4, 2 + 5 or 1 + 19"  # the least numbers of models that can reach p = 0.05
BLOCK = 4_000_000  # numbers of an array that is held at once

BINS, CLIP, EPS = 20, 100.0, 1e-5  # of KLoM: bins of a histogram, limit of |phi|, least probability of the oracles
DELTA = 1e-5  # of (epsilon, delta)
LEAST_FOR_EPSILON = 12  # models of a kind: with fewer than 6 to test on no outcome gives a bound above 0


def smallest_p(unlearned: int, retrained: int) -> float:
    """The smallest p-value that a permutation test over so many models can reach.

    With as many of one kind as of the other, exchanging the kinds gives the same squared differences, so that each
    value occurs twice.
    """
    ways = math.comb(unlearned + retrained, unlearned)
    return (2 if unlearned == retrained else 1) / ways


def require_enough_models(unlearned: int, retrained: int) -> None:
    """Raise an InputError where no outcome of the permutation test could reach 5 %."""
    least = smallest_p(unlearned, retrained) if unlearned and retrained else 1.0
    if least > LEVEL:
        raise InputError(
            f"{unlearned} unlearned models and {retrained} Retrains are too few: the smallest p-value that they can "
            f"give is {least:.3f}; take at least {SIZES}."
        )


@dataclass(frozen=True)
class ModelTest:
    """A permutation test of "unlearned models and Retrains have the same distribution of phi".

    Attributes:
        unlearned: the number of unlearned models.
        retrained: the number of Retrains.
        examples: on which phi was taken.
        shift: the difference of the mean phi between the kinds, each model less its own mean on the control data:
            root mean square over the examples.
        shift_p: p-value of the shift.
        klom: KLoM, mean over the examples, in nats.
        klom_by_chance: its mean over the permutations: what two equal kinds of so many models give.
        klom_p: p-value of KLoM.
        smaller_p: p-value of both together: the smaller of the two, calibrated in the same permutations.
        p: the p-value that decides: `smaller_p`, or `shift_p` where the models are too few for two statistics.
        permutations: how many assignments of labels were compared, the observed one included.
        exhaustive: whether these are all there are.
    """

    unlearned: int
    retrained: int
    examples: int
    shift: float
    shift_p: float
    klom: float
    klom_by_chance: float
    klom_p: float
    smaller_p: float
    p: float
    permutations: int
    exhaustive: bool

    @property
    def word(self) -> Words:
        """The verdict: a test that does not reject shows no equality."""
        return verdict(self.p)


def verdict(p: float) -> Words:
    """The rule for "differs" over many models: a p-value of at most 5 %; everything else cannot be told."""
    return "differs" if p <= LEVEL else "cannot tell"


def models_needed(comparisons: int) -> int:
    """The least number of models of each kind for a p-value of 5 % over so many comparisons (Bonferroni)."""
    return next(n for n in itertools.count(4) if comparisons * smallest_p(n, n) <= LEVEL)


def permutation_test(
    unlearned: npt.ArrayLike,
    retrained: npt.ArrayLike,
    control_unlearned: npt.ArrayLike,
    control_retrained: npt.ArrayLike,
    *,
    draws: int = DRAWS,
    seed: int = 0,
) -> ModelTest:
    """Test whether unlearned models and Retrains differ, by permuting which model is of which kind.

    Two statistics see different things. The shift subtracts each model's mean phi on control data, so that a model
    that is surer of everything does not count, and averages the squared differences of the means over the examples.
    KLoM takes phi as it is; it also sees another spread. What decides is the smaller of both p-values, compared with
    the same number in every permutation. Two statistics need twice as many permutations as one for a p-value of 5 %:
    with fewer (4 + 4, 3 + 4, 2 + 5, 1 + 19) the shift alone decides, which is known before any model is trained.

    Args:
        unlearned: phi under M unlearned models, (M, examples).
        retrained: phi under R Retrains, (R, examples).
        control_unlearned: phi of the unlearned models on data that nobody forgets, such as the test set,
            (M, controls).
        control_retrained: the same of the Retrains, (R, controls).
        draws: how many random permutations where there are more than 5,000.
        seed: of these draws.

    Raises:
        InputError: if the models are too few for any p-value of 5 %, or the shapes do not fit.
    """
    u, o = phi_pair(unlearned, retrained)
    require_enough_models(len(u), len(o))
    centred = np.concatenate(_centred(u, o, control_unlearned, control_retrained))
    labels, exhaustive = _assignments(len(u), len(o), draws, seed)
    shifts = _shifts(centred, labels)
    divergences = KlomBins(u, o).means(labels)
    p_values = [_p_values(statistic) for statistic in (shifts, divergences)]
    both = _p_values(-np.minimum(*p_values))
    shift_alone = 2 * smallest_p(len(u), len(o)) > LEVEL
    return ModelTest(
        unlearned=len(u),
        retrained=len(o),
        examples=u.shape[1],
        shift=math.sqrt(float(shifts[0])),
        shift_p=float(p_values[0][0]),
        klom=float(divergences[0]),
        klom_by_chance=float(divergences.mean()),
        klom_p=float(p_values[1][0]),
        smaller_p=float(both[0]),
        p=float(p_values[0][0] if shift_alone else both[0]),
        permutations=len(labels),
        exhaustive=exhaustive,
    )


def phi_pair(unlearned: npt.ArrayLike, retrained: npt.ArrayLike) -> tuple[Floats, Floats]:
    """Both as (models, examples) of finite numbers, with the same examples."""
    u = np.asarray(unlearned, dtype=np.float64)
    o = np.asarray(retrained, dtype=np.float64)
    if u.ndim != 2 or o.ndim != 2 or u.shape[1] != o.shape[1] or not (u.size and o.size):
        raise InputError(f"phi has shapes {u.shape} and {o.shape}: give (models, examples) with the same examples.")
    if not (np.isfinite(u).all() and np.isfinite(o).all()):
        raise InputError("some phi are not finite: they come from `score_examples`, which keeps them finite.")
    return u, o


def _centred(
    u: Floats, o: Floats, control_unlearned: npt.ArrayLike, control_retrained: npt.ArrayLike
) -> tuple[Floats, Floats]:
    """Phi of each model less its mean on the control data."""
    control_u, control_o = phi_pair(control_unlearned, control_retrained)
    if len(control_u) != len(u) or len(control_o) != len(o):
        raise InputError(
            f"there are {len(u)} and {len(o)} models, and {len(control_u)} and {len(control_o)} on the control data: "
            "give the same models in the same order."
        )
    return u - control_u.mean(1, keepdims=True), o - control_o.mean(1, keepdims=True)


def _assignments(unlearned: int, retrained: int, draws: int, seed: int) -> tuple[npt.NDArray[np.bool_], bool]:
    """Which models are called unlearned, (permutations, models), the observed assignment first; whether it is all."""
    models = unlearned + retrained
    if math.comb(models, unlearned) <= ENUMERATED:
        chosen = np.array(list(itertools.combinations(range(models), unlearned)))  # the first is 0 .. M - 1
        labels = np.zeros((len(chosen), models), dtype=np.bool_)
        np.put_along_axis(labels, chosen, values=True, axis=1)
        return labels, True
    observed = np.arange(models) < unlearned
    rng = np.random.default_rng(seed)
    drawn = rng.permuted(np.tile(observed, (draws, 1)), axis=1)
    return np.concatenate([observed[None], drawn]), False


def _shifts(phi: Floats, labels: npt.NDArray[np.bool_]) -> Floats:
    """The mean over the examples of the squared differences of the means, for each assignment of labels."""
    of_kind = labels.sum(1)[0]
    weights = np.where(labels, 1 / of_kind, -1 / (len(phi) - of_kind))
    step = max(1, BLOCK // phi.shape[1])
    squares = [((weights[i : i + step] @ phi) ** 2).mean(1) for i in range(0, len(weights), step)]
    return np.concatenate(squares)


def _p_values(statistic: Floats) -> Floats:
    """For each assignment the share of all assignments with at least its statistic; equal up to rounding is equal."""
    scale = max(1.0, float(np.abs(statistic).max()))
    rounded = np.round(statistic / scale, 10)
    below = np.searchsorted(np.sort(rounded), rounded, side="left")
    return np.asarray((len(rounded) - below) / len(rounded), dtype=np.float64)


class KlomBins:
    """The histograms of KLoM for two kinds of model, under any assignment of the models to the kinds.

    An example's bins span the range of both kinds, so that a model's bin is the same under every assignment; only the
    counts by kind change. KL(p || q) of an example with counts a of M unlearned models and b of R Retrains in each bin
    is the sum of p log(p / q) with p = a / M and q = b / R, at least 1e-5 where a > 0, and q divided by its sum.

    Args:
        unlearned: phi under M unlearned models, (M, examples).
        retrained: phi under R Retrains, (R, examples).
    """

    def __init__(self, unlearned: Floats, retrained: Floats) -> None:
        phi = np.clip(np.concatenate([unlearned, retrained]), -CLIP, CLIP)
        low = phi.min(0)
        width = phi.max(0) - low
        scaled = (phi - low) / np.where(width > 0, width, 1.0)
        bins = np.minimum((BINS * scaled).astype(np.int64), BINS - 1)  # the highest value belongs to the last bin
        cells = bins + BINS * np.arange(phi.shape[1])
        used, at = np.unique(cells, return_inverse=True)  # the cells that hold a model, in the order of the examples
        self.models = (len(unlearned), len(retrained))
        self.held = np.zeros((len(phi), len(used)), dtype=np.float32)  # whether a model is in a cell
        np.put_along_axis(self.held, at.reshape(cells.shape), values=1.0, axis=1)
        self.totals = self.held.sum(0).astype(np.int64)
        self.starts = np.searchsorted(used, BINS * np.arange(phi.shape[1]))

    @cached_property
    def _terms(self) -> tuple[Floats, npt.NDArray[np.bool_]]:
        """Terms p log(p / q) for a unlearned of t models in a bin, (M + 1, M + R + 1), and where q was raised."""
        m, r = self.models
        a = np.arange(m + 1)[:, None]
        b = np.arange(m + r + 1)[None, :] - a
        raised = (a > 0) & (b == 0)
        p = a / m
        q = np.where(b > 0, b / r, EPS)
        terms = np.where((a > 0) & (b >= 0), p * np.log(np.where(a > 0, p, 1.0) / q), 0.0)
        return terms, raised

    def per_example(self, labels: npt.NDArray[np.bool_]) -> Floats:
        """KLoM of each example for each assignment of labels, (assignments, examples), in nats.

        Args:
            labels: which models are called unlearned, (assignments, M + R).
        """
        terms, raised = self._terms
        counts = np.rint(labels.astype(np.float32) @ self.held).astype(np.int64)
        divergence = np.add.reduceat(terms[counts, self.totals], self.starts, axis=1)
        missing = np.add.reduceat(raised[counts, self.totals].astype(np.int64), self.starts, axis=1)
        return np.asarray(np.maximum(divergence + np.log1p(EPS * missing), 0.0), dtype=np.float64)

    def means(self, labels: npt.NDArray[np.bool_]) -> Floats:
        """The mean over the examples for each assignment of labels."""
        step = max(1, BLOCK // self.held.shape[1])
        parts = [self.per_example(labels[i : i + step]).mean(1) for i in range(0, len(labels), step)]
        return np.concatenate(parts)

    def observed(self) -> Floats:
        """KLoM of each example for the models as they are."""
        labels = np.arange(sum(self.models)) < self.models[0]
        return np.asarray(self.per_example(labels[None])[0], dtype=np.float64)


@dataclass(frozen=True)
class MeanOverModels:
    """The mean of one number for each model, with Student's 95 % interval over the models.

    Attributes:
        value: the mean.
        low: lower end of the interval.
        high: upper end of the interval.
        models: how many numbers there are.
    """

    value: float
    low: float
    high: float
    models: int


def student_over_models(by_model: npt.ArrayLike, *, least: float = -math.inf, most: float = math.inf) -> MeanOverModels:
    """The mean over models with Student's interval, which has no ends for a single model.

    Args:
        by_model: one number for each model, or for each pair of models, (models,).
        least: the least value that the mean can have; the interval ends there.
        most: the largest value that it can have.
    """
    from scipy.stats import t  # scipy takes half a second

    values = np.asarray(by_model, dtype=np.float64)
    if values.ndim != 1 or not len(values):
        raise InputError(f"numbers by model have the shape {values.shape}: give (models,).")
    mean = float(values.mean())
    if len(values) == 1:
        return MeanOverModels(mean, least, most, 1)
    half = float(t.ppf(1 - LEVEL / 2, len(values) - 1)) * float(values.std(ddof=1)) / math.sqrt(len(values))
    return MeanOverModels(mean, max(mean - half, least), min(mean + half, most), len(values))


@dataclass(frozen=True)
class EpsilonBound:
    """A lower bound on epsilon with 95 % confidence, from models that did not help to choose the attack.

    "The unlearned model and Retrain are not (epsilon, delta)-indistinguishable for any epsilon below `value`." A value
    of 0 says that this attack and so many models show nothing; it is no proof that there is nothing.

    Attributes:
        value: the bound.
        ceiling: what the same models give where the attack makes no error.
        attack: `mean` of the centred phi, or `likelihood ratio` of two normals with a common variance.
        false_positives: Retrains taken for unlearned models.
        false_negatives: unlearned models taken for Retrains.
        models: of each kind that were tested; as many had chosen the attack and its threshold, or one fewer.
    """

    value: float
    ceiling: float
    attack: str
    false_positives: int
    false_negatives: int
    models: int


def epsilon_bound(
    unlearned: npt.ArrayLike,
    retrained: npt.ArrayLike,
    control_unlearned: npt.ArrayLike,
    control_retrained: npt.ArrayLike,
    *,
    delta: float = DELTA,
) -> EpsilonBound:
    """Choose one attack and one threshold on the first half of the models, and bound epsilon by its errors on the rest.

    Args:
        unlearned: phi under N unlearned models, (N, examples).
        retrained: phi under N Retrains of other seeds, (N, examples).
        control_unlearned: phi of the unlearned models on control data, (N, controls).
        control_retrained: the same of the Retrains.
        delta: of (epsilon, delta).

    Raises:
        InputError: if there are fewer than 12 models of a kind, or not as many of each.
    """
    u, o = phi_pair(unlearned, retrained)
    if len(u) != len(o) or len(u) < LEAST_FOR_EPSILON:
        raise InputError(
            f"there are {len(u)} unlearned models and {len(o)} Retrains: a bound on epsilon needs as many of each, at "
            f"least {LEAST_FOR_EPSILON}; with fewer none can be above 0."
        )
    u, o = _centred(u, o, control_unlearned, control_retrained)
    half = len(u) // 2
    attacks = {"mean": _mean_scores, "likelihood ratio": _ratio_scores}
    thresholds = {}
    for name, scores_of in attacks.items():
        ours, theirs = scores_of(u[:half], o[:half], u[:half], o[:half])
        thresholds[name] = _best_threshold(ours, theirs, delta)
    name = max(thresholds, key=lambda attack: thresholds[attack][:2])
    _, _, threshold, direction = thresholds[name]
    ours, theirs = attacks[name](u[:half], o[:half], u[half:], o[half:])
    missed = int((direction * ours <= direction * threshold).sum())
    alarms = int((direction * theirs > direction * threshold).sum())
    tested = len(u) - half
    return EpsilonBound(
        value=epsilon_of_errors(alarms, missed, tested, delta),
        ceiling=epsilon_of_errors(0, 0, tested, delta),
        attack=name,
        false_positives=alarms,
        false_negatives=missed,
        models=tested,
    )


def epsilon_of_errors(false_positives: int, false_negatives: int, models: int, delta: float = DELTA) -> float:
    """Bound epsilon from below by an attack's errors on fresh models: 95 % confidence, 2.5 % for either error rate.

    Args:
        false_positives: Retrains taken for unlearned models.
        false_negatives: unlearned models taken for Retrains.
        models: of each kind.
        delta: of (epsilon, delta).

    Returns:
        max{0, ln((1 - delta - FP+) / FN+), ln((1 - delta - FN+) / FP+)} with Clopper and Pearson's upper bounds.
    """
    counts = np.array([[false_positives], [false_negatives]])
    return float(_epsilons(counts, models, delta)[0])


def _epsilons(counts: npt.NDArray[np.int64], models: int, delta: float) -> Floats:
    """The bound for each column of (false positives, false negatives), (2, K)."""
    fp, fn = _upper_rates(models)[counts]
    ratios = np.stack([(1 - delta - fp) / fn, (1 - delta - fn) / fp])
    return np.asarray(np.log(np.maximum(ratios.max(0), 1.0)), dtype=np.float64)


@cache
def _upper_rates(models: int) -> Floats:
    """Clopper and Pearson's upper bound at 2.5 % of the rate behind 0, 1, … errors of so many models."""
    from scipy.stats import beta  # scipy takes half a second

    errors = np.arange(models)
    return np.append(beta.ppf(1 - LEVEL / 2, errors + 1, models - errors), 1.0)


def _mean_scores(fit_u: Floats, fit_o: Floats, u: Floats, o: Floats) -> tuple[Floats, Floats]:
    """The mean of the centred phi of each model: nothing is fitted."""
    return u.mean(1), o.mean(1)


def _ratio_scores(fit_u: Floats, fit_o: Floats, u: Floats, o: Floats) -> tuple[Floats, Floats]:
    """The log-likelihood ratio of two normals with one variance, up to its scale, for each model.

    Where models are scored on the fit that they entered (`u is fit_u`), model i of both kinds is left out of it.
    """
    own = len(u) == len(fit_u) and np.shares_memory(u, fit_u)
    left_out = len(fit_u) - 1 if own else len(fit_u)
    mean_u = (fit_u.sum(0) - (u if own else 0.0)) / left_out
    mean_o = (fit_o.sum(0) - (o if own else 0.0)) / left_out
    direction = mean_u - mean_o
    middle = (mean_u + mean_o) / 2
    return ((u - middle) * direction).mean(-1), ((o - middle) * direction).mean(-1)


def _best_threshold(ours: Floats, theirs: Floats, delta: float) -> tuple[float, float, float, float]:
    """The best single threshold: its bound, minus its share of errors (for equal bounds), itself, its direction."""
    values = np.unique(np.concatenate([ours, theirs]))
    cuts = np.append((values[:-1] + values[1:]) / 2, values[-1])
    best = (-1.0, 0.0, 0.0, 1.0)
    for direction in (1.0, -1.0):
        missed = (direction * ours[:, None] <= direction * cuts).sum(0)
        alarms = (direction * theirs[:, None] > direction * cuts).sum(0)
        bounds = _epsilons(np.stack([alarms, missed]), len(ours), delta)
        fewest = -(missed + alarms) / (2 * len(ours))
        at = int(np.lexsort((fewest, bounds))[-1])
        best = max(best, (float(bounds[at]), float(fewest[at]), float(cuts[at]), direction))
    return best


@dataclass(frozen=True, eq=False)
class SampleExposure:
    """For each example how much surer the unlearned models are of it than Retrains, over models.

    Attributes:
        difference: of the mean centred phi, unlearned less Retrain, (examples,).
        low: lower end of its 95 % interval (Welch), for this example alone.
        high: upper end.
        p: p-value adjusted for all examples: by the largest statistic over the examples in each permutation of the
            models' labels (Westfall and Young), so that a false name is in the list in 5 % of studies at most.
    """

    difference: Floats
    low: Floats
    high: Floats
    p: Floats

    @property
    def remembered(self) -> npt.NDArray[np.bool_]:
        """The examples that the unlearned models know better than Retrains do."""
        return (self.p <= LEVEL) & (self.difference > 0)

    @property
    def over_unlearned(self) -> npt.NDArray[np.bool_]:
        """The examples that the unlearned models know less well than Retrains do, which gives them away as well."""
        return (self.p <= LEVEL) & (self.difference < 0)


def sample_exposure(
    unlearned: npt.ArrayLike,
    retrained: npt.ArrayLike,
    control_unlearned: npt.ArrayLike,
    control_retrained: npt.ArrayLike,
    *,
    draws: int = DRAWS,
    seed: int = 0,
) -> SampleExposure:
    """Compare unlearned models and Retrains example by example.

    Args:
        unlearned: phi under M unlearned models, (M, examples).
        retrained: phi under R Retrains, (R, examples).
        control_unlearned: phi of the unlearned models on control data, (M, controls).
        control_retrained: the same of the Retrains.
        draws: how many random permutations where there are more than 5,000.
        seed: of these draws.

    Raises:
        InputError: if the models are too few for any p-value of 5 %.
    """
    from scipy.stats import t

    u, o = phi_pair(unlearned, retrained)
    require_enough_models(len(u), len(o))
    u, o = _centred(u, o, control_unlearned, control_retrained)
    labels, _ = _assignments(len(u), len(o), draws, seed)
    phi = np.concatenate([u, o])
    phi = phi - phi.mean(0)  # a variance from sums of squares loses no digits then
    step = max(1, BLOCK // phi.shape[1])
    parts = [_differences(phi, labels[i : i + step]) for i in range(0, len(labels), step)]
    difference, error, degrees = (part[0] for part in parts[0])
    largest = np.concatenate([np.abs(_ratios(each[0], each[1])).max(1) for each in parts])
    statistic = np.abs(_ratios(difference, error))
    beaten = np.searchsorted(np.sort(largest), statistic - 1e-9, side="left")
    half = t.ppf(1 - LEVEL / 2, degrees) * error
    return SampleExposure(
        difference=difference,
        low=difference - half,
        high=difference + half,
        p=np.asarray((len(largest) - beaten) / len(largest), dtype=np.float64),
    )


def _ratios(difference: Floats, error: Floats) -> Floats:
    """Differences in units of their standard errors; 0 where all models agree."""
    return np.asarray(difference / np.where(error > 0, error, np.inf), dtype=np.float64)


def _differences(phi: Floats, labels: npt.NDArray[np.bool_]) -> tuple[Floats, Floats, Floats]:
    """Mean differences, their standard errors and Welch's degrees of freedom, (assignments, examples) each.

    A kind of a single model has no variance of its own: it takes that of the other.
    """
    kinds = (labels.astype(np.float64), (~labels).astype(np.float64))
    sizes = [int(kind[0].sum()) for kind in kinds]
    means = [kind @ phi / size for kind, size in zip(kinds, sizes, strict=True)]
    squares = [kind @ phi**2 for kind in kinds]
    variances = []
    for size, mean, square in zip(sizes, means, squares, strict=True):
        variances.append(np.maximum(square - size * mean**2, 0.0) / max(size - 1, 1))
    if sizes[0] == 1:
        variances[0] = variances[1]
    if sizes[1] == 1:
        variances[1] = variances[0]
    parts = [variance / size for variance, size in zip(variances, sizes, strict=True)]
    total = parts[0] + parts[1]
    terms = [part**2 / (size - 1) for part, size in zip(parts, sizes, strict=True) if size > 1]
    degrees = np.where(total > 0, total**2 / np.maximum(sum(terms), 1e-300), 1.0)
    degrees = np.minimum(degrees, sum(size - 1 for size in sizes if size > 1))
    return means[0] - means[1], np.sqrt(total), degrees
