# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from fedquit.core import Effort, Model, Params, Part, Program, Reply, State
from fedquit.core.fedavg import Learn
from fedquit.core.params import mean
from fedquit.engine import Address, Ask
from fedquit.errors import InputError, NonFiniteError, RequestError
from fedquit.running.costs import Costs, Metered
from fedquit.running.session import Session, advance
from fedquit.running.store import DiskMemory, Journal, StateFile

START: Params = {"w": torch.zeros(2), "b": torch.zeros(())}


@dataclass
class Scripted:
    """An engine that answers as it is told, and remembers what it was asked."""

    model: Model
    answer: Callable[[int], Params]
    asked: list[tuple[Address, int]] = field(default_factory=list)

    def run(self, ask: Ask) -> Iterator[Reply]:
        for client in ask.clients:
            self.asked.append((ask.address, client))
            yield Reply(client, self.answer(client), examples=client + 1)


def ones(client: int) -> Params:
    return {"w": torch.full((2,), float(client)), "b": torch.tensor(1.0)}


@pytest.fixture
def engine(toy_model: Model) -> Scripted:
    return Scripted(toy_model, ones)


def test_questions_are_numbered_within_their_round(engine: Scripted) -> None:
    session = Session(engine, 7, (0, 1))
    session.enter("train", 0)
    list(session.run(Learn(), [0, 1], start=START))
    list(session.run(Learn(), [1], start=START))
    session.enter("train", 1)
    list(session.run(Learn(), [0], start=START))
    places = [(a.seed, a.phase, a.round, a.question, c) for a, c in engine.asked]
    assert places == [(7, "train", 0, 0, 0), (7, "train", 0, 0, 1), (7, "train", 0, 1, 1), (7, "train", 1, 0, 0)]


def test_the_server_s_own_seed_follows_from_the_place(engine: Scripted) -> None:
    seeds = []
    for seed, phase, number in [(0, "train", 0), (1, "train", 0), (0, "recover", 0), (0, "train", 1)]:
        session = Session(engine, seed, (0,))
        session.enter(phase, number)
        seeds.append(session.seed)
        list(session.run(Learn(), [0], start=START))
        seeds.append(session.seed)
    assert len(set(seeds)) == len(seeds)


def test_nobody_is_asked_who_is_not_there(engine: Scripted) -> None:
    session = Session(engine, 0, (0, 2))
    session.enter("recover-0", 0)
    with pytest.raises(RequestError, match=r"client 1 cannot be asked in phase 'recover-0'.*enrolled anew"):
        session.run(Learn(), [0, 1], start=START)
    assert engine.asked == []


PROGRAM = Program((Part(Learn(), "forget"), Part(Learn(), "retain")))


def test_a_program_is_one_question_to_those_who_are_there(engine: Scripted) -> None:
    events: list[dict[str, object]] = []
    session = Session(engine, 0, (0, 2), log=events.append)
    session.enter("unlearn-0", 0)
    list(session.run(PROGRAM, [0, 2], start=START))
    assert [(a.question, c) for a, c in engine.asked] == [(0, 0), (0, 2)]
    assert [(e["task"], e["split"]) for e in events] == [("Learn+Learn", "forget+retain")] * 2
    with pytest.raises(RequestError, match="client 1 cannot be asked"):
        session.run(PROGRAM, [1], start=START)
    with pytest.raises(InputError, match="leave out split='forget'"):
        session.run(PROGRAM, [0], split="forget", start=START)
    with pytest.raises(InputError, match="send it as `start`"):
        list(Metered(session).run(PROGRAM, [0], teacher=START))
    with pytest.raises(InputError, match="ask the server for one task at a time"):
        session.run_at_server(PROGRAM, start=START)  # type: ignore[arg-type]


def test_what_a_visit_took_survives_a_kill_and_is_charged_once(toy_model: Model, tmp_path: Path) -> None:
    @dataclass
    class Visits(Scripted):
        def run(self, ask: Ask) -> Iterator[Reply]:
            for reply in super().run(ask):
                yield Reply(reply.client, reply.params, 30, 0.5, (Effort(10, 1), Effort(20, 1)))

    engine = Visits(toy_model, ones)
    meters = []
    for _ in range(2):
        session = Session(engine, 0, (0, 1), Journal(tmp_path))
        session.enter("unlearn-0", 0)
        meters.append(Metered(session))
        (reply,) = meters[-1].run(PROGRAM, [0], start=START)
        assert reply.efforts == (Effort(10, 1), Effort(20, 1))
    assert len(engine.asked) == 1
    assert meters[0].costs == meters[1].costs == Costs(12, 12, 1, 2.0)


