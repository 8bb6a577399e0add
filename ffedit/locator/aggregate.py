"""Average traces over facts, by the role of a token: the average indirect effects (AIE) of ROME's figure 2.

Prompts differ in length and wording; what they share is the roles of their tokens (arXiv 2202.05262, figure 2). Each
fact counts once in every role that it has, with the mean over its tokens in that role. Intervals are percentiles of a
bootstrap over facts. Facts whose answer the model does not generate cannot be traced: they are counted and named, and
excluded from every average.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ffedit.algebra import bootstrap
from ffedit.algebra.bootstrap import Interval, percentile_interval
from ffedit.errors import FactError
from ffedit.locator.result import Effects, Kind, Metric, Part, Trace, TraceSet, save_arrays

SETTINGS = ("kind", "window", "sever", "metric", "corruption", "exact")
ROLES = ("first subject", "mid subject", "last subject", "next token", "further tokens", "last token")


@dataclass(frozen=True, eq=False)
class Aggregate:
    """Average effects over the facts that the model knows."""

    roles: tuple[str, ...]  # names of the rows, those of `ROLES` that occur
    effects: Effects  # AIE, [roles, layers], in units of `metric`
    low: Effects  # lower ends of the intervals, [roles, layers]
    high: Effects  # upper ends, [roles, layers]
    counts: tuple[int, ...]  # number of facts that have a token in the role, [roles]
    total: Interval  # average total effect (ATE)
    clean: float  # mean of the clean runs
    corrupted: float  # mean of the corrupted runs
    facts: int  # number of known facts that were averaged
    unknown: tuple[str, ...]  # prompts of the facts that the model does not know, excluded from every average
    layer: int  # the layer to edit
    level: float  # confidence level of the intervals
    kind: Kind  # what was restored
    window: int  # layers restored together
    sever: Part | None  # the kind of modules that could not respond, or None
    metric: Metric  # what was measured
    corruption: str  # corruption of the subject, in words
    exact: bool  # False where the effects are first-order estimates

    def to_dict(self) -> dict[str, Any]:
        """Return plain lists and numbers; `effects`, `low` and `high` have the axes (role, layer)."""
        return {name: v.tolist() if isinstance(v, np.ndarray) else v for name, v in asdict(self).items()}

    def save(self, path: str | Path) -> None:
        """Write the numbers as `.npz`; the array `axes` names the axes of `effects`, `low` and `high`."""
        values = {**self.to_dict(), "total": [self.total.mean, self.total.low, self.total.high]}
        save_arrays(Path(path), ("role", "layer"), values)


def rank_correlation(first: ArrayLike, second: ArrayLike) -> float | None:
    """Compute Spearman's rank correlation, ties with their mean rank; None if one side is constant."""
    ranks = []
    for values in (first, second):
        _, rank_of, counts = np.unique(np.asarray(values, float), return_inverse=True, return_counts=True)
        ranks.append((np.cumsum(counts) - (counts - 1) / 2)[rank_of])
    if any(np.ptp(rank) == 0 for rank in ranks):
        return None
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def by_role(trace: Trace) -> Effects:
    """Average the effects of a fact's tokens in each role, [roles, layers]; NaN for a role that it lacks.

    A subject of one token has only a "last subject"; a prompt that ends there has no "last token".
    """
    start, end = trace.subject
    count = trace.effects.shape[1]
    spans = (  # in the order of `ROLES`
        slice(start, min(start + 1, end - 1)),
        slice(start + 1, end - 1),
        slice(end - 1, end),
        slice(end, min(end + 1, count - 1)),
        slice(end + 1, count - 1),
        slice(max(end, count - 1), count),
    )
    empty = np.full(len(trace.effects), np.nan)
    return np.stack([trace.effects[:, span].mean(1) if span.start < span.stop else empty for span in spans])


def aggregate(traces: TraceSet, resamples: int = 1000, level: float = 0.95, seed: int = 0) -> Aggregate:
    """Average `traces` over the facts that the model knows.

    Args:
        traces: of at least one fact, all with the same settings.
        resamples: of the bootstrap over facts.
        level: of the intervals.
        seed: of the bootstrap.

    Raises:
        FactError: the model knows none of the facts, or only some layers were traced.
    """
    if any(np.isnan(trace.effects).any() for trace in traces.traces):
        raise FactError("only some layers were traced; averages are over all layers: trace without layers")
    known = traces.known
    unknown = tuple(trace.prompt for trace in traces.traces if not trace.known)
    if not known:
        raise FactError(
            f"the model gives the traced answer by itself for none of {len(unknown)} facts, so there is nothing to "
            "average; check prompts and previous objects"
        )
    totals = np.array([trace.total for trace in known])
    values = np.stack([by_role(trace) for trace in known])  # [facts, roles, layers]
    occurs = np.asarray(~np.isnan(values[:, :, 0]))
    rows = [int(i) for i in np.flatnonzero(occurs.any(axis=0))]
    sums, there = np.where(occurs[:, rows, None], values[:, rows], 0.0), occurs[:, rows].astype(float)
    draws = np.concatenate(list(bootstrap.draws(len(known), seed, resamples)))
    weights = there.T @ draws.T  # [roles, resamples]
    means = np.einsum("bf,frl->brl", draws, sums) / np.where(weights, weights, np.nan).T[:, :, None]
    tails = [50 * (1 - level), 50 * (1 + level)]
    low, high = np.nanpercentile(means, tails, axis=0)
    return Aggregate(
        roles=tuple(ROLES[i] for i in rows),
        effects=sums.sum(0) / there.sum(0)[:, None],
        low=low,
        high=high,
        counts=tuple(int(n) for n in there.sum(0)),
        total=percentile_interval(float(totals.mean()), draws @ totals / len(known), tails),
        clean=float(np.mean([trace.clean for trace in known])),
        corrupted=float(np.mean([trace.corrupted for trace in known])),
        facts=len(known),
        unknown=unknown,
        layer=TraceSet(known).layer,
        level=level,
        **{name: getattr(known[0], name) for name in SETTINGS},
    )
