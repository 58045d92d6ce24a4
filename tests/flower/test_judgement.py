# SPDX-License-Identifier: Apache-2.0
"""Each rule by which a reply is judged, by its name."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("flwr", reason="needs the extra `flower`")

import torch
from hypothesis import given
from hypothesis import strategies as st

from fedquit.core import Effort, Local, Measurement, Params, Part, Program, Reply
from fedquit.core.fedavg import Learn
from fedquit.core.params import norm, sub
from fedquit.engine import Address, Ask
from fedquit.engine.optim import OPTIMIZERS, Signal, clipped
from fedquit.flower.judgement import (
    FAR,
    IDLE,
    SKETCH,
    SPREAD,
    DilutedError,
    Judge,
    Pace,
    RefusedReply,
    Unlearning,
    Witness,
    cosine,
    counted_examples,
    expected_lengths,
    is_idle,
    is_too_far,
    is_training,
    is_unchanged,
    kept_share,
    longest_step,
    permitted_step,
    planned_steps,
    require_permitted,
    shortened,
    sketch,
    steps_from_start,
)
from fedquit.methods.fedau import TrainHead
from fedquit.methods.fedquit import Distill
from fedquit.methods.pga import Ascend
from fedquit.methods.ssd import FisherDiagonal

START: Params = {"w": torch.tensor([3.0, -4.0]), "b": torch.tensor([0.5])}
SGD = Pace(length=2.0, steps=10.0, rate=0.1, adaptive=False)


def question(task: Any, **sent: Params) -> Ask:
    return Ask(task, (0,), "forget", {"start": START, **sent}, Address(0, "unlearn-0"))


def moved(by: float, examples: int = 32, client: int = 0) -> Reply:
    """A reply whose update has this length."""
    return Reply(client, {"w": START["w"] + torch.tensor([by, 0.0]), "b": START["b"]}, examples)


# counted_examples


def test_counted_examples_is_what_was_enrolled_less_what_was_erased() -> None:
    assert counted_examples(10**12, 40) == 40
    assert counted_examples(10**12, 40, erased=10) == 30
    assert counted_examples(7, 40, erased=10) == 30, "nor does a site count for fewer than were agreed"
    assert counted_examples(0, 40) == 0, "but one without examples trains nothing"
    assert counted_examples(7, 40, leaving=True) == 7, "samples to forget are a part"
    assert counted_examples(50, 40, leaving=True) == 40
    assert counted_examples(7, 40, erased=50) == 0
    assert counted_examples(10**12, None, erased=3) == 10**12, "nothing is known where the federation is not closed"


# permitted_step


def run_steps(local: Local, gradients: torch.Tensor) -> Params:
    """Where an optimizer of the engine comes to from START, by gradients `(T, 3)` whatever they are."""
    params = START
    optimizer = OPTIMIZERS[local.optimizer]
    slots = {name: {n: torch.zeros_like(p) for n, p in params.items()} for name in optimizer.slots}
    for t, row in enumerate(gradients, 1):
        gradient = clipped({"w": row[:2], "b": row[2:]}, local)
        params, slots = optimizer.step(params, slots, Signal(t, gradient), local)
    return params


@given(
    seed=st.integers(0, 2**31),
    steps=st.integers(1, 60),
    scale=st.sampled_from([1e-4, 1.0, 1e4]),
    decay=st.sampled_from([0.0, 0.01]),
    optimizer=st.sampled_from(["adam", "adamw"]),
    sparse=st.booleans(),
)
def test_permitted_step_of_adam_holds_for_gradients_of_any_size(
    seed: int, steps: int, scale: float, decay: float, optimizer: str, sparse: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    gradients = scale * (torch.randn(steps, 3, generator=generator) + 0.5)
    if sparse:
        gradients *= torch.rand(steps, 3, generator=generator) < 0.2
    local = Local(optimizer=optimizer, lr=1e-2, weight_decay=decay)
    update = sub(run_steps(local, gradients), START)
    largest = max(float(p.abs().max()) for p in update.values())
    assert largest <= permitted_step(local, steps, START).largest


@given(
    seed=st.integers(0, 2**31),
    steps=st.integers(1, 60),
    momentum=st.sampled_from([0.0, 0.5, 0.9]),
    decay=st.sampled_from([0.0, 0.01]),
    clips=st.sampled_from([(1.0, 0.0), (0.0, 1.0), (2.0, 1.0)]),
)
def test_permitted_step_of_sgd_follows_from_clipping_momentum_and_decay(
    seed: int, steps: int, momentum: float, decay: float, clips: tuple[float, float]
) -> None:
    gradients = 100 * (torch.rand(steps, 3, generator=torch.Generator().manual_seed(seed)) + 0.1)
    local = Local(lr=0.05, momentum=momentum, weight_decay=decay, clip=clips[0], clip_tensor=clips[1])
    length = float(norm(sub(run_steps(local, gradients), START)))
    assert length <= permitted_step(local, steps, START).length


def test_permitted_step_is_no_larger_than_it_must_be() -> None:
    assert permitted_step(Local(optimizer="adam", lr=1e-3), 10, START).largest == pytest.approx(1.2e-2)
    assert permitted_step(Local(lr=0.1, clip=2.0), 10, START).length == pytest.approx(2.0, rel=2e-3)
    assert permitted_step(Local(lr=0.1, momentum=0.9, clip=2.0), 10, START).length == pytest.approx(20.0, rel=2e-3)
    assert permitted_step(Local(lr=0.1), 10, START).length == math.inf, "a gradient may have any size"
    assert permitted_step(Local(optimizer="adahessian", lr=0.1), 10, START).largest == math.inf
    assert permitted_step(Local(optimizer="adamw", lr=1.0, weight_decay=0.5), 2, START).largest == math.inf


def test_steps_from_start_is_true_of_tasks_whose_answer_is_where_their_steps_end() -> None:
    assert steps_from_start(Learn())
    assert steps_from_start(Distill())
    assert not steps_from_start(Ascend()), "it begins elsewhere, and is projected"
    assert not steps_from_start(TrainHead())


def test_require_permitted_allows_for_a_site_that_has_got_more_data_and_not_for_any_number() -> None:
    learn = question(Learn(Local(lr=1e-2, optimizer="adam", batch_size=8)))
    reply = moved(0.06, examples=40)  # 5 steps of at most 0.012, and none to spare
    update = sub(reply.params, START)
    require_permitted(learn, update, START, reply, said=40)
    farther = moved(0.11, examples=40)
    with pytest.raises(RefusedReply, match="farther than 5 steps of adam"):
        require_permitted(learn, sub(farther.params, START), START, farther, said=40)
    require_permitted(learn, sub(farther.params, START), START, farther, said=75)
    huge = moved(1.0, examples=40)
    with pytest.raises(RefusedReply, match="farther than 10 steps"):
        require_permitted(learn, sub(huge.params, START), START, huge, said=10**12)


# longest_step


def test_longest_step_is_four_times_the_cohorts_median() -> None:
    assert longest_step([1.0, 1.0, 1.0, 1000.0], []) == SPREAD
    assert longest_step([1.0, 1.0, 1000.0, 1000.0], []) == SPREAD, "half of them cannot raise it"
    assert longest_step([1.0, 1.0, 1.0, 1000.0], [50.0]) == SPREAD, "a cohort is its own measure"


def test_longest_step_asks_earlier_rounds_where_there_is_no_cohort() -> None:
    assert longest_step([1000.0], [1.0, 2.0, 3.0]) == SPREAD * 2
    assert longest_step([1.0, 1000.0], []) == SPREAD, "one of two cannot set the measure"
    assert longest_step([5.0, 6.0, 7.0], [1.0]) == SPREAD * 6, "after an unlearning all move farther"


def test_shortened_scales_the_update_alone() -> None:
    reply = shortened(moved(8.0), START, 0.25)
    assert torch.equal(reply.params["w"], torch.tensor([5.0, -4.0]))
    assert torch.equal(reply.params["b"], START["b"])


# is_idle, is_too_far, is_training


def test_is_idle_where_a_model_moved_less_than_a_twentieth_of_what_its_steps_do() -> None:
    assert is_idle(Unlearning(IDLE * 2 * 0.99, least=2.0, most=2.0, cosine=None))
    assert not is_idle(Unlearning(IDLE * 2 * 1.01, least=2.0, most=2.0, cosine=None))
    assert is_idle(Unlearning(0.0, least=0.0, most=math.inf, cosine=None)), "nothing is nothing, whatever is known"
    assert not is_idle(Unlearning(1e-9, least=0.0, most=math.inf, cosine=None))


def test_is_too_far_beyond_ten_times_what_its_steps_do() -> None:
    assert is_too_far(Unlearning(FAR * 2 * 1.01, least=2.0, most=2.0, cosine=None))
    assert not is_too_far(Unlearning(FAR * 2 * 0.99, least=2.0, most=2.0, cosine=None))
    assert not is_too_far(Unlearning(1e9, least=0.0, most=math.inf, cosine=None))


def test_is_training_where_a_model_moved_as_its_last_update_did() -> None:
    assert is_training(Unlearning(1.0, 1.0, 1.0, cosine=0.11))
    assert not is_training(Unlearning(1.0, 1.0, 1.0, cosine=0.09))
    assert not is_training(Unlearning(1.0, 1.0, 1.0, cosine=None))


def test_expected_lengths_are_smaller_for_fewer_steps_and_lower_rates() -> None:
    same = question(Learn(Local(lr=0.1)))
    assert expected_lengths(same, 10, 3, SGD) == (2.0, 2.0)
    assert expected_lengths(same, 1, 3, SGD) == (0.2, 2.0), "a tiny forget set takes few steps"
    assert expected_lengths(same, 40, 3, SGD) == (2.0, 8.0)
    assert expected_lengths(question(Learn(Local(lr=0.01))), 10, 3, SGD) == pytest.approx((0.2, 2.0))
    assert expected_lengths(question(Learn(Local(lr=1.0))), 10, 3, SGD) == pytest.approx((2.0, 20.0))
    assert expected_lengths(same, 10, 3, None) == (0.0, math.inf), "nothing is known before the first round"


def test_expected_lengths_of_another_optimizer_than_trainings() -> None:
    adam = question(Distill(Local(lr=1e-3, optimizer="adam")))
    assert expected_lengths(adam, 10, 10_000, SGD) == pytest.approx((0.1, 2.0))
    assert expected_lengths(adam, 100, 10_000, SGD) == pytest.approx((0.1, 20.0))
    trained_by_adam = dataclasses.replace(SGD, adaptive=True)
    assert expected_lengths(question(Learn(Local(lr=0.1))), 10, 3, trained_by_adam) == (0.0, 2.0)


def test_planned_steps_of_a_program_are_those_that_it_took() -> None:
    program = Program((Part(Distill(Local(batch_size=8)), "forget"), Part(FisherDiagonal(), "retain")))
    reply = Reply(0, START, 24, efforts=())
    assert planned_steps(question(Learn(Local(batch_size=8, epochs=2.0))), reply) == 6
    took = dataclasses.replace(reply, efforts=(Effort(16, 2), Effort(8, 1)))
    assert planned_steps(Ask(program, (0,), "all", {"start": START}, Address(0, "x")), took) == 2


# kept_share, is_unchanged


def test_kept_share_is_what_is_left_of_a_clients_own_move() -> None:
    own = {"w": torch.tensor([2.0, 0.0])}
    assert kept_share(own, own) == 1.0
    assert kept_share({"w": torch.tensor([0.2, 5.0])}, own) == pytest.approx(0.1)


@dataclass
class Replies:
    """A federation with these replies."""

    replies: list[Reply]
    model: Any = None
    clients: tuple[int, ...] = (0, 1, 2)
    seed: int = 0

    def run(self, task: Any, clients: Any, **_: Any) -> Any:
        return iter([r for r in self.replies if r.client in clients])

    def run_at_server(self, task: Any, **_: Any) -> Params:
        raise NotImplementedError


def test_a_witness_objects_where_one_answer_cancels_another() -> None:
    federation = Replies([moved(2.0, client=0), moved(0.0, client=1)])
    witness = Witness(federation, leaving=(0, 1))
    list(witness.run(Learn(), [0, 1], start=START))
    with pytest.raises(DilutedError, match="cancel"):
        witness.require_lasting(START, moved(0.1).params)
    witness.require_lasting(START, moved(1.7).params)
    list(witness.run(Learn(), [2], start=START))
    witness.require_lasting(START, moved(0.1).params)  # others are in the model too: nothing is known


def test_is_unchanged_only_where_every_parameter_is() -> None:
    assert is_unchanged(START, dict(START))
    assert not is_unchanged(START, moved(1e-3).params)


# sketch


def test_sketch_keeps_angles_of_large_updates_and_small_ones_whole() -> None:
    generator = torch.Generator().manual_seed(3)
    a = torch.randn(20 * SKETCH, generator=generator)
    for angle in (-0.6, 0.0, 0.1, 0.9):
        b = angle * a + math.sqrt(1 - angle**2) * torch.randn(20 * SKETCH, generator=generator)
        exact = cosine(a, b)
        assert len(sketch({"w": a})) == SKETCH
        assert cosine(sketch({"w": a}), sketch({"w": b})) == pytest.approx(exact, abs=0.03)
    assert torch.equal(sketch(START), torch.tensor([0.5, 3.0, -4.0]))


# The judge


def judged(training: bool = True, memory: dict[str, Params] | None = None) -> tuple[Judge, dict[str, Params]]:
    kept: dict[str, Params] = {} if memory is None else memory
    return Judge(kept, training=training), kept


def test_the_judge_remembers_training_alone_and_one_update_for_each_client() -> None:
    learn = question(Learn(Local(lr=0.1, batch_size=8)))
    judge, memory = judged()
    judge.bounded(learn, START, [moved(1.0, client=c) for c in range(4)])
    assert sorted(memory) == ["pace", "update/0", "update/1", "update/2", "update/3"]
    judge.bounded(learn, START, [moved(3.0, client=c) for c in range(4)])
    assert judge.pace == Pace(2.0, 4.0, 0.1, adaptive=False)
    other, kept = judged(training=False)
    other.bounded(learn, START, [moved(1.0)])
    assert not kept


def test_the_judge_bounds_who_stays_and_refuses_who_leaves() -> None:
    learn, distill = question(Learn(Local(lr=0.1, batch_size=8))), question(Distill(Local(lr=0.1, batch_size=8)))
    judge, _ = judged()
    counted, too_long = judge.bounded(learn, START, [*(moved(1.0, client=c) for c in range(4)), moved(100.0, client=4)])
    assert too_long == [4]
    assert counted[4].params["w"][0] == pytest.approx(START["w"][0] + SPREAD)
    assert torch.equal(counted[3].params["w"], moved(1.0).params["w"]), "the others are as they came, bit for bit"
    for reply, reason in (
        (moved(0.0), "did not move"),
        (moved(20.0), "was to be expected"),
        (moved(0.5), "trained instead"),
    ):
        with pytest.raises(RefusedReply, match=reason):
            judge.require_plausible(distill, START, reply, leaving=True)
    judge.require_plausible(distill, START, moved(-0.5), leaving=True)
    judge.require_plausible(distill, START, moved(0.0), leaving=False)


def test_a_leaver_that_says_it_has_fewer_examples_than_is_known_does_not_shrink_what_is_expected_of_it() -> None:
    judge, _ = judged()
    asked = question(Distill(Local(batch_size=8, lr=0.1)))
    step = {n: torch.full_like(p, 1.0) for n, p in START.items()}
    trained = [Reply(c, {n: START[n] + step[n] for n in START}, 80) for c in range(4)]  # 10 steps
    learn = question(Learn(Local(batch_size=8, lr=0.1)))
    judge.bounded(learn, START, trained)
    moved_little = Reply(9, {n: p - 0.01 * step[n] for n, p in START.items()}, 1)
    judge.require_plausible(asked, START, moved_little, leaving=True)
    with pytest.raises(RefusedReply, match="did not move"):
        judge.require_plausible(asked, START, moved_little, leaving=True, known=80)
    with pytest.raises(RefusedReply, match="says that it has 1 examples, and it was enrolled with 80"):
        judge.require_plausible(asked, START, moved_little, leaving=True, fewest=80, known=80)


def test_the_judge_says_nothing_of_means_and_of_clients_without_examples() -> None:
    judge, memory = judged()
    measure = question(FisherDiagonal())
    assert isinstance(measure.parts[0].task, Measurement)
    judge.require_plausible(measure, START, moved(1e9), leaving=True)
    assert judge.bounded(measure, START, [moved(1e9)])[1] == []
    judge.require_plausible(question(Distill()), START, moved(0.0, examples=0), leaving=False)
    with pytest.raises(RefusedReply, match="without an example"):
        judge.require_plausible(question(Distill()), START, moved(0.0, examples=0), leaving=True)
    of_retain = dataclasses.replace(question(Distill()), split="retain")  # of a client whose samples are all forgotten
    judge.require_plausible(of_retain, START, moved(0.0, examples=0), leaving=True)
    assert not memory
