# SPDX-License-Identifier: Apache-2.0
"""The error of a deployment."""

from __future__ import annotations

from fedquit.errors import FedquitError


class DeploymentError(FedquitError):
    """A process does not start, does not answer, or does not keep running."""
