# SPDX-License-Identifier: Apache-2.0
"""Ordinary training on the data that stays, which repairs what unlearning has damaged."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedquit.distill.batches import Collate, Data, Forward, Labels
from fedquit.distill.stepping import NewOptimizer
from fedquit.distill.unlearning import Callback
from fedquit.single.training import Drawn, trained_copy


def recover(
    model: nn.Module,
    retain: Data,
    *,
    lr: float,
    epochs: int = 1,
    batch_size: int = 32,
    optimizer: str | NewOptimizer = "adam",
    forward: Forward | None = None,
    labels: Labels | None = None,
    shift: bool | Literal["auto"] = "auto",
    class_dim: int = -1,
    ignore_index: int = -100,
    collate: Collate | None = None,
    norm: Literal["train", "frozen"] = "train",
    dropout: bool = True,
    autocast: torch.dtype | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
    callback: Callback | None = None,
    progress: bool = False,
    share_frozen: bool = False,
) -> nn.Module:
    """Return a copy of the model, trained on the retain data with cross-entropy; the given model is left as it is.

    A warning says where the model guesses on that data afterwards, as after training at too large a rate.

    Args:
        model: any module that `fedquit.unlearn` takes, with the same options.
        retain: the data that stays, in any form that `fedquit.unlearn` takes.
        lr: the learning rate; that with which training ended is a good choice.
        epochs: passes over the data.
        batch_size: samples per step; a DataLoader has its own.
        optimizer: `adam`, `adamw` or `sgd`; a class of `torch.optim`; or (parameters, lr) -> optimizer.
        forward: (model, batch) -> logits, for batches or outputs of another form.
        labels: the key of the labels in a mapping, or (batch) -> labels.
        shift: whether the logits at a position are of the next label; `auto`: for Hugging Face's
            causal language models.
        class_dim: the dimension of the classes in the logits; 1 for segmentation.
        ignore_index: a label that is left out.
        collate: makes a batch of a list of a dataset's samples; by default torch's.
        norm: `frozen` keeps the statistics of BatchNorm, which `train` takes from the retain data; a batch of one
            sample passes by them as they are.
        dropout: whether dropout is active.
        autocast: torch.bfloat16 or torch.float16 computes a float32 model's passes in it.
        seed: fixes the order of the samples and dropout.
        device: where to work; by default where the model's parameters are.
        callback: is told of each step; when it returns True, that step was the last.
        progress: show a bar with the time left.
        share_frozen: whether frozen parameters share memory with the given model's.

    Returns:
        A new module on `device`, whose gradients are empty.

    Raises:
        InputError: for data, labels, a model or numbers that cannot be used.
        NonFiniteError: if the weights arrive at NaN or infinity.
    """
    return trained_copy(
        model,
        retain,
        cross_entropy_losses,
        lr=lr,
        epochs=epochs,
        batch_size=batch_size,
        optimizer=optimizer,
        forward=forward,
        labels=labels,
        shift=shift,
        class_dim=class_dim,
        ignore_index=ignore_index,
        collate=collate,
        norm=norm,
        dropout=dropout,
        autocast=autocast,
        seed=seed,
        device=device,
        callback=callback,
        title="Recovering" if progress else "",
        share_frozen=share_frozen,
        tell_damage=True,
    )


def cross_entropy_losses(logits: Tensor, targets: Tensor, _drawn: Drawn) -> Tensor:
    """Ordinary training's loss of each label."""
    return cross_entropy(logits, targets, reduction="none")
