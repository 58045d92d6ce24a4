# SPDX-License-Identifier: Apache-2.0
"""NoT: Federated Unlearning via Weight Negation. Khalil et al. CVPR 2025.

The server multiplies the weights of one layer by -1 and lets the remaining clients train on. No
client takes part in the unlearning, and the model is the same whoever leaves.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedquit.core import Federation, Params, Request, State, Trained
from fedquit.core.method import Method
from fedquit.errors import InputError
from fedquit.utils.names import unknown


@dataclass(frozen=True)
class NoT(Method):
    """Negate one layer: the first weight tensor, unless `layer` names another."""

    layer: str = ""

    knobs = ()  # a sign is changed or not

    def unlearn(self, fed: Federation, state: State, trained: Trained, request: Request) -> State:
        """Change the signs of one tensor; no client is asked."""
        layer = self.layer or first_weight(state.params)
        if layer not in state.params:
            raise unknown("layer", layer, state.params)
        return state.next({n: -p if n == layer else p for n, p in state.params.items()})


def first_weight(params: Params) -> str:
    """Return the name of the first tensor of two or more dimensions: a kernel, a matrix, an embedding."""
    name = next((n for n, p in params.items() if p.dim() >= 2), None)
    if name is None:
        raise InputError("the model has no weight tensor of two or more dimensions: name one with method.layer.")
    return name
