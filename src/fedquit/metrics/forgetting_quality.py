# SPDX-License-Identifier: Apache-2.0
"""Deprecated name of `fedquit.audit.metrics.forgetting_quality`."""

from fedquit.audit.metrics.forgetting_quality import *  # noqa: F403
from fedquit.utils.deprecation import warn_moved

warn_moved("fedquit.metrics.forgetting_quality", "fedquit.audit.metrics.forgetting_quality")