@pytest.mark.parametrize(
    ("params", "error", "sentence"),
    [
        (
            {"w": torch.tensor([1.0, torch.nan])},
            NonFiniteError,
            "reply of client 3 in round 5 .* NaN or infinity in 'w'",
        ),
        ({"w": torch.tensor([1.0, torch.inf])}, NonFiniteError, "lower the learning rate"),
        ({"w": torch.zeros(3)}, InputError, r"reply of client 3 .* shape \(3,\) in 'w' where \(2,\) is expected"),
    ],
)
def test_what_comes_back_is_checked(
    params: Params, error: type[Exception], sentence: str, toy_model: Model, tmp_path: Path
) -> None:
    session = Session(Scripted(toy_model, lambda _: params), 0, (3,), Journal(tmp_path))
    session.enter("unlearn-0", 4)
    with pytest.raises(error, match=sentence):
        list(session.run(Learn(), [3], start=START))
    assert list(tmp_path.iterdir()) == [], "a bad reply is not kept"


def test_replies_of_other_models_are_not_averaged(toy_model: Model) -> None:
    odd = Scripted(toy_model, lambda c: {"w": torch.zeros(2)} if c else {"v": torch.zeros(2)})
    session = Session(odd, 0, (0, 1))
    with pytest.raises(InputError, match=r"the reply of client 1 has other parameters than expected \(v, w\)"):
        mean(session.run(Learn(), [0, 1], start=START))


def test_what_was_answered_is_not_asked_again(engine: Scripted, tmp_path: Path) -> None:
    for _ in range(2):
        session = Session(engine, 0, (0, 1, 2), Journal(tmp_path))
        session.enter("unlearn-0", 0)
        stream = session.run(Learn(), [0, 1, 2], start=START)
        replies = [next(stream), next(stream)]  # and then the process is killed
    assert [c for _, c in engine.asked] == [0, 1]
    assert [r.client for r in replies] == [0, 1]
    assert torch.equal(replies[1].params["w"], torch.ones(2))
    assert next(stream).client == 2
    session.enter("unlearn-0", 1)
    assert [r.client for r in session.run(Learn(), [0], start=START)] == [0], "another round asks anew"
    assert [c for _, c in engine.asked] == [0, 1, 2, 0]


def test_a_phase_goes_on_from_disk_and_stops_in_time(engine: Scripted, tmp_path: Path) -> None:
    session, file = Session(engine, 0, (0,)), StateFile(tmp_path / "state")

    def step(state: State) -> State:
        return state.next({"w": state.params["w"] + 1, "b": state.params["b"]}).tick()

    first = advance(session, "p", State(START), step, file, rounds=5)
    assert [next(first).state.round for _ in range(3)] == [0, 1, 2]
    rest = [p.state for p in advance(session, "p", State(START), step, file, rounds=5)]
    assert [s.round for s in rest] == [2, 3, 4, 5]
    assert rest[-1].clock == 5
    assert rest[-1].params["w"].tolist() == [5.0, 5.0]
    assert [p.state.round for p in advance(session, "p", State(START), step, file, rounds=5)] == [5]


ROUND = Costs(down_bytes=12, up_bytes=12, participations=1, client_epochs=1.0)  # one client, a model of 12 bytes


@dataclass
class Keeping:
    """A phase whose rounds ask one client, and keep a model each; opened anew like a process that starts again."""

    engine: Scripted
    folder: Path
    cut_off: bool = False

    def rounds(self) -> Iterator[Costs]:
        memory = DiskMemory(self.folder / "memory")
        session = Session(self.engine, 0, (0,), memories=(memory,))
        meter = Metered(session, lambda: (sum(memory.size_of(k) for k in memory), 0))

        def step(state: State) -> State:
            (reply,) = meter.run(Learn(), [0], start=state.params)
            memory[f"{state.round}"] = reply.params
            if self.cut_off:
                raise InterruptedError
            return state.next(reply.params)

        found = advance(session, "p", State(START), step, StateFile(self.folder / "state"), 3, meter)
        return (p.costs for p in found)


def test_a_phase_stores_something_before_its_first_round(engine: Scripted, tmp_path: Path) -> None:
    found = list(Keeping(engine, tmp_path).rounds())
    assert found[0] == Costs(server_storage_bytes=12)
    assert [c.server_storage_bytes for c in found] == [12, 24, 36, 48]


def test_a_phase_that_goes_on_counts_nothing_twice(engine: Scripted, tmp_path: Path) -> None:
    first = Keeping(engine, tmp_path).rounds()
    seen = [next(first) for _ in range(3)]
    rest = list(Keeping(engine, tmp_path).rounds())
    assert rest[0] == seen[-1] == ROUND + ROUND + Costs(server_storage_bytes=36)
    assert rest[-1] == ROUND + ROUND + ROUND + Costs(server_storage_bytes=48)
    assert list(Keeping(engine, tmp_path).rounds()) == [rest[-1]], "nor does one that is over"


@pytest.mark.parametrize("done", [0, 1])
def test_what_a_round_that_was_cut_off_kept_is_not_stored(done: int, engine: Scripted, tmp_path: Path) -> None:
    first = Keeping(engine, tmp_path)
    whole = first.rounds()
    before = [next(whole) for _ in range(done + 1)]
    first.cut_off = True
    with pytest.raises(InterruptedError):
        next(whole)
    assert len(list((tmp_path / "memory").iterdir())) == done + 1, "it lies there"
    assert next(Keeping(engine, tmp_path).rounds()) == before[-1]
