"""The cache of what is kept between runs: files and converted models, by the fingerprint of what they were made from.

An entry is written to a temporary path and moved in one step, so that two processes never see half of one.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from platformdirs import user_cache_path

from ffedit.errors import EditError
from ffedit.files.atomic import write_file


def folder() -> Path:
    """Return `FFEDIT_CACHE`, or `ffedit` in the platform's cache folder."""
    return Path(os.environ.get("FFEDIT_CACHE") or user_cache_path("ffedit", appauthor=False))


def path(kind: str, key: str, suffix: str) -> Path:
    """Return the path of an entry of some kind, whether it exists or not."""
    return folder() / kind / f"{key}{suffix}"


def write(target: Path, save: Callable[[Path], object]) -> None:
    """Let `save` write a file that is then moved to `target`; a cache that cannot be written is ignored.

    A full or read-only disk costs the next run some seconds, and must not cost this one its result.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_file(target, save)
    except (EditError, OSError):
        return


def entries() -> list[Path]:
    """Return all entries of the cache, sorted: files, and the folders of converted models."""
    return sorted(p for p in folder().glob("*/*") if not p.name.startswith("."))


def sizes() -> dict[Path, int]:
    """Return the bytes of every entry; leave out one that another process deletes meanwhile."""
    bytes_of = {}
    for entry in entries():
        try:
            files = entry.rglob("*") if entry.is_dir() else [entry]
            bytes_of[entry] = sum(file.stat().st_size for file in files if not file.is_dir())
        except FileNotFoundError:
            continue
    return bytes_of


def clear() -> int:
    """Delete all entries; return the number of bytes freed, without those that other processes delete meanwhile."""
    freed = 0
    for entry, size in sizes().items():
        try:
            if entry.is_dir():
                # Moved away first, so that no other process sees it half deleted.
                away = Path(tempfile.mkdtemp(dir=entry.parent, prefix="."))
                os.replace(entry, away / entry.name)
                shutil.rmtree(away)
            else:
                entry.unlink()
        except FileNotFoundError:
            continue
        freed += size
    return freed
