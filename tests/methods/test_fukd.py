# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from fedquit.core import SERVER, ClientId, Local, Memory, Params, Reply, Request, State, Training
from fedquit.core.fedavg import Learn, fedavg
from fedquit.core.params import add, sub
from fedquit.errors import InputError, RequestError
from fedquit.methods.fukd import FUKD, Imitate
from fedquit.running.runner import run
from methods.method_world import Line, Question, Scripted, batch, close, column, numbers, same, trained, vec
from worlds import tiny

LEAVES = Request((0,))
EXAMPLES = {0: 5, 1: 1, 2: 2}


def watched(memory: Memory, round: int, updates: dict[ClientId, Params]) -> None:
    """A round of training in which these clients took part, from the model (1, 1)."""
    start = vec(1, 1)
    for client, update in updates.items():
        FUKD().watch(memory, round, start, Reply(client, add(start, update), EXAMPLES[client]))
    FUKD().after_round(memory, round, {c: EXAMPLES[c] for c in updates})


def test_a_client_s_sum_is_of_its_weighted_shares_of_the_rounds_it_took_part_in() -> None:
    memory: Memory = {}
    watched(memory, 0, {0: vec(8, 0), 1: vec(0, 8), 2: vec(4, 4)})  # shares 5/8, 1/8, 2/8
    watched(memory, 1, {1: vec(3, 0), 2: vec(0, 3)})  # shares 1/3, 2/3
    watched(memory, 2, {0: vec(0, 6), 1: vec(6, 0)})  # shares 5/6, 1/6
    assert sorted(memory) == ["sum/0", "sum/1", "sum/2"], "what is kept for a round is gone after it"
    close(memory["sum/0"], vec(5, 5))
    close(memory["sum/1"], vec(1 + 1, 1))
    close(memory["sum/2"], vec(1, 1 + 2))


def test_all_sums_together_are_the_way_that_training_went() -> None:
    generator = torch.Generator().manual_seed(2)

    def answer(question: Question, client: ClientId) -> Params:
        return {"w": question.sent["start"]["w"] + torch.randn(2, generator=generator).double()}

    memory: Memory = {}
    method, training = FUKD(), Training(Learn(), rounds=9, clients_per_round=2)
    state = State(vec(1, 1))
    for r in range(training.rounds):
        fed = Scripted(answer, EXAMPLES, seed=r)  # partial participation: two of three, other ones each round
        state = fedavg(
            fed,
            state,
            training,
            fed.clients,
            watch=lambda clock, start, reply: method.watch(memory, clock, start, reply),
            after_round=lambda clock, examples: method.after_round(memory, clock, examples),
        )
    total = vec(0, 0)
    for c in EXAMPLES:
        total = add(total, memory[f"sum/{c}"])
    close(total, sub(state.params, vec(1, 1)))


def test_the_contribution_is_subtracted_and_the_old_model_teaches_at_the_server() -> None:
    memory: Memory = {"sum/0": vec(5, 2), "sum/1": vec(100, 100)}
    fed = Scripted(lambda question, client: vec(7, 7))
    state = FUKD().unlearn(fed, State(vec(1, 1), clock=4), trained(vec(1, 1), memory=memory), LEAVES)
    (question,) = fed.asked
    assert question.clients == (SERVER,), "no client takes part"
    close(dict(question.sent["start"]), vec(-4, -1))
    same(dict(question.sent["teacher"]), vec(1, 1))
    assert question.sent.keys() == {"start", "teacher"}
    assert question.task == Imitate(Local(20.0, 32, "adam", 1e-3), temperature=3.0)
    same(state.params, vec(7, 7))
    assert (state.round, state.clock) == (1, 4)


def test_the_contributions_of_several_clients_are_subtracted_together() -> None:
    memory: Memory = {"sum/0": vec(5, 2), "sum/1": vec(1, 1), "sum/2": vec(100, 100)}
    fed = Scripted(lambda question, client: vec(7, 7))
    FUKD().unlearn(fed, State(vec(1, 1)), trained(vec(1, 1), memory=memory), Request((0, 1)))
    close(dict(fed.asked[0].sent["start"]), vec(-5, -2))


def test_a_client_that_never_took_part_contributed_nothing() -> None:
    fed = Scripted(lambda question, client: vec(7, 7))
    FUKD().unlearn(fed, State(vec(1, 1)), trained(vec(1, 1), memory={"sum/1": vec(9, 9)}), LEAVES)
    same(dict(fed.asked[0].sent["start"]), vec(1, 1))


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_the_distillation_in_numbers(temperature: float) -> None:
    task = Imitate(temperature=temperature)
    teacher = vec(temperature * math.log(3), 0)  # softened: (3/4, 1/4)
    for label in (0, 1):  # labels do not matter
        found = task.loss(Line(), vec(0, 0), {"teacher": teacher}, batch(column(1.0, 0.0), [label, label]))
        kl = 0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5)
        torch.testing.assert_close(found, numbers(temperature**2 * kl, 0), rtol=0, atol=1e-12)


def test_the_teacher_s_distribution_leads() -> None:
    # KL(old || new) with old = (3/4, 1/4) and new = (9/10, 1/10), not the other way round.
    task = Imitate(temperature=1.0)
    found = task.loss(Line(), vec(math.log(9), 0), {"teacher": vec(math.log(3), 0)}, batch(column(1.0), [0]))
    expected = 0.75 * math.log(0.75 / 0.9) + 0.25 * math.log(0.25 / 0.1)
    torch.testing.assert_close(found, numbers(expected), rtol=0, atol=1e-12)


def test_it_announces_the_sums_of_all_clients_and_the_updates_of_a_round() -> None:
    assert FUKD().history_bytes(Training(Learn(), rounds=200), 10, 44_880_528) == 20 * 44_880_528


def test_requests_for_samples_are_refused_with_a_reason() -> None:
    with pytest.raises(RequestError, match="FUKD forgets whole clients: it subtracts what a client has contributed"):
        FUKD().check(Request((0,), samples=True))
    FUKD().check(Request((0, 1)))


def test_without_public_data_it_is_refused_before_any_training(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"fukd needs data of the server's own, and there is none: set data\.public"):
        run(tiny(method={"name": "fukd"}, data={"public": 0.0}), tmp_path / "a")
    assert not (tmp_path / "cache").exists()


def test_the_unlearning_moves_nothing_over_the_network(tmp_path: Path) -> None:
    rows = {r["phase"]: r for r in run(tiny(method={"name": "fukd"}), tmp_path / "a")["rows"]}
    unlearned = rows["unlearned"]
    assert (unlearned["participations"], unlearned["down_bytes"], unlearned["up_bytes"]) == (0, 0, 0)
    assert unlearned["server_epochs"] == 20
    assert unlearned["server_storage_bytes"] == 5 * rows["retrained"]["server_storage_bytes"], "the model and four sums"
