# SPDX-License-Identifier: Apache-2.0
"""What one model does on the data that it should forget, and on the rest; and the verdict against the hold-out."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from fedquit.audit.metrics.holdout import HoldoutNull, holdout_null
from fedquit.audit.scores import Scores, score_logits
from fedquit.distill.batches import (
    Batches,
    Collate,
    Data,
    Forward,
    Labels,
    Reader,
    describe,
    mapped,
    refuse_probabilities,
)
from fedquit.distill.unlearning import check_count, copied, place_of
from fedquit.distill.virtual_teacher import check_labels
from fedquit.errors import InputError, NonFiniteError
from fedquit.inference.trace import MARGIN
from fedquit.single.overlap import refuse_trained_holdout

MOST_TEXTS = 8  # in a pass of a causal language model, whose logits are (texts, positions, vocabulary)


@dataclass(frozen=True)
class Evidence:
    """What one model does on each set that was given.

    Attributes:
        scores: of every example, by set: `forget`, `holdout`, `retain`, `test`.
        null: the comparison of the forget data with the hold-out, with its verdict; None without a hold-out.
    """

    scores: Mapping[str, Scores] = field(repr=False)
    null: HoldoutNull | None = field(default=None, repr=False)

    @property
    def sizes(self) -> dict[str, int]:
        """The number of examples of each set."""
        return {name: len(scores) for name, scores in self.scores.items()}

    @property
    def accuracy(self) -> dict[str, float]:
        """The accuracy on each set, in percent; of sequences, over their positions."""
        return {name: 100 * float(scores.correct.mean()) for name, scores in self.scores.items()}

    @property
    def loss(self) -> dict[str, float]:
        """The mean cross-entropy on each set, in nats."""
        return {name: float(scores.loss.mean()) for name, scores in self.scores.items()}

    @property
    def verdict(self) -> str:
        """`remembered`, `forgotten within the margin`, `over-unlearned` or `cannot tell`."""
        return self.null.verdict if self.null else "cannot tell"

    @property
    def reason(self) -> str:
        """Why, as a phrase."""
        return (
            self.null.trace.reason
            if self.null
            else "there is no hold-out: give data of the same kind, never trained on"
        )

    def to_dict(self) -> dict[str, Any]:
        """The figures, for JSON, without the scores of single examples."""
        fields: dict[str, Any] = {"sizes": self.sizes, "accuracy": self.accuracy, "loss": self.loss}
        if self.null:
            judged = self.null.trace
            fields |= {
                "auc": self.null.auc.value,
                "auc_low": self.null.auc.low,
                "auc_high": self.null.auc.high,
                "tail_p": judged.tail,
                "margin": judged.margin,
                "original_auc_low": judged.original_low,
            }
        return fields | {"verdict": self.verdict, "reason": self.reason}

    def __str__(self) -> str:
        lines = [f"{'set':<10}{'examples':>10}{'accuracy %':>12}{'loss':>9}"]
        lines += [
            f"{name:<10}{size:>10,}{self.accuracy[name]:>12.1f}{self.loss[name]:>9.3f}"
            for name, size in self.sizes.items()
        ]
        return "\n".join([*lines, f"{self.verdict}: {self.reason}"])


def evaluate(
    model: nn.Module,
    *,
    forget: Data,
    holdout: Data | None = None,
    retain: Data | None = None,
    test: Data | None = None,
    original: nn.Module | Evidence | None = None,
    margin: float = MARGIN,
    batch_size: int = 128,
    forward: Forward | None = None,
    labels: Labels | None = None,
    shift: bool | Literal["auto"] = "auto",
    class_dim: int = -1,
    ignore_index: int = -100,
    collate: Collate | None = None,
    device: torch.device | str | None = None,
) -> Evidence:
    """Judge a model on the data that it should have forgotten.

    The verdict compares the forget data with the hold-out, data of the same kind that no model was trained on.
    `forgotten within the margin` is said only where the same test catches the original model, and errs in at most 5 %
    of the cases in which the AUC lies outside the margin (docs/evaluation.md).

    Args:
        model: any module that `fedquit.unlearn` takes, with the same options.
        forget: the data to forget.
        holdout: data of the same kind that was never trained on, from a random split.
        retain: training data that stays.
        test: test data.
        original: the model before unlearning, or its evidence on the same data; without it nothing is called forgotten.
            With the model, a warning says where the accuracy on `test` or else `retain` fell to what naming one
            class gives.
        margin: how far from one half an AUC may lie and still count as forgotten.
        batch_size: samples in a pass; a DataLoader has its own.
        forward: (model, batch) -> logits, for batches or outputs of another form.
        labels: the key of the labels in a mapping, or (batch) -> labels.
        shift: whether the logits at a position are of the next label.
        class_dim: the dimension of the classes in the logits; 1 for segmentation.
        ignore_index: a label that is left out.
        collate: makes a batch of a list of a dataset's samples.
        device: where to work; by default where the model's parameters are.

    Raises:
        InputError: for data or a model that cannot be used.
    """
    batch_size = check_count("batch_size", batch_size)
    place = place_of(model, device)
    refuse_trained_holdout(holdout, forget=forget, retain=retain)
    others = {"holdout": holdout, "retain": retain, "test": test}
    given = {"forget": forget} | {name: data for name, data in others.items() if data is not None}
    how = {"forward": forward, "labels": labels, "shift": shift, "class_dim": class_dim, "ignore_index": ignore_index}
    before: Evidence | None = None
    if isinstance(original, nn.Module):
        before = Evidence(_scores(original, given, batch_size, collate, place, how))
    elif original is None or isinstance(original, Evidence):
        before = original
    else:
        raise InputError(f"original is {describe(original)}: give the nn.Module before unlearning, or its evidence.")
    scores = _scores(model, given, batch_size, collate, place, how)
    evidence = Evidence(scores, null_of(scores, before, margin))
    if before is not None and isinstance(original, nn.Module):
        destruction = destroyed(before, evidence)
        if destruction:
            warnings.warn(destruction, stacklevel=2)
    return evidence


def destroyed(before: Evidence, after: Evidence, advice: str = "lower the rate") -> str:
    """A sentence where a model fell to what naming one class gives; "" where it did not, or nothing can tell.

    The test data decides, or else the retained data. The hold-out is of the forgotten kind: where this kind is mostly
    of one class, a healthy model may fall so far on it by forgetting, and the sentence asks for test data. An original
    that lies above that level by less than three standard errors has nothing to lose.

    Args:
        before: evidence on the original.
        after: evidence on the model that was made from it.
        advice: what to do.
    """
    both = before.scores.keys() & after.scores.keys()
    kept = next((name for name in ("test", "retain", "holdout") if name in both), None)
    if kept is None:
        return ""
    level, was, now = chance(after.scores[kept]), before.accuracy[kept], after.accuracy[kept]
    error = 100 * math.sqrt(level / 100 * (1 - level / 100) / len(after.scores[kept]))
    if not now <= level or not level + 3 * error < was:
        return ""
    fell = (
        f"The {kept} accuracy fell from {was:.1f} to {now:.1f} %, no more than naming one class gives ({level:.1f} %): "
    )
    if kept == "holdout":
        return fell + "the model may be destroyed, give test=… to tell."
    return fell + f"the model is destroyed, {advice}."


def null_of(scores: Mapping[str, Scores], before: Evidence | None, margin: float) -> HoldoutNull | None:
    """The forget data against the hold-out; None without one.

    Args:
        scores: of the model to judge, by set.
        before: evidence on the original, of the same data; None where it is unknown.
        margin: around one half.
    """
    if "holdout" not in scores:
        return None
    pair = None
    if before:
        sizes = {name: len(scores[name]) for name in ("forget", "holdout")}
        if {name: size for name, size in before.sizes.items() if name in sizes} != sizes:
            raise InputError("the original's evidence is of other data: evaluate both models on the same sets.")
        pair = before.scores["forget"], before.scores["holdout"]
    return holdout_null(scores["forget"], scores["holdout"], pair, margin)


def _scores(
    model: nn.Module,
    sets: Mapping[str, Data],
    batch_size: int,
    collate: Collate | None,
    place: torch.device,
    how: Mapping[str, Any],
) -> dict[str, Scores]:
    """The scores of every example of every set, under one model in evaluation mode."""
    judged = copied(model, place, share_frozen=True).eval()
    reader = Reader(model, **how)
    size = min(batch_size, MOST_TEXTS) if reader.shift else batch_size
    scores = {}
    for name, data in sets.items():
        try:
            with torch.no_grad():
                parts = _scores_of_batches(judged, reader, Batches(data, 1, size, collate=collate), place)
        except InputError as error:
            raise InputError(f"{name} data: {error}") from error
        except NonFiniteError as error:
            raise NonFiniteError(f"{name} data: {error}") from error
        if not parts:
            raise InputError(f"every label of the {name} data is {reader.ignore_index}, which is left out.")
        scores[name] = Scores.joined(*parts)
    return scores


def _scores_of_batches(judged: nn.Module, reader: Reader, batches: Batches, place: torch.device) -> list[Scores]:
    """The scores of the examples of each batch; of examples of different lengths, of each on its own.

    Args:
        judged: the model in evaluation mode.
        reader: gives it the batches.
        batches: of one set.
        place: the device.
    """
    parts: list[Scores] = []
    for batch in batches:
        inputs, targets = reader.split(mapped(batch, lambda tensor: tensor.to(place)))
        logits = reader.logits(judged, inputs)
        kept = reader.kept(targets) if targets.shape == logits.shape[:-1] else None
        counted = logits if kept is None else logits[kept]
        check_labels(targets if kept is None else targets[kept], counted)
        if not counted.isfinite().all():
            raise NonFiniteError(
                "the model returns NaN or infinity: check its weights and the data; after unlearning, lower the rate."
            )
        if not parts and counted.numel():
            refuse_probabilities(counted, reader.forward)
        if kept is None:
            parts.append(score_logits(logits.flatten(1, -2) if logits.ndim > 3 else logits, _flat(targets)))
        elif targets.ndim == 1:
            parts += [score_logits(counted, targets[kept])] if bool(kept.any()) else []
        else:
            rows = zip(logits, targets, kept, strict=True)
            parts += [score_logits(z[k][None], y[k][None]) for z, y, k in rows if bool(k.any())]
    return parts


def _flat(targets: torch.Tensor) -> torch.Tensor:
    """Labels (B,) or (B, T): those of an image are a sequence."""
    return targets.flatten(1) if targets.ndim > 2 else targets


def chance(scores: Scores) -> float:
    """The accuracy of always naming the most frequent class, in percent; 0 for sequences."""
    if not (scores.label >= 0).all():
        return 0.0
    return 100 * float(np.bincount(scores.label).max()) / len(scores)
