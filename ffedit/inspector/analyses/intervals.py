"""95% confidence intervals of a layer's numbers, over keys or over positions.

Percentile bootstrap (Efron 1979); for proportions, where all values are 0 or 1, Wilson's score interval (1927).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ffedit.algebra.bootstrap import wilson

SEED, DRAWS = 0, 500
LEVELS = (2.5, 97.5)
Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Interval:
    """A number, the ends of its interval, and the number of values behind it."""

    value: float
    low: float
    high: float
    count: int


@lru_cache(maxsize=4)
def _draws(count: int) -> Array:
    return np.random.default_rng(SEED).integers(0, count, (DRAWS, count), dtype=np.int32)


def interval(values: ArrayLike, statistic: Callable[..., Any] = np.mean) -> Interval | None:
    """Return `statistic` (np.mean, np.median) of values [n] that are not NaN, with its interval; None without any."""
    found = np.asarray(values, dtype=np.float64)
    found = found[~np.isnan(found)]
    if not len(found):
        return None
    if statistic is np.mean and np.isin(found, (0.0, 1.0)).all():
        share = float(found.mean())
        return Interval(share, *wilson(share, len(found)), len(found))
    low, high = np.percentile(statistic(found[_draws(len(found))], axis=1), LEVELS)
    return Interval(float(statistic(found)), float(low), float(high), len(found))
