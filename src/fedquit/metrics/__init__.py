# SPDX-License-Identifier: Apache-2.0
"""Deprecated name of `fedquit.audit.metrics`."""
