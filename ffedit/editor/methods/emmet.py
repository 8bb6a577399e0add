"""Equality-constrained batch editing: every fact gets its value exactly, at the least cost to other text.

Gupta et al. 2024, arXiv 2403.14236. ROME for several facts at once; they must not outnumber d_ff.
"""

from __future__ import annotations

from ffedit.algebra.low_rank import LowRank
from ffedit.algebra.updates import equality
from ffedit.editor.job import Problem
from ffedit.editor.methods.method import Method
from ffedit.editor.methods.published import PAPER_MEMIT


def solve(problem: Problem) -> LowRank:
    """Return the Δ of smallest C-norm with (W + Δ) K = V and Δ K_p = 0."""
    return equality(problem.W, problem.K, problem.V, problem.metric, problem.kept)


# EMMET takes MEMIT's procedure for v*, and so its numbers.
EMMET = Method(
    "emmet",
    solves="(W+Δ)K = V for all facts at once, Δ of smallest C-norm",
    choose="a batch that must hold exactly, of fewer facts than d_ff",
    source="Gupta et al. 2024, arXiv 2403.14236",
    solve=solve,
    exact=True,
    layers=True,
    presets={"paper": PAPER_MEMIT},
)
