# SPDX-License-Identifier: Apache-2.0
"""Forget samples with one call: choose the rate, unlearn, recover, and judge the result."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from fedquit.distill.batches import Collate, Data, Forward, Labels
from fedquit.distill.damage import DamageWarning
from fedquit.distill.stepping import NewOptimizer
from fedquit.distill.unlearning import Callback, check_count, check_options, is_rate
from fedquit.distill.virtual_teacher import whole_number
from fedquit.errors import InputError, NonFiniteError
from fedquit.inference.trace import MARGIN
from fedquit.single.evidence import Evidence, destroyed, evaluate, null_of
from fedquit.single.methods import METHODS
from fedquit.single.overlap import refuse_retained
from fedquit.single.recovery import recover
from fedquit.studies.sweep import Candidate, HalfVerdict, Sweep, choose
from fedquit.utils.names import lookup

RATES = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)


class NoRateError(InputError):
    """No rate can be recommended; `sweep` has what each of them did."""

    def __init__(self, message: str, sweep: Sweep) -> None:
        super().__init__(message)
        self.sweep = sweep


@dataclass(frozen=True)
class Forgotten:
    """A model that has forgotten, and the evidence.

    Attributes:
        model: the model to go on with: recovered where retain data was given, else as unlearning left it.
        method: the name of the method.
        lr: the rate of the unlearning; None for a method without one.
        before: evidence on the given model.
        unlearned: evidence right after the unlearning.
        recovered: evidence after the recovery; None without one.
        sweep: the rates that were tried; None where the rate was given.
        unmoved: names of trainable parameters that are the same before and after.
        notes: what a reader should know, a sentence each.
        seconds: of everything.
    """

    model: nn.Module = field(repr=False)
    method: str
    lr: float | None
    before: Evidence
    unlearned: Evidence
    recovered: Evidence | None
    sweep: Sweep | None
    unmoved: tuple[str, ...]
    notes: tuple[str, ...]
    seconds: float

    @property
    def evidence(self) -> Evidence:
        """Evidence on `model`."""
        return self.recovered or self.unlearned

    @property
    def verdict(self) -> str:
        """`remembered`, `forgotten within the margin`, `over-unlearned` or `cannot tell`, for `model`."""
        return self.evidence.verdict

    def to_dict(self) -> dict[str, Any]:
        """The figures, for JSON."""
        return {
            "method": self.method,
            "lr": self.lr,
            "before": self.before.to_dict(),
            "unlearned": self.unlearned.to_dict(),
            "recovered": self.recovered.to_dict() if self.recovered else None,
            "sweep": self.sweep.to_dict() if self.sweep else None,
            "unmoved": list(self.unmoved),
            "notes": list(self.notes),
            "seconds": round(self.seconds, 3),
        }

    def __str__(self) -> str:
        phases = {"before": self.before, "unlearned": self.unlearned, "recovered": self.recovered}
        shown = {name: evidence for name, evidence in phases.items() if evidence}
        lines = [f"{'accuracy %':<12}{'examples':>10}" + "".join(f"{name:>11}" for name in shown)]
        for name, size in self.before.sizes.items():
            accuracies = "".join(f"{evidence.accuracy[name]:>11.1f}" for evidence in shown.values())
            lines.append(f"{name:<12}{size:>10,}{accuracies}")
        if self.before.null:
            aucs = "".join(f"{e.null.auc.value:>11.3f}" if e.null else f"{'':>11}" for e in shown.values())
            lines.append(f"{'AUC':<12}{'':>10}{aucs}")
        lines.append(f"{self.verdict}: {self.evidence.reason}")
        rate = "" if self.lr is None else f", lr {self.lr:g}"
        lines.append(f"{self.method}{rate}, {self.seconds:.1f} s")
        return "\n".join([*lines, *self.notes])

    def report(self, path: Path | str) -> Path:
        """Write the page and return where it is."""
        from fedquit.single.page import write_page

        return write_page(self, Path(path))


def forget(
    model: nn.Module,
    forget: Data,
    retain: Data | None = None,
    holdout: Data | None = None,
    *,
    test: Data | None = None,
    method: str = "fedquit",
    lr: float | Literal["auto"] = "auto",
    rates: Sequence[float] = RATES,
    epochs: int = 1,
    batch_size: int = 32,
    optimizer: str | NewOptimizer = "adam",
    recover_lr: float | None = None,
    recover_epochs: int = 1,
    recover_optimizer: str | NewOptimizer = "adam",
    margin: float = MARGIN,
    forward: Forward | None = None,
    labels: Labels | None = None,
    shift: bool | Literal["auto"] = "auto",
    class_dim: int = -1,
    ignore_index: int = -100,
    collate: Collate | None = None,
    norm: Literal["train", "frozen"] = "frozen",
    dropout: bool = False,
    autocast: torch.dtype | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
    callback: Callback | None = None,
    progress: bool = False,
    share_frozen: bool = False,
    **options: Any,  # noqa: ANN401 - of the method
) -> Forgotten:
    """Make a model forget data, repair it, and say what can be told about the result; the given model is left as it is.

    With a hold-out and `lr="auto"` the rate is the smallest that one half of the hold-out calls forgotten, if the other
    half confirms it. The statistics of BatchNorm are kept while unlearning, and dropout rests, so that the student
    starts as the teacher; recovery is ordinary training.

    Args:
        model: any module that `fedquit.unlearn` takes.
        forget: the data to forget, in any form that `fedquit.unlearn` takes.
        retain: training data that stays; recovery trains on it.
        holdout: data of the same kind as `forget` that was never trained on, from a random split: what the verdict and
            the choice of the rate compare with.
        test: test data, for the table.
        method: `fedquit`, `ascent`, `random-labels`, `not`, `scrub` or `ssd`.
        lr: of the unlearning; `auto` tries `rates`. `not` and `ssd` have none.
        rates: to try.
        epochs: passes of the unlearning over the forget data.
        batch_size: samples per step; a DataLoader has its own.
        optimizer: of the unlearning: a name, a class of `torch.optim`, or (parameters, lr) -> optimizer.
        recover_lr: of the recovery: that with which training ended is a good choice. Needed with `retain`.
        recover_epochs: passes of the recovery over the retain data.
        recover_optimizer: of the recovery; training's own is a good choice.
        margin: how far from one half an AUC may lie and still count as forgotten.
        forward: (model, batch) -> logits, for batches or outputs of another form.
        labels: the key of the labels in a mapping, or (batch) -> labels.
        shift: whether the logits at a position are of the next label.
        class_dim: the dimension of the classes in the logits; 1 for segmentation.
        ignore_index: a label that is left out.
        collate: makes a batch of a list of a dataset's samples.
        norm: of BatchNorm while unlearning: `frozen` or `train`.
        dropout: whether dropout is active while unlearning.
        autocast: torch.bfloat16 or torch.float16 computes a float32 model's passes in it.
        seed: fixes every draw.
        device: where to work; by default where the model's parameters are.
        callback: is told of each step of the unlearning; when it returns True, that step was the last.
        progress: show bars with the time left.
        share_frozen: whether frozen parameters of the result share memory with the given model's, so that a large
            model with adapters is not copied; whoever then changes the one in place, changes the other.
        options: of the method: of FedQUIT `teacher`, `loss`, and the teacher's own; of SCRUB `max_steps`, `min_steps`,
            `alpha`, `gamma`, `temperature`; of `ssd` `alpha` and `dampening`.

    Raises:
        NoRateError: if no rate can be recommended; it says why, and has the table of all rates.
        InputError: for anything that cannot be used.
    """
    began = time.monotonic()
    chosen = lookup(METHODS, method, "method")
    own = chosen.checked(method, options)
    reading: dict[str, Any] = {
        "forward": forward,
        "labels": labels,
        "shift": shift,
        "class_dim": class_dim,
        "ignore_index": ignore_index,
        "collate": collate,
        "device": device,
    }
    _check_given(method, lr, retain, holdout, recover_lr)
    refuse_retained(forget, retain)
    if whole_number(recover_epochs) != 0:
        recover_epochs = check_count("recover_epochs", recover_epochs)
    seed = check_options(seed, autocast, callback)
    how: dict[str, Any] = reading | {
        "epochs": epochs,
        "batch_size": batch_size,
        "optimizer": optimizer,
        "norm": norm,
        "dropout": dropout,
        "autocast": autocast,
        "seed": seed,
        "callback": callback,
        "progress": progress,
    }
    sets: dict[str, Any] = {"forget": forget, "holdout": holdout, "retain": retain, "test": test}

    alone = all(other is None for other in (holdout, retain, test))

    def unlearned_with(rate: float | None, *, share: bool = True) -> nn.Module:
        rated = how | {"share_frozen": share} | ({} if rate is None else {"lr": rate})
        with nullcontext() if alone else _judged_by_evidence():
            return chosen.run(model, forget, retain, rated, own)

    def recovered_from(student: nn.Module) -> nn.Module | None:
        if retain is None or recover_epochs == 0:
            return None
        with _judged_by_evidence():
            return recover(
                student, retain, lr=recover_lr or 0.0, epochs=recover_epochs, batch_size=batch_size,
                optimizer=recover_optimizer, autocast=autocast, seed=seed, progress=progress, share_frozen=True,
                **reading,
            )  # fmt: skip

    def judged(one: nn.Module, original: Evidence | None) -> Evidence:
        return evaluate(one, **sets, original=original, margin=margin, **reading)

    original = judged(model, None)
    before = Evidence(original.scores, null_of(original.scores, original, margin))  # it is its own original
    sweep: Sweep | None = None
    rate = float(lr) if chosen.has_rate and lr != "auto" else None
    diverged: float | None = None
    if chosen.has_rate and rate is None:
        sweep, diverged = _swept(rates, before, unlearned_with, recovered_from, judged)
        if sweep.chosen is None:
            raise NoRateError(f"no rate can be recommended: {sweep.reason}. Give lr=… to choose one yourself.", sweep)
        rate = sweep.chosen.lr
    student = unlearned_with(rate, share=share_frozen)
    unlearned = judged(student, before)
    repaired = recovered_from(student)  # it may share with the student, which nobody else has
    recovered = judged(repaired, before) if repaired is not None else None
    final = repaired if repaired is not None else student
    unmoved = _unmoved(model, final)
    advice = "lower the rate" if chosen.has_rate else "give more recover_epochs, or a larger recover_lr"
    notes = _notes(before, recovered or unlearned, repaired is None, unmoved, diverged, advice)
    for note in notes:
        warnings.warn(note, stacklevel=2)
    seconds = time.monotonic() - began
    return Forgotten(final, method, rate, before, unlearned, recovered, sweep, unmoved, notes, seconds)


@contextmanager
def _judged_by_evidence() -> Iterator[None]:
    """Leave warnings of too large a rate out, where accuracies on other data tell more, with a note of their own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DamageWarning)
        yield


