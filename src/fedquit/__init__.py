# SPDX-License-Identifier: Apache-2.0
"""Federated unlearning: FedQUIT, seventeen other methods, and the evaluation of unlearned models.

For a PyTorch model and a forget set, without any federation:

    result = fedquit.forget(model, forget_set, retain_set, holdout_set, recover_lr=1e-3)
    unlearned = fedquit.unlearn(model, forget_set, lr=1e-4)
    z_virt = fedquit.virtual_logits(logits, labels, teacher="min")

For a federation, from a recipe or from a network and the clients' data as objects:

    result = fedquit.run("demo")
    table = fedquit.compare(fedquit.Setting(make_model, clients, test), ["fedquit", "pga"], targets=["a", "b"])

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
    from fedquit.federation.calls import compare as compare
    from fedquit.federation.calls import run as run
    from fedquit.federation.calls import study as study
    from fedquit.federation.outcomes import ComparisonResult as ComparisonResult
    from fedquit.federation.outcomes import RunResult as RunResult
    from fedquit.federation.outcomes import StudyResult as StudyResult
    from fedquit.federation.setting import Setting as Setting
    from fedquit.single.evidence import Evidence as Evidence
    from fedquit.single.evidence import evaluate as evaluate
    from fedquit.single.forgetting import Forgotten as Forgotten
    from fedquit.single.forgetting import forget as forget
    from fedquit.single.recovery import recover as recover
    from fedquit.single.trainer import trainer_options as trainer_options

__version__ = "0.2.0"
__all__ = [
    "ComparisonResult",
    "Evidence",
    "FedquitError",
    "Forgotten",
    "InputError",
    "NoExamplesError",
    "NonFiniteError",
    "RequestError",
    "RunResult",
    "Setting",
    "StoreError",
    "StudyResult",
    "UnknownNameError",
    "__version__",
    "compare",
    "evaluate",
    "forget",
    "recover",
    "run",
    "study",
    "trainer_options",
    "unlearn",
    "virtual_logits",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "fedquit.distill.unlearning": ["unlearn"],
            "fedquit.distill.virtual_teacher": ["virtual_logits"],
            "fedquit.federation.calls": ["compare", "run", "study"],
            "fedquit.federation.outcomes": ["ComparisonResult", "RunResult", "StudyResult"],
            "fedquit.federation.setting": ["Setting"],
            "fedquit.single.evidence": ["Evidence", "evaluate"],
            "fedquit.single.forgetting": ["Forgotten", "forget"],
            "fedquit.single.recovery": ["recover"],
            "fedquit.single.trainer": ["trainer_options"],
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
