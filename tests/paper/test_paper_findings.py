# SPDX-License-Identifier: Apache-2.0
"""The claims of the paper: they hold in its own tables unless said here, and records decide them by the rule."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from fedquit.paper.findings import FAILS, HOLDS, OPEN, Claim, judge, load_claims
from fedquit.paper.numbers import Key, load_paper
from fedquit.paper.records import Measured, Records, Source, load_records

PAPER = load_paper()
CLAIMS = load_claims()
CONTRADICTED = {("teachers-geometry-drives-recovery", "cifar100-iid")}  # the probability ladder lies behind flatten
NOT_PRINTED = {"pairs-best-retained", "entropy-close-to-retrain", "smaller-v-forgets-more", "entropy-v-underforgets"}


def by_id(name: str, setting: str) -> Claim:
    return next(claim for claim in CLAIMS if (claim.id, claim.setting) == (name, setting))


def records(values: dict[str, list[float]], setting: str = "shakespeare") -> Records:
    """Forget gaps after recovery, by method, a value for each target."""
    cells = [
        Measured(Key(setting, "client", method, "recovered", "forget_acc"), (i,), 0, 50.0, Source("x"), gap=gap)
        for method, gaps in values.items()
        for i, gap in enumerate(gaps)
    ]
    return Records(cells)


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: f"{claim.id}-{claim.setting}")
def test_the_papers_own_tables_bear_a_claim_out_unless_it_is_known_that_they_do_not(claim: Claim) -> None:
    expected = None if claim.id in NOT_PRINTED else (claim.id, claim.setting) not in CONTRADICTED
    assert claim.in_paper(PAPER) is expected


def test_every_claim_is_named_once_in_a_setting_and_says_how_it_is_decided() -> None:
    assert len({(claim.id, claim.setting) for claim in CLAIMS}) == len(CLAIMS)
    assert all(claim.says.endswith(".") and claim.how.endswith(".") for claim in CLAIMS)
    assert all(1 <= claim.needed <= len(claim.comparisons) for claim in CLAIMS)


def test_a_claim_holds_where_every_target_of_enough_agrees() -> None:
    claim = by_id("shakespeare-smallest-forget-gap", "shakespeare")
    others = {method: [2.0] * 5 for method in ("mode", "fedau", "not", "fedosd")}
    finding = judge(claim, PAPER, records({"fedquit": [1.0] * 5, **others}))
    assert (finding.word, finding.p) == (HOLDS, 1 / 32)
    assert finding.reason == "4 of 4 comparisons are as stated, over 5 targets."


def test_four_targets_cannot_tell_and_the_reason_says_how_many_could() -> None:
    claim = by_id("shakespeare-smallest-forget-gap", "shakespeare")
    others = {method: [2.0] * 4 for method in ("mode", "fedau", "not", "fedosd")}
    finding = judge(claim, PAPER, records({"fedquit": [1.0] * 4, **others}))
    assert (finding.word, finding.p) == (OPEN, 1 / 16)
    assert "At least 5 targets are needed" in finding.reason


def test_one_comparison_the_other_way_round_refutes_a_claim_that_needs_all_by_bonferroni() -> None:
    claim = by_id("shakespeare-smallest-forget-gap", "shakespeare")
    others = {method: [2.0] * 7 for method in ("mode", "fedau", "not")}
    finding = judge(claim, PAPER, records({"fedquit": [1.0] * 7, "fedosd": [0.5] * 7, **others}))
    assert (finding.word, finding.refuted_p) == (FAILS, 4 / 2**7)
    assert finding.reason == "3 of 4 comparisons are as stated, over 7 targets."


def test_what_is_not_run_counts_against_holding() -> None:
    claim = by_id("shakespeare-smallest-forget-gap", "shakespeare")
    finding = judge(claim, PAPER, records({"fedquit": [1.0] * 8, "mode": [2.0] * 8}))
    assert finding.word == OPEN
    assert finding.reason == "1 of 1 comparisons are as stated, over 8 targets. 3 more are not run yet."
    assert judge(claim, PAPER, Records()).reason == "Not run yet."


def test_only_targets_that_have_both_sides_are_compared() -> None:
    claim = by_id("shakespeare-smallest-forget-gap", "shakespeare")
    finding = judge(claim, PAPER, records({"fedquit": [1.0] * 3, "mode": [2.0] * 5}))
    assert finding.targets == (3, 3)


def test_a_count_is_decided_by_one_record() -> None:
    claim = by_id("mode-unlearning-costs-150-times", "cifar100-iid")
    source = Source("x")
    key = Key("cifar100-iid", "client", "fedquit", "unlearned", "bytes")
    small = Measured(key, (0,), 0, 1.0, source)
    large = dataclasses.replace(small, key=key._replace(method="mode"), value=154.0)
    assert judge(claim, PAPER, Records([small, large])).word == HOLDS
    equal = dataclasses.replace(large, value=75.0)
    assert judge(claim, PAPER, Records([small, equal])).word == OPEN
    assert judge(claim, PAPER, Records([small, dataclasses.replace(large, value=70.0)])).word == FAILS


def test_a_side_may_be_a_number_a_factor_or_a_drop() -> None:
    claim = by_id("iid-twenty-times-cheaper", "cifar100-iid")
    cells = [
        Measured(Key("cifar100-iid", "client", "fedquit", "total", measure), (i,), 0, 1.0, Source("x"), times=11.0)
        for measure in ("bytes", "flops")
        for i in range(5)
    ]
    assert judge(claim, PAPER, Records(cells)).word == HOLDS
    slow = [dataclasses.replace(cell, times=9.0) for cell in cells]
    assert judge(claim, PAPER, Records(slow)).word == OPEN  # 2 comparisons of 5 targets: 2/32 is above 5 %


def test_the_committed_records_decide_nothing_that_two_targets_cannot() -> None:
    stored = load_records(Path(__file__).parents[2] / "results")
    for claim in CLAIMS:
        finding = judge(claim, PAPER, stored)
        assert finding.word == OPEN or claim.counted or finding.targets[1] >= 5
