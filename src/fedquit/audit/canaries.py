# SPDX-License-Identifier: Apache-2.0
"""Canaries of the one-run audit: examples of a client of which fair coins decide, before training, who is trained on.

Steinke, Nasr, Jagielski: Privacy Auditing with One (1) Training Run (2023). Natural canaries are the client's examples
as they are, and speak for its samples. Mislabelled ones have another label, and speak for the worst case: a network can
get them right only by heart. `fedquit.inference.one_run` says what follows from the guesses on them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedquit.audit.scores import Floats
from fedquit.core import ClientId
from fedquit.data.federated import NOTHING, FederatedData
from fedquit.errors import InputError, RequestError
from fedquit.inference.one_run import OneRunAudit, Tally, audit, count_correct

NATURAL = "natural"
MISLABELLED = "mislabelled"
KINDS = (NATURAL, MISLABELLED)


@dataclass(frozen=True, eq=False)
class CanarySet:
    """Canaries of one kind.

    Attributes:
        at: where they lie, (m,), in an order that does not depend on the coins.
        included: the coins: which of them are trained on, (m,) bool.
    """

    at: Tensor
    included: Tensor

    @property
    def excluded_at(self) -> Tensor:
        """Where those lie that nobody trains on."""
        return self.at[~self.included]

    def tally(self, phi: Floats, k: int) -> Tally:
        """The guesses from the scores phi of a model, (m,).

        Args:
            phi: of the canaries, in their order.
            k: guesses of each kind.
        """
        return count_correct(phi, self.included.numpy(), k)


@dataclass(frozen=True, eq=False)
class Canaries:
    """The canaries of the clients of one request.

    Attributes:
        clients: whose they are.
        sets: by kind; `at` are positions in the data set.
        k: guesses of each kind, fixed beforehand.
        delta: of the statements about epsilon.
    """

    clients: tuple[ClientId, ...]
    sets: Mapping[str, CanarySet]
    k: int
    delta: float

    def audit(self, phi: Mapping[str, Floats], original: Mapping[str, Floats] | None) -> dict[str, OneRunAudit]:
        """Judge a model by its scores phi on the canaries of each kind, beside Original's where it is another model."""
        before = self._tallies(original) if original is not None else None
        return audit(self._tallies(phi), self.delta, before)

    def _tallies(self, phi: Mapping[str, Floats]) -> dict[str, Tally]:
        return {kind: canaries.tally(phi[kind], self.k) for kind, canaries in self.sets.items()}


def draw_canaries(examples: int, canaries: int, kinds: Sequence[str], seed: int) -> dict[str, CanarySet]:
    """Draw a client's canaries, and toss the coins.

    Args:
        examples: how many the client has.
        canaries: how many of each kind.
        kinds: of `KINDS`; no example is a canary of two kinds.
        seed: of this client alone.

    Returns:
        By kind, with positions among the client's examples from 0 on.

    Raises:
        InputError: where the client has too few examples.
    """
    if examples <= canaries * len(kinds):
        raise InputError(
            f"{canaries * len(kinds)} canaries are asked for, and the client has {examples} examples: take fewer "
            "canaries, and leave something to train on."
        )
    rng = np.random.default_rng(seed)
    order = torch.from_numpy(rng.permutation(examples)[: canaries * len(kinds)])
    coins = torch.from_numpy(rng.integers(0, 2, canaries * len(kinds)).astype(bool))
    parts = zip(order.split(canaries), coins.split(canaries), strict=True)
    return {kind: CanarySet(at, included) for kind, (at, included) in zip(kinds, parts, strict=True)}


def without_excluded(examples: int, sets: Mapping[str, CanarySet]) -> Tensor:
    """Which of a client's examples may be trained on, (examples,) bool: all but the canaries left out."""
    mask = torch.ones(examples, dtype=torch.bool)
    for canaries in sets.values():
        mask[canaries.excluded_at] = False
    return mask


def plant_canaries(
    data: FederatedData, seeds: Mapping[ClientId, int], count: int, kinds: Sequence[str]
) -> tuple[FederatedData, dict[str, CanarySet]]:
    """The data with the canaries of some clients in it.

    Canaries that the coins leave out are nobody's training data. Natural ones join their client's hold-out; mislabelled
    ones, in or out, have a wrong label from here on.

    Args:
        data: as it is divided among the clients.
        seeds: of each client that has canaries.
        count: canaries of each kind and client.
        kinds: of `KINDS`.

    Returns:
        The data, and the canaries of all these clients by kind, with positions in the data set.
    """
    labels = data.y.clone()
    train = dict(data.train)
    holdout = dict(data.holdout)
    sets: dict[str, list[CanarySet]] = {kind: [] for kind in kinds}
    for client, seed in seeds.items():
        if client not in data.train:
            raise RequestError(f"client {client} is not in the federation: its clients are {list(data.clients)}.")
        mine = data.train[client]
        own = draw_canaries(len(mine), count, kinds, seed)
        train[client] = mine[without_excluded(len(mine), own)]
        for kind, canaries in own.items():
            placed = replace(canaries, at=mine[canaries.at])
            sets[kind].append(placed)
            if kind == MISLABELLED:
                labels[placed.at] = _wrong(labels[placed.at], data.dataset.classes, seed)
            else:
                holdout[client] = torch.cat([holdout.get(client, NOTHING), placed.excluded_at]).sort().values
    planted = replace(data, dataset=replace(data.dataset, y=labels), train=train, holdout=holdout)
    return planted, {kind: _joined(parts) for kind, parts in sets.items()}


def _wrong(labels: Tensor, classes: int, seed: int) -> Tensor:
    """Another label for each example, every other class with the same chance; one shift for a whole sequence."""
    if classes < 2:
        raise InputError("mislabelled canaries need a second class: take natural ones.")
    rng = np.random.default_rng([seed, 1])
    shifts = torch.from_numpy(rng.integers(1, classes, len(labels)))
    return (labels + shifts.view(-1, *[1] * (labels.dim() - 1)).to(labels.device)) % classes


def _joined(parts: Sequence[CanarySet]) -> CanarySet:
    return CanarySet(torch.cat([part.at for part in parts]), torch.cat([part.included for part in parts]))


def fields_of(audits: Mapping[str, OneRunAudit]) -> dict[str, Any]:
    """The fields of a row of `results.json` that an audit gives, by kind of canaries."""
    fields: dict[str, Any] = {}
    for kind, judged in audits.items():
        own = {
            "canaries": judged.tally.canaries,
            "guesses": judged.tally.guesses,
            "correct": judged.tally.correct,
            "epsilon_low": judged.epsilon_low,
            "gain_high": judged.gain_high if np.isfinite(judged.gain_high) else None,
            "p": judged.p,
            "delta": judged.delta,
            "confidence": judged.confidence,
            "verdict": judged.verdict,
            "sentence": judged.sentence,
        }
        fields |= {f"canary_{kind}_{name}": value for name, value in own.items()}
    return fields
