# SPDX-License-Identifier: Apache-2.0
"""The one-run audit in a row of the results, by kind of canaries."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from fedquit.results.schema import CANARY_KINDS, PHASES, Row, number


@dataclass(frozen=True)
class CanaryAudit:
    """What the canaries of one kind say about one model.

    Attributes:
        phase: of the row.
        kind: `natural` or `mislabelled`.
        guesses: r; None where the row lacks it, as for the other numbers.
        correct: v, of the guesses.
        epsilon_low: the lower bound on epsilon.
        gain_high: at most what the attack gains, as an epsilon.
        p: corrected for several kinds.
        verdict: `remembered`, `over-unlearned`, `not detected` or `blind`.
        sentence: the verdict in words.
    """

    phase: str
    kind: str
    guesses: float | None
    correct: float | None
    epsilon_low: float | None
    gain_high: float | None
    p: float | None
    verdict: str
    sentence: str


def canary_audits(rows: Iterable[Row]) -> Iterator[CanaryAudit]:
    """The audits in some rows, in their order; rows without canaries give none."""
    for row in rows:
        for kind in CANARY_KINDS:
            verdict = row.get(f"canary_{kind}_verdict")
            if row["phase"] in PHASES and isinstance(verdict, str):
                yield CanaryAudit(
                    phase=str(row["phase"]),
                    kind=kind,
                    guesses=number(row.get(f"canary_{kind}_guesses")),
                    correct=number(row.get(f"canary_{kind}_correct")),
                    epsilon_low=number(row.get(f"canary_{kind}_epsilon_low")),
                    gain_high=number(row.get(f"canary_{kind}_gain_high")),
                    p=number(row.get(f"canary_{kind}_p")),
                    verdict=verdict,
                    sentence=str(row.get(f"canary_{kind}_sentence", "")),
                )
