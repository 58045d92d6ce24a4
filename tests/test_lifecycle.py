# SPDX-License-Identifier: Apache-2.0
"""The state machine of a federation's life: which steps lead on, who takes part, what is erased, when to fall back."""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from fedquit.core import (
    ClientId,
    Federation,
    Memory,
    Params,
    Part,
    Program,
    Reply,
    Request,
    State,
    Trained,
    Training,
)
from fedquit.core.fedavg import Learn
from fedquit.core.method import Method
from fedquit.core.params import fingerprint
from fedquit.errors import (
    AbsentClientError,
    FedquitError,
    InputError,
    NoExamplesError,
    NonFiniteError,
    RepliesDifferError,
    RequestError,
    StoreError,
    UnreachableError,
)
from fedquit.methods import METHODS
from fedquit.methods.baselines import Natural
from fedquit.methods.fukd import FUKD
from fedquit.running import lifecycle
from fedquit.running.lifecycle import STEPS, Life, Phase, PhaseKind, TransitionError, UnusableModelError
from fedquit.running.membership import Membership
from fedquit.running.runner import run
from fedquit.running.setup import build_setup
from fedquit.running.simulation import RecoveryRun, Simulation
from fedquit.running.store import Memories
from worlds import tiny

FOUR = Membership((0, 1, 2, 3))
STEP: dict[str, Callable[[Life], Life]] = {
    "join": lambda life: life.join([7], anew=False, rounds=2),
    "begin_unlearning": lambda life: life.begin_unlearning(Request((1,)), rounds=2),
    "narrow": lambda life: life.narrow(Request(()), ()),
    "fall_back": lambda life: life.fall_back(),
    "begin_recovery": lambda life: life.begin_recovery(),
    "give_up": lambda life: life.give_up(),
    "begin_erasing": lambda life: life.begin_erasing(),
    "resume_training": lambda life: life.resume_training(),
}


def life_in(kind: PhaseKind) -> Life:
    life = Life(FOUR)
    paths: dict[PhaseKind, tuple[str, ...]] = {
        "train": (),
        "join": ("join",),
        "unlearn": ("begin_unlearning",),
        "recover": ("begin_unlearning", "begin_recovery"),
        "erase": ("begin_unlearning", "begin_recovery", "begin_erasing"),
    }
    for step in paths[kind]:
        life = STEP[step](life)
    assert life.phase.kind == kind
    return life


@pytest.mark.parametrize("step", STEP)
@pytest.mark.parametrize("kind", ["train", "join", "unlearn", "recover", "erase"])
def test_a_step_leads_on_as_the_table_says_or_is_refused_with_one_sentence(kind: PhaseKind, step: str) -> None:
    life = life_in(kind)
    if step == "join" and kind == "join":
        life = dataclasses.replace(life, membership=FOUR)  # nobody joins twice
    following = STEPS.get((kind, step))
    if following:
        assert STEP[step](life).phase.kind == following
        return
    with pytest.raises(TransitionError, match=rf"^a federation in phase '.*' cannot {step}: from here it can .*\.$"):
        STEP[step](life)


def test_a_request_is_narrowed_to_a_part_of_it_which_the_same_method_serves() -> None:
    life = Life(FOUR).begin_unlearning(Request((1, 2)), rounds=2)
    narrowed = life.narrow(Request((2,)), ["r0002"])
    assert narrowed.requested == Request((2,))
    assert narrowed.phase.serving == ("r0002",)
    assert not narrowed.phase.fallback
    assert narrowed.phase.number == life.phase.number + 1, "it begins again from the model before the request"
    for other in (Request((1, 2)), Request((3,))):
        with pytest.raises(TransitionError, match="no part of the request"):
            life.narrow(other, ["r0003"])


def test_the_table_in_the_module_s_docstring_is_the_table() -> None:
    lines = [line.split() for line in (lifecycle.__doc__ or "").splitlines()]
    written = {(a, b): c for a, b, c, *_ in (line for line in lines if len(line) > 3) if (a, b) in STEPS}
    assert written == dict(STEPS)


