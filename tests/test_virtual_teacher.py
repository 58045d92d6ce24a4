# SPDX-License-Identifier: Apache-2.0
"""The rules of the virtual teacher against plain formulas, at the extremes, and on input that cannot be used.

Tolerances are on probabilities unless a test says otherwise: 1e-12 where the rule is given float64, 1e-6 for float32,
and 1e-3 for float32 logits near 10,000, whose own spacing is 1e-3.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedquit.distill.virtual_teacher import (
    DEFAULTS,
    TEACHERS,
    TeacherOptions,
    entropy,
    flatten,
    incompetent,
    log_geometric_sum,
    logit_ladder,
    minimum,
    probability_ladder,
    teach,
    top_k,
    virtual_logits,
)
from fedquit.errors import InputError, NonFiniteError, UnknownNameError

OPTIONS: TeacherOptions = {"v": -1.5, "tau": 3.0, "k": 2}
MASS_KEEPING = ["min", "temperature", "flatten", "topk", "logit_ladder", "probability_ladder"]
FROM_LOGITS = [*MASS_KEEPING, "fixed", "entropy"]
CLASSES = [2, 3, 10, 1000, 10_000]


def only_its_own(teacher: str) -> dict[str, float]:
    options = {"v": OPTIONS["v"], "tau": OPTIONS["tau"], "k": OPTIONS["k"]}
    return {name: options[name] for name in TEACHERS[teacher].takes if name in options}


@st.composite
def samples(draw: st.DrawFn, spacing: float | None = None) -> tuple[Tensor, int]:
    C = draw(st.integers(2, 12))
    logit = st.floats(-8, 8, width=32) if spacing is None else st.integers(-128, 128).map(lambda n: n * spacing)
    logits = draw(st.lists(logit, min_size=C, max_size=C))
    return torch.tensor(logits, dtype=torch.float64), draw(st.integers(0, C - 1))


def one(z: Tensor, y: int, teacher: str, **options: float) -> Tensor:
    return virtual_logits(z[None], torch.tensor([y]), teacher, **options)[0]


def by_the_formula(teacher: str, z: list[float], y: int) -> list[float]:
    """The rules as one would write them on paper, for logits that exp can take as they are."""
    C, M = len(z), len(z) - 1
    v = min(z)
    others = [c for c in range(C) if c != y]
    best_first = sorted(others, key=lambda c: -z[c])
    S = sum(math.exp(z[c]) for c in others)
    result = list(z)
    if teacher == "fixed":
        v = OPTIONS["v"]
    elif teacher == "entropy":
        v = sum(math.exp(z[c]) / S * z[c] for c in others)
    elif teacher == "temperature":
        scaled = sum(math.exp(z[c] / OPTIONS["tau"]) for c in others)
        for c in others:
            result[c] = z[c] / OPTIONS["tau"] + math.log(S / scaled)
    elif teacher == "flatten":
        for c in others:
            result[c] = math.log(S / M)
    elif teacher == "topk" and OPTIONS["k"] < M:
        rest = best_first[OPTIONS["k"] :]
        for c in rest:
            result[c] = math.log(sum(math.exp(z[r]) for r in rest) / len(rest))
    elif teacher == "logit_ladder" and M > 1:
        low, high = 0.0, 100.0
        for _ in range(200):
            slope = (low + high) / 2
            small = sum(math.exp(min(slope * n, 600.0)) for n in range(M)) < S * math.exp(-v)
            low, high = (slope, high) if small else (low, slope)
        for rank, c in enumerate(best_first):
            result[c] = v + (low + high) / 2 * (M - 1 - rank)
    elif teacher == "probability_ladder" and M > 1:
        total = math.exp(v) + S
        p = math.exp(v) / total
        step = max(0.0, 2 * (1 - (M + 1) * p) / (M * (M - 1)))
        for rank, c in enumerate(best_first):
            result[c] = math.log(total * (p + (M - 1 - rank) * step))
    result[y] = v
    return result


@pytest.mark.parametrize("teacher", FROM_LOGITS)
@settings(max_examples=60)
@given(sample=samples())
def test_every_rule_is_its_formula(teacher: str, sample: tuple[Tensor, int]) -> None:
    z, y = sample
    expected = torch.tensor(by_the_formula(teacher, z.tolist(), y), dtype=torch.float64)
    virtual = one(z, y, teacher, **only_its_own(teacher))
    # On the logits themselves, not only up to a shift: 1e-9 leaves room for the reference's own rounding.
    torch.testing.assert_close(virtual, expected, rtol=0, atol=1e-9)
    single = one(z.float(), y, teacher, **only_its_own(teacher))
    torch.testing.assert_close(single.double().softmax(-1), expected.softmax(-1), rtol=0, atol=1e-6)


@settings(max_examples=60)
@given(sample=samples())
def test_min_rule_keeps_the_ratios_of_all_other_classes(sample: tuple[Tensor, int]) -> None:
    z, y = sample
    others = torch.arange(len(z)) != y
    virtual = one(z, y, "min")
    assert torch.equal(virtual[others], z[others])
    assert virtual[y] == z.min()


@pytest.mark.parametrize("teacher", FROM_LOGITS)
@settings(max_examples=25)
@given(sample=samples(spacing=1 / 16), shift=st.integers(-50, 50))
def test_a_shift_of_all_logits_shifts_the_virtual_teacher(teacher: str, sample: tuple[Tensor, int], shift: int) -> None:
    z, y = sample  # with such logits and shifts, sums are exact: no tie is made or broken
    options = only_its_own(teacher)
    plain = one(z, y, teacher, **options)
    if "v" in options:
        options["v"] += shift
    torch.testing.assert_close(one(z + shift, y, teacher, **options), plain + shift, rtol=0, atol=1e-11)


def extreme(case: str, C: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(C)
    z = torch.randn(3, C, generator=generator, dtype=torch.float64)
    y = torch.randint(C, (3,), generator=generator)
    true = torch.arange(C) == y[:, None]
    shuffled = torch.stack([torch.randperm(C, generator=generator) for _ in range(3)])
    cases = {
        "spread below": torch.linspace(-1e4, 0, C, dtype=torch.float64)[shuffled],
        "spread above": torch.linspace(0, 1e4, C, dtype=torch.float64)[shuffled],
        "one far above": torch.where(torch.arange(C) == (y[:, None] + 1) % C, 1e4, z),
        "one far below": torch.where(torch.arange(C) == (y[:, None] + 1) % C, -1e4, z),
        "two levels": torch.where(shuffled % 2 == 0, 1e4, 0.0).double(),
        "ties": (shuffled % 3).double(),
        "all equal": torch.full_like(z, 7.3),
        "all equal and large": torch.full_like(z, 1e4),
        "true the least": torch.where(true, -30.0, z),
        "true far below": torch.where(true, -1e4, z),
        "true far above": torch.where(true, 1e4, z),
    }
    return cases[case], y


EXTREMES = [
    "spread below",
    "spread above",
    "one far above",
    "one far below",
    "two levels",
    "ties",
    "all equal",
    "all equal and large",
    "true the least",
    "true far below",
    "true far above",
]


def log_mass_of_others(z: Tensor, y: Tensor) -> Tensor:
    true = torch.arange(z.shape[-1]) == y[:, None]
    return z.double().masked_fill(true, -math.inf).logsumexp(-1)


@pytest.mark.parametrize("C", CLASSES)
@pytest.mark.parametrize("case", EXTREMES)
@pytest.mark.parametrize("teacher", MASS_KEEPING)
def test_mass_keeping_rules_keep_the_mass_at_the_extremes(teacher: str, case: str, C: int) -> None:
    z, y = extreme(case, C)
    mass = log_mass_of_others(z, y)
    p_true = (z.amin(-1) - torch.logaddexp(z.amin(-1), mass)).exp()
    virtual = virtual_logits(z, y, teacher, **only_its_own(teacher))
    assert virtual.isfinite().all()
    # In float64: log S to 1e-10, the rounding of logits of 1e4 among 10,000 classes, and the probability to 1e-12.
    torch.testing.assert_close(log_mass_of_others(virtual, y), mass, rtol=0, atol=1e-10)
    got = virtual.softmax(-1).gather(-1, y[:, None])[:, 0]
    torch.testing.assert_close(got, p_true, rtol=0, atol=1e-12)
    single = virtual_logits(z.float(), y, teacher, **only_its_own(teacher))
    assert single.dtype == torch.float32
    tolerance = 1e-3 if float(z.abs().max()) > 1e3 else 1e-6
    of_single = single.double().softmax(-1)
    torch.testing.assert_close(of_single, virtual.softmax(-1), rtol=0, atol=tolerance)


@pytest.mark.parametrize("C", CLASSES)
@pytest.mark.parametrize("case", EXTREMES)
@pytest.mark.parametrize("teacher", FROM_LOGITS)
def test_float32_gives_the_float64_result_rounded_once(teacher: str, case: str, C: int) -> None:
    z, y = extreme(case, C)
    single = z.float()
    options = only_its_own(teacher)
    expected = virtual_logits(single.double(), y, teacher, **options).float()
    assert torch.equal(virtual_logits(single, y, teacher, **options), expected)


@pytest.mark.parametrize("C", CLASSES)
@pytest.mark.parametrize("case", EXTREMES)
@pytest.mark.parametrize("teacher", TEACHERS)
def test_no_rule_gives_nan_or_infinity_in_values_or_gradients(teacher: str, case: str, C: int) -> None:
    z, y = extreme(case, C)
    z = z.float().requires_grad_()
    virtual = teach(teacher, z, y, torch.tensor([0.0, 0.5, 1 - 2**-24]), **OPTIONS)
    assert virtual.isfinite().all()
    if virtual.requires_grad:
        weights = torch.randn(C, generator=torch.Generator().manual_seed(0))
        (gradient,) = torch.autograd.grad((virtual.log_softmax(-1) * weights).sum(), z)
        assert gradient.isfinite().all()
    else:
        assert teacher in ("incompetent", "random")


@pytest.mark.parametrize("C", [3, 10, 1000, 10_000])
@pytest.mark.parametrize("case", EXTREMES)
def test_logit_ladder_has_equal_steps_in_the_order_of_the_logits_and_ends_at_v(case: str, C: int) -> None:
    z, y = extreme(case, C)
    ladder = virtual_logits(z, y, "logit_ladder")
    for row in range(3):
        others = torch.arange(C) != y[row]
        order = z[row][others].argsort(descending=True, stable=True)
        rungs = ladder[row][others][order]
        steps = rungs[:-1] - rungs[1:]
        assert (steps >= 0).all()
        torch.testing.assert_close(steps, steps.mean().expand_as(steps), rtol=0, atol=1e-11)
        assert rungs[-1] == z[row].min()


def test_slope_of_the_logit_ladder_has_no_cap() -> None:
    z = torch.tensor([[5.0, 0.0, -1e4, -3.0]], dtype=torch.float64)
    ladder = virtual_logits(z, torch.tensor([0]), "logit_ladder")
    # The mass is that of the best class but for e^-3, so two steps lead from -1e4 to log(1 + e^-3).
    top = math.log1p(math.exp(-3.0))
    torch.testing.assert_close(ladder[0, 1:], torch.tensor([top, -1e4, (top - 1e4) / 2], dtype=torch.float64))


@pytest.mark.parametrize("terms", [2, 3, 50, 10_000])
@pytest.mark.parametrize("slope", [0.0, 1e-300, 1e-12, 1e-4, 0.3, 20.0, 1e4])
def test_log_geometric_sum_is_the_sum_written_out(slope: float, terms: int) -> None:
    written_out = (slope * torch.arange(terms, dtype=torch.float64)).logsumexp(-1)
    got = log_geometric_sum(torch.tensor(slope, dtype=torch.float64), terms)
    torch.testing.assert_close(got, written_out, rtol=1e-14, atol=1e-12)


@pytest.mark.parametrize("C", [3, 10, 1000, 10_000])
@pytest.mark.parametrize("case", EXTREMES)
def test_probability_ladder_has_equal_steps_in_the_order_of_the_logits_and_ends_at_the_true_class(
    case: str, C: int
) -> None:
    z, y = extreme(case, C)
    ladder = virtual_logits(z, y, "probability_ladder").softmax(-1)
    for row in range(3):
        others = torch.arange(C) != y[row]
        order = z[row][others].argsort(descending=True, stable=True)
        rungs = ladder[row][others][order]
        steps = rungs[:-1] - rungs[1:]
        torch.testing.assert_close(steps, steps.mean().expand_as(steps), rtol=0, atol=1e-12)
        torch.testing.assert_close(rungs[-1], ladder[row, y[row]], rtol=0, atol=1e-12)


def test_probability_ladder_does_not_clip_small_probabilities() -> None:
    z = torch.tensor([[5.0, 0.0, -1e4, -3.0]], dtype=torch.float64)
    ladder = virtual_logits(z, torch.tensor([0]), "probability_ladder")
    assert ladder[0, 2] == -1e4
    torch.testing.assert_close(ladder.softmax(-1)[0, [1, 3]], torch.tensor([2 / 3, 1 / 3], dtype=torch.float64))


@pytest.mark.parametrize("teacher", ["logit_ladder", "probability_ladder", "topk", "flatten", "temperature"])
def test_with_two_classes_every_mass_keeping_rule_is_min(teacher: str) -> None:
    z = torch.tensor([[3.0, -1e4], [0.25, 0.25], [-2.0, 9.0]])
    for label in (0, 1):
        y = torch.full((3,), label)
        assert torch.equal(virtual_logits(z, y, teacher), virtual_logits(z, y, "min"))


@pytest.mark.parametrize("tau", [1.0, 4.0, math.inf])
@settings(max_examples=30)
@given(sample=samples())
def test_temperature_runs_from_min_to_flatten(tau: float, sample: tuple[Tensor, int]) -> None:
    z, y = sample
    warm = one(z, y, "temperature", tau=tau)
    if tau == 1.0:
        torch.testing.assert_close(warm, one(z, y, "min"), rtol=0, atol=1e-12)
    elif tau == math.inf:
        torch.testing.assert_close(warm, one(z, y, "flatten"), rtol=0, atol=1e-12)
    else:
        others = torch.arange(len(z)) != y
        spread = warm[others].max() - warm[others].min()
        torch.testing.assert_close(spread * tau, z[others].max() - z[others].min(), rtol=0, atol=1e-11)


@settings(max_examples=30)
@given(sample=samples(), k=st.integers(1, 20))
def test_topk_keeps_the_k_largest_and_levels_the_rest(sample: tuple[Tensor, int], k: int) -> None:
    z, y = sample
    others = torch.arange(len(z)) != y
    virtual = one(z, y, "topk", k=k)
    order = z[others].argsort(descending=True, stable=True)
    kept, rest = virtual[others][order][:k], virtual[others][order][k:]
    assert torch.equal(kept, z[others][order][:k])
    assert (rest == rest[:1]).all()
    if k >= len(z) - 1:
        assert torch.equal(virtual, one(z, y, "min"))


def test_the_coldest_temperature_is_finite_on_logits_far_apart() -> None:
    z = torch.tensor([[0.0, 1e4, -1e4, 9999.0]])
    virtual = virtual_logits(z, torch.tensor([0]), "temperature", tau=1e-6)
    assert virtual.isfinite().all()
    assert torch.equal(virtual.softmax(-1), torch.tensor([[0.0, 1.0, 0.0, 0.0]]))


def test_ties_go_to_the_lower_index() -> None:
    z = torch.zeros(1, 5, dtype=torch.float64)
    z[0, 4] = -1.0
    ladder = virtual_logits(z, torch.tensor([1]), "logit_ladder")[0]
    assert ladder[0] > ladder[2] > ladder[3] > ladder[4]
    topped = virtual_logits(z, torch.tensor([1]), "topk", k=2)[0]
    assert topped[0] == topped[2] == 0
    assert topped[3] == topped[4] < 0


def test_defaults_are_those_written_down() -> None:
    z, y = torch.randn(4, 9, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 3, 8, 2])
    assert torch.equal(virtual_logits(z, y), minimum(z, y))
    assert torch.equal(virtual_logits(z, y, "topk"), top_k(z, y, 5))
    assert (virtual_logits(z, y, "fixed").gather(-1, y[:, None]) == 0).all()
    assert torch.equal(virtual_logits(z, y, "temperature"), virtual_logits(z, y, "temperature", tau=1.0))
    assert DEFAULTS == {"v": 0.0, "tau": 1.0, "k": 5}


def test_every_teacher_says_what_it_does() -> None:
    assert TEACHERS["incompetent"].__doc__ == incompetent.__doc__
    assert len({teacher.__doc__ for teacher in TEACHERS.values()}) == len(TEACHERS)


def test_incompetent_is_uniform() -> None:
    z, y = extreme("spread above", 10)
    assert torch.equal(virtual_logits(z, y, "incompetent").softmax(-1), torch.full_like(z, 0.1))


@pytest.mark.parametrize("C", CLASSES)
def test_random_is_one_hot_to_the_last_bit(C: int) -> None:
    z, y = extreme("spread above", C)
    virtual = virtual_logits(z.float(), y, "random")
    assert virtual.isfinite().all()
    p = virtual.softmax(-1)
    assert torch.equal(p.max(-1).values, torch.ones(3))
    assert (p != 0).sum() == 3


def test_random_takes_the_label_that_u_points_at() -> None:
    z, y = torch.zeros(6, 4), torch.zeros(6, dtype=torch.int64)
    u = torch.tensor([0.0, 0.2499, 0.25, 0.74, 0.999, 1.0])
    assert teach("random", z, y, u, **OPTIONS).argmax(-1).tolist() == [0, 0, 1, 2, 3, 3]


def test_random_repeats_for_a_seed_and_covers_all_classes() -> None:
    z, y = torch.zeros(4000, 5), torch.zeros(4000, dtype=torch.int64)
    before = torch.get_rng_state()
    first, again, other = (virtual_logits(z, y, "random", seed=seed).argmax(-1) for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(virtual_logits(z, y, "random"), virtual_logits(z, y, "random", seed=0))
    counts = first.bincount(minlength=5)
    assert (counts - 800).abs().max() < 130  # five standard deviations


@pytest.mark.parametrize("teacher", TEACHERS)
def test_half_precision_is_computed_and_returned_in_float32(teacher: str) -> None:
    z, y = torch.randn(5, 6, generator=torch.Generator().manual_seed(2)), torch.tensor([0, 1, 2, 3, 5])
    for half in (torch.float16, torch.bfloat16):
        narrow = virtual_logits(z.to(half), y, teacher)
        assert narrow.dtype == torch.float32
        assert torch.equal(narrow, virtual_logits(z.to(half).float(), y, teacher))
    assert virtual_logits(z, y, teacher).dtype == torch.float32
    assert virtual_logits(z.double(), y, teacher).dtype == torch.float64


@pytest.mark.parametrize("teacher", TEACHERS)
def test_logits_of_sequences_are_taken_position_by_position(teacher: str) -> None:
    generator = torch.Generator().manual_seed(5)
    z, y = torch.randn(2, 3, 7, generator=generator), torch.randint(7, (2, 3), generator=generator)
    options = only_its_own(teacher)
    whole = virtual_logits(z, y, teacher, **options)
    assert whole.shape == z.shape
    assert torch.equal(whole.reshape(6, 7), virtual_logits(z.reshape(6, 7), y.reshape(6), teacher, **options))
    assert virtual_logits(z[0, 0], y[0, 0], teacher, **options).shape == (7,)


@pytest.mark.parametrize("teacher", TEACHERS)
def test_input_is_left_as_it_is_and_small_label_types_do(teacher: str) -> None:
    z, y = torch.randn(4, 6, generator=torch.Generator().manual_seed(7)), torch.tensor([0, 5, 2, 1])
    z_before, y_before = z.clone(), y.clone()
    virtual = virtual_logits(z, y, teacher)
    assert torch.equal(z, z_before)
    assert torch.equal(y, y_before)
    for dtype in (torch.uint8, torch.int32):
        assert torch.equal(virtual_logits(z, y.to(dtype), teacher), virtual)


@pytest.mark.parametrize("teacher", TEACHERS)
def test_an_empty_batch_gives_an_empty_batch(teacher: str) -> None:
    assert virtual_logits(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64), teacher).shape == (0, 4)


@pytest.mark.parametrize("C", [2, 3, 11])
@pytest.mark.parametrize("teacher", TEACHERS)
def test_rules_are_the_same_under_vmap(teacher: str, C: int) -> None:
    generator = torch.Generator().manual_seed(C)
    z, u = torch.randn(2, 4, C, generator=generator), torch.rand(2, 4, generator=generator)
    y = torch.randint(C, (2, 4), generator=generator)

    def rule(z: Tensor, y: Tensor, u: Tensor) -> Tensor:
        return teach(teacher, z, y, u, **OPTIONS)

    plain = rule(z, y, u)
    assert torch.equal(torch.func.vmap(rule)(z, y, u), plain)
    assert torch.equal(torch.func.vmap(torch.func.vmap(rule))(z, y, u), plain)


@pytest.mark.parametrize(
    "rule", [minimum, entropy, flatten, logit_ladder, probability_ladder, incompetent], ids=lambda rule: rule.__name__
)
def test_rules_are_one_graph_for_the_compiler(rule: Callable[[Tensor, Tensor], Tensor]) -> None:
    z, y = torch.randn(4, 6, generator=torch.Generator().manual_seed(9)), torch.tensor([0, 5, 2, 1])
    compiled = torch.compile(rule, fullgraph=True, backend="eager")
    assert torch.equal(compiled(z, y), rule(z, y))


@pytest.mark.parametrize("name", ["fixed", "temperature", "topk", "random"])
def test_rules_with_options_are_one_graph_for_the_compiler(name: str) -> None:
    z, y = torch.randn(4, 6, generator=torch.Generator().manual_seed(9)), torch.tensor([0, 5, 2, 1])
    offered = {"u": torch.tensor([0.1, 0.9, 0.4, 0.6]), **OPTIONS}
    options = {option: offered[option] for option in TEACHERS[name].takes}
    rule = TEACHERS[name].rule
    compiled = torch.compile(rule, fullgraph=True, backend="eager")
    assert torch.equal(compiled(z, y, **options), rule(z, y, **options))


Z, Y = torch.zeros(2, 3), torch.tensor([0, 2])


def test_an_unknown_teacher_is_answered_with_the_nearest_name() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'entropy'"):
        virtual_logits(Z, Y, "entrop")


@pytest.mark.parametrize(
    ("teacher", "option", "valid"),
    [
        ("topk", "kk", "choose one of k"),
        ("topk", "tau", "choose one of k"),
        ("min", "v", "there is none to choose from"),
        ("fixed", "u", "choose one of v"),
        ("min", "seed", "there is none to choose from"),
        ("random", "u", "choose one of seed"),
        ("random", "v", "choose one of seed"),
        ("temperature", "seed", "choose one of tau"),
    ],
)
def test_an_option_that_does_not_apply_is_answered_with_those_that_do(teacher: str, option: str, valid: str) -> None:
    with pytest.raises(UnknownNameError, match=f"option of teacher '{teacher}' '{option}'.*{valid}"):
        virtual_logits(Z, Y, teacher, **{option: 1})


@pytest.mark.parametrize(
    ("teacher", "option", "value", "says"),
    [
        ("temperature", "tau", 0.0, "tau is 0.0"),
        ("temperature", "tau", -2.0, "tau is -2.0"),
        ("temperature", "tau", math.nan, "tau is nan"),
        ("topk", "k", 0, "k is 0"),
        ("topk", "k", 1.5, "k is an integer"),
        ("fixed", "v", math.inf, "v is inf"),
        ("fixed", "v", math.nan, "v is nan"),
        ("fixed", "v", 1e300, "finite in float32"),
        ("fixed", "v", "low", "v and tau are numbers"),
        ("temperature", "tau", 1e-300, "tau is 1e-300"),
    ],
)
def test_an_option_out_of_range_is_refused(teacher: str, option: str, value: float, says: str) -> None:
    with pytest.raises(InputError, match=says):
        virtual_logits(Z, Y, teacher, **{option: value})


@pytest.mark.parametrize(
    ("logits", "labels", "says"),
    [
        (torch.zeros(2, 1), torch.tensor([0, 0]), r"shape \(2, 1\).*at least 2 classes"),
        (torch.zeros(2, 3), torch.tensor([0.0, 1.0]), "labels are torch.float32"),
        (torch.zeros(2, 3), torch.tensor([True, False]), "labels are torch.bool"),
        (torch.zeros(2, 3), torch.tensor([0, 1, 2]), r"labels have shape \(3,\).*\(2, 3\).*shape \(2,\)"),
        (torch.zeros(2, 3), torch.tensor([[0], [1]]), r"labels have shape \(2, 1\)"),
        (torch.zeros(2, 3), torch.tensor([0, 3]), "labels run from 0 to 3.*3 classes"),
        (torch.zeros(2, 3), torch.tensor([-1, 0]), "labels run from -1 to 0"),
        (torch.zeros(2, 3, dtype=torch.int64), torch.tensor([0, 1]), "logits are torch.int64"),
        (torch.zeros(2, 3, dtype=torch.complex64), torch.tensor([0, 1]), "logits are torch.complex64"),
        (torch.tensor(1.0), torch.tensor(0), "at least 2 classes"),
    ],
)
def test_input_that_cannot_be_used_is_refused(logits: Tensor, labels: Tensor, says: str) -> None:
    with pytest.raises(InputError, match=says):
        virtual_logits(logits, labels)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_are_refused(bad: float) -> None:
    with pytest.raises(NonFiniteError, match="NaN or infinity"):
        virtual_logits(torch.tensor([[0.0, bad]]), torch.tensor([0]))
