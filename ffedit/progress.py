"""Callback through which long computations report progress; the user interface shows it as a bar."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

# (stage, steps done, steps in total)
Progress: TypeAlias = Callable[[str, int, int], None]


def silent(stage: str, done: int, total: int) -> None:
    """Ignore the progress: the default callback."""
