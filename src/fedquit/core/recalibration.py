# SPDX-License-Identifier: Apache-2.0
"""BatchNorm's running statistics, measured anew by the clients that stay.

The statistics of a federated model are averages over all that took part. Unlearning moves weights and leaves the
statistics as they were, with the leaving client's data in them. One pass without gradients over the retained data
replaces them: each client averages the mean and the variance of its batches, weighted by their sizes, and the server
averages over clients with weights n_k.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fedquit.core.local_layers import local_names
from fedquit.core.params import mean, statistics_of
from fedquit.core.types import Batch, ClientId, Federation, Local, Measurement, Model, Params, Sent
from fedquit.errors import InputError


@dataclass(frozen=True)
class Recalibrate(Measurement):
    """The mean over the examples of the statistics of their batches."""

    def statistic(self, model: Model, params: Params, sent: Sent, batch: Batch) -> Params:
        """The batch's statistics, the same for each of its examples: `(B, C)` by name."""
        tell = getattr(model, "batch_statistics", None)
        if tell is None:
            raise InputError("the network cannot tell BatchNorm's statistics: engines ask through `engine.training`.")
        return {n: s.expand(len(batch.y), *s.shape) for n, s in tell(params, batch.x).items()}

    def zeros(self, sent: Sent) -> Params:
        """Zeros for the statistics alone."""
        return {n: torch.zeros_like(p) for n, p in statistics_of(self.begin(sent)).items()}


def recalibrated(fed: Federation, params: Params, clients: Sequence[ClientId], batch_size: int) -> Params:
    """Return the model with statistics of the clients' retained data; a model without any as it is.

    Where BatchNorm is local each client keeps the statistics that it measured, and the model stays as it is.

    Args:
        fed: the way to the clients.
        params: the model.
        clients: who measures.
        batch_size: examples at once.
    """
    measure = Recalibrate(Local(batch_size=batch_size))
    if local_names(fed.model):
        deque(fed.run(measure, clients, split="retain", start=params), maxlen=0)
    if not statistics_of(params):
        return params
    return {**params, **mean(fed.run(measure, clients, split="retain", start=params))}
