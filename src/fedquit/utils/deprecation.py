# SPDX-License-Identifier: Apache-2.0
"""Old names of modules: they work for one more minor release, and warn."""

from __future__ import annotations

import warnings


def warn_moved(old: str, new: str) -> None:
    """Warn that a module has moved; the module at the old place calls this when it is imported.

    Args:
        old: the full name that was imported.
        new: the full name to import instead.
    """
    warnings.warn(f"{old} is now {new}: change the import.", DeprecationWarning, stacklevel=3)
