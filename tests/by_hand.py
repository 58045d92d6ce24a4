# SPDX-License-Identifier: Apache-2.0
"""What a client does with plain examples, for tests that redo a run by hand."""

from __future__ import annotations

from torch import Tensor

from fedquit.core import Model, Params, Sent, Task
from fedquit.engine import Examples, sequential


def run_client(model: Model, task: Task, x: Tensor, y: Tensor, sent: Sent, seed: int) -> tuple[Params, float]:
    """The trained parameters and the mean loss."""
    done = sequential.run_client(model, task, Examples.unmarked(x, y), sent, seed)
    return done.params, done.loss
