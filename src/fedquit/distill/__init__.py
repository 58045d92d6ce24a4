# SPDX-License-Identifier: Apache-2.0
"""FedQUIT on one model, without a federation: virtual teacher, losses and training loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedquit.utils.exports import lazy_exports

if TYPE_CHECKING:
    from fedquit.distill.losses import LOSSES as LOSSES
    from fedquit.distill.losses import distillation_loss as distillation_loss
    from fedquit.distill.unlearning import unlearn as unlearn
    from fedquit.distill.virtual_teacher import TEACHERS as TEACHERS
    from fedquit.distill.virtual_teacher import virtual_logits as virtual_logits

__all__ = ["LOSSES", "TEACHERS", "distillation_loss", "unlearn", "virtual_logits"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "fedquit.distill.losses": ["LOSSES", "distillation_loss"],
            "fedquit.distill.unlearning": ["unlearn"],
            "fedquit.distill.virtual_teacher": ["TEACHERS", "virtual_logits"],
        },
    )