def test_the_fallback_is_tried_once() -> None:
    life = life_in("unlearn").fall_back()
    with pytest.raises(TransitionError, match="is the fallback already: give the request up instead"):
        life.fall_back()


def test_after_a_request_that_the_fallback_served_the_method_serves_again() -> None:
    life = life_in("unlearn").fall_back().begin_recovery().begin_erasing().resume_training()
    assert not life.phase.fallback
    assert life.phase.name == "train-1"
    assert not life.begin_unlearning(Request((2,)), rounds=0).phase.fallback


@pytest.mark.parametrize(
    "act",
    [
        lambda life: life.begin_unlearning(Request((9,)), rounds=0),
        lambda life: life.begin_unlearning(Request((0, 1, 2, 3)), rounds=0),
        lambda life: life.join([1], anew=False, rounds=0),
    ],
)
def test_a_step_that_the_members_do_not_allow_is_refused(act: Callable[[Life], Life]) -> None:
    with pytest.raises(RequestError):
        act(Life(FOUR))


def test_phases_are_named_as_their_random_numbers_always_were() -> None:
    life = Life(FOUR)
    names = [life.phase.name]
    for step in ("begin_unlearning", "begin_recovery", "begin_erasing", "resume_training", "join"):
        life = STEP[step](life)
        names += [life.phase.name] if life.phase.kind != "erase" else []
    life = life.begin_unlearning(Request((0,)), rounds=1)
    names += [life.phase.name, life.fall_back().phase.name, life.fall_back().begin_recovery().phase.name]
    assert names == [
        "train",
        "unlearn-0",
        "recover-0",
        "train-1",
        "join-1",
        "unlearn-2",
        "unlearn-2-fallback",
        "recover-2-fallback",
    ]


def test_rounds_of_training_are_counted_and_recoveries_are_not() -> None:
    life = Life(FOUR).begin_unlearning(Request((1,)), rounds=5).begin_recovery().begin_erasing().resume_training()
    assert life.phase == Phase(number=3, trained=5, served=1)
    assert life.begin_unlearning(Request((2,)), rounds=3).phase.trained == 8


@pytest.mark.parametrize("samples", [False, True])
def test_who_takes_part_in_which_phase(samples: bool) -> None:
    request = Request((1, 2), samples)
    everybody, others = (0, 1, 2, 3), (0, 1, 2, 3) if samples else (0, 3)
    unlearn = Life(FOUR).begin_unlearning(request, rounds=1)
    assert unlearn.askable(FOUR.active) == everybody
    assert unlearn.askable([0]) == (0, 1, 2), "who must answer is asked whether it can be reached or not"
    assert unlearn.required == {1, 2}
    assert unlearn.left_out == (set() if samples else {1, 2}), "a round does not wait for who leaves"
    fallback = unlearn.fall_back()
    assert fallback.required == frozenset()
    assert fallback.askable(FOUR.active) == others
    for life in (unlearn.begin_recovery(), fallback.begin_recovery()):
        assert life.askable(FOUR.active) == others
        assert life.required == frozenset()
    after = unlearn.begin_recovery().begin_erasing().resume_training()
    assert after.membership.active == others
    assert after.membership.erased == (frozenset() if samples else {1, 2})
    given_up = fallback.give_up()
    assert given_up.membership.erased == after.membership.erased, "left out, though not forgotten"


def test_what_a_request_finds() -> None:
    life = Life(Membership((0, 1, 2), frozenset({3}))).begin_unlearning(Request((1,)), rounds=0)
    state = State({"w": torch.ones(1)}, clock=7)
    training = Training(Learn(), rounds=3)
    found = life.trained(state, {}, training, {0: 5, 1: 6, 2: 7, 3: 8}, {})
    assert found.training.rounds == 7, "as many as lie behind the model, whatever was planned"
    assert found.examples == {0: 5, 1: 6, 2: 7}, "the forgotten do not count"
    assert life.begin_recovery().trained(state, {}, training, {0: 5, 1: 6, 2: 7}, {}).examples == found.examples


