# SPDX-License-Identifier: Apache-2.0
"""The virtual teacher: the target logits for a sample that has to be forgotten.

Every rule takes the logits `z` of the global model, `(…, C)`, and the labels `y`, `(…)`, and returns logits of
`z`'s shape. `S` is the sum of `exp(z_c)` over the classes other than the true one, `M = C - 1` their number.

min                 the true logit falls to the smallest of all C logits, the others stay: FedQUIT
fixed               the true logit becomes the number `v`
entropy             the true logit becomes the v that gives the virtual teacher the largest entropy
temperature         min, and the other logits divided by `tau`
flatten             min, and the other logits all equal
topk                min, and the other logits equal but for the `k` largest
logit_ladder        min, and the other logits equally spaced in their order, the last one level with the true one
probability_ladder  min, and the other probabilities equally spaced in their order, the last one level likewise
incompetent         all logits equal, whatever the global model says
random              one label drawn at random, whatever the global model says

From `temperature` to `probability_ladder` the rules move mass among the other classes but keep S,
so all of them put the same probability on the true class as `min`.

The rules have no branch on the value of a tensor and change nothing in place, so that they run under
`torch.func.vmap` and `torch.compile`. They work on logarithms throughout, and in float64 wherever exponentials are
summed: logits 10,000 apart and 10,000 classes are ordinary input.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor

from fedquit.errors import InputError, NonFiniteError
from fedquit.utils.names import lookup, unknown

# Below the logit of the drawn label by enough for exp to underflow to zero, in float64 too.
FAR = 1e4
# Halvings of the slope's bracket: they leave an error below 1e-13 in any logit of a ladder 1e4
# high.
HALVINGS = 60
# Stands in for zero where a logarithm follows; far below what can be seen next to the numbers it is
# added to.
NOUGHT = 1e-290
# The smallest temperature; any float32 logits of use stay finite when divided by it.
COLDEST = 1e-6
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def is_true_class(z: Tensor, y: Tensor) -> Tensor:
    """The mask of z's shape that is true at the label."""
    return torch.arange(z.shape[-1], device=z.device) == y.unsqueeze(-1)


def log_mass(z: Tensor, among: Tensor) -> Tensor:
    """The log of the sum of exp(z) over a mask with at least one class in it, with the class dimension kept."""
    return z.masked_fill(~among, -math.inf).logsumexp(-1, keepdim=True)


def ranks(z: Tensor, y: Tensor) -> Tensor:
    """0 for the largest logit of the other classes, 1 for the next, … and C-1 for the true class; ties by index."""
    others = z.masked_fill(is_true_class(z, y), -math.inf)
    return others.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)


def with_lowest_truth(z: Tensor, y: Tensor, others: Tensor) -> Tensor:
    """The smallest of all logits at the label and `others` elsewhere, in z's dtype."""
    return torch.where(is_true_class(z, y), z.amin(-1, keepdim=True), others).to(z.dtype)


def minimum(z: Tensor, y: Tensor) -> Tensor:
    """The true logit falls to the smallest of all: FedQUIT's own rule, with at most 1/C for the true class."""
    return with_lowest_truth(z, y, z)


def fixed(z: Tensor, y: Tensor, v: float) -> Tensor:
    """The true logit becomes the number `v`, the same for every sample."""
    return z.masked_fill(is_true_class(z, y), v)


def entropy(z: Tensor, y: Tensor) -> Tensor:
    """The true logit is the mean of the others under their own softmax, where the entropy of the whole peaks."""
    true = is_true_class(z, y)
    wide = z.double()
    share = wide.masked_fill(true, -math.inf).softmax(-1)
    v = (share * wide).sum(-1, keepdim=True)
    return torch.where(true, v, wide).to(z.dtype)


