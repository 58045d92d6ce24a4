# SPDX-License-Identifier: Apache-2.0
"""`fedquit check`: every kind of violation is found, in the right place, and blamed on no other contract."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from fedquit.check import Report, check_method
from fedquit.check.behaviour import behaviour
from fedquit.check.comparisons import judge_real_kills
from fedquit.check.federation import SmallFederation, recipe_for
from fedquit.check.life import lead_life
from fedquit.check.on_flower import CLIENTS, judge_on_flower, why_not
from fedquit.check.report import PARTS, Findings, Violation
from fedquit.cli import main
from fedquit.methods import METHODS
from fedquit.methods.fedau import FedAU

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
    "DrawsAndRestores": ("determinism", "unlearning round 1", "the same request, served twice, gives two models"),
    "WorksOnce": ("determinism", "one client", "served a second time, ends in IndexError: pop from empty list"),
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


# ---- what the quick form leaves out


def only(findings: Findings, part: str) -> Violation:
    (violation,) = findings.all
    assert violation.part == part
    return violation


@pytest.mark.slow
def test_what_only_the_process_remembers_is_lost_with_it(tmp_path: Path) -> None:
    name = "violating_methods:RemembersInTheProcess"
    assert quick(name).violations == (), "nothing that can be seen changes"
    federation = SmallFederation(recipe_for({"name": name}))
    first = lead_life(federation, "one client", tmp_path / "first")
    findings = Findings()
    assert judge_real_kills(federation, "one client", tmp_path / "killed", first, findings) == 2
    violation = only(findings, "resume")
    assert violation.where == "unlearning round 2 (one client)"
    assert "a process that goes on from 2 that were killed gives another model here" in violation.seen


@pytest.mark.slow
def test_a_method_without_rounds_of_its_own_is_killed_in_its_recovery(tmp_path: Path) -> None:
    federation = SmallFederation(recipe_for({"name": "natural"}))
    first = lead_life(federation, "one client", tmp_path / "first")
    findings = Findings()
    assert judge_real_kills(federation, "one client", tmp_path / "killed", first, findings) == 1
    assert findings.all == ()


@pytest.mark.flower
def test_what_no_message_can_carry_is_found_on_flower(tmp_path: Path) -> None:
    pytest.importorskip("flwr", reason="needs the extra `flower`")
    name = "violating_methods:SendsWhatGrew"
    assert quick(name).violations == (), "the simulator carries it"
    findings = Findings()
    judge_on_flower(SmallFederation(recipe_for({"name": name}), clients=CLIENTS), "one client", tmp_path, findings)
    violation = only(findings, "flower")
    assert violation.where == "Flower (one client)"
    assert "did not serve the request of client 1 " in violation.seen


def test_flower_is_skipped_with_the_reason_where_a_method_cannot_be_tried_there() -> None:
    assert "must know the request in advance" in why_not(FedAU(when="during"))


@pytest.mark.slow
def test_a_model_that_only_guesses_is_flagged_beside_those_that_do_not(tmp_path: Path) -> None:
    findings = Findings()
    lines = behaviour({"name": "violating_methods:Ruins"}, tmp_path, findings)
    violation = only(findings, "behaviour")
    assert violation.where == "Fashion-MNIST, violating_methods:Ruins, recovered"
    assert "gets 10.0 % of the test images right" in violation.seen
    shown = [(line.method, line.phase) for line in lines]
    assert shown[:2] == [("original", "original"), ("retrain", "retrained")]
    assert {method for method, _ in shown} == {"original", "retrain", "fedquit", "natural", "violating_methods:Ruins"}


@pytest.mark.slow
@pytest.mark.flower
def test_one_of_our_own_methods_keeps_every_contract_of_the_full_form() -> None:
    pytest.importorskip("flwr", reason="needs the extra `flower`")
    report = check_method("fedquit")
    assert report.violations == ()
    assert {p.name: p.status for p in report.parts} == {**dict.fromkeys(PARTS, "kept"), "behaviour": "shown"}
    by_phase = {(line.method, line.phase): line for line in report.behaviour}
    natural, unlearned = by_phase["natural", "unlearned"], by_phase["fedquit", "unlearned"]
    assert natural.forget_accuracy == by_phase["original", "original"].forget_accuracy
    assert (unlearned.forget_accuracy or 0) < (natural.forget_accuracy or 0) - 10
    assert (natural.bytes, unlearned.bytes > 0) == (0, True)


# ---- the command


def command(*words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.argv", ["fedquit", "check", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    printed = capsys.readouterr()
    return int(ended.value.code or 0), printed.out, printed.err


def test_a_method_that_is_fine_gets_one_page_and_exit_code_0(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("fedquit", "--quick", "--set", "lr=1e-3", "--set", "method.order=sequential")
    code, page, _ = command(*words, monkeypatch=monkeypatch, capsys=capsys)
    assert code == 0
    assert "lr = 0.001" in page
    assert "order = sequential" in page
    assert [line.split()[0] for line in page.splitlines() if line[1:13].strip() in PARTS] == list(PARTS)
    assert "Not judged: flower, behaviour." in page
    assert "\x1b" not in page, "plain where it is no terminal"
    assert len(page.splitlines()) < 60


def test_a_broken_contract_is_a_line_of_the_page_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, page, _ = command("violating_methods:ReadsAll", "--quick", monkeypatch=monkeypatch, capsys=capsys)
    assert code == 1
    (line,) = [line for line in page.splitlines() if line.startswith("contract: ")]
    assert line == (
        "contract: unlearning round 1, client 12, task Climb (one client): asks a leaving client for its 'all' data "
        '(6 times); ask leaving clients with split="forget".'
    )
    assert "1 contract is broken. Not judged: determinism, resume, engines, flower, behaviour." in page


def test_json_holds_what_the_page_says(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    name = "violating_methods:HoldsTensors"
    code, out, _ = command(name, "--quick", "--json", monkeypatch=monkeypatch, capsys=capsys)
    report = json.loads(out)
    assert (code, report["kept"], report["form"]) == (1, False, "quick")
    assert [part["name"] for part in report["parts"]] == list(PARTS)
    assert report["parts"][0]["violations"][0]["where"] == "class HoldsTensors, field centre"
    assert {line["request"] for line in report["costs"]} == {outcome["request"] for outcome in report["requests"]}


BROKEN_MODULE = "import nothing_of_that_name\n"
UNFINISHED_MODULE = "def method(:\n"
NEEDY_MODULE = """
from dataclasses import dataclass
from violating_methods import Good

