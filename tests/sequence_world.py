# SPDX-License-Identifier: Apache-2.0
"""Four clients who speak in windows of six out of twelve characters, and a tiny LSTM that continues them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedquit.audit.attacks import ATTACKS
from fedquit.data.federated import Dataset
from fedquit.running.recipe import Recipe, build

VOCABULARY, LENGTH, CLIENTS = 12, 6, 4

TALK: dict[str, Any] = {
    "title": "talk",
    "data": {"name": "sequence_world:talk", "partition": "chunks", "clients": CLIENTS, "public": 0.1, "holdout": 0.2},
    "model": {"name": "char_lstm", "options": {"embedding": 4, "hidden": 6}, "dtype": "float64"},
    "train": {"rounds": 2, "batch_size": 8, "lr": 0.5},
    "request": [{"clients": [1]}],
    "method": {"name": "fedquit", "lr": 1e-2},
    "recover": {"until": "rounds", "max_rounds": 1},
    "evaluate": {"attacks": list(ATTACKS), "relearn": 1},
}


def talk(*, windows: int = 64, length: int = LENGTH) -> Dataset:
    """Each character mostly decides the next; what follows which differs from one quarter of the data to the other."""
    generator = torch.Generator().manual_seed(3)

    def spoken(n: int) -> tuple[Tensor, Tensor]:
        step = 1 + torch.arange(n) * CLIENTS // n  # who speaks
        text = [torch.randint(VOCABULARY, (n,), generator=generator)]
        for _ in range(length):
            slip = (torch.rand(n, generator=generator) < 0.1).long()
            text.append((text[-1] + step + slip) % VOCABULARY)
        whole = torch.stack(text, 1)
        return whole[:, :-1].contiguous(), whole[:, 1:].contiguous()

    return Dataset(*spoken(windows), *spoken(16), classes=VOCABULARY)


def talking(**changes: Any) -> Recipe:
    """The recipe with some sections changed."""
    values = dict(TALK)
    for key, change in changes.items():
        merge = isinstance(change, dict) and key in TALK and key != "method"
        values[key] = {**TALK[key], **change} if merge else change
    return build(Recipe, values, "recipe")
