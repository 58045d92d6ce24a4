# SPDX-License-Identifier: Apache-2.0
"""Early stopping, for the hooks `monitor_start`, `monitor` and `monitor_end` of a task."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedquit.core.types import Params, Step
from fedquit.errors import InputError

BEST = "best:"  # before the name of a parameter


@dataclass(frozen=True)
class EarlyStopping:
    """End a training once the mean loss of an epoch has not fallen below the best one for some epochs.

    A task passes its three hooks on to the three functions. An epoch's loss is the mean over its
    examples, each at the step in which it was used.

    Attributes:
        patience: how many epochs in a row may bring no improvement, at least 1.
        restore_best: whether a training that was ended goes back to the parameters after its best
            epoch, as Keras does; one that takes all its epochs keeps its last parameters.
    """

    patience: int
    restore_best: bool = False

    def __post_init__(self) -> None:
        if self.patience < 1:
            raise InputError(f"patience is {self.patience}: give a whole number of epochs from 1 on.")

    def start(self, params: Params) -> Params:
        """Return the state before the first step from `params`."""
        zero = next(iter(params.values())).new_zeros(())
        state = {"sum": zero, "seen": zero, "best": zero + torch.inf, "waited": zero, "halted": zero.bool()}
        return {**state, **{BEST + n: p for n, p in params.items()}} if self.restore_best else state

    def observe(self, state: Params, step: Step, params: Params) -> Params:
        """Return the state after a step.

        Args:
            state: before the step.
            step: its loss, and whether an epoch ends with it.
            params: after the step.
        """
        ends = step.ends_epoch
        total = state["sum"] + step.loss * step.examples
        seen = state["seen"] + step.examples
        loss = total / seen
        better = ends & (loss < state["best"])
        waited = torch.where(better, 0.0, state["waited"] + ends)
        new = {
            "sum": torch.where(ends, 0.0, total),
            "seen": torch.where(ends, 0.0, seen),
            "best": torch.where(better, loss, state["best"]),
            "waited": waited,
            "halted": state["halted"] | (ends & (waited >= self.patience)),
        }
        if self.restore_best:
            new |= {BEST + n: torch.where(better, p, state[BEST + n]) for n, p in params.items()}
        return new

    def end(self, state: Params, params: Params) -> Params:
        """Return the parameters that the training ends with.

        Args:
            state: after the last step.
            params: after the last step.
        """
        if not self.restore_best:
            return params
        return {n: torch.where(state["halted"], state[BEST + n], p) for n, p in params.items()}
