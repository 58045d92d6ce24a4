# SPDX-License-Identifier: Apache-2.0
"""The server: trains, and forgets whom it is asked to forget."""

from __future__ import annotations

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedquit.flower.server import serve

from .task import Net, test_accuracy

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train with FedAvg, take requests, unlearn, recover; the state folder goes on where a run stopped."""
    serve(grid, context, model=lambda context: Net(), evaluate=test_accuracy)
