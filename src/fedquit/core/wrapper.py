# SPDX-License-Identifier: Apache-2.0
"""A federation around another one, for whoever counts, restricts or watches what a method asks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fedquit.core.types import ClientId, Federation, Model, Params, Program, Reply, Split, Task


@dataclass
class FederationWrapper:
    """Passes everything on to the federation inside; subclasses override what they change."""

    inner: Federation

    @property
    def model(self) -> Model:
        """The network that everybody trains."""
        return self.inner.model

    @property
    def clients(self) -> tuple[ClientId, ...]:
        """The clients that can be asked now."""
        return self.inner.clients

    @property
    def seed(self) -> int:
        """Of the server's own draws."""
        return self.inner.seed

    def run(
        self, task: Task | Program, clients: Sequence[ClientId], *, split: Split = "all", **sent: Params
    ) -> Iterator[Reply]:
        """Ask clients to do a task or a program."""
        return self.inner.run(task, clients, split=split, **sent)

    def run_at_server(self, task: Task, **sent: Params) -> Params:
        """Do a task on the server's own public data."""
        return self.inner.run_at_server(task, **sent)