@dataclass(frozen=True, kw_only=True)
class Needy(Good):
    strength: float

@dataclass(frozen=True)
class Abstract(Good):
    def __post_init__(self):
        raise RuntimeError("never")
"""


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["fedqit"], "unknown method 'fedqit': did you mean 'fedquit'?"),
        (["no_module_of_that_name:X"], "cannot be imported (No module named 'no_module_of_that_name')"),
        (["violating_methods:Goood"], "did you mean 'Good'?"),
        (["violating_methods:LOCAL"], "is not a method"),
        (["broken:X"], "method 'broken:X' cannot be imported (No module named 'nothing_of_that_name')"),
        (["unfinished:X"], "unfinished:X cannot be imported and built (SyntaxError: "),
        (["needy:Needy"], "missing 1 required keyword-only argument: 'strength'"),
        (["needy:Abstract"], "RuntimeError: never (needy.py, line 12)"),
        (["fedquit", "--set", "lrr=1"], "unknown key in method 'lrr': did you mean 'lr'?"),
        (["fedquit", "--set", "lr=fast"], "method.lr is 'fast', but must be of type float"),
        (["fedquit", "--set", "lr"], "--set 'lr' has no value"),
        (["fedquit", "--set", "name=pga"], "the method's name is the argument of the command"),
        (["fedquit", "--set", "preset=authors"], "unknown preset of method 'fedquit' 'authors'"),
    ],
)
def test_what_cannot_be_checked_is_one_sentence_and_exit_code_2(
    words: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    modules = {"broken": BROKEN_MODULE, "unfinished": UNFINISHED_MODULE, "needy": NEEDY_MODULE}
    for name, source in modules.items():
        (tmp_path / f"{name}.py").write_text(source)
        monkeypatch.delitem(sys.modules, name, raising=False)
    code, out, err = command(*words, monkeypatch=monkeypatch, capsys=capsys)
    assert (code, out) == (2, "")
    assert sentence in err
    assert "Traceback" not in err
