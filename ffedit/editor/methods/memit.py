"""Mass-editing memory: thousands of facts by least squares, over one layer or several.

Meng et al. 2023, arXiv 2210.07229. What a fact may give up to ordinary text is relative to the facts' own keys
(`EditConfig.memit_ridge`), where the published λ is a number for one model.
"""

from __future__ import annotations

from functools import partial

from ffedit.algebra.low_rank import LowRank
from ffedit.algebra.updates import least_squares
from ffedit.editor.solve import Problem, Solver, write_batch


def solve(problem: Problem) -> LowRank:
    """argmin_Δ ‖(W + Δ) K − V‖² + ‖Δ K_p‖² + λ ‖Δ‖_C²."""
    return least_squares(problem.W, problem.K, problem.V, problem.C, problem.config.memit_ridge, problem.kept)


SOLVER = Solver("memit", solve)
memit = partial(write_batch, SOLVER)
