"""95% confidence intervals of a layer's numbers, over keys or over positions (`ffedit.algebra.bootstrap`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ffedit.algebra import bootstrap

SEED, DRAWS = 0, 500


@dataclass(frozen=True)
class CountedInterval(bootstrap.Interval):
    """A number, the ends of its interval, and the number of values behind it."""

    count: int


def interval(values: ArrayLike, statistic: Callable[..., Any] = np.mean) -> CountedInterval | None:
    """Return `statistic` (np.mean, np.median) of values [n] that are not NaN, with its interval; None without any."""
    array = np.asarray(values, dtype=np.float64)
    array = array[~np.isnan(array)]
    if not len(array):
        return None
    bounds = bootstrap.statistic_interval(array, statistic, SEED, DRAWS)
    return CountedInterval(bounds.mean, bounds.low, bounds.high, len(array))
