# SPDX-License-Identifier: Apache-2.0
"""LiRA: is phi of this example under this model more like that of models that saw it, or of models that did not?

Carlini, Chien, Nasr, Song, Terzis, Tramèr: Membership Inference Attacks From First Principles (S&P 2022). phi is close
to normal over retrained models, so two means and two variances for each example say all.

U-LiRA asks the question that unlearning poses: "saw x and unlearnt it" against "never saw x". Hayes, Shumailov,
Triantafillou, Khalifa, Papernot: Inexact Unlearning Needs More Careful Evaluations to Avoid a False Sense of Privacy
(SaTML 2025). It is the attack of somebody who knows the unlearning method, and the one an unlearner must withstand.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedquit.audit.scores import Floats
from fedquit.errors import InputError

Mask = npt.NDArray[np.bool_]
FEW = 64  # models; with fewer, one variance serves all examples unless told otherwise
SMALLEST = 1e-6  # of the standard deviations, where all models agree


@dataclass(frozen=True, eq=False)
class Normal:
    """A mean and a standard deviation for each example."""

    mean: Floats
    std: Floats

    def log_density(self, phi: Floats) -> Floats:
        """Up to a constant."""
        return (-(((phi - self.mean) / self.std) ** 2) / 2 - np.log(self.std)).astype(np.float64)


def lira_offline(
    phi: npt.ArrayLike,
    references: npt.ArrayLike,
    *,
    seen: npt.ArrayLike | None = None,
    fixed_variance: bool | None = None,
) -> Floats:
    """LiRA, offline: by how many standard deviations phi lies above models that did not see the example.

    The paper's score is the normal probability of that number; this one ranks alike and does not saturate.

    Args:
        phi: under the attacked model, (N,).
        references: under M other models, (M, N).
        seen: which of them saw which example, (M, N); these are left out. None: none saw any.
        fixed_variance: one variance for all examples; None: where fewer than 64 models are left for some example.
    """
    asked, refs, mask = _inputs(phi, references, seen)
    out = _fit(refs, ~mask, fixed_variance)
    return ((asked - out.mean) / out.std).astype(np.float64)


def lira_online(
    phi: npt.ArrayLike, references: npt.ArrayLike, *, seen: npt.ArrayLike, fixed_variance: bool | None = None
) -> Floats:
    """LiRA, online: the log-likelihood ratio between models that saw the example and models that did not.

    Args:
        phi: under the attacked model, (N,).
        references: under M other models, (M, N).
        seen: which of them saw which example, (M, N); each example needs models of both kinds.
        fixed_variance: one variance for all examples; None: where fewer than 64 models are left for some example.
    """
    asked, refs, mask = _inputs(phi, references, seen)
    inside, outside = _fit(refs, mask, fixed_variance), _fit(refs, ~mask, fixed_variance)
    return inside.log_density(asked) - outside.log_density(asked)


@dataclass(frozen=True, eq=False)
class Duel:
    """Scores of K models that unlearnt the examples and of K that never saw them, (K, N) each: high means unlearnt."""

    unlearned: Floats
    never: Floats

    @property
    def accuracy(self) -> Floats:
        """For each example, how often the sign of the score is right; one half means that nothing is left to find."""
        right = np.sign(self.unlearned) - np.sign(self.never)  # an undecided score counts half
        return np.asarray(0.5 + right.mean(0) / 4, dtype=np.float64)


def ulira(unlearned: npt.ArrayLike, never: npt.ArrayLike, *, fixed_variance: bool | None = None) -> Duel:
    """U-LiRA: the log-likelihood ratio between "saw it and unlearnt it" and "never saw it", model by model.

    Models i of both kinds are scored by normals fitted to all other models: no model is judged by a fit that it
    entered, and leaving out one of each kind keeps the fits even. Feed `unlearned` and `never` of the answer to
    `strength.roc`.

    Args:
        unlearned: phi under models that were trained with the examples and then unlearnt them, (M, N).
        never: phi under models that never saw them (other seeds of Retrain), (M, N). Models without a partner only
            enter the fits.
        fixed_variance: one variance for all examples; None: where there are fewer than 64 models of a kind.
    """
    u, n = (np.asarray(s, dtype=np.float64) for s in (unlearned, never))
    if u.ndim != 2 or n.ndim != 2 or u.shape[1] != n.shape[1] or min(len(u), len(n)) < 2:
        raise InputError(
            f"phi has shapes {u.shape} and {n.shape}: give (models, examples) with two models of each kind."
        )
    scores: tuple[list[Floats], list[Floats]] = ([], [])
    for i in range(min(len(u), len(n))):
        rest = [np.delete(s, i, axis=0) for s in (u, n)]
        one, other = (_fit(s, np.ones(s.shape, dtype=np.bool_), fixed_variance) for s in rest)
        for ratios, phi in zip(scores, (u[i], n[i]), strict=True):
            ratios.append(one.log_density(phi) - other.log_density(phi))
    return Duel(np.stack(scores[0]), np.stack(scores[1]))


def ulira_by_model(unlearned: npt.ArrayLike, never: npt.ArrayLike, *, fixed_variance: bool | None = None) -> Floats:
    """How often U-LiRA is right about each pair of models that no fit has seen; one half means that it cannot tell.

    The first half of the models of either kind fits the normals, and the others are scored, so that the pairs are
    independent given the fits: Student's interval over them holds. Over the pairs of `ulira` it does not, since every
    model enters the fits of all others.

    Args:
        unlearned: phi under models that were trained with the examples and then unlearnt them, (M, N).
        never: phi under models that never saw them (other seeds of Retrain), (M, N).
        fixed_variance: one variance for all examples; None: where there are fewer than 64 models of a kind.

    Returns:
        The share of right decisions of each pair, (M - M // 2,); an undecided one counts half.
    """
    u, n = (np.asarray(s, dtype=np.float64) for s in (unlearned, never))
    if u.ndim != 2 or u.shape != n.shape or len(u) < 4:
        raise InputError(f"phi has shapes {u.shape} and {n.shape}: give (models, examples) with as many of each kind.")
    half = len(u) // 2
    one, other = (_fit(s[:half], np.ones((half, s.shape[1]), dtype=np.bool_), fixed_variance) for s in (u, n))
    signs = [np.sign(one.log_density(phi) - other.log_density(phi)) for phi in (u[half:], n[half:])]
    return np.asarray(0.5 + (signs[0] - signs[1]).mean(1) / 4, dtype=np.float64)


def _inputs(phi: npt.ArrayLike, references: npt.ArrayLike, seen: npt.ArrayLike | None) -> tuple[Floats, Floats, Mask]:
    asked, refs = np.asarray(phi, dtype=np.float64), np.asarray(references, dtype=np.float64)
    mask = np.zeros(refs.shape, dtype=np.bool_) if seen is None else np.asarray(seen, dtype=np.bool_)
    if asked.ndim != 1 or refs.ndim != 2 or refs.shape[1] != len(asked) or mask.shape != refs.shape:
        raise InputError(
            f"phi {asked.shape}, references {refs.shape} and seen {mask.shape} do not fit: (N,), (M, N) twice."
        )
    return asked, refs, mask


def _fit(phi: Floats, which: Mask, fixed_variance: bool | None) -> Normal:
    """A normal for each example, over the models marked for it."""
    count = which.sum(0)
    if not (count > 0).all():
        raise InputError("some examples have no reference model of one kind: train more, or leave those examples out.")
    mean = np.where(which, phi, 0.0).sum(0) / count
    squares = np.where(which, (phi - mean) ** 2, 0.0).sum(0)
    if fixed_variance is None:
        fixed_variance = bool(count.min() < FEW)
    if not fixed_variance and bool((count < 2).any()):
        raise InputError("a variance for each example needs two models for each: take fixed_variance.")
    if not fixed_variance:
        variance = squares / (count - 1)
    elif count.sum() > len(count):  # pooled around each example's own mean
        variance = np.full(len(count), squares.sum() / (count.sum() - len(count)))
    else:  # one model only: the spread over the examples is all there is
        variance = np.full(len(count), mean.var())
    return Normal(mean.astype(np.float64), np.maximum(np.sqrt(variance), SMALLEST).astype(np.float64))
