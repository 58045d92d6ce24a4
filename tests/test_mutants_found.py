# SPDX-License-Identifier: Apache-2.0
"""What mutation testing found untested (benchmarks/mutants.py): each test here fails for a mutant that survived."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fedquit.core import Learn, Params, State, Task
from fedquit.core.params import device_of, foreach_add, foreach_mul, foreach_sub, nbytes, placed
from fedquit.data.federated import Dataset, FederatedData
from fedquit.methods.bad_teacher import BadTeacher, Teach
from fedquit.methods.fedau import FedAU, LearnBoth
from fedquit.methods.fedquit import Distill, FedQUIT
from fedquit.methods.fukd import FUKD, Imitate
from fedquit.methods.fused import FUSED, TrainAdapters
from fedquit.methods.pga import PGA, Ascend
from fedquit.methods.scrub import SCRUB, Diverge, Repair
from fedquit.running.lifecycle import RetainedData, TransitionError
from methods.method_world import Line, Scripted, close, same, vec

# ---- tasks


def fields_of(task: Task) -> dict[str, object]:
    """The fields that a task adds to those of every task."""
    every = {f.name for f in dataclasses.fields(Task)}
    return {name: value for name, value in vars(task).items() if name not in every}


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        (Distill(), fields_of(FedQUIT().distill)),
        (Imitate(), {"temperature": FUKD.temperature}),
        (Diverge(), {"temperature": SCRUB.temperature}),
        (Repair(), {"alpha": SCRUB.alpha, "gamma": SCRUB.gamma, "temperature": SCRUB.temperature}),
        (Teach(), {"teachers": "both", "temperature": BadTeacher.temperature, "seed": 0}),
        (TrainAdapters(), {"density": FUSED.density, "seed": FUSED.seed}),
        (LearnBoth(), {"head": FedAU.head, "carry": FedAU.carry}),
        (
            Ascend(),
            {"squared": PGA.squared, "halt": PGA.halt, "random_models": PGA.random_models, "share": 1 / 10, "seed": 0},
        ),
    ],
    ids=lambda thing: type(thing).__name__,
)
def test_a_task_made_without_options_is_that_of_the_method_s_defaults(task: Task, expected: dict[str, object]) -> None:
    assert fields_of(task) == expected


# ---- the algebra of parameters


def test_the_algebra_of_many_tensors_at_once_is_that_of_each() -> None:
    a: Params = {"x": torch.tensor([1.0, 2.0]), "y": torch.tensor([[3.0]])}
    b: Params = {"y": torch.tensor([[10.0]]), "x": torch.tensor([20.0, 30.0])}  # names are matched, not positions
    same(foreach_add(a, b), {"x": torch.tensor([21.0, 32.0]), "y": torch.tensor([[13.0]])})
    same(foreach_sub(a, b), {"x": torch.tensor([-19.0, -28.0]), "y": torch.tensor([[-7.0]])})
    same(foreach_mul(a, 3), {"x": torch.tensor([3.0, 6.0]), "y": torch.tensor([[9.0]])})
    assert foreach_add({}, {}) == foreach_sub({}, {}) == foreach_mul({}, 2.0) == {}


def test_size_and_place_of_parameters() -> None:
    a: Params = {"x": torch.zeros(3), "y": torch.zeros(2, 2, dtype=torch.float64)}
    assert nbytes(a) == 3 * 4 + 4 * 8
    assert device_of({}) == torch.device("cpu")
    meta = placed(a, torch.device("meta"))
    assert meta.keys() == a.keys()
    assert device_of(meta) == torch.device("meta")


# ---- data


def test_labels_are_counted_for_every_class_also_the_absent_ones() -> None:
    x = torch.zeros(5, 1)
    data = FederatedData(
        Dataset(x, torch.tensor([0, 0, 2, 1, 1]), x, torch.zeros(5).long(), 4),
        {0: torch.tensor([0, 1, 2]), 1: torch.tensor([3, 4])},
    )
    assert data.label_counts() == {"0": [2, 0, 1, 0], "1": [0, 2, 0, 0]}
    sequences = dataclasses.replace(data, dataset=Dataset(x, torch.zeros(5, 3).long(), x, torch.zeros(5, 3).long(), 4))
    assert sequences.label_counts() == {}


# ---- the life of a federation


def test_a_federation_of_retained_data_is_the_one_behind_it_but_for_the_split() -> None:
    inner = Scripted(examples={3: 1, 5: 2}, model=Line(7), seed=11)
    fed = RetainedData(inner)
    assert (fed.model, fed.clients, fed.seed) == (Line(7), (3, 5), 11)
    start = vec(1, 2)
    replies = list(fed.run(Learn(), [5], start=start, other=vec(3, 4)))
    assert [reply.client for reply in replies] == [5]
    close(fed.run_at_server(Learn(), start=start, other=vec(5, 6)), start)
    asked, at_server = inner.asked
    assert (asked.split, asked.clients, sorted(asked.sent)) == ("retain", (5,), ["other", "start"])
    assert sorted(at_server.sent) == ["other", "start"]
    with pytest.raises(TransitionError, match="asks for the forgotten data in its recovery"):
        fed.run(Learn(), [5], split="forget", start=start)


def test_a_state_s_next_phase_begins_at_round_zero() -> None:
    later = State(vec(1), clock=3, round=2, kept={"a": vec(2)})
    assert (later.fresh().round, later.fresh().clock, later.settled().kept) == (0, 3, {})
