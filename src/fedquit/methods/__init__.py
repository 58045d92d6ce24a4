# SPDX-License-Identifier: Apache-2.0
"""The unlearning methods: one file each. Adding one is a file, an entry here, and a page in docs/methods."""

from __future__ import annotations

from fedquit.core.method import Method
from fedquit.methods.ascent import GradientAscent
from fedquit.methods.bad_teacher import BadTeacher
from fedquit.methods.baselines import Natural, Retrain
from fedquit.methods.fedau import FedAU
from fedquit.methods.federaser import FedEraser
from fedquit.methods.fedosd import FedOSD
from fedquit.methods.fedquit import FedQUIT
from fedquit.methods.fedunran import FedUNRAN
from fedquit.methods.fukd import FUKD
from fedquit.methods.fused import FUSED
from fedquit.methods.mode import MoDe
from fedquit.methods.not_ import NoT
from fedquit.methods.pga import PGA
from fedquit.methods.puf import PUF
from fedquit.methods.rapid import RapidRetraining
from fedquit.methods.scrub import SCRUB
from fedquit.methods.ssd import SSD

__all__ = ["METHODS"]

METHODS: dict[str, type[Method]] = {
    "fedquit": FedQUIT,
    "federaser": FedEraser,
    "pga": PGA,
    "mode": MoDe,
    "fedau": FedAU,
    "not": NoT,
    "fedosd": FedOSD,
    "ascent": GradientAscent,
    "fedunran": FedUNRAN,
    "fukd": FUKD,
    "rapid": RapidRetraining,
    "fused": FUSED,
    "puf": PUF,
    "scrub": SCRUB,
    "ssd": SSD,
    "bad_teacher": BadTeacher,
    "natural": Natural,
    "retrain": Retrain,
}
