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

ROLES = ("first subject", "mid subject", "last subject", "next token", "further tokens", "last token")


@dataclass(frozen=True, eq=False)
class Aggregate:
    """Average effects over the facts that the model knows.

    Attributes:
        roles: names of the rows, those of `ROLES` that occur.
        effects: AIE, [roles, layers], in units of `metric`.
        low: lower ends of the intervals, [roles, layers].
        high: upper ends, [roles, layers].
        counts: number of facts that have a token in the role, [roles].
        total: average total effect (ATE).
        clean: mean of the clean runs.
        corrupted: mean of the corrupted runs.
        facts: number of known facts that were averaged.
        unknown: prompts of the facts that the model does not know, excluded from every average.
        layer: the layer to edit.
        level: confidence level of the intervals.
        kind: what was restored.
        window: layers restored together.
        sever: the kind of modules that could not respond, or None.
        metric: what was measured.
        corruption: corruption of the subject, in words.
        exact: False where the effects are first-order estimates.
    """

    roles: tuple[str, ...]
    effects: Effects
    low: Effects
    high: Effects
    counts: tuple[int, ...]
    total: Interval
    clean: float
    corrupted: float
    facts: int
    unknown: tuple[str, ...]
    layer: int
    level: float
    kind: Kind
    window: int
    sever: Part | None
    metric: Metric
    corruption: str
    exact: bool

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


def role_spans(trace: Trace) -> dict[str, range]:
    """Return the token positions of each role that occurs.

    A subject of one token has only a "last subject"; a prompt that ends there has no "last token".
    """
    start, end = trace.subject
    count = trace.effects.shape[1]
    spans = {
        "first subject": range(start, min(start + 1, end - 1)),
        "mid subject": range(start + 1, end - 1),
        "last subject": range(end - 1, end),
        "next token": range(end, min(end + 1, count - 1)),
        "further tokens": range(end + 1, count - 1),
        "last token": range(max(end, count - 1), count),
    }
    return {role: span for role, span in spans.items() if span}


def by_role(trace: Trace) -> Effects:
    """Average the effects of a fact's tokens in each role, [roles, layers]; NaN for a role that it lacks."""
    effects = np.full((len(ROLES), len(trace.effects)), np.nan)
    for role, span in role_spans(trace).items():
        effects[ROLES.index(role)] = trace.effects[:, span.start : span.stop].mean(1)
    return effects


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
    known = [trace for trace in traces.traces if trace.known]
    unknown = tuple(trace.prompt for trace in traces.traces if not trace.known)
    if not known:
        raise FactError(
            f"the model gives the traced answer by itself for none of {len(unknown)} facts, so there is nothing to "
            "average; check prompts and previous objects"
        )
    one = known[0]
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
        layer=TraceSet(tuple(known)).layer,
        level=level,
        kind=one.kind,
        window=one.window,
        sever=one.sever,
        metric=one.metric,
        corruption=one.corruption,
        exact=one.exact,
    )
