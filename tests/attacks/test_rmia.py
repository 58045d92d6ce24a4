# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedquit.audit.attacks.rmia import rmia
from fedquit.audit.attacks.roc import auc
from fedquit.audit.scores import Floats
from fedquit.errors import InputError
from fedquit.results.intervals import Interval
from signal_world import Kind, phi_over_models

quick = settings(max_examples=40)


def confidence(phi: Floats) -> Floats:
    return np.asarray(1 / (1 + np.exp(-phi)), dtype=np.float64)


def test_four_ratios_worked_out_by_hand() -> None:
    x, refs, z, z_refs = [0.9, 0.5], [[0.6, 0.5]], [0.5, 0.8, 0.9], [[0.5] * 3]
    # a = 1: ratios 1.5 and 1 against 1, 1.6, 1.8; equal ratios do not dominate
    assert rmia(x, refs, z, z_refs, a=1.0).tolist() == pytest.approx([1 / 3, 0])
    # a = 0: p(x) = (p_out + 1) / 2, ratios 1.125 and 0.667 against 0.667, 1.067, 1.2
    assert rmia(x, refs, z, z_refs, a=0.0).tolist() == pytest.approx([2 / 3, 0])
    assert rmia(x, refs, z, z_refs, a=1.0, gamma=0.5).tolist() == [1, 1]
    assert rmia(x, refs, z, z_refs, a=1.0, gamma=2.0).tolist() == [0, 0]


def test_several_references_are_averaged() -> None:
    pair = rmia([0.9], [[0.4], [0.8]], [0.5, 0.8], [[0.4, 0.4], [0.6, 0.6]], a=0.4)
    one = rmia([0.9], [[0.6]], [0.5, 0.8], [[0.5, 0.5]], a=0.4)
    assert pair.tolist() == one.tolist()


def test_perfect_separation_and_identical_distributions() -> None:
    population, refs = np.full(50, 0.5), np.full((2, 50), 0.5)
    assert rmia(np.full(4, 0.99), np.full((2, 4), 0.5), population, refs).tolist() == [1.0] * 4
    rng = np.random.default_rng(0)
    draws = [rng.uniform(0.2, 0.9, n) for n in (800, 800)]
    found = rmia(draws[0], np.full((1, 800), 0.5), draws[1], np.full((1, 800), 0.5))
    assert auc(found, rmia(draws[1], np.full((1, 800), 0.5), draws[1], np.full((1, 800), 0.5))).covers(0.5)


@quick
@given(seed=st.integers(0, 999), gamma=st.floats(0.1, 5), a=st.floats(0, 1))
def test_scores_are_shares_fall_with_gamma_and_do_not_depend_on_the_order(seed: int, gamma: float, a: float) -> None:
    rng = np.random.default_rng(seed)
    x, refs, z, z_refs = rng.uniform(size=9), rng.uniform(size=(3, 9)), rng.uniform(size=12), rng.uniform(size=(3, 12))
    found = rmia(x, refs, z, z_refs, gamma=gamma, a=a)
    assert ((found >= 0) & (found <= 1)).all()
    assert (rmia(x, refs, z, z_refs, gamma=2 * gamma, a=a) <= found).all()
    mixed, order = rng.permutation(12), rng.permutation(9)
    assert (
        rmia(x[order], refs[:, order], z[mixed], z_refs[:, mixed], gamma=gamma, a=a).tolist() == found[order].tolist()
    )


def test_confidences_of_nought_do_no_harm() -> None:
    assert np.isfinite(rmia([0.0, 1.0], [[0.0, 0.0]], [0.0, 0.5], [[0.0, 0.0]], a=1.0)).all()


def attacked(kind: Kind) -> Interval:
    """Forget data against a hold-out as hard, with three references that saw neither."""
    n = 400
    unseen: Kind = "wiped" if kind == "wiped" else "retrain"
    refs = [confidence(phi_over_models("retrain", 3, n, seed)) for seed in (1, 2)]
    forget = confidence(phi_over_models(kind, 1, n, 3)[0])
    holdout = confidence(phi_over_models(unseen, 1, n, 4)[0])
    scores = rmia(forget, refs[0], holdout, refs[1]), rmia(holdout, refs[1], holdout, refs[1])
    return auc(*scores)


def test_an_unlearner_that_does_nothing_is_caught_and_retrain_is_not() -> None:
    assert attacked("nothing").low > 0.7
    assert attacked("retrain").covers(0.5)


def test_a_wiped_model_cannot_be_caught_since_it_remembers_nobody() -> None:
    """Forget and hold-out data are equally unknown to it: what a wipe costs shows in the accuracies."""
    assert attacked("wiped").covers(0.5)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(InputError, match="do not fit"):
        rmia([0.5, 0.5], [[0.5]], [0.5], [[0.5]])
    with pytest.raises(InputError, match="gamma"):
        rmia([0.5], [[0.5]], [0.5], [[0.5]], gamma=0)
    with pytest.raises(InputError, match="a from 0 to 1"):
        rmia([0.5], [[0.5]], [0.5], [[0.5]], a=1.5)
