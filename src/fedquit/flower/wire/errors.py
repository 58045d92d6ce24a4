# SPDX-License-Identifier: Apache-2.0
"""The error for a message that cannot be used."""

from __future__ import annotations

from fedquit.errors import InputError

MAX_DETAIL = 200  # characters of an underlying error that are passed on


class InvalidMessage(InputError):
    """A message that cannot be read, or that is not what was asked for."""


def shortened(error: Exception) -> str:
    """Type and text of an error, cut to a length that fits into a log line."""
    return f"{type(error).__name__}: {error}"[:MAX_DETAIL]