@pytest.mark.parametrize(
    ("rounds", "accuracy", "target", "over"),
    [
        (2, 50.0, 60.0, False),
        (2, 60.0, 60.0, True),
        (3, 0.0, 60.0, True),
        (2, 99.0, None, False),
        (2, None, 1.0, False),
    ],
)
def test_where_a_recovery_ends(rounds: int, accuracy: float | None, target: float | None, over: bool) -> None:
    assert lifecycle.recovery_is_over(rounds, 3, accuracy, target) is over


# Falling back.

REASONS: list[FedquitError] = [
    UnreachableError("it did not answer", [1]),
    RequestError("PGA forgets whole clients"),
    NoExamplesError("nobody has an example"),
    NonFiniteError("NaN"),
    UnusableModelError("a part of a model"),
    RepliesDifferError("one of them sent a part"),
]
ERRORS: list[Exception] = [
    TypeError("f() takes 1 positional argument"),
    AssertionError(),
    KeyError("sum/1"),
    ZeroDivisionError(),
    InputError("shapes differ"),
    StoreError("the disk is full"),
    TransitionError("not from here"),
    AbsentClientError("client 9 cannot be asked"),
    FedquitError("something"),
]


@pytest.mark.parametrize("error", [*REASONS, *ERRORS], ids=lambda e: type(e).__name__)
def test_only_declared_conditions_are_reasons_to_fall_back(error: Exception) -> None:
    assert lifecycle.is_reason_to_fall_back(error) is (error in REASONS)


@dataclasses.dataclass(frozen=True)
class Raising(Method):
    """Breaks in its unlearning."""

    number: int = 0

    def unlearn(self, fed: Federation, state: State, trained: Trained, request: Request) -> State:
        raise [*REASONS, *ERRORS][self.number]


@dataclasses.dataclass(frozen=True)
class Partial(Method):
    """Returns a part of the model."""

    def unlearn(self, fed: Federation, state: State, trained: Trained, request: Request) -> State:
        return state.next(dict(itertools.islice(state.params.items(), 1)))


@pytest.mark.parametrize("number", range(len(REASONS) + len(ERRORS)))
def test_in_the_simulator_an_error_in_the_code_is_never_taken_for_a_refusal(number: int, tmp_path: Path) -> None:
    error = [*REASONS, *ERRORS][number]
    recipe = tiny(method={"name": "test_lifecycle:Raising", "number": number}, train={"rounds": 1})
    setup = build_setup(recipe)
    simulation = Simulation(setup, tmp_path, fallback=METHODS["natural"]())
    simulation.train(1)
    request = Request((1,))
    if error in REASONS:
        unlearned = simulation.unlearn(request, simulation.data.mark(request))
        assert isinstance(unlearned.method, METHODS["natural"])
        return
    with pytest.raises(type(error)):
        simulation.unlearn(request, simulation.data.mark(request))


def test_a_round_whose_result_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnusableModelError, match="the model after round 1 of unlearning has other parameters"):
        run(tiny(method={"name": "test_lifecycle:Partial"}, train={"rounds": 1}), tmp_path / "a")


# The defects of which each had a federation remember too much or too little.

AGAIN: list[dict[str, Any]] = [
    {"clients": [1]},
    {"kind": "join", "clients": [1], "anew": True, "rounds": 2},
    {"clients": [1]},
]


def spied(monkeypatch: pytest.MonkeyPatch, method: type[Method]) -> list[dict[str, Params]]:
    """What the method finds in its memory at the beginning of each unlearning."""
    shelves: list[dict[str, Params]] = []
    unlearn = method.unlearn

    def spy(self: Any, fed: Federation, state: State, trained: Trained, request: Request) -> State:
        if state.round == 0:
            shelves.append(dict(trained.memory))
        return unlearn(self, fed, state, trained, request)

    monkeypatch.setattr(method, "unlearn", spy)
    return shelves


