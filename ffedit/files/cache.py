"""The cache of what is kept between runs: files and converted models, by the fingerprint of what they were made from.

An entry is written to a temporary path and moved in one step, so that two processes never see half of one.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError


def folder() -> Path:
    """Return `FFEDIT_CACHE`, or `ffedit` in the platform's cache folder."""
    if given := os.environ.get("FFEDIT_CACHE"):
        return Path(given)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "ffedit"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home())) / "ffedit"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ffedit"


def path(kind: str, key: str, suffix: str) -> Path:
    """Return the path of an entry of some kind, whether it exists or not."""
    return folder() / kind / f"{key}{suffix}"


def write(target: Path, save: Callable[[Path], None]) -> None:
    """Let `save` write a file that is then moved to `target`; a cache that cannot be written is ignored."""
    temporary: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=".", suffix=target.suffix)
        os.close(handle)
        temporary = Path(name)
        save(temporary)
        os.replace(temporary, target)
    except (OSError, SafetensorError):  # safetensors raises its own error for a full disk
        # A full or read-only disk costs the next run some seconds, and must not cost this one its result.
        pass
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def entries() -> list[Path]:
    """Return all entries of the cache, sorted: files, and the folders of converted models."""
    return sorted(p for p in folder().glob("*/*") if not p.name.startswith("."))


def sizes() -> dict[Path, int]:
    """Return the bytes of every entry; leave out one that another process deletes meanwhile."""
    found = {}
    for entry in entries():
        try:
            parts = entry.rglob("*") if entry.is_dir() else [entry]
            found[entry] = sum(part.stat().st_size for part in parts if not part.is_dir())
        except FileNotFoundError:
            continue
    return found


def clear() -> int:
    """Delete all entries; return the number of bytes freed, without those that other processes delete meanwhile."""
    freed = 0
    for entry, size in sizes().items():
        try:
            if entry.is_dir():
                _delete(entry)
            else:
                entry.unlink()
        except FileNotFoundError:
            continue
        freed += size
    return freed


def _delete(entry: Path) -> None:
    """Delete a folder so that no other process sees it half deleted."""
    away = Path(tempfile.mkdtemp(dir=entry.parent, prefix=".")) / entry.name
    os.replace(entry, away)
    shutil.rmtree(away.parent)
