"""Confidence of a mean over facts. The bootstrap (Efron 1979) draws facts with replacement and averages each draw.

A draw is the vector of how often each fact was drawn, so the mean of a draw is one product. Quantities compared on the
same draws are paired. Where all facts agree the bootstrap sees no spread: there a bound from the binomial distribution
(Wilson 1927) limits what facts that were not drawn may still be.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

# Entries of the draws that are held in memory at once.
AT_ONCE = 2**24

# 97.5 % quantile of the standard normal distribution.
Z = 1.959963984540054

Array: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


@dataclass(frozen=True)
class Interval:
    """Mean over facts and its 95 % interval, in the unit of the averaged quantity."""

    mean: float
    low: float
    high: float


def wilson(share: float, count: int) -> tuple[float, float]:
    """Return the 95 % score interval (Wilson 1927) of a proportion: `share` of `count` independent outcomes."""
    weight = Z**2 / count
    middle = (share + weight / 2) / (1 + weight)
    half = Z / (1 + weight) * (share * (1 - share) / count + weight / (4 * count)) ** 0.5
    return 0.0 if share == 0 else max(0.0, middle - half), 1.0 if share == 1 else min(1.0, middle + half)


def unseen(count: int) -> float:
    """Return the largest share of facts that may be of a kind not seen among `count`: Wilson's upper end of 0."""
    return Z**2 / (count + Z**2)


def draws(facts: int, seed: int, count: int) -> Iterator[Array]:
    """Yield how often each fact is drawn, [draws, facts], a part of `count` draws at a time; the same for one seed."""
    generator, size = np.random.default_rng(seed), max(1, AT_ONCE // facts)
    for first in range(0, count, size):
        some = min(size, count - first)
        yield generator.multinomial(facts, np.full(facts, 1 / facts), size=some).astype(np.float64)
