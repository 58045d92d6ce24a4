# SPDX-License-Identifier: Apache-2.0
"""Deprecated name of `fedquit.running.paper_costs`."""

from fedquit.running.paper_costs import *  # noqa: F403
from fedquit.utils.deprecation import warn_moved

warn_moved("fedquit.accounting", "fedquit.running.paper_costs")
