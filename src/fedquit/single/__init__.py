# SPDX-License-Identifier: Apache-2.0
"""One model of one's own, without a federation: forget samples, recover, and judge the result."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedquit.utils.exports import lazy_exports

if TYPE_CHECKING:
    from fedquit.single.evidence import Evidence as Evidence
    from fedquit.single.evidence import evaluate as evaluate
    from fedquit.single.forgetting import Forgotten as Forgotten
    from fedquit.single.forgetting import NoRateError as NoRateError
    from fedquit.single.forgetting import forget as forget
    from fedquit.single.recovery import recover as recover
    from fedquit.single.trainer import trainer_options as trainer_options

__all__ = ["Evidence", "Forgotten", "NoRateError", "evaluate", "forget", "recover", "trainer_options"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "fedquit.single.evidence": ["Evidence", "evaluate"],
            "fedquit.single.forgetting": ["Forgotten", "NoRateError", "forget"],
            "fedquit.single.recovery": ["recover"],
            "fedquit.single.trainer": ["trainer_options"],
        },
    )
