# SPDX-License-Identifier: Apache-2.0
"""Attacks that compare one number with a threshold.

Yeom, Giacomelli, Fredrikson, Jha: Privacy Risk in Machine Learning: Analyzing the Connection to Overfitting (CSF 2018):
a member's loss is at most the mean loss of the members.

Song, Mittal: Systematic Evaluation of Privacy Risks of Machine Learning Models (USENIX Security 2021): right or wrong;
or confidence, entropy or modified entropy against a threshold for each class, fitted here on retain data (members)
against test data (outsiders) under the evaluated model itself.

Each answers with the share of suspects that it calls members, in percent. There is no good value as such: good is what
Retrain gets.
"""

from __future__ import annotations

import numpy as np

from fedquit.audit.scores import SEQUENCE, Floats, Integers, Scores
from fedquit.errors import InputError


def yeom(members: Scores, outsiders: Scores, suspects: Scores, *, seed: int) -> float:
    """Yeom: suspects whose loss is at most the mean loss of all members."""
    _need(members, suspects)
    mean = float(members.loss.mean())
    return _percent(suspects.loss <= mean * (1 + 1e-12))  # a mean of equal losses may round below them


def song_correctness(members: Scores, outsiders: Scores, suspects: Scores, *, seed: int) -> float:
    """Song and Mittal: suspects that the model predicts right; the same number as their accuracy.

    A sequence counts where the fraction of right positions reaches a threshold, fitted like the others.
    """
    _need(members, suspects)
    if bool((suspects.label == SEQUENCE).any()):
        return _called(members, outsiders, suspects, "correct", 1)
    return _percent(suspects.correct >= 1)


def song_confidence(members: Scores, outsiders: Scores, suspects: Scores, *, seed: int) -> float:
    """Song and Mittal: suspects whose true-class confidence reaches the threshold of their class."""
    return _called(members, outsiders, suspects, "confidence", 1)


def song_entropy(members: Scores, outsiders: Scores, suspects: Scores, *, seed: int) -> float:
    """Song and Mittal: suspects whose predictive entropy is at most the threshold of their class."""
    return _called(members, outsiders, suspects, "entropy", -1)


def song_modified_entropy(members: Scores, outsiders: Scores, suspects: Scores, *, seed: int) -> float:
    """Song and Mittal: suspects whose modified entropy is at most the threshold of their class."""
    return _called(members, outsiders, suspects, "modified_entropy", -1)


def best_threshold(members: Floats, outsiders: Floats) -> float:
    """The threshold t with the highest balanced accuracy of "a member iff score >= t".

    Candidates are the observed scores and infinity ("nobody"); counted in whole numbers, so that ties are exact. Of
    equally good ones it takes the highest: the one that accuses fewest.
    """
    candidates = np.unique(np.concatenate([members, outsiders, [np.inf]]))
    hits, accused = (len(s) - np.searchsorted(np.sort(s), candidates, side="left") for s in (members, outsiders))
    gain = hits.astype(np.int64) * len(outsiders) - accused.astype(np.int64) * len(members)
    return float(candidates[np.flatnonzero(gain == gain.max())[-1]])


def class_thresholds(
    members: Floats, outsiders: Floats, of_members: Integers, of_outsiders: Integers
) -> dict[int, float]:
    """A threshold for each class that has both members and outsiders."""
    shared = np.intersect1d(of_members, of_outsiders)
    return {int(c): best_threshold(members[of_members == c], outsiders[of_outsiders == c]) for c in shared}


def _called(members: Scores, outsiders: Scores, suspects: Scores, number: str, sign: int) -> float:
    """The share at or above the threshold of their class; where the class has none, the one of all classes together."""
    _need(members, suspects, outsiders)
    inside, outside, asked = (sign * getattr(s, number) for s in (members, outsiders, suspects))
    by_class = class_thresholds(inside, outside, members.label, outsiders.label)
    classes, position = np.unique(suspects.label, return_inverse=True)
    if any(int(c) not in by_class for c in classes):
        overall = best_threshold(inside, outside)
        by_class = {int(c): by_class.get(int(c), overall) for c in classes}
    return _percent(asked >= np.array([by_class[int(c)] for c in classes])[position])


def _need(*sets: Scores) -> None:
    if not all(len(s) for s in sets):
        raise InputError("an attack needs at least one member, outsider and suspect.")


def _percent(called: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> float:
    return 100 * float(called.mean())
