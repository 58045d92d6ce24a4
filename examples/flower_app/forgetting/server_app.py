# SPDX-License-Identifier: Apache-2.0
"""The server: trains the model, and unlearns clients that ask to be forgotten."""

from __future__ import annotations

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedquit.flower.server import serve

from .task import Net, test_accuracy

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train with FedAvg, receive requests, unlearn, recover; a run continues from its state directory."""
    serve(grid, context, model=lambda context: Net(), evaluate=test_accuracy)
