"""Cache of files and converted models that are kept between runs, by a hash of all that they depend on.

An entry is written to a temporary path and moved in one step, so that two processes never see half of one. The cache is
bounded: after a write, entries that were not used for long are deleted, then the least recently used ones
until the rest fits. The time of modification of an entry says when it was last used; one that was used within `IN_USE`
stays, since a process may still read it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache
from hashlib import sha256
from math import nan
from pathlib import Path

from platformdirs import user_cache_path

from ffedit.errors import EditError
from ffedit.files.atomic import write_file
from ffedit.files.placing import LOCK, beside, claimed, sweep

DAY = 24 * 60 * 60
IN_USE = DAY  # seconds
MAX_GB = 20.0  # size of all entries
MAX_DAYS = 90  # days since an entry was last used


def max_bytes() -> float:
    """Return how many bytes all entries may have: `FFEDIT_CACHE_MAX_GB`, or `MAX_GB`; EditError if it is not a size."""
    text = os.environ.get("FFEDIT_CACHE_MAX_GB") or MAX_GB
    try:
        most = float(text) * 1e9
    except ValueError:
        most = nan
    if not most >= 0:
        raise EditError(f"FFEDIT_CACHE_MAX_GB is {text!r}; a number of gigabytes such as 20 was expected")
    return most


def bounds() -> str:
    """Describe which entries are deleted after a write."""
    return f"at most {max_bytes() / 1e9:g} GB, entries unused for {MAX_DAYS} days are deleted"


def folder() -> Path:
    """Return `FFEDIT_CACHE`, or `ffedit` in the platform's cache folder; EditError for a user without a home."""
    try:
        return Path(os.environ.get("FFEDIT_CACHE") or user_cache_path("ffedit", appauthor=False))
    except RuntimeError as error:
        raise EditError(f"no folder for the cache ({error}); name one in FFEDIT_CACHE") from error


def path(kind: str, key: str, suffix: str) -> Path:
    """Return the path of an entry of some kind, whether it exists or not; one that exists counts as used now."""
    max_bytes()  # a wrong limit is refused before long work: `write` would ignore it
    entry = folder() / kind / f"{key}{suffix}"
    _swept(entry.parent)
    try:
        os.utime(entry)
    except OSError:  # there is none, or it is another user's
        return entry
    return entry


def entry(kind: str, about: str, suffix: str = ".safetensors") -> Path:
    """Return the path of an entry of some kind by all that it depends on, `about`, as `path` does."""
    return path(kind, sha256(about.encode()).hexdigest()[:24], suffix)


def write(target: Path, save: Callable[[Path], object]) -> None:
    """Let `save` write a file that is then moved to `target`; a cache that cannot be written is ignored.

    A full or read-only disk costs the next run some seconds, and must not cost this one its result.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_file(target, save)
        prune(target.stat().st_mtime)
    except (EditError, OSError):
        return


def forget(entry: Path) -> None:
    """Delete an entry, where there is one and the cache can be written."""
    try:
        entry.unlink()
    except OSError:
        return


def entries() -> list[Path]:
    """Return all entries of the cache, sorted: files, and the folders of converted models."""
    return sorted(p for p in folder().glob("*/*") if not p.name.startswith("."))


def sizes() -> dict[Path, int]:
    """Return the bytes of every entry, the least recently used first; leave out one that is deleted meanwhile."""
    listed = []
    for entry in entries():
        try:
            files = entry.rglob("*") if entry.is_dir() else [entry]
            size = sum(file.stat().st_size for file in files if not file.is_dir())
            listed.append((entry.stat().st_mtime, entry, size))
        except FileNotFoundError:
            continue
    return {entry: size for _, entry, size in sorted(listed)}


def prune(now: float) -> None:
    """Delete the entries that are too old, and those that there is no room for, the least recently used first.

    `now` is the file system's time: a file server's clock may be days apart from this machine's, by which entries that
    were used a moment ago would be deleted.
    """
    for kind in folder().glob("*"):
        _sweep(kind)
    bytes_of, most = sizes(), max_bytes()
    total = sum(bytes_of.values())
    for entry, size in bytes_of.items():
        idle = now - (entry.stat().st_mtime if entry.exists() else 0)
        if idle > IN_USE and (total > most or idle > MAX_DAYS * DAY):
            _delete(entry, size)
            total -= size  # also where another process has deleted it since


def clear() -> int:
    """Delete all entries; return the number of bytes freed, without those that other processes delete meanwhile."""
    for kind in folder().glob("*"):
        _sweep(kind)
    return sum(_delete(entry, size) for entry, size in sizes().items())


def _sweep(kind: Path) -> None:
    """Delete what killed processes left in the folder of a kind of entries."""
    sweep(kind)
    if (kind / LOCK).exists():
        try:
            with claimed(kind):  # which deletes the lock at its end
                pass
        except EditError:  # a live process holds it
            return


_swept = lru_cache(None)(_sweep)  # once in each process: most commands only read what is there


def _delete(entry: Path, size: int) -> int:
    """Delete an entry; return its size, or 0 if another process deleted it."""
    try:
        if entry.is_dir():
            with beside(entry) as away:  # moved there first, so that no other process sees it half deleted
                os.replace(entry, away / entry.name)
        else:
            entry.unlink()
    except FileNotFoundError:
        return 0
    return size
