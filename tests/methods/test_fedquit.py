# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math

import torch

from fedquit.core import Local, Request, State
from fedquit.methods.fedquit import Distill, FedQUIT
from methods.method_world import Line, Scripted, batch, close, column, moves, numbers, trained, vec, work


def test_the_student_is_held_against_the_global_model_as_it_was_received() -> None:
    """Algorithm 1: the teacher is the model that was sent, with its true logit lowered to the least of all."""
    teacher, student = vec(math.log(6), math.log(2), 0.0), vec(0.0, math.log(3), 0.0)
    losses = Distill().loss(Line(3), student, {"start": teacher}, batch(column(1.0), [0]))
    p = numbers(1, 2, 1) / 4  # the true class falls from 6 to 1, the smallest
    q = numbers(1, 3, 1) / 5
    torch.testing.assert_close(losses, (p * (p / q).log()).sum().reshape(1), rtol=0, atol=1e-12)


def test_the_teacher_stays_the_same_while_the_student_learns() -> None:
    """A student that follows a fixed teacher arrives at it; one that followed itself would go on to the uniform."""
    start = vec(2.0, 1.0, 0.0)
    task = Distill(Local(epochs=400.0, batch_size=1, optimizer="sgd", lr=1.0))
    student = work(Line(3), task, column(1.0), [0], start=start)["w"]
    expected = numbers(0.0, 1.0, 0.0).softmax(-1)
    torch.testing.assert_close(student.softmax(-1), expected, rtol=0, atol=1e-6)


def test_the_leaving_clients_alone_are_asked_for_their_forget_sets_and_weighted_by_them() -> None:
    """Algorithm 2."""
    examples = {0: 3, 1: 1, 2: 9}
    fed = Scripted(moves({0: vec(4), 1: vec(8)}), examples)
    state = FedQUIT().unlearn(fed, State(vec(1), clock=4), trained(vec(1), examples=examples), Request((0, 1)))
    close(state.params, vec(1 + 5))  # (3 * 4 + 1 * 8) / 4
    (question,) = fed.asked
    assert (question.clients, question.split) == ((0, 1), "forget")
    assert question.task == Distill(Local(1.0, 32, "adam", 1e-4))
    assert (state.round, state.clock) == (1, 4)


def test_one_after_the_other_each_starts_from_the_last_ones_snapshot() -> None:
    method, request = FedQUIT(order="sequential"), Request((0, 2))
    found = trained(vec(1))
    assert method.rounds(found, request) == 2
    fed = Scripted(moves({0: vec(4)}, {2: vec(8)}))
    state = method.unlearn(fed, State(vec(1)), found, request)
    state = method.unlearn(fed, state, found, request)
    close(state.params, vec(1 + 4 + 8))
    assert [question.clients for question in fed.asked] == [(0,), (2,)]
