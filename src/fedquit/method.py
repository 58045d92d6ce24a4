# SPDX-License-Identifier: Apache-2.0
"""Deprecated name of `fedquit.core.method`."""

from fedquit.core.method import *  # noqa: F403
from fedquit.utils.deprecation import warn_moved

warn_moved("fedquit.method", "fedquit.core.method")
