# SPDX-License-Identifier: Apache-2.0
"""Deprecated name of `fedquit.audit.metrics.klom`."""

from fedquit.audit.metrics.klom import *  # noqa: F403
from fedquit.utils.deprecation import warn_moved

warn_moved("fedquit.metrics.klom", "fedquit.audit.metrics.klom")
