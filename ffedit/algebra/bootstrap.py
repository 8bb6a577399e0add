"""95 % confidence intervals: the percentile bootstrap (Efron 1979), and Wilson's score interval (1927) of proportions.

A draw of facts with replacement is the vector of how often each fact was drawn, so the mean of a draw is one product.
Quantities compared on the same draws are paired. Facts that are not independent, as those of one subject, form a
cluster and are drawn together (Davison and Hinkley 1997, section 3.8); Wilson's interval and the rule below count a
cluster once.

Where all facts agree the bootstrap sees no spread: an end of a share's interval that no fact lies beyond does not
account for unseen facts. It is moved outwards, as if a share z² / (n + z²) of facts, the largest compatible with none
in n, lay at the end of the range: 30 times 1 gives [.89, 1], as Wilson does, and 30 times no change [−.11, .11].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

# Entries of the draws that are held in memory at once.
AT_ONCE = 2**24
# 97.5 % quantile of the standard normal distribution, and the percentiles of the draws that bound the interval.
Z, LEVELS = 1.959963984540054, (2.5, 97.5)

Array: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
# Cluster of each fact, [facts], numbered from 0.
Clusters: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


@dataclass(frozen=True)
class Interval:
    """Mean (or another statistic) over facts and its 95 % interval, in the unit of the averaged quantity."""

    mean: float
    low: float
    high: float

    @property
    def is_point(self) -> bool:
        """True if both ends agree up to a rounding: draws of equal values show no spread, so there is no interval."""
        return math.isclose(self.low, self.high, rel_tol=1e-9, abs_tol=1e-12)

    def ends(self, words: Callable[[float], str]) -> str:
        """Return "[low, high]", each by `words`; "" where both read the same: draws of equal values show no spread."""
        low, high = words(self.low), words(self.high)
        return "" if low == high else f"[{low}, {high}]"


def percentile_interval(mean: float, drawn: Array, levels: Sequence[float] = LEVELS) -> Interval:
    """Return the percentile interval of a statistic, `mean`, from its values [draws] in the draws; NaN do not count."""
    low, high = np.nanpercentile(drawn, levels)
    return Interval(mean, float(low), float(high))


def wilson(share: float, count: int) -> tuple[float, float]:
    """Return the 95 % score interval (Wilson 1927) of a proportion: `share` of `count` independent outcomes."""
    weight = Z**2 / count
    middle = (share + weight / 2) / (1 + weight)
    half = Z / (1 + weight) * (share * (1 - share) / count + weight / (4 * count)) ** 0.5
    return 0.0 if share == 0 else max(0.0, middle - half), 1.0 if share == 1 else min(1.0, middle + half)


def clusters_of(labels: Sequence[str]) -> Clusters:
    """Return the cluster of each label, [facts]: equal labels share one; numbered in order of first appearance."""
    numbers = {label: i for i, label in enumerate(dict.fromkeys(labels))}
    return np.array([numbers[label] for label in labels], dtype=np.int64)


def draws(facts: int, seed: int, count: int, clusters: Clusters | None = None) -> Iterator[Array]:
    """Yield how often each fact is drawn, [draws, facts], a part of the `count` draws at a time; the same for a seed.

    With `clusters`, as many clusters are drawn as there are, each with all its facts.
    """
    generator, size = np.random.default_rng(seed), max(1, AT_ONCE // facts)
    units = facts if clusters is None else int(clusters.max()) + 1
    for first in range(0, count, size):
        drawn = generator.multinomial(units, np.full(units, 1 / units), size=min(size, count - first))
        yield (drawn if clusters is None else drawn[:, clusters]).astype(np.float64)


def mean_draws(values: Array, seed: int, count: int, clusters: Clusters | None = None) -> Array:
    """Return the means over facts of `values` [facts, measures] in `count` draws; NaN where none was measured."""
    measured = ~np.isnan(values)
    filled = np.where(measured, values, 0.0)
    with np.errstate(invalid="ignore"):
        return np.concatenate([(w @ filled) / (w @ measured) for w in draws(len(values), seed, count, clusters)])


def mean_interval(
    values: Array, drawn: Array, bounds: tuple[float, float] | None, clusters: Clusters | None = None
) -> Interval:
    """Return the interval of the mean of `values` [facts], NaN where not measured, from its means in the draws.

    It is Wilson's for outcomes of 0 and 1; else the percentiles of the draws, moved outwards for unseen facts within
    `bounds`, the range of shares or of their differences.
    """
    is_measured = ~np.isnan(values)
    measured = values[is_measured]
    units = len(measured) if clusters is None else len(np.unique(clusters[is_measured]))
    interval = percentile_interval(float(measured.mean()), drawn)
    if bounds == (0.0, 1.0) and np.isin(measured, bounds).all():
        return Interval(interval.mean, *wilson(interval.mean, units))
    if bounds is None:
        return interval
    tolerance = 1e-9  # means of equal values may differ by a rounding
    reached = interval.low <= measured.min() + tolerance, interval.high >= measured.max() - tolerance
    return with_unseen(interval, units, bounds, reached)


def with_unseen(
    interval: Interval, units: int, bounds: tuple[float, float], reached: tuple[bool, bool] = (True, True)
) -> Interval:
    """Move the ends that no fact lies beyond, as `reached` says, outwards for unseen facts at the `bounds`.

    `units` is the number of facts or clusters that were seen.
    """
    share = Z**2 / (units + Z**2)  # Wilson's upper end of 0 of `units`
    return Interval(
        interval.mean,
        interval.low + share * (bounds[0] - interval.low) if reached[0] else interval.low,
        interval.high + share * (bounds[1] - interval.high) if reached[1] else interval.high,
    )
