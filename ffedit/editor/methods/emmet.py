"""Equality-constrained batch editing: every fact gets its value exactly, at the least cost to other text.

Gupta et al. 2024, arXiv 2403.14236. ROME for several facts at once; they must not outnumber d_ff.
"""

from __future__ import annotations

from functools import partial

from ffedit.algebra.low_rank import LowRank
from ffedit.algebra.updates import equality
from ffedit.editor.solve import Problem, Solver, write_batch


def solve(problem: Problem) -> LowRank:
    """(W + Δ) K = V and Δ K_p = 0, of smallest C-norm."""
    return equality(problem.W, problem.K, problem.V, problem.C, problem.kept)


SOLVER = Solver("emmet", solve, exact=True)
emmet = partial(write_batch, SOLVER)
