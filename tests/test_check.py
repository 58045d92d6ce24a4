# SPDX-License-Identifier: Apache-2.0
"""`fedquit check`: every kind of violation is found, in the right place, and blamed on no other contract."""

from __future__ import annotations

import pytest

from fedquit.check import Report, check_method
from fedquit.check.report import PARTS
from fedquit.methods import METHODS

# Of each violating method: the part that is broken, where it is seen, and what the line says.
VIOLATIONS = {
    "AsksTheGone": ("contract", "recovery round 1, client 12, task Learn", "asks a client that has left"),
    "ForgetsLate": ("contract", "recovery round 1, client 12, task Learn", "asks for 'forget' data in the recovery"),
    "ReadsAll": ("contract", "unlearning round 1, client 12, task Climb", "asks a leaving client for its 'all' data"),
    "AsksStayersToForget": ("contract", "unlearning round 1, client 11, task Climb", "for forget data"),
    "AsksByPosition": ("contract", "unlearning round 1, client 0, task Climb", "a client that cannot be asked"),
    "AsksTwice": ("contract", "unlearning round 1, client 12, task Climb", "asks client 12 twice in one question"),
    "UsesPublicData": ("contract", "unlearning round 1, task Climb", "without saying that it needs any"),
    "NamesKeysWrongly": ("contract", "training round 1, client 11", "'client-11', which names client 11, and not as"),
    "KeepsUnderAnother": ("contract", "training round 1, client 11", "'update/12', which is of another client"),
    "KeepsOneSecretly": ("contract", "recovery", "'target', which holds replies of client 12 alone"),
    "KeepsACopy": ("contract", "erasure", "under 'update/12' is still there under 'archive'"),
    "KeepsNumbers": ("contract", "training round 1, client 11", "keeps a float in the server's memory"),
    "KnowsTheFuture": ("contract", "training, client 12", "`training_task` depends on the request"),
    "SendsTensors": ("contract", "unlearning round 1, task ClimbFrom", "cannot be sent: centre is a Tensor"),
    "SendsAnotherType": ("contract", "unlearning round 1, task ClimbWhole", "cannot be read again once it is sent"),
    "HidesAttributes": ("contract", "unlearning round 1, task Climb", "carries 'centre', which is no field"),
    "DefinesTasksInside": ("contract", "unlearning round 1, task Inner", "is defined inside a function"),
    "AveragesLosses": (
        "contract",
        "unlearning round 1, client 12, task MeanLoss",
        "`loss` returns () for a batch of 32",
    ),
    "ChangesTheState": ("contract", "unlearning round 1 ", "`unlearn` changes `state.params` in place"),
    "ChangesReplies": ("contract", "unlearning round 1 ", "`unlearn` changes the reply of client 12 in place"),
    "ChangesMemory": ("contract", "training round 2, client 11", "in the server's memory under 'sum/11' in place"),
    "ChangesInATask": (
        "contract",
        "unlearning round 1, client 12, task Halting",
        "`after_step` changes `old` in place",
    ),
    "RemembersOnSelf": ("contract", "unlearning round 1", "`unlearn` changes self.before"),
    "RemembersOnClass": ("contract", "unlearning round 1", "changes the class attribute RemembersOnClass.seen"),
    "RemembersInModule": ("contract", "unlearning round 1", "changes the global violating_methods.CACHE"),
    "Undecorated": ("contract", "class Undecorated", "it is no frozen dataclass"),
    "HoldsTensors": ("contract", "class HoldsTensors, field centre", "it is a Tensor, which no recipe can express"),
    "LosesALayer": ("contract", "unlearning round 1", "returns a model with other parameters (1.weight)"),
    "Sorts": ("contract", "unlearning round 1", "returns the parameters in another order"),
    "Flattens": ("contract", "unlearning round 1", "'1.weight' has shape (128,) where the model has (8, 16)"),
    "Rounds": ("contract", "unlearning round 1", "'1.weight' is torch.float32 where the model has torch.float64"),
    "Explodes": ("contract", "unlearning round 1", "'1.weight' holds NaN or infinity"),
    "KeepsTheGraph": ("contract", "unlearning round 1", "'1.weight' still hangs on an autograd graph"),
    "StandsStill": ("contract", "unlearning round 1", "returns a state at round 0 after round 0"),
    "ReturnsParams": ("contract", "unlearning round 1", "`unlearn` returns dict"),
    "Diverges": ("contract", "unlearning round 1", "the reply of client 12 in round 1 of phase 'unlearn-0' holds NaN"),
    "DrawsFromTorch": ("determinism", "unlearning round 1", "`unlearn` draws from torch's global generator"),
    "DrawsFromNumpy": ("determinism", "unlearning round 1", "`unlearn` draws from numpy's global generator"),
    "DrawsFromPython": ("determinism", "unlearning round 1", "`unlearn` draws from Python's global generator"),
    "DrawsFromTheSystem": ("determinism", "unlearning round 1", "the same request, served twice, gives two models"),
    "DrawsInATask": (
        "determinism",
        "unlearning round 1, client 12, task DropOut",
        "`loss` draws from torch's global generator",
    ),
    "KeepsAnEmptyMark": ("resume", "unlearning round 2", "a run that was killed in every round gives another model"),
    "ComparesExamples": ("engines", "engine stacked, unlearning round 1", "away from those of the sequential engine"),
    "Branches": ("engines", "engine stacked", "the life ends in RuntimeError"),
    "FailsForSamples": ("requests", "unlearning round 1 (samples of one client)", "ends in KeyError: 'samples'"),
    "RefusesWithAnotherError": ("requests", "(samples of one client)", "ends in NotImplementedError"),
    "RefusesWithoutAReason": ("requests", "(samples of one client)", "refuses the request with 'no samples'"),
    "RefusesEverything": ("requests", "all kinds of request", "the method refuses every one"),
    "ReadsOneReply": ("costs", "unlearning round 1, task Climb", "asks 3 clients and reads 1 of the replies"),
    "RunsTheNetwork": ("costs", "unlearning round 1", "the server runs the network itself"),
    "ReachesInside": ("costs", "unlearning round 1", "reaches for `fed.inner`"),
    "GoesAround": ("costs", "unlearning", "down bytes are counted at the engine, and 0 are charged"),
    "KeepsAtHome": ("costs", "recovery", "clients keep 'last' at home, which `at_home` does not name"),
    "PromisesTooLittle": ("costs", "training", "bytes at the server during the training"),
    "ComputesElsewhere": ("costs", "unlearning", "FLOPs were computed and"),
}
IN_FULL = {
    "RemembersInTheProcess": ("resume", "unlearning round 2", "a process that goes on from"),
    "SendsWhatGrew": ("flower", "Flower (one client)", "the method did not serve the request"),
    "Ruins": ("behaviour", "Fashion-MNIST", "gets 10.0 % of the test images right"),
}


