# SPDX-License-Identifier: Apache-2.0
"""Per-example scores: what an attack sees of one model on one set.

Attacks and metrics never touch logits, models or clients: they work on `Scores`. Everything is computed from logits in
float64 and without forming 1 - p, so that logits that are 10,000 apart neither overflow nor round to certainty.

phi is the logit-scaled confidence of Carlini, Chien, Nasr, Song, Terzis, Tramèr: Membership Inference Attacks From
First Principles (S&P 2022); the modified entropy is that of Song, Mittal: Systematic Evaluation of Privacy Risks of
Machine Learning Models (USENIX Security 2021).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedquit.core import Model, Params
from fedquit.errors import InputError, NonFiniteError

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
CHUNK = 2**24  # numbers of logits that are worked on at a time, in about ten arrays of float64
SEQUENCE = -1  # the label of an example that has one for each position


@dataclass(frozen=True, eq=False)
class Scores:
    """For each example of one set, under one model.

    A sequence is one example: `correct` is the fraction of its positions, `loss` and the entropies are means over them,
    and `confidence` and `phi` come from the mean log-probability.
    """

    label: Integers  # the true class; SEQUENCE for an example that has one label for each position
    correct: Floats  # 0 or 1
    confidence: Floats  # p_y, the probability of the true class
    loss: Floats  # -log p_y
    phi: Floats  # log p_y - log(1 - p_y)
    entropy: Floats  # -sum_i p_i log p_i
    modified_entropy: Floats  # -(1 - p_y) log p_y - sum_{i != y} p_i log(1 - p_i)

    def __post_init__(self) -> None:
        shapes = {f.name: getattr(self, f.name).shape for f in fields(self)}
        if len(set(shapes.values())) > 1 or len(shapes["label"]) != 1:
            raise InputError(f"per-example scores need one number for each example, not arrays of shapes {shapes}.")

    def __len__(self) -> int:
        return len(self.label)

    def __getitem__(self, which: slice | Integers | npt.NDArray[np.bool_]) -> Scores:
        """Some of the examples: a slice, positions, or a mask."""
        return Scores(*(getattr(self, f.name)[which] for f in fields(self)))

    def take(self, indices: npt.ArrayLike) -> Scores:
        """The examples at these positions, in this order."""
        return self[np.asarray(indices, dtype=np.int64)]

    @staticmethod
    def joined(*parts: Scores) -> Scores:
        """Several sets as one."""
        if not parts:
            raise InputError("there are no per-example scores to join: give at least one set.")
        return Scores(*(np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(Scores)))


def in_batches(examples: Tensor, size: int = 0) -> tuple[Tensor, ...]:
    """Split examples into batches.

    Args:
        examples: (N, …).
        size: examples in a batch; 0 for what the device digests well (a GPU 2,000, a CPU what its caches hold, 128).
    """
    batches: tuple[Tensor, ...] = examples.split(size or (2000 if examples.is_cuda else 128))
    return batches


def logits_of(model: Model, params: Params, x: Tensor, batch_size: int = 0) -> Iterator[Tensor]:
    """One forward pass: the logits of each batch, (B, C), or (B, T, C) for sequences, as the model computed them.

    Args:
        model: the network.
        params: its parameters.
        x: the examples, (N, …).
        batch_size: examples in a batch; 0 for the device's own.
    """
    for batch in in_batches(x, batch_size):
        with torch.no_grad():
            logits = model(params, batch)
        yield logits


def score_examples(model: Model, params: Params, x: Tensor, y: Tensor, batch_size: int = 0) -> Scores:
    """The per-example scores of one model on one set.

    Args:
        model: the network.
        params: its parameters.
        x: the examples, (N, …).
        y: their labels, (N,), or (N, T) for sequences.
        batch_size: examples in a batch; 0 for the device's own.
    """
    if len(x) != len(y):
        raise InputError(f"there are {len(x)} examples but {len(y)} labels: give as many of each.")
    pairs = zip(logits_of(model, params, x, batch_size), in_batches(y, batch_size), strict=True)
    return Scores.joined(*(score_logits(logits, labels) for logits, labels in pairs))


def score_logits(logits: Tensor, y: Tensor) -> Scores:
    """The per-example scores of logits (B, C) or (B, T, C) and labels (B,) or (B, T)."""
    with torch.no_grad():
        label, *rest = (part.cpu().numpy() for part in _of_logits(logits, y))
    return Scores(label.astype(np.int64), *(part.astype(np.float64) for part in rest))


def js_of_logits(a: Iterable[Tensor], b: Iterable[Tensor]) -> Floats:
    """Jensen and Shannon's divergence between two models' predictions, from their logits on the same batches.

    Args:
        a: batches of one model's logits, (B, C) or (B, T, C) each.
        b: the same of the other.

    Returns:
        One number for each example, in nats from 0 to ln 2; for a sequence the mean over its positions.
    """
    parts = []
    with torch.no_grad():
        for z_a, z_b in zip(a, b, strict=True):
            log_p = _checked(z_a).log_softmax(-1)
            log_q = _checked(z_b).log_softmax(-1)
            log_m = torch.logaddexp(log_p, log_q) - math.log(2)
            js = (log_p.exp() * (log_p - log_m) + log_q.exp() * (log_q - log_m)).sum(-1) / 2
            parts.append(_over_positions(js).clamp(0, math.log(2)).cpu())
    return torch.cat(parts).numpy().astype(np.float64)


def _checked(logits: Tensor) -> Tensor:
    if logits.dim() < 2 or logits.shape[-1] < 2:
        raise InputError(f"logits of shape {tuple(logits.shape)} name fewer than two classes for each example.")
    if not bool(torch.isfinite(logits).all()):
        raise NonFiniteError("some logits are not finite: lower the learning rate or clip the gradient.")
    return logits.double()


def _over_positions(values: Tensor) -> Tensor:
    return values.flatten(1).mean(1) if values.dim() > 1 else values


def _without(logits: Tensor, which: Tensor) -> Tensor:
    """The logsumexp of all classes but one."""
    return logits.scatter(-1, which.unsqueeze(-1), -math.inf).logsumexp(-1)


def _softplus(x: Tensor) -> Tensor:
    return torch.logaddexp(x, torch.zeros_like(x))


def _of_logits(logits: Tensor, y: Tensor) -> list[Tensor]:
    if logits.shape[:-1] != y.shape:
        raise InputError(f"logits of shape {tuple(logits.shape)} do not fit labels of shape {tuple(y.shape)}.")
    classes = logits.shape[-1]
    if len(y) and not (int(y.min()) >= 0 and int(y.max()) < classes):
        raise InputError(f"labels run from {int(y.min())} to {int(y.max())}: they must lie in 0 … {classes - 1}.")
    rows = max(1, CHUNK // max(classes, 1))  # a language model's logits are too many to be worked on at once
    if y.numel() <= rows:
        parts = _of_rows(_checked(logits), y)
    else:
        chunks = zip(logits.flatten(0, -2).split(rows), y.flatten().split(rows), strict=True)
        columns = zip(*(_of_rows(_checked(z), labels) for z, labels in chunks), strict=True)
        parts = [torch.cat(column).view(y.shape) for column in columns]
    correct, loss, phi, entropy, modified = parts
    if y.dim() > 1:
        label = torch.full((len(y),), SEQUENCE, dtype=torch.int64, device=y.device)
        phi = _phi_of_mean(phi.flatten(1))
    else:
        label = y.long()
    mean_loss = _over_positions(loss)
    confidence = (-mean_loss).exp()
    return [label, *map(_over_positions, (correct, confidence, mean_loss, phi, entropy, modified))]


def _of_rows(z: Tensor, y: Tensor) -> list[Tensor]:
    """For each label: whether it is right, its loss, phi, the entropy and the modified entropy, in float64."""
    phi = z.gather(-1, y.unsqueeze(-1)).squeeze(-1) - _without(z, y)
    loss = _softplus(-phi)
    log_p = z.log_softmax(-1)
    p = log_p.exp()

    # log(1 - p_i): at most one p_i is above one half, and for that one the others are summed directly
    top = z.argmax(-1)
    top_phi = z.gather(-1, top.unsqueeze(-1)).squeeze(-1) - _without(z, top)
    others = torch.log1p(-p.clamp(max=0.5)).scatter(-1, top.unsqueeze(-1), -_softplus(top_phi).unsqueeze(-1))
    wrong = (-p * others).scatter(-1, y.unsqueeze(-1), 0.0).sum(-1)
    modified = torch.sigmoid(-phi) * loss + wrong
    return [(top == y).double(), loss, phi, -(p * log_p).sum(-1), modified]


def _phi_of_mean(phi: Tensor) -> Tensor:
    """Find log p - log(1 - p) for log p = the mean of log p_t, where log p_t may be as near to 0 as -exp(-10000)."""
    loss = _softplus(-phi)
    log_loss = torch.where(phi > 30, -phi, loss.clamp(min=1e-300).log())
    log_mean = log_loss.logsumexp(1) - math.log(phi.shape[1])
    mean = loss.mean(1)
    shrunk = torch.where(mean > 1e-8, (-torch.expm1(-mean) / mean.clamp(min=1e-8)).log(), -mean / 2)
    return -mean - log_mean - shrunk