def _check_given(
    method: str, lr: float | str, retain: Data | None, holdout: Data | None, recover_lr: float | None
) -> None:
    if lr != "auto" and not is_rate(lr):
        raise InputError(f"lr is {lr!r} and has to be 'auto' or a finite number above 0, such as 1e-4.")
    chosen = METHODS[method]
    if lr == "auto" and holdout is None and chosen.has_rate:
        raise InputError(
            "lr='auto' compares the forget data with a hold-out, and none was given: give holdout=…, data of the same "
            "kind that was never trained on, or a rate such as lr=1e-4."
        )
    if chosen.needs_retain and retain is None:
        raise InputError(f"the method {method!r} needs the data that stays: give retain=… and recover_lr=….")
    if retain is not None and recover_lr is None:
        raise InputError(
            "retain is given, and recovery needs a rate: give recover_lr=…, that with which training ended."
        )
    if recover_lr is not None and not is_rate(recover_lr):
        raise InputError(f"recover_lr is {recover_lr!r} and has to be a finite number above 0, such as 1e-4.")


def _swept(
    rates: Sequence[float],
    before: Evidence,
    unlearned_with: Callable[[float], nn.Module],
    recovered_from: Callable[[nn.Module], nn.Module | None],
    judged: Callable[[nn.Module, Evidence | None], Evidence],
) -> tuple[Sweep, float | None]:
    """Every rate, and the one that the sweep's rule takes; beside it the rate that led to NaN or infinity, if one did.

    Larger rates than that are not tried.

    Args:
        rates: to try.
        before: evidence on the given model.
        unlearned_with: the student of a rate.
        recovered_from: the recovered student; None without recovery.
        judged: evidence on a model, given that on the original.
    """
    given: Any = rates
    listed = isinstance(given, Iterable) and not isinstance(given, str)
    if not listed or not list(given) or not all(is_rate(rate) for rate in given):
        shown = list(given) if listed else given
        raise InputError(f"rates are {shown!r}: give a list of finite numbers above 0.")
    candidates: list[Candidate] = []
    diverged: float | None = None
    for rate in sorted(set(rates)):
        try:
            student = unlearned_with(rate)
            unlearned = judged(student, before)
            repaired = recovered_from(student)
            after = judged(repaired, before) if repaired is not None else unlearned
        except NonFiniteError:
            if not candidates:
                raise
            diverged = rate
            break
        candidates.append(_candidate(rate, unlearned, after))
    return choose(_candidate(0.0, before, before), candidates), diverged


