"""The cache of what is kept between runs: files and converted models, by the fingerprint of what they were made from.

An entry is written to a temporary path and moved in one step, so that two processes never see half of one. The cache is
bounded (`Limits`): after a write, entries that were not used for long are deleted, then the least recently used ones
until the rest fits. Its time of modification says when an entry was used; one that was used within `IN_USE` stays,
since a process may still read it.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from platformdirs import user_cache_path

from ffedit.errors import EditError
from ffedit.files.atomic import write_file
from ffedit.files.placing import LOCK, beside, claimed, sweep

DAY = 24 * 60 * 60
IN_USE = DAY  # seconds
UNITS = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


@dataclass(frozen=True)
class Limits:
    """Bounds of the cache."""

    size: float = 20e9  # bytes of all entries
    age: float = 90  # days since an entry was last used

    @classmethod
    def set(cls) -> Limits:
        """Return the limits that `FFEDIT_CACHE_MAX_SIZE` (such as 20GB) and `FFEDIT_CACHE_MAX_AGE` (days) set."""
        size, age = (os.environ.get(f"FFEDIT_CACHE_MAX_{name}") for name in ("SIZE", "AGE"))
        try:
            return cls(parse_size(size) if size else cls.size, parse_days(age) if age else cls.age)
        except ValueError as error:
            raise EditError(f"FFEDIT_CACHE_MAX_SIZE and FFEDIT_CACHE_MAX_AGE: {error}") from error

    def __str__(self) -> str:
        return f"at most {self.size / 1e9:g} GB, entries unused for {self.age:g} days are deleted"


def parse_size(text: str) -> float:
    """Parse a number of bytes such as 500MB or 20GB; ValueError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kMGT]?)B?", text)
    if match is None:
        raise ValueError(f"{text!r} is not a size; a size such as 500MB or 20GB was expected")
    return float(match[1]) * UNITS[match[2]]


def parse_days(text: str) -> float:
    """Parse a number of days that is not negative; ValueError for anything else."""
    if re.fullmatch(r"\d+(\.\d+)?", text) is None:
        raise ValueError(f"{text!r} is not a number of days; a number such as 30 was expected")
    return float(text)


def folder() -> Path:
    """Return `FFEDIT_CACHE`, or `ffedit` in the platform's cache folder; EditError for a user without a home."""
    try:
        return Path(os.environ.get("FFEDIT_CACHE") or user_cache_path("ffedit", appauthor=False))
    except RuntimeError as error:
        raise EditError(f"no folder for the cache ({error}); name one in FFEDIT_CACHE") from error


def path(kind: str, key: str, suffix: str) -> Path:
    """Return the path of an entry of some kind, whether it exists or not; one that exists counts as used now."""
    entry = folder() / kind / f"{key}{suffix}"
    _swept(entry.parent)
    try:
        os.utime(entry)
    except OSError:  # there is none, or it is another user's
        return entry
    return entry


def write(target: Path, save: Callable[[Path], object]) -> None:
    """Let `save` write a file that is then moved to `target`; a cache that cannot be written is ignored.

    A full or read-only disk costs the next run some seconds, and must not cost this one its result.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_file(target, save)
        prune(Limits.set(), target.stat().st_mtime)
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


def prune(limits: Limits, now: float | None = None) -> int:
    """Delete the entries that `limits` leave no room for, the least recently used first; return the bytes freed.

    `now` is a time of the file system's, by default this machine's: a file server's clock may be another, and where
    they are days apart, entries would be deleted that were used a moment ago.
    """
    for kind in folder().glob("*"):
        _sweep(kind)
    bytes_of, freed = sizes(), 0
    total, now = sum(bytes_of.values()), time.time() if now is None else now
    for entry, size in bytes_of.items():
        idle = now - (entry.stat().st_mtime if entry.exists() else 0)
        if idle > IN_USE and (total - freed > limits.size or idle > limits.age * DAY):
            freed += _delete(entry, size)
    return freed


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
            with claimed(kind):  # whose end deletes the lock
                pass
        except EditError:  # a live process's
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
