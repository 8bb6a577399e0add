"""Callback through which long computations report progress; the user interface shows it as a bar."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

# (stage, steps done, steps in total)
Progress: TypeAlias = Callable[[str, int, int], None]


def silent(stage: str, done: int, total: int) -> None:
    """Ignore the progress: the default callback."""


def part(progress: Progress, first: int, count: int, whole: int) -> Progress:
    """Return a callback for `count` items of a stage that has `whole` of equal length, after its `first` ones."""
    return lambda stage, done, total: progress(stage, first * total + count * done, whole * total)
