# SPDX-License-Identifier: Apache-2.0
"""What every method must keep to, with every preset and kind of request: the contract of `fedquit check`.

`tests/test_check.py` puts each method through the other parts: it repeats, survives kills, and agrees on all engines.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fedquit.check.contract import Trial, judge_class, try_request
from fedquit.check.federation import KINDS, RECOVERY_ROUNDS, SmallFederation, recipe_for
from fedquit.check.report import Findings
from fedquit.methods import METHODS

SAMPLES = {"samples of one client", "samples of several clients"}
REFUSES = {  # what the method's paper does not define
    "federaser": SAMPLES,
    "pga": SAMPLES,
    "fukd": SAMPLES,
    "fedosd": {"several clients", "samples of several clients"},
}
SERVES_ALL = {("fedosd", "authors")}  # presets that lift the restriction
ROUNDS = {"mode": 7}  # of unlearning, where later ones differ from the first: MoDe degrades in six

CASES = [
    pytest.param(name, preset, kind, id=f"{name}{'-' + preset if preset else ''}: {kind}")
    for name, cls in METHODS.items()
    for preset in ("", *cls.presets)
    for kind in KINDS
]


@pytest.mark.parametrize(("name", "preset", "kind"), CASES)
def test_a_method_keeps_the_contract_or_refuses_what_its_paper_does_not_define(
    name: str, preset: str, kind: str, tmp_path: Path
) -> None:
    table = {"name": name, "preset": preset} if preset else {"name": name}
    federation = SmallFederation(recipe_for(table), most_rounds=ROUNDS.get(name, 3))
    findings = Findings()
    judge_class(federation.build_method(), findings)
    trial = try_request(federation, kind, tmp_path, findings, flops=kind == "one client")
    assert findings.all == ()
    refused = kind in REFUSES.get(name, set()) and (name, preset) not in SERVES_ALL
    assert trial.outcome.outcome == ("refused" if refused else "served")
    if not refused:
        asks_all_who_stay_to_recover(federation, trial)


def asks_all_who_stay_to_recover(federation: SmallFederation, trial: Trial) -> None:
    assert trial.life is not None
    rounds = RECOVERY_ROUNDS if federation.build_method().recovers else 0
    staying = federation.request(trial.kind).stay(federation.clients)
    assert trial.life.costs["recovery"].participations == rounds * len(staying)


@pytest.mark.parametrize("name", METHODS)
def test_a_method_file_names_its_paper_and_its_class_says_what_it_is(name: str) -> None:
    module = sys.modules[METHODS[name].__module__]
    assert module.__doc__
    assert METHODS[name].__doc__
    if name not in ("natural", "retrain", "ascent"):
        assert any(year in module.__doc__ for year in map(str, range(2016, 2027))) or "Mora" in module.__doc__