def quick(name: str) -> Report:
    return check_method(name, quick=True)


@pytest.mark.parametrize("name", VIOLATIONS)
def test_a_violation_is_one_line_that_blames_no_other_contract(name: str) -> None:
    part, where, seen = VIOLATIONS[name]
    report = quick(f"violating_methods:{name}")
    assert [violation.part for violation in report.violations] == [part], report.violations
    (violation,) = report.violations
    assert where in violation.where
    assert seen in violation.seen
    assert violation.advice
    assert "\n" not in violation.line
    assert [p.name for p in report.parts if p.status == "broken"] == [part]


@pytest.mark.parametrize("name", METHODS)
def test_our_own_methods_keep_every_contract_of_the_quick_form(name: str) -> None:
    report = quick(name)
    assert report.violations == ()
    assert {p.name: p.status for p in report.parts} == {
        **dict.fromkeys(PARTS, "kept"),
        "flower": "skipped",
        "behaviour": "skipped",
    }
    assert any(line.phase == "unlearning" for line in report.costs)


def test_a_method_that_keeps_every_contract_is_not_blamed() -> None:
    for name in ("Good", "RefusesSamples"):
        assert quick(f"violating_methods:{name}").violations == ()
    refused = [o for o in quick("violating_methods:RefusesSamples").requests if o.outcome == "refused"]
    assert [o.request for o in refused] == ["samples of one client", "samples of several clients"]