def temperature(z: Tensor, y: Tensor, tau: float) -> Tensor:
    """As min, with the other logits over `tau`, then lifted together so that S stays."""
    others = ~is_true_class(z, y)
    wide = z.double()
    # Measured from their largest, the other logits are at most zero: no small tau makes exp
    # overflow.
    scaled = (wide - wide.masked_fill(~others, -math.inf).amax(-1, keepdim=True)) / tau
    return with_lowest_truth(z, y, scaled + (log_mass(wide, others) - log_mass(scaled, others)))


def flatten(z: Tensor, y: Tensor) -> Tensor:
    """As min, with S shared equally by the other logits."""
    mass = log_mass(z.double(), ~is_true_class(z, y))
    return with_lowest_truth(z, y, mass - math.log(z.shape[-1] - 1))


def top_k(z: Tensor, y: Tensor, k: int) -> Tensor:
    """As min, but past the `k` largest of the other logits the rest share equally what they had together."""
    rest_size = z.shape[-1] - 1 - k
    if rest_size <= 0:
        return minimum(z, y)
    wide = z.double()
    rest = (ranks(z, y) >= k) & ~is_true_class(z, y)
    return with_lowest_truth(z, y, torch.where(rest, log_mass(wide, rest) - math.log(rest_size), wide))


def log_geometric_sum(slope: Tensor, terms: int) -> Tensor:
    """log(1 + e^s + … + e^((terms-1) s)) for s >= 0, without overflow and down to s = 0."""
    slope = slope.clamp_min(NOUGHT)
    return (terms - 1) * slope + (torch.expm1(-terms * slope) / torch.expm1(-slope)).log()


def logit_ladder(z: Tensor, y: Tensor) -> Tensor:
    """As min, with the other logits equally spaced in their order, upwards from the true one's v.

    The rungs are v, v + slope, …, v + (M-1) slope, the slope being what keeps S.
    """
    M = z.shape[-1] - 1
    if M == 1:
        return minimum(z, y)
    wide = z.double()
    v = wide.amin(-1, keepdim=True)
    height = log_mass(wide, ~is_true_class(z, y)) - v
    # At slope 0 the sum is M, at most e^height as v is the minimum; at height/(M-1) its last term
    # alone is e^height.
    low = torch.zeros_like(height)
    high = height / (M - 1)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        short = log_geometric_sum(middle, M) < height
        low = torch.where(short, middle, low)
        high = torch.where(short, high, middle)
    return with_lowest_truth(z, y, v + (low + high) / 2 * (M - 1 - ranks(z, y)))


def probability_ladder(z: Tensor, y: Tensor) -> Tensor:
    """As min, with the other probabilities equally spaced in their order, upwards from the true one's p.

    The rungs are p, p + step, …, p + (M-1) step, the step being what makes the sum one.
    """
    M = z.shape[-1] - 1
    if M == 1:
        return minimum(z, y)
    wide = z.double()
    v = wide.amin(-1, keepdim=True)
    log_total = torch.logaddexp(v, log_mass(wide, ~is_true_class(z, y)))
    log_p = v - log_total
    spare = -torch.expm1(math.log(M + 1) + log_p)  # 1 - (M+1) p, what is left once every class has p
    log_step = spare.clamp_min(NOUGHT).log() + math.log(2 / (M * (M - 1)))
    rungs = (M - 1 - ranks(z, y)).clamp_min(0).double()  # the true class has no rung, and its value is overwritten
    return with_lowest_truth(z, y, log_total + torch.logaddexp(log_p, rungs.log() + log_step))


def incompetent(z: Tensor, y: Tensor) -> Tensor:
    """The uniform distribution, whatever the global model says."""
    return torch.zeros_like(z)


def random_label(z: Tensor, y: Tensor, u: Tensor) -> Tensor:
    """One-hot at the label that the uniforms `u` in [0, 1) point at; it may be the true one."""
    C = z.shape[-1]
    drawn = (u * C).floor().clamp(max=C - 1)  # rounded to fewer bits, a u may have become 1
    return torch.zeros_like(z).masked_fill(~is_true_class(z, drawn), -FAR)


