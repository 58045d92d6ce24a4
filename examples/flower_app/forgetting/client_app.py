# SPDX-License-Identifier: Apache-2.0
"""The client: an ordinary ClientApp, made erasable."""

from __future__ import annotations

from flwr.app import Context
from flwr.clientapp import ClientApp
from torch import Tensor

from fedquit.flower.client import erasable

from .task import Net, load_partition


def data(context: Context) -> tuple[Tensor, Tensor]:
    """This client's images and labels."""
    return load_partition(int(context.node_config["partition-id"]), int(context.run_config["partitions"]))


app = erasable(ClientApp(), model=lambda context: Net(), data=data)