def _candidate(rate: float, unlearned: Evidence, after: Evidence) -> Candidate:
    null = after.null
    if null is None or not null.halves:
        raise InputError("the hold-out is too small to be halved: give at least two examples, and better 300.")
    halves = []
    for half in null.halves:
        ends = half.area.interval()
        halves.append(HalfVerdict(half.verdict, half.reason, ends.value, ends.low, ends.high, half.area.outsiders))
    accuracy = after.accuracy
    return Candidate(
        rate,
        unlearned.accuracy["forget"],
        accuracy["forget"],
        accuracy["holdout"],
        accuracy.get("test", math.nan),
        null.auc.value,
        null.auc.low,
        null.auc.high,
        null.verdict,
        null.trace.reason,
        tuple(halves),
    )


def _unmoved(model: nn.Module, final: nn.Module) -> tuple[str, ...]:
    pairs = zip(model.named_parameters(), final.parameters(), strict=True)
    return tuple(name for (name, old), new in pairs if old.requires_grad and torch.equal(old.to(new.device), new))


def _notes(
    before: Evidence,
    after: Evidence,
    unrecovered: bool,
    unmoved: Sequence[str],
    diverged: float | None,
    advice: str,
) -> tuple[str, ...]:
    notes = []
    if diverged is not None:
        notes.append(f"At the rate {diverged:g} the weights or logits became infinite: no larger rate was tried.")
    if unmoved:
        some = ", ".join(unmoved[:3]) + (f" and {len(unmoved) - 3} more" if len(unmoved) > 3 else "")
        notes.append(f"Trainable parameters that did not move: {some}.")
    destruction = destroyed(before, after, advice)
    if destruction:
        notes.append(destruction)
    if unrecovered:
        notes.append(
            "Nothing was recovered, for want of retain data or of epochs: do not publish the model before it was "
            "trained further."
        )
    return tuple(notes)
