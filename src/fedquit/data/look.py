# SPDX-License-Identifier: Apache-2.0
"""Deprecated name of `fedquit.data.preprocessing`."""

from fedquit.data.preprocessing import *  # noqa: F403
from fedquit.utils.deprecation import warn_moved

warn_moved("fedquit.data.look", "fedquit.data.preprocessing")