def test_fukd_subtracts_from_a_client_that_came_back_only_what_it_contributed_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelves = spied(monkeypatch, FUKD)
    shares: list[Params] = []  # of client 1, in each round of training
    after_round = FUKD.after_round

    def spy(self: FUKD, memory: Memory, round: int, examples: dict[ClientId, int]) -> None:
        total = sum(examples.values())
        if 1 in examples:
            shares.append({n: p / total for n, p in memory["round/1"].items()})
        after_round(self, memory, round, examples)

    monkeypatch.setattr(FUKD, "after_round", spy)
    run(tiny(request=AGAIN, method={"name": "fukd", "epochs": 1.0}), tmp_path / "a")
    assert len(shares) == 3 + 2, "three rounds of training, two after it had joined anew"
    for memory, own in zip(shelves, (shares[:3], shares[3:]), strict=True):
        for name, tensor in memory["sum/1"].items():
            expected = torch.stack([share[name] for share in own]).sum(0)
            torch.testing.assert_close(tensor, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["fukd", "federaser", "pga"])
def test_who_comes_back_finds_nothing_under_its_name_in_any_memory(name: str, tmp_path: Path) -> None:
    setup = build_setup(tiny(method={"name": name}, train={"rounds": 2}))
    simulation = Simulation(setup, tmp_path)
    simulation.train(2)
    assert simulation.memories is not None
    simulation.memories.close()
    simulation.memories.server["another/sum/1"] = {"w": torch.zeros(1)}  # of a method that watched beside it
    request = Request((1,))
    unlearned = simulation.unlearn(request, simulation.data.mark(request))
    recovery = simulation.recovery(unlearned)
    assert of_client(recovery.memories, 1), "until the request is over, the method may look back"
    simulation.erase(unlearned, next(recovery.rounds), recovery.memories)
    assert simulation.memories is not None
    assert of_client(simulation.memories, 1) == []
    assert of_client(simulation.memories, 2)


def of_client(memories: Memories, client: ClientId) -> list[str]:
    own = [key for key in memories.clients if key.startswith(f"{client}/")]
    return own + [key for key in memories.server if str(client) in key.split("/")]


