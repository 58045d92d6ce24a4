# SPDX-License-Identifier: Apache-2.0
"""KLoM: the KL divergence of margins between unlearned and retrained models, example by example.

Georgiev, Rinberg, Park, Garg, Ilyas, Mądry, Neel: Attribute-to-Delete: Machine Unlearning via Datamodel Matching
(2024).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedquit.audit.scores import Floats
from fedquit.inference.models import BINS, CLIP, EPS, KlomBins, phi_pair

__all__ = ["BINS", "CLIP", "EPS", "Klom", "klom", "phi_pair"]


@dataclass(frozen=True, eq=False)
class Klom:
    """One divergence for each example, in nats."""

    per_example: Floats

    @property
    def mean(self) -> float:
        """Over the examples."""
        return float(self.per_example.mean())

    @property
    def p95(self) -> float:
        """The 95th percentile: how bad it is for the worst twentieth."""
        return float(np.percentile(self.per_example, 95))


def klom(unlearned: npt.ArrayLike, oracle: npt.ArrayLike) -> Klom:
    """KL(histogram of phi over unlearned models || the same over oracles), for each example.

    phi is clipped to ±100; the 20 bins of an example share the range of both kinds of model; where an unlearned model
    falls and no oracle does, the oracles get a probability of 1e-5.

    Args:
        unlearned: phi under the unlearned models, (models, examples).
        oracle: phi under the Retrains, (models, examples).
    """
    return Klom(KlomBins(*phi_pair(unlearned, oracle)).observed())
