# SPDX-License-Identifier: Apache-2.0
"""Each model reads each set of examples once: what a forward pass gave is remembered.

Accuracy, attacks, the price of forgetting, leakage and the distance to Retrain all look at the same few models on the
same few sets. `Passes` keeps the per-example scores of each (model, set). A model is known by the fingerprint of its
parameters, a set by whatever key its owner gives it.

Memory: 56 bytes an example and model. What belongs to parameters that somebody still holds stays; of models that
nobody holds any more, the scores stay up to `SCORES_BYTES` (the oldest go first) and the logits go at once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, fields

import numpy as np
from torch import Tensor

from fedquit.audit.scores import Floats, Scores, in_batches, js_of_logits, logits_of, score_logits
from fedquit.core import Model, Params
from fedquit.core.params import fingerprint
from fedquit.errors import InputError

SCORES_BYTES = 256 * 2**20  # of models that nobody holds any more
LOGITS_BYTES = 64 * 2**20  # of one model on one set; where there are more, they are computed again when asked for


@dataclass(frozen=True, eq=False)
class Pass:
    """What one model said about one set of N examples."""

    scores: Scores
    true_logits: Floats  # the logit of the true class, (N,); for sequences of T positions (N * T,)
    logits: Sequence[Tensor] | None = None  # in batches, where the model computed them; None: too many, or not wanted

    @property
    def nbytes(self) -> int:
        """Bytes of all numbers but the logits."""
        parts = [getattr(self.scores, column.name) for column in fields(self.scores)]
        return sum(int(part.nbytes) for part in [*parts, self.true_logits])


def make_pass(
    model: Model,
    params: Params,
    x: Tensor,
    y: Tensor,
    *,
    keep_logits: bool = False,
    most_bytes: float | None = None,
) -> Pass:
    """Let a model read some examples once.

    Args:
        model: the network.
        params: its parameters.
        x: the examples, (N, …).
        y: their labels, (N,), or (N, T) for sequences.
        keep_logits: whether to keep the logits too.
        most_bytes: that the logits may take, else `LOGITS_BYTES`; where there are more, none are kept.
    """
    if len(x) != len(y):
        raise InputError(f"there are {len(x)} examples but {len(y)} labels: give as many of each.")
    most_bytes = LOGITS_BYTES if most_bytes is None else most_bytes
    parts: list[Scores] = []
    true_logits: list[Floats] = []
    logits: list[Tensor] | None = [] if keep_logits else None
    for z, labels in zip(logits_of(model, params, x), in_batches(y), strict=True):
        parts.append(score_logits(z, labels))
        true_logits.append(z.gather(-1, labels.unsqueeze(-1)).double().flatten().cpu().numpy())
        if logits is not None:
            logits.append(z)
            if len(x) * (z.nbytes // max(len(z), 1)) > most_bytes:
                logits = None
    return Pass(Scores.joined(*parts), np.concatenate(true_logits), logits)


@dataclass(frozen=True)
class _KnownModel:
    """Parameters that were seen, without keeping them alive."""

    fingerprint: str
    tensors: tuple[tuple[str, weakref.ref[Tensor]], ...]

    def is_alive(self) -> bool:
        return all(tensor() is not None for _, tensor in self.tensors)

    def is_same(self, params: Params) -> bool:
        if len(params) != len(self.tensors):
            return False
        pairs = zip(params.items(), self.tensors, strict=True)
        return all(name == known and tensor is ref() for (name, tensor), (known, ref) in pairs)


@dataclass(eq=False)
class Passes:
    """The passes made so far, by model and set."""

    made: int = 0  # passes in all
    _passes: dict[tuple[str, Hashable], Pass] = field(default_factory=dict)
    _numbers: dict[tuple[str, Hashable], float | None] = field(default_factory=dict)
    _models: list[_KnownModel] = field(default_factory=list)

    def fingerprint(self, params: Params) -> str:
        """The fingerprint of some parameters, computed once while they live."""
        self._models = [model for model in self._models if model.is_alive()]
        for model in self._models:
            if model.is_same(params):
                return model.fingerprint
        tensors = tuple((name, weakref.ref(tensor)) for name, tensor in params.items())
        self._models.append(_KnownModel(fingerprint(params), tensors))
        return self._models[-1].fingerprint

    def get(self, params: Params, examples: Hashable, make: Callable[[], Pass]) -> Pass:
        """The pass of these parameters over a set.

        Args:
            params: the model's parameters.
            examples: the key of the set.
            make: makes the pass, where it has not been made.
        """
        key = self.fingerprint(params), examples
        if key not in self._passes:
            self._passes[key] = make()
            self.made += 1
            self._release()
        return self._passes[key]

    def number(self, params: Params, examples: Hashable, make: Callable[[], float | None]) -> float | None:
        """A single number that a pass over a set gives, computed once like `get`."""
        key = self.fingerprint(params), examples
        if key not in self._numbers:
            self._numbers[key] = make()
            self.made += 1
        return self._numbers[key]

    def _release(self) -> None:
        """Let go of what belongs to models that nobody holds: logits at once, the oldest scores beyond the bound."""
        alive = {model.fingerprint for model in self._models if model.is_alive()}
        idle = [key for key in self._passes if key[0] not in alive]
        for key in idle:
            remembered = self._passes[key]
            if remembered.logits is not None:
                self._passes[key] = Pass(remembered.scores, remembered.true_logits)
        total = sum(self._passes[key].nbytes for key in idle)
        for key in idle:
            if total <= SCORES_BYTES:
                return
            total -= self._passes.pop(key).nbytes


def js_between(model: Model, a: tuple[Params, Pass], b: tuple[Params, Pass], x: Tensor) -> Floats:
    """Jensen and Shannon's divergence for each example, in nats, from two passes over the same set.

    Args:
        model: the network.
        a: parameters, and what they said about `x`.
        b: the other parameters, and what they said.
        x: the examples, which are read again only by a model whose logits were too many to keep.
    """
    return js_of_logits(_logits(model, *a, x), _logits(model, *b, x))


def _logits(model: Model, params: Params, made: Pass, x: Tensor) -> Iterable[Tensor]:
    return made.logits if made.logits is not None else logits_of(model, params, x)
