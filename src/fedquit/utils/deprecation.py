# SPDX-License-Identifier: Apache-2.0
"""Old names of modules: they keep working for one minor release, with a warning that says the new name."""

from __future__ import annotations

import warnings


def warn_moved(old: str, new: str) -> None:
    """Warn whoever imports `old` that the module is now `new`; called by the old module itself."""
    warnings.warn(f"{old} is now {new}: change the import.", DeprecationWarning, stacklevel=3)