@dataclass(frozen=True)
class Teacher:
    """A rule.

    Attributes:
        rule: (logits, labels, …) -> logits.
        takes: the names of what it takes besides.
        keeps_relations: whether the wrong classes differ as they did, at least in their order or in the largest.
    """

    rule: Callable[..., Tensor]
    takes: tuple[str, ...] = ()
    keeps_relations: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "__doc__", self.rule.__doc__)  # so that lists of teachers can say what each does


TEACHERS: dict[str, Teacher] = {
    "min": Teacher(minimum),
    "fixed": Teacher(fixed, ("v",)),
    "entropy": Teacher(entropy),
    "temperature": Teacher(temperature, ("tau",)),
    "flatten": Teacher(flatten, keeps_relations=False),
    "topk": Teacher(top_k, ("k",)),
    "logit_ladder": Teacher(logit_ladder),
    "probability_ladder": Teacher(probability_ladder),
    "incompetent": Teacher(incompetent, keeps_relations=False),
    "random": Teacher(random_label, ("u",), keeps_relations=False),
}


class TeacherOptions(TypedDict):
    """The options of all rules; each rule takes its own."""

    v: float
    tau: float
    k: int


DEFAULTS: TeacherOptions = {"v": 0.0, "tau": 1.0, "k": 5}


def at_least_single(logits: Tensor) -> Tensor:
    """Return half precision as float32, and float32 and float64 as they are."""
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


def teach(name: str, z: Tensor, y: Tensor, u: Tensor, *, v: float, tau: float, k: int) -> Tensor:
    """Return the virtual teacher's logits; nothing is checked, so that a training step can call it.

    Args:
        name: a name from `TEACHERS`.
        z: the global model's logits, `(…, C)`.
        y: the true classes, `(…)`.
        u: uniform numbers in [0, 1) of the labels' shape, the only randomness; the teacher `random`
            alone uses them.
        v: the true logit of the teacher `fixed`.
        tau: the temperature of the teacher `temperature`.
        k: how many classes the teacher `topk` keeps.

    Returns:
        Logits `(…, C)`, in float32 at least.
    """
    teacher = TEACHERS[name]
    offered = {"u": u, "v": v, "tau": tau, "k": k}
    return teacher.rule(at_least_single(z), y, **{option: offered[option] for option in teacher.takes})


def checked_options(teacher: str, given: Mapping[str, float]) -> TeacherOptions:
    """Return a teacher's options with the defaults filled in.

    Raises:
        UnknownNameError: for a teacher, or an option of it, that does not exist.
        InputError: for a value that cannot be used.
    """
    takes = tuple(option for option in lookup(TEACHERS, teacher, "teacher").takes if option != "u")
    for option in given:
        if option not in takes:
            raise unknown(f"option of teacher {teacher!r}", option, takes)
    try:
        v = float(given.get("v", DEFAULTS["v"]))
        tau = float(given.get("tau", DEFAULTS["tau"]))
        k = operator.index(given.get("k", DEFAULTS["k"]))  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise InputError(
            f"teacher {teacher!r} cannot use {dict(given)}: v and tau are numbers, k is an integer."
        ) from error
    if not abs(v) <= torch.finfo(torch.float32).max:
        raise InputError(f"v is {v}, and the true logit has to be finite in float32: choose a number such as -50.")
    if not tau >= COLDEST:
        raise InputError(f"tau is {tau} and has to be above 0, {COLDEST} at least: 1 changes nothing, inf flattens.")
    if k < 1:
        raise InputError(f"k is {k} and has to be at least 1: use the teacher 'flatten' to keep no class.")
    return {"v": v, "tau": tau, "k": k}


