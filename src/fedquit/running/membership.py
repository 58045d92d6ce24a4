# SPDX-License-Identifier: Apache-2.0
"""Who is in the federation, and who must never take part again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fedquit.core import ClientId, Request
from fedquit.errors import RequestError


@dataclass(frozen=True)
class Membership:
    """Active clients, and those that were forgotten."""

    active: tuple[ClientId, ...]
    erased: frozenset[ClientId] = frozenset()

    def check(self, request: Request) -> None:
        """Refuse a request of somebody who is not here."""
        forgotten = [c for c in request.clients if c in self.erased]
        if forgotten:
            raise RequestError(
                f"client {forgotten[0]} has been forgotten already: there is nothing of it left to forget."
            )
        request.check(self.active)

    def allows(self, request: Request) -> bool:
        """Whether `check` has nothing against the request."""
        try:
            self.check(request)
        except RequestError:
            return False
        return True

    def serve(self, request: Request) -> Membership:
        """After a request: whole clients leave for good; clients that gave up samples stay."""
        self.check(request)
        return self.leave_out(() if request.samples else request.clients)

    def leave_out(self, clients: Sequence[ClientId]) -> Membership:
        """Without these clients, whether they could be forgotten or not."""
        stay = tuple(c for c in self.active if c not in clients)
        return replace(self, active=stay, erased=self.erased | set(clients))

    def join(self, clients: Sequence[ClientId], *, anew: bool = False) -> Membership:
        """Let clients in. One that was forgotten is refused unless it is enrolled anew, with consent given again."""
        if not clients or len(set(clients)) < len(clients):
            raise RequestError(f"clients {list(clients)} cannot join: name each of them, at least one, once.")
        for client in clients:
            if client in self.active:
                raise RequestError(f"client {client} is in the federation already.")
            if client in self.erased and not anew:
                raise RequestError(
                    f"client {client} was forgotten at its own request and may not come back as if nothing had been: "
                    "enrol it anew (anew = true) once it has consented again."
                )
        return Membership(tuple(sorted((*self.active, *clients))), self.erased - set(clients))
