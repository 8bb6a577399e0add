"""How sure is a mean over facts? The bootstrap (Efron 1979) draws facts with replacement and averages each draw.

A draw is the vector of how often each fact was drawn, so that a mean of a draw is one product. What is compared on the
same draws is paired.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

# Entries of the draws that are held at once.
AT_ONCE = 2**24

Array: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


@dataclass(frozen=True)
class Interval:
    """A mean over facts and its bootstrap interval, in the unit of what was averaged."""

    mean: float
    low: float
    high: float


def draws(facts: int, seed: int, count: int) -> Iterator[Array]:
    """How often each fact is drawn, [some draws, facts], a part of `count` draws at a time; the same for one seed."""
    generator, size = np.random.default_rng(seed), max(1, AT_ONCE // facts)
    for first in range(0, count, size):
        some = min(size, count - first)
        yield generator.multinomial(facts, np.full(facts, 1 / facts), size=some).astype(np.float64)
