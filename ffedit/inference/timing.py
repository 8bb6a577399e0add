"""Timing of single operations on this machine."""

from __future__ import annotations

import timeit
from collections.abc import Callable


def least_seconds(work: Callable[[], object], count: int = 3) -> float:
    """Return the seconds that `work` takes once it has run: the least of `count`.

    A device works on while Python goes on: work on one has to end with a number that is read.
    """
    work()
    return min(timeit.repeat(work, number=1, repeat=count))
