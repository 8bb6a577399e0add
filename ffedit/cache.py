"""What is worth keeping between runs: a folder of files, each under the fingerprint of what it was computed from.

A file is written beside its place and moved there in one step, so two processes never see half of one.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError


def folder() -> Path:
    """`FFEDIT_CACHE`, or `ffedit` in the platform's cache folder."""
    if given := os.environ.get("FFEDIT_CACHE"):
        return Path(given)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "ffedit"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home())) / "ffedit"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ffedit"


def path(kind: str, key: str, suffix: str) -> Path:
    """Where an entry of some kind lies, or would lie."""
    return folder() / kind / f"{key}{suffix}"


def write(target: Path, save: Callable[[Path], None]) -> None:
    """Let `save` write a file that then takes its place; a cache that cannot be written is done without."""
    temporary: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=".", suffix=target.suffix)
        os.close(handle)
        temporary = Path(name)
        save(temporary)
        os.replace(temporary, target)
    except (OSError, SafetensorError):  # safetensors has its own name for a full disk
        # A full or read-only disk costs the next run some seconds, and must not cost this one its result.
        pass
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def entries() -> list[Path]:
    """All files of the cache, sorted."""
    return sorted(p for p in folder().glob("*/*") if p.is_file() and not p.name.startswith("."))


def sizes() -> dict[Path, int]:
    """The bytes of every entry; one that another process deletes meanwhile is none."""
    found = {}
    for entry in entries():
        try:
            found[entry] = entry.stat().st_size
        except FileNotFoundError:
            continue
    return found


def clear() -> int:
    """Delete all entries; the number of bytes set free. What other processes delete meanwhile does not count."""
    freed = 0
    for entry, size in sizes().items():
        try:
            entry.unlink()
        except FileNotFoundError:
            continue
        freed += size
    return freed
