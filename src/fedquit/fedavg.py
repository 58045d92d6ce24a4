# SPDX-License-Identifier: Apache-2.0
"""Deprecated name of `fedquit.core.fedavg`."""

from fedquit.core.fedavg import *  # noqa: F403
from fedquit.utils.deprecation import warn_moved

warn_moved("fedquit.fedavg", "fedquit.core.fedavg")
