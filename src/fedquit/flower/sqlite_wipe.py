# SPDX-License-Identifier: Apache-2.0
"""Removes deleted messages from the disk of a SuperLink.

A SuperLink stores messages, and the models in them, in an SQLite file. What it deletes stays readable in free pages of
the file and in the write-ahead log, until something else happens to be written over it.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

FOLDER = "flower"  # in the state directory: the files of a SuperLink that fedquit runs
DATABASE = "superlink.db"  # in that folder
TRIES = 4  # while a SuperLink reads and writes
WAIT = 3.0  # seconds for a lock; less than a SuperLink waits for one
PAUSE = 1.0  # seconds between two tries


def wipe_traces(database: Path, say: Callable[[str], None]) -> bool:
    """Rewrite a database without the rows that were deleted from it; a SuperLink may be using it.

    Args:
        database: the SQLite file; nothing happens if it does not exist.
        say: takes one sentence for the operator, if the database stays locked.

    Returns:
        Whether nothing that was deleted is left.
    """
    if not database.exists():
        return True
    for tries_left in reversed(range(TRIES)):
        try:
            _rewrite(database)
        except sqlite3.Error as error:
            if not tries_left:
                say(f"{database} may still hold messages that Flower has deleted ({error}): it is tried again later.")
        else:
            return True
        time.sleep(PAUSE if tries_left else 0)
    return False


def _rewrite(database: Path) -> None:
    with contextlib.closing(sqlite3.connect(database, timeout=WAIT, isolation_level=None)) as connection:
        connection.execute("PRAGMA temp_store = MEMORY")  # a temporary file would leave traces of its own
        connection.execute("PRAGMA secure_delete = ON")
        connection.execute("VACUUM")
        (busy, _, _) = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        if busy:
            raise sqlite3.OperationalError("its log is in use")
