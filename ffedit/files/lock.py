"""A lock that lets one command at a time work on a folder.

It is a lock of the operating system, which ends with the process, however that ends: no stale lock is left behind.
The locked file itself is deleted when the work is done.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from ffedit.errors import EditError

LOCK = ".lock"
POLL = 0.2  # seconds


@contextmanager
def claimed(folder: Path, wait: bool = False) -> Iterator[None]:
    """Lock `folder` against every other command; it is created if it does not exist.

    Args:
        folder: the folder.
        wait: wait until another command releases it.

    Raises:
        EditError: another command holds it, or the folder cannot be written.
    """
    path = folder / LOCK
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = path.open("a")
        except OSError as error:
            raise EditError(f"{folder}: cannot be written ({error.strerror})") from error
        with file:
            try:
                _lock(file)
            except OSError as error:
                if wait and isinstance(error, BlockingIOError | PermissionError):
                    time.sleep(POLL)
                    continue
                raise EditError(f"{folder}: another run works on this folder; wait for it, or name another") from error
            if _is_at(file, path):  # a run that ended meanwhile may have deleted it
                try:
                    yield
                finally:
                    if sys.platform != "win32":  # Windows deletes no open file
                        path.unlink(missing_ok=True)
                return


def _is_at(file: IO[str], path: Path) -> bool:
    """Return True if an open file is still the one at `path`."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError:
        return False


def _lock(file: IO[str]) -> None:
    """Lock an open file, or fail at once; closing it, or the end of the process, releases the lock."""
    if sys.platform == "win32":
        import msvcrt

        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