def check_labels(labels: Tensor, logits: Tensor) -> None:
    """Raise an InputError unless `labels` `(…)` name one class for each row of `logits` `(…, C)`."""
    if not logits.is_floating_point() or logits.dtype not in FLOATS:
        raise InputError(f"logits are {logits.dtype}: give them as float16, bfloat16, float32 or float64.")
    one_logit = logits.ndim == 1 and labels.shape == logits.shape and labels.numel() > 0
    if logits.ndim < 1 or logits.shape[-1] < 2 or one_logit:
        raise InputError(
            f"logits have shape {tuple(logits.shape)}: their last dimension must hold at least 2 classes; "
            "for one logit z of a binary model, let `forward` return the pair (0, z); a regression has no classes."
        )
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        several = ": give one class number for each, several labels at once are not supported"
        each = (
            several if labels.shape == logits.shape else ": give class numbers of an integer type, such as torch.int64"
        )
        raise InputError(f"labels are {labels.dtype}{each}.")
    if labels.shape != logits.shape[:-1]:
        raise InputError(
            f"labels have shape {tuple(labels.shape)}, but logits of shape {tuple(logits.shape)} "
            f"need labels of shape {tuple(logits.shape[:-1])}: {_shape_advice(labels.shape, logits.shape)}."
        )
    if labels.numel():
        low, high = (int(end) for end in torch.aminmax(labels))
        if low < 0 or high >= logits.shape[-1]:
            raise InputError(
                f"labels run from {low} to {high}, but the logits have {logits.shape[-1]} classes: "
                f"labels must lie in 0..{logits.shape[-1] - 1}."
            )


def _shape_advice(labels: torch.Size, logits: torch.Size) -> str:
    """What to do where labels do not have the shape of logits (…, C) without their classes."""
    if labels == logits:
        return "give class numbers, such as labels.argmax(-1) of one-hot rows; several labels at once are not supported"
    if labels[-1:] == (1,) and labels[:-1] == logits[:-1]:
        return "give labels.squeeze(-1)"
    if len(logits) > 2 and labels == logits[:1] + logits[2:]:
        return "give class_dim=1, where the logits have their classes in dimension 1"
    if len(labels) == len(logits) - 1 > 2 and labels[0] == logits[0]:
        return "let `forward` interpolate the logits to the size of the labels"
    if labels[:1] != logits[:1]:
        return "let the model return one row of logits for each example"
    return "give one class number for each row of logits, or choose the rows that have labels by `forward`"


def whole_number(given: object) -> int | None:
    """Return an integer of Python's, NumPy's or any other type that is one; None for all else."""
    try:
        return operator.index(given)  # type: ignore[arg-type]
    except TypeError:
        return None


def virtual_logits(logits: Tensor, labels: Tensor, teacher: str = "min", **options: float) -> Tensor:
    """Return the logits of the virtual teacher for the logits of a global model.

    Args:
        logits: the global model's logits, `(…, C)`, in any floating type.
        labels: the true classes, integers `(…)`.
        teacher: a name from `TEACHERS`.
        options: `v` of `fixed` (0 if not given), `tau` of `temperature` (1), `k` of `topk` (5), `seed` of
            `random` (0).

    Returns:
        Logits of the same shape: float64 for float64, float32 for all else.

    Raises:
        InputError: for logits, labels or options that cannot be used.
        UnknownNameError: for a teacher or an option that does not exist.
        NonFiniteError: if the logits hold NaN or infinity.
    """
    seeded = lookup(TEACHERS, teacher, "teacher").takes == ("u",)
    seed = options.pop("seed", 0) if seeded else 0
    if seeded and options:
        raise unknown(f"option of teacher {teacher!r}", next(iter(options)), ["seed"])
    settings = checked_options(teacher, options)
    for given in list[object]((logits, labels)):
        if not isinstance(given, Tensor):
            raise InputError("logits and labels must be tensors: convert them with torch.as_tensor.")
    whole = whole_number(seed)
    if whole is None:
        raise InputError(f"seed is {seed!r}: give a whole number.")
    check_labels(labels, logits)
    if not logits.isfinite().all():
        raise NonFiniteError("logits hold NaN or infinity: check the model that made them.")
    uniforms = torch.rand(labels.shape, generator=torch.Generator().manual_seed(whole))
    return teach(teacher, logits, labels, uniforms.to(logits.device), **settings)
