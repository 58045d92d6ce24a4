# SPDX-License-Identifier: Apache-2.0
"""Deprecated name of `fedquit.core.params`."""

from fedquit.core.params import *  # noqa: F403
from fedquit.utils.deprecation import warn_moved

warn_moved("fedquit.params", "fedquit.core.params")
