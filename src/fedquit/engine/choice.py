# SPDX-License-Identifier: Apache-2.0
"""Which engine is fastest for a network, data and a device. It follows from sizes, so that runs repeat exactly."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch.func import vmap
from torch.utils.flop_counter import FlopCounterMode

from fedquit.core import Model, Params
from fedquit.data.federated import FederatedData

# Measured. Below, most of a step is overhead, which stacked clients share; above, stacking only moves memory.
STACKED_FLOPS = 150_000  # forward, for one example: a perceptron of 28x28 pixels has 100,000, a CNN of them 500,000
STACKED_PARAMETERS = 200_000
THREADED_PARAMETERS = 2_000_000  # above, a second client costs half a gigabyte, and a step keeps all cores busy


@dataclass(frozen=True)
class Choice:
    """An engine's name, and why it was chosen, in words."""

    name: str
    why: str


def choose(name: str, model: Model, data: FederatedData, params: Params | None = None) -> Choice:
    """Return the engine of that name; for `auto`, the one that is fastest here.

    Args:
        name: What the recipe says: "auto" or one of `fedquit.engine.ENGINES`.
        model: The network.
        data: All clients' examples, on the device that computes.
        params: The network's parameters; None draws them anew, for their sizes.
    """
    if name != "auto":
        return Choice(name, "as the recipe says")
    if data.y.device.type == "cuda":
        return Choice("stacked", "on a GPU all clients go together")
    params = params or model.init(0)
    size = sum(p.numel() for p in params.values())
    if size <= STACKED_PARAMETERS and _is_light(model, params, data) and _can_be_stacked(model, params, data):
        return Choice("stacked", "the network is small: all clients go together")
    threads = torch.get_num_threads()
    if threads > 1 and len(data.clients) > 1 and size <= THREADED_PARAMETERS:
        return Choice("threaded", f"{threads} threads, a client on each")
    return Choice("sequential", f"one client after the other, {threads} thread{'s' * (threads > 1)} on each")


def _is_light(model: Model, params: Params, data: FederatedData) -> bool:
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(params, data.x[:1])
    return int(counter.get_total_flops()) <= STACKED_FLOPS


def _can_be_stacked(model: Model, params: Params, data: FederatedData) -> bool:
    """Return whether `vmap` takes the network for several clients at once, without a loop over them."""
    two = {n: torch.stack([p, p]) for n, p in params.items()}
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("error")
            vmap(model)(two, torch.stack([data.x[:1]] * 2))
    except Exception:  # a user's own network may do anything
        return False
    return True