@pytest.mark.parametrize("name", ["fukd", "federaser"])
def test_the_training_after_a_join_is_watched(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    method = METHODS[name]
    clocks: list[tuple[int, ClientId]] = []
    watch = method.watch

    def spy(self: Any, memory: Memory, round: int, start: Params, reply: Reply) -> None:
        clocks.append((round, reply.client))
        watch(self, memory, round, start, reply)

    monkeypatch.setattr(method, "watch", spy)
    run(tiny(request=AGAIN[:2], method={"name": name}), tmp_path / "a")
    recovery = [(clock, c) for clock in (3, 4) for c in (0, 2, 3)] if method.recovers else []
    joined = [(clock, c) for clock in ((5, 6) if recovery else (3, 4)) for c in range(4)]
    training = [(clock, c) for clock in range(3) for c in range(4)]
    assert clocks == [*training, *recovery, *joined]


def test_a_client_that_joined_keeps_what_its_method_needs_at_home(tmp_path: Path) -> None:
    results = run(tiny(request=AGAIN, method={"name": "pga", "epochs": 1.0}), tmp_path / "a")
    phases = [row["phase"] for row in results["rows"] if row["request"] == 2]
    assert phases[-2:] == ["unlearned", "recovered"], "it has a last local model: PGA could begin"


def test_federaser_replays_the_rounds_after_a_join_too(tmp_path: Path) -> None:
    events = [*AGAIN[:2], {"clients": [2]}]
    results = run(tiny(request=events, method={"name": "federaser"}), tmp_path / "a")
    unlearned = [row["rounds"] for row in results["rows"] if row["phase"] == "unlearned"]
    assert unlearned == [3, 5]


def test_no_part_of_a_program_reaches_the_forgotten_data_in_the_recovery() -> None:
    class Asked:
        """A federation that writes down what it is asked."""

        model = seed = None
        clients = (0, 1)
        programs: ClassVar[list[Program]] = []

        def run(self, task: Program, clients: object, **sent: Params) -> Iterator[Reply]:
            self.programs.append(task)
            return iter(())

    retained = lifecycle.RetainedData(Asked())  # type: ignore[arg-type]
    list(retained.run(Program((Part(Learn()), Part(Learn(), "retain"))), [0], start={}))
    assert [part.split for part in Asked.programs[0].parts] == ["retain", "retain"]
    with pytest.raises(TransitionError, match="asks for the forgotten data in its recovery"):
        retained.run(Program((Part(Learn(), "retain"), Part(Learn(), "forget"))), [0], start={})
    assert len(Asked.programs) == 1


def test_recovery_never_reaches_the_forgotten_data(tmp_path: Path) -> None:
    @dataclasses.dataclass(frozen=True)
    class Greedy(Natural):
        split: str = "all"

        def recover(self, fed: Federation, state: State, trained: Trained, request: Request) -> State:
            replies = list(fed.run(trained.training.task, fed.clients, split=self.split, start=state.params))  # type: ignore[arg-type]
            return state.next(replies[0].params).tick()

    sys.modules["worlds"].Greedy = Greedy  # type: ignore[attr-defined]
    request = [{"clients": [1], "samples": 0.5}]
    run(tiny(request=request, method={"name": "worlds:Greedy"}), tmp_path / "a")
    events = [json.loads(line) for line in (tmp_path / "a" / "events.jsonl").read_text().splitlines()]
    assert {e["split"] for e in events if e["phase"] == "recover-0"} == {"retain"}
    with pytest.raises(TransitionError, match="asks for the forgotten data in its recovery"):
        run(tiny(request=request, method={"name": "worlds:Greedy", "split": "forget"}), tmp_path / "b")


def test_recoveries_that_are_over_hold_nothing_in_ram(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Memories] = []
    recovery = Simulation.recovery

    def spy(self: Simulation, *arguments: Any) -> RecoveryRun:
        started = recovery(self, *arguments)
        opened.append(started.memories)
        return started

    monkeypatch.setattr(Simulation, "recovery", spy)
    three = {"until": "retrained-mean-of-3", "max_rounds": 1}
    run(tiny(method={"name": "pga"}, recover=three), tmp_path / "a")
    assert len(opened) == 3
    assert all(memory._bytes == {"device": 0, "host": 0} for memories in opened for memory in memories.own)


def test_a_run_of_several_events_that_another_version_began_is_refused(tmp_path: Path) -> None:
    recipe = tiny(request=AGAIN, retrain=False)
    run(recipe, tmp_path / "a")
    path = tmp_path / "a" / "recipe.json"
    claim = json.loads(path.read_text())
    assert claim.pop("events") == 2
    path.write_text(json.dumps(claim))
    with pytest.raises(StoreError, match="holds a run of several events by another version of fedquit"):
        run(recipe, tmp_path / "a")
    run(tiny(retrain=False), tmp_path / "b")
    assert "events" not in json.loads((tmp_path / "b" / "recipe.json").read_text()), "one event is as it always was"


def test_what_happens_in_the_wrong_phase_is_refused(tmp_path: Path) -> None:
    setup = build_setup(tiny(train={"rounds": 1}))
    simulation = Simulation(setup, tmp_path)
    simulation.train(1)
    request = Request((1,))
    unlearned = simulation.unlearn(request, simulation.data.mark(request))
    with pytest.raises(TransitionError, match="in phase 'recover-0' cannot train"):
        simulation.train(1)
    with pytest.raises(TransitionError, match="has been trained"):
        simulation.leave_untrained(request, simulation.data)
    recovery = simulation.recovery(unlearned)
    recovered = next(recovery.rounds)
    simulation.erase(unlearned, recovered, recovery.memories)
    with pytest.raises(TransitionError, match="in phase 'train-1' has nothing to recover from"):
        simulation.recovery(unlearned)
    with pytest.raises(TransitionError, match="in phase 'train-1' has no recovery to follow"):
        simulation.follow(unlearned, recovered, recovery.memories)
    with pytest.raises(TransitionError, match="in phase 'train-1' serves no request"):
        simulation.natural(unlearned, recovered)


def test_a_method_whose_unlearning_is_all_that_it_does_takes_no_round_of_recovery() -> None:
    assert lifecycle.recovery_rounds(METHODS["federaser"](), 7) == 0
    assert lifecycle.recovery_rounds(METHODS["fedquit"](), 7) == 7


def test_a_federation_begins_with_the_first_model_and_no_cost(tmp_path: Path) -> None:
    setup = build_setup(tiny())
    progress = Simulation(setup, tmp_path).progress
    assert (progress.state.round, progress.seconds, progress.costs.bytes) == (0, 0.0, 0)
    assert fingerprint(progress.state.params) == fingerprint(setup.initial)


@dataclasses.dataclass(frozen=True)
class Counting(Method):
    """Counts the rounds of its recovery in its memory."""

    def unlearn(self, fed: Federation, state: State, trained: Trained, request: Request) -> State:
        return state.next(state.params)

    def recover(self, fed: Federation, state: State, trained: Trained, request: Request) -> State:
        before = trained.memory.get("rounds", {"n": torch.zeros(1)})
        trained.memory["rounds"] = {"n": before["n"] + 1}
        return super().recover(fed, state, trained, request)


def test_each_recovery_of_a_request_remembers_for_itself(tmp_path: Path) -> None:
    setup = build_setup(tiny(method={"name": "test_lifecycle:Counting"}, train={"rounds": 1}))
    simulation = Simulation(setup, tmp_path)
    simulation.train(1)
    request = Request((1,))
    unlearned = simulation.unlearn(request, simulation.data.mark(request))
    for number, rounds in enumerate((2, 3)):
        recovery = simulation.recovery(unlearned, f"recovery-{number}", f"recovered-{number}", number)
        next(progress for progress in recovery.rounds if progress.state.round == rounds)
        own = recovery.memories.of("test_lifecycle:Counting")
        assert float(own["rounds"]["n"]) == rounds, "counted from the end of the unlearning, in a memory of its own"
    assert "rounds" not in unlearned.memories.of("test_lifecycle:Counting")


def test_the_same_steps_again_lead_to_the_same_model_without_any_work(tmp_path: Path) -> None:
    setup = build_setup(tiny(method={"name": "fukd", "epochs": 1.0}))
    replies: list[object] = []

    def lived() -> Simulation:
        simulation = Simulation(setup, tmp_path, log=replies.append)
        simulation.train(1)
        simulation.train(2)
        request = Request((2,))
        unlearned = simulation.unlearn(request, simulation.data.mark(request))
        recovery = simulation.recovery(unlearned)
        progress = next(progress for progress in recovery.rounds if progress.state.round == 1)
        simulation.erase(unlearned, progress, recovery.memories)
        simulation.join([2], anew=True, rounds=2)
        simulation.train(2)
        return simulation

    first = lived()
    remembered = contents(first)
    count = len(replies)
    assert count == 3 * 4 + 3 + (2 + 2) * 4
    second = lived()
    assert len(replies) == count, "everything was on disk"
    assert fingerprint(second.state.params) == fingerprint(first.state.params)
    assert second.life == first.life
    assert contents(second) == remembered


def contents(simulation: Simulation) -> dict[str, str]:
    assert simulation.memories is not None
    return {key: fingerprint(params) for memory in simulation.memories.own for key, params in memory.items()}


@dataclasses.dataclass(frozen=True)
class Picky(Natural):
    """Forgets whole clients, one at a time."""

    def check(self, request: Request) -> None:
        if request.samples or len(request.clients) > 1:
            raise RequestError("one whole client at a time.")


@pytest.mark.parametrize(
    ("method", "waiting", "together", "chosen", "fallback"),
    [
        (Natural(), Request((3, 1)), True, (1, 3), False),
        (Natural(), Request((3, 1)), False, (3,), False),
        (Picky(), Request((3, 1)), True, (3,), False),
        (Picky(), Request((3, 1), samples=True), True, (1, 3), True),
        (Picky(), Request((3, 1), samples=True), False, (3,), True),
        (Natural(), Request((3, 0, 1, 2)), True, (3,), False),  # nobody would be left
    ],
)
def test_who_is_served_next_and_by_which_method(
    method: Method, waiting: Request, together: bool, chosen: tuple[int, ...], fallback: bool
) -> None:
    turn = lifecycle.next_turn(waiting, FOUR, method, together=together)
    assert (turn.request.clients, turn.fallback) == (chosen, fallback)
    assert bool(turn.reason) is fallback


def test_the_last_member_cannot_be_served() -> None:
    with pytest.raises(RequestError, match="drop the model instead"):
        lifecycle.next_turn(Request((3,)), Membership((3,)), Natural(), together=True)
