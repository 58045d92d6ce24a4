# SPDX-License-Identifier: Apache-2.0
"""What Flower's database has deleted goes from the disk as well.

A SuperLink keeps messages, and the models in them, in a file of SQLite's. What it deletes from there stays readable in
free pages of the file and in the log beside it, until something else happens to be written over it.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from pathlib import Path

from fedquit.flower.deploy.processes import Say

FOLDER, DATABASE = "flower", "superlink.db"  # below the state folder: what belongs to a SuperLink of our own
TRIES = 4  # while a SuperLink reads and writes
WAIT = 3.0  # seconds for a lock, and less than a SuperLink waits for one
PAUSE = 1.0


def wipe_traces(database: Path, say: Say) -> None:
    """Rewrite a database without what was deleted from it; a SuperLink may be at work on it."""
    if not database.exists():
        return
    for left in reversed(range(TRIES)):
        try:
            _rewrite(database)
        except sqlite3.Error as error:
            if not left:
                say(f"{database} may still hold messages that Flower has deleted ({error}): it is tried again later.")
        else:
            return
        time.sleep(PAUSE if left else 0)


def _rewrite(database: Path) -> None:
    with contextlib.closing(sqlite3.connect(database, timeout=WAIT, isolation_level=None)) as connection:
        connection.execute("PRAGMA temp_store = MEMORY")  # a temporary file would leave traces of its own
        connection.execute("PRAGMA secure_delete = ON")
        connection.execute("VACUUM")
        (busy, _, _) = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        if busy:
            raise sqlite3.OperationalError("its log is in use")
