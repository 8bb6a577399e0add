"""How sure is a mean over facts? 95 % bootstrap intervals, percentile, over facts (Efron 1979).

Facts are drawn with all their prompts (`ffedit.bootstrap`): prompts of one fact are no independent samples. Before and
after an edit, and two methods, are compared on the same draws: the interval of the difference is paired. The harmonic
score is computed anew in every draw from that draw's means.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ffedit import bootstrap
from ffedit.bootstrap import Array, Interval

SEED, DRAWS = 0, 2000
LEVELS = (2.5, 97.5)
# The means that the harmonic score is made of.
PARTS = ("efficacy", "paraphrase", "specificity")


def interval(values: Sequence[float | None], seed: int = SEED, draws: int = DRAWS) -> Interval | None:
    """Of the mean of what was measured; None where fewer than two facts were.

    Args:
        values: one per fact; None where there was nothing to measure.
        seed: of the draws.
        draws: how many.
    """
    return intervals({"": values}, seed, draws).get("")


def paired(
    before: Sequence[float | None], after: Sequence[float | None], seed: int = SEED, draws: int = DRAWS
) -> Interval | None:
    """Of the mean of after − before over the facts where both were measured; None for fewer than two.

    Raises:
        ValueError: the two are not of the same facts.
    """
    pairs = zip(before, after, strict=True)
    return interval([None if a is None or b is None else b - a for a, b in pairs], seed, draws)


def intervals(columns: dict[str, Sequence[float | None]], seed: int = SEED, draws: int = DRAWS) -> dict[str, Interval]:
    """Of several measures of the same facts, on the same draws; "score" is made of its parts where they are there.

    Args:
        columns: by name, one value per fact; all of one length.
        seed: of the draws.
        draws: how many.
    """
    kept = {name: array for name, values in columns.items() if (array := _array(values)) is not None}
    kept.pop("score", None)
    if not kept:
        return {}
    means = _means(np.stack(list(kept.values()), 1), seed, draws)
    drawn = dict(zip(kept, means.T, strict=True))
    found = {name: _interval(float(np.nanmean(kept[name])), drawn[name]) for name in kept}
    if all(part in kept for part in PARTS):
        found["score"] = _interval(_harmonic([found[p].mean for p in PARTS]), _harmonics([drawn[p] for p in PARTS]))
    return found


def changes(
    before: dict[str, Sequence[float | None]],
    after: dict[str, Sequence[float | None]],
    seed: int = SEED,
    draws: int = DRAWS,
) -> dict[str, Interval]:
    """Of after − before, by name, paired by fact; of "score", the difference of two harmonic means of one draw."""
    both = [name for name in before if name in after and name != "score"]
    paired_columns: dict[str, Sequence[float | None]] = {
        name: [None if a is None or b is None else b - a for a, b in zip(before[name], after[name], strict=True)]
        for name in both
    }
    found = intervals(paired_columns, seed, draws)
    sides = [[_array(side.get(part, ())) for part in PARTS] for side in (before, after)]
    if all(array is not None for side in sides for array in side):
        old, new = (np.stack([array for array in side if array is not None], 1) for side in sides)
        drawn = [_harmonics(list(_means(side, seed, draws).T)) for side in (old, new)]
        mean = _harmonic(list(np.nanmean(new, 0))) - _harmonic(list(np.nanmean(old, 0)))
        found["score"] = _interval(mean, drawn[1] - drawn[0])
    return found


def _array(values: Sequence[float | None]) -> Array | None:
    """NaN for what was not measured; None where fewer than two facts were."""
    array = np.array([np.nan if value is None else value for value in values], dtype=np.float64)
    return array if int((~np.isnan(array)).sum()) > 1 else None


def _means(values: Array, seed: int, draws: int) -> Array:
    """Means over facts of `values` [facts, measures] in each draw, [draws, measures]; NaN where no fact was drawn."""
    there = ~np.isnan(values)
    filled = np.where(there, values, 0.0)
    with np.errstate(invalid="ignore"):
        return np.concatenate([(w @ filled) / (w @ there) for w in bootstrap.draws(len(values), seed, draws)])


def _harmonic(means: Sequence[float]) -> float:
    return float(_harmonics([np.array([mean]) for mean in means])[0])


def _harmonics(means: Sequence[Array]) -> Array:
    """Harmonic means, entry by entry; 0 where one is 0."""
    with np.errstate(divide="ignore"):
        return np.asarray(len(means) / sum(1 / mean for mean in means))


def _interval(mean: float, drawn: Array) -> Interval:
    low, high = np.nanpercentile(drawn, LEVELS)
    return Interval(mean, float(low), float(high))
