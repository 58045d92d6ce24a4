# SPDX-License-Identifier: Apache-2.0
"""A client's own canaries for the one-run audit: drawn at home, from a secret seed that never leaves it.

The file `canaries.json` in the client's home holds the seed. The server learns how many guesses on the canaries were
correct, and nothing about single examples.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path

from fedquit.audit.canaries import NATURAL, CanarySet, draw_canaries
from fedquit.errors import InputError
from fedquit.flower.twice import read_json_either
from fedquit.inference.one_run import LEAST_GUESSES, SHARE
from fedquit.utils.files import write_json

LEAST = LEAST_GUESSES * SHARE  # canaries: with fewer, a tenth of them is too few guesses
SEED_BITS = 63


@dataclass(frozen=True)
class HomeCanaries:
    """The canaries of one client.

    Attributes:
        home: the client's directory.
        count: how many to draw where none are drawn yet; 0 for none.

    Raises:
        InputError: for so few canaries that the audit could show nothing.
    """

    home: Path
    count: int = 0

    def __post_init__(self) -> None:
        if self.count and self.count < LEAST:
            raise InputError(f"{self.count} canaries are too few for an audit: take {LEAST} or more, or none.")

    @property
    def path(self) -> Path:
        """The file with the secret seed."""
        return self.home / "canaries.json"

    def drawn(self, examples: int) -> CanarySet | None:
        """The canaries by position in the client's data, drawn once and written down before any are used.

        Args:
            examples: how many the client has now; those that were added after the draw are no canaries.

        Returns:
            None where the client has none.
        """
        if not self.path.exists():
            if not self.count:
                return None
            draw_canaries(examples, self.count, [NATURAL], seed=0)  # refuses a client with too few examples
            seed = secrets.randbits(SEED_BITS)
            write_json(self.path, {"seed": seed, "canaries": self.count, "examples": examples})
        stored = read_json_either(self.path, "which examples were never trained on")
        if examples < stored["examples"]:
            raise InputError(
                f"{self.path} was drawn from {stored['examples']} examples, and this client has only {examples} now: "
                "give it its data as it was, in the same order."
            )
        return draw_canaries(stored["examples"], stored["canaries"], [NATURAL], stored["seed"])[NATURAL]

    def forget(self) -> None:
        """Delete the seed, once the client has been forgotten."""
        self.path.unlink(missing_ok=True)
