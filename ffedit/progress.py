"""One callback through which long work says how far it is; the surface turns it into a bar."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

# (what is being done, and after a colon how it goes; steps done; steps in all)
Progress: TypeAlias = Callable[[str, int, int], None]


def silent(stage: str, done: int, total: int) -> None:
    """Say nothing."""
