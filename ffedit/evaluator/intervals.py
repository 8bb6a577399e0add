"""95 % confidence intervals of means over facts, with subjects as the sampling units.

- A proportion, with one outcome of 0 or 1 for each fact (efficacy, generation): Wilson's score interval (1927),
  with the number of subjects as the sample size.
- Any other mean: the percentile bootstrap over subjects (Efron 1979). Shares (0 to 1, where a fact has several prompts)
  and their paired differences (−1 to 1) also follow the rule for unseen facts (`ffedit.algebra.bootstrap`).
- The harmonic score: the bootstrap. Where all draws agree, the interval from the harmonic mean of its parts' lower ends
  to that of their upper ends; for its change, the rule for unseen facts.

Subjects are drawn with all their facts, and facts with all their prompts: neither the facts of one subject nor the
prompts of one fact are independent samples. Before and after an edit, and two methods, are compared on the same draws:
the interval of the difference is paired. The harmonic score is computed anew in every draw from that draw's means.

Without subjects, each fact is a sampling unit of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np

from ffedit.algebra.bootstrap import (
    Array,
    Interval,
    clusters_of,
    mean_draws,
    mean_interval,
    percentile_interval,
    with_unseen,
)
from ffedit.evaluator.metrics import METRICS, SCORE_PARTS

SEED, DRAWS = 0, 2000
# The values of each score by its name, one per fact; None where there was nothing to measure.
Columns: TypeAlias = Mapping[str, Sequence[float | None]]


def intervals(
    columns: Columns, bounds: tuple[float, float] = (0.0, 1.0), subjects: Sequence[str] | None = None
) -> dict[str, Interval]:
    """Return the intervals of several scores of the same facts, on the same draws.

    `columns` has, by name of the score, one value per fact; `subjects` has each fact's subject. "score" is computed
    from `SCORE_PARTS` if all of them were measured. Shares, or differences of shares, lie within `bounds`.
    """
    clusters = None if subjects is None else clusters_of(subjects)
    kept = {name: array for name, values in columns.items() if (array := _array(values)) is not None}
    kept.pop("score", None)
    if not kept:
        return {}
    means = mean_draws(np.stack(list(kept.values()), 1), SEED, DRAWS, clusters)
    drawn = dict(zip(kept, means.T, strict=True))
    shares = {name for name in kept if METRICS[name.partition("/")[0]].unit == "share"}
    bounded = {
        name: mean_interval(kept[name], drawn[name], bounds if name in shares else None, clusters) for name in kept
    }
    if all(part in kept for part in SCORE_PARTS):
        mean, low, high = (
            float(_harmonic([getattr(bounded[part], name) for part in SCORE_PARTS])) for name in ("mean", "low", "high")
        )
        score = percentile_interval(mean, _harmonic([drawn[part] for part in SCORE_PARTS]))
        bounded["score"] = Interval(mean, low, high) if score.is_point else score
    return bounded


def changes(before: Columns, after: Columns, subjects: Sequence[str] | None = None) -> dict[str, Interval]:
    """Return the intervals of after − before by name, paired by fact; for "score", of the difference of harmonic means.

    In each draw, both harmonic means are of the same facts.
    """
    shared = [name for name in before if name in after and name != "score"]
    by_name = {name: _differences(before[name], after[name]) for name in shared}
    differences = intervals(by_name, bounds=(-1.0, 1.0), subjects=subjects)
    clusters = None if subjects is None else clusters_of(subjects)
    differences.pop("score", None)
    sides = [[_array(side.get(part, ())) for part in SCORE_PARTS] for side in (before, after)]
    if all(array is not None for side in sides for array in side):
        old, new = (np.stack([array for array in side if array is not None], 1) for side in sides)
        drawn = [_harmonic(list(mean_draws(side, SEED, DRAWS, clusters).T)) for side in (old, new)]
        mean = float(_harmonic(list(np.nanmean(new, 0)))) - float(_harmonic(list(np.nanmean(old, 0))))
        score = percentile_interval(mean, drawn[1] - drawn[0])
        labels = np.arange(len(old)) if clusters is None else clusters
        # A mean is no more certain than its part that was measured on the fewest.
        units = min(len(np.unique(labels[measured])) for measured in ~np.isnan(old + new).T)
        differences["score"] = with_unseen(score, units, (-1.0, 1.0)) if score.is_point else score
    return differences


def _differences(before: Sequence[float | None], after: Sequence[float | None]) -> list[float | None]:
    return [None if a is None or b is None else b - a for a, b in zip(before, after, strict=True)]


def _array(values: Sequence[float | None]) -> Array | None:
    """Return the values as float64, NaN where not measured; None where fewer than two facts were measured."""
    array = np.array([np.nan if value is None else value for value in values], dtype=np.float64)
    return array if int((~np.isnan(array)).sum()) > 1 else None


def _harmonic(means: Sequence[Array] | Sequence[float]) -> Array:
    """Return the harmonic mean, entry by entry; 0 where one of the values is 0."""
    with np.errstate(divide="ignore"):
        return np.asarray(len(means) / sum(1 / np.asarray(mean) for mean in means))
