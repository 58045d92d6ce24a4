# SPDX-License-Identifier: Apache-2.0
"""Federated unlearning: FedQUIT, seventeen other methods, and the evaluation of unlearned models.

For a PyTorch model and a forget set, without any federation:

    unlearned = fedquit.unlearn(model, forget_set, lr=1e-4)
    z_virt = fedquit.virtual_logits(logits, labels, teacher="min")

`docs/api.md` says which names are stable. A name's module is imported when the name is first used, so that
`import fedquit` and `fedquit --help` do not wait for torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedquit.utils.exports import lazy_exports

if TYPE_CHECKING:
    from fedquit.distill.unlearning import unlearn as unlearn
    from fedquit.distill.virtual_teacher import virtual_logits as virtual_logits
    from fedquit.errors import FedquitError as FedquitError
    from fedquit.errors import InputError as InputError
    from fedquit.errors import NoExamplesError as NoExamplesError
    from fedquit.errors import NonFiniteError as NonFiniteError
    from fedquit.errors import RequestError as RequestError
    from fedquit.errors import StoreError as StoreError
    from fedquit.errors import UnknownNameError as UnknownNameError

__version__ = "0.1.0"
__all__ = [
    "FedquitError",
    "InputError",
    "NoExamplesError",
    "NonFiniteError",
    "RequestError",
    "StoreError",
    "UnknownNameError",
    "__version__",
    "unlearn",
    "virtual_logits",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "fedquit.distill.unlearning": ["unlearn"],
            "fedquit.distill.virtual_teacher": ["virtual_logits"],
            "fedquit.errors": [
                "FedquitError",
                "InputError",
                "NoExamplesError",
                "NonFiniteError",
                "RequestError",
                "StoreError",
                "UnknownNameError",
            ],
        },
        eager=["__version__"],
    )
