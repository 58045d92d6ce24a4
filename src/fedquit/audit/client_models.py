# SPDX-License-Identifier: Apache-2.0
"""The models of clients that have BatchNorm of their own: which one reads an example, and what it says.

An example of a client is read by this client's model: the shared parameters with its own layers. A test example is
nobody's, and the models of the clients that stay read the test set in turn. So a set has one score for each example, as
attacks need it, and its accuracy estimates the mean over these models in one pass.

A client without layers is a newcomer to the model: above all the one that left, whose layers went with it. Retrain
never met it, and every unlearned or recovered model is judged in the same way, so that damage to layers that nobody
keeps counts for nothing. A newcomer gets what FedBN's authors suggest for clients outside the training: the mean of the
others' layers, with running statistics of its own examples, training data and hold-out alike and without their labels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedquit.audit.passes import Pass, make_pass
from fedquit.audit.scores import Scores, in_batches
from fedquit.core import ClientId, Local, Model, Params
from fedquit.core.local_layers import completed, mean_layers, separated
from fedquit.core.recalibration import Recalibrate
from fedquit.data.federated import NOTHING, FederatedData
from fedquit.engine import Examples, run_client
from fedquit.engine.local_layers import first_layers

BATCH = 128  # examples of a newcomer whose statistics are measured at once


@dataclass(frozen=True)
class ClientModels:
    """The models of all clients.

    Attributes:
        model: the network as it is evaluated.
        network: the network itself.
        shared: the parameters that all clients share.
        layers: each client's own.
        data: of the federation; it holds the clients that leave, too.
        stay: the clients that stay.
    """

    model: Model
    network: Model
    shared: Params
    layers: Mapping[ClientId, Params]
    data: FederatedData
    stay: Sequence[ClientId]

    @classmethod
    def of(
        cls, model: Model, network: Model, params: Params, data: FederatedData, stay: Sequence[ClientId]
    ) -> ClientModels:
        """Take apart the models of all clients; `params` is as `core.local_layers.with_all_layers` returns it."""
        shared, layers = separated(params)
        return cls(model, network, shared, layers, data, stay)

    def of_client(self, client: ClientId) -> Params:
        """Return the whole model of a client."""
        layers = self.layers.get(client)
        return completed(self.network, self.shared, layers) if layers else self._of_newcomer(client)

    def _of_newcomer(self, client: ClientId) -> Params:
        examples = {c: len(self.data.view(c, "retain")) for c in self.stay}
        others = {c: self.layers[c] for c in self.stay if c in self.layers and examples[c]}
        layers = mean_layers(others, examples) if others else first_layers(self.network, run_seed=0)
        whole = completed(self.network, self.shared, layers)
        at = torch.cat([self.data.train[client], self.data.holdout.get(client, NOTHING)])
        mine = Examples.unmarked(self.data.x[at], self.data.y[at], self.data.dataset.look)
        measured = run_client(self.network, Recalibrate(Local(batch_size=BATCH)), mine, {"start": whole}, seed=0)
        return {**whole, **measured.answer} if len(at) else whole

    def read(self, x: Tensor, y: Tensor, owners: npt.NDArray[np.int64], *, keep_logits: bool = False) -> Pass:
        """Let each example be read by its owner's model.

        Args:
            x: the examples, (N, …), at least one.
            y: their labels, (N,), or (N, T) for sequences.
            owners: the client of each, (N,).
            keep_logits: whether to keep the logits too.
        """
        parts: list[Pass] = []
        order: list[npt.NDArray[np.int64]] = []
        for client in np.unique(owners):
            at = np.flatnonzero(owners == client)
            rows = torch.from_numpy(at).to(y.device)
            params = self.of_client(int(client))
            parts.append(make_pass(self.model, params, x[rows], y[rows], keep_logits=keep_logits, most_bytes=math.inf))
            order.append(at)
        back = np.argsort(np.concatenate(order))  # (N,): where each example lies among the parts
        true_logits = np.concatenate([part.true_logits for part in parts]).reshape(len(y), -1)[back].ravel()
        scores = Scores.joined(*(part.scores for part in parts)).take(back)
        if not keep_logits:
            return Pass(scores, true_logits)
        logits = torch.cat([z for part in parts for z in part.logits or ()])  # (N, C), or (N, T, C)
        return Pass(scores, true_logits, in_batches(logits[torch.from_numpy(back).to(logits.device)]))


def owners_of(data: FederatedData, positions: Tensor) -> npt.NDArray[np.int64]:
    """Return the client of each example, (N,).

    Args:
        data: of the federation.
        positions: in the data set, (N,), of training or hold-out examples.
    """
    owner = np.full(len(data.y), -1, dtype=np.int64)
    for by_client in (data.train, data.holdout):
        for client, at in by_client.items():
            owner[at.cpu().numpy()] = client
    owners: npt.NDArray[np.int64] = owner[positions.cpu().numpy()]
    return owners
