# SPDX-License-Identifier: Apache-2.0
"""For users of `transformers.Trainer`: what a trainer has settled already, as options of `fedquit.forget`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from fedquit.distill.batches import LABEL_KEYS, unwrapped
from fedquit.errors import InputError


def trainer_options(trainer: Any) -> dict[str, Any]:  # noqa: ANN401 - transformers need not be installed
    """Options of `fedquit.forget` that a `transformers.Trainer` has settled: how it batches, steps and computes.

        result = fedquit.forget(trainer.model, forget, retain, holdout, **fedquit.trainer_options(trainer))
        trainer.model = result.model

    The data sets are those that the trainer takes. Its collator makes the batches, without the columns that the model
    does not read; recovery has its optimizer and learning rate, whose schedule is not repeated.

    Args:
        trainer: a `Trainer`, or a subclass such as `SFTTrainer`.

    Returns:
        `collate`, `labels`, `batch_size`, `recover_lr`, `recover_optimizer`, `autocast` and `seed`; each can be
        replaced before it is passed on.

    Raises:
        InputError: for an object that is no trainer, or one without a model.
    """
    missing = [name for name in ("args", "model", "data_collator") if getattr(trainer, name, None) is None]
    if missing:
        raise InputError(
            f"a {type(trainer).__name__} has no {missing[0]}: give a transformers.Trainer that was made with its model."
        )
    args = trainer.args
    names = list(getattr(trainer, "label_names", None) or LABEL_KEYS[:1])
    return {
        "collate": _collator(trainer, names),
        "labels": names[0],
        "batch_size": int(args.per_device_train_batch_size),
        "recover_lr": float(args.learning_rate),
        "recover_optimizer": _optimizer(trainer),
        "autocast": torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None,
        "seed": int(args.seed),
    }


def _collator(trainer: Any, names: Iterable[str]) -> Callable[[list[Any]], Any]:  # noqa: ANN401
    """The trainer's collator, after the columns that the model does not read were taken out, as the trainer does."""
    collate: Callable[[list[Any]], Any] = trainer.data_collator
    if not trainer.args.remove_unused_columns:
        return collate
    read = {*inspect.signature(unwrapped(trainer.model).forward).parameters, *names, "label", "label_ids"}

    def collated(samples: list[Any]) -> Any:  # noqa: ANN401
        kept = []
        for sample in samples:
            mapping = isinstance(sample, Mapping)
            kept.append({key: value for key, value in sample.items() if key in read} if mapping else sample)
        return collate(kept)

    return collated


def _optimizer(trainer: Any) -> Callable[..., torch.optim.Optimizer]:  # noqa: ANN401
    """(parameters, lr) -> the trainer's optimizer, of the class and with the settings that its arguments name."""
    make, settings = type(trainer).get_optimizer_cls_and_kwargs(trainer.args, trainer.model)

    def made(parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        decay = {"weight_decay": trainer.args.weight_decay}
        optimizer: torch.optim.Optimizer = make(parameters, **{**decay, **settings, "lr": lr})
        return optimizer

    return made
