# SPDX-License-Identifier: Apache-2.0
"""Who draws random numbers: torch, numpy or Python, told by the states of their generators."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class RandomStates:
    """The states of the global generators."""

    of_torch: Tensor
    of_numpy: dict[str, Any]
    of_python: object

    @classmethod
    def now(cls) -> RandomStates:
        """Read them."""
        return cls(torch.get_rng_state(), np.random.get_state(legacy=False), random.getstate())  # noqa: NPY002


@contextmanager
def random_states() -> Iterator[RandomStates]:
    """Yield the states of the generators, and set them back at the end."""
    states = RandomStates.now()
    try:
        yield states
    finally:
        torch.set_rng_state(states.of_torch)
        np.random.set_state(states.of_numpy)  # noqa: NPY002
        random.setstate(states.of_python)  # type: ignore[arg-type]


def sources_drawn_from(before: RandomStates) -> list[str]:
    """Return whose generator has moved since: "torch", "numpy", "Python's random", in this order."""
    now = RandomStates.now()
    moved = {
        "torch": not torch.equal(now.of_torch, before.of_torch),
        "numpy": repr(now.of_numpy["state"]) != repr(before.of_numpy["state"]),
        "Python's random": now.of_python != before.of_python,
    }
    return [source for source, has_moved in moved.items() if has_moved]
