# SPDX-License-Identifier: Apache-2.0
"""The unlearning methods: one file each. Adding one is a file and an entry here."""

from __future__ import annotations

from fedquit.method import Method
from fedquit.methods.fedquit import FedQUIT
from fedquit.methods.references import Natural, Retrain

METHODS: dict[str, type[Method]] = {
    "fedquit": FedQUIT,
    "natural": Natural,
    "retrain": Retrain,
}
