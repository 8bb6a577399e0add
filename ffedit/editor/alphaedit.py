"""Null-space editing: change only what ordinary text hardly uses, and keep what earlier edits stored.

Fang et al. 2025, arXiv 2410.02355. C says which directions may be used; within them each costs the same. Besides the
keys of earlier edits, those of the facts' own texts are kept (`algebra.steadied`), weighted as everywhere.
"""

from __future__ import annotations

from functools import partial

import torch

from ffedit.algebra import factor, null_space
from ffedit.editor.batch import Problem, write_batch
from ffedit.lowrank import LowRank

# Of the mean eigenvalue: makes the own texts' second moment, which may lack directions, positive definite.
RIDGE = 1e-9


def solve(problem: Problem) -> LowRank:
    """argmin_Δ ‖(W + Δ) K − V‖² + ‖Δ K_p‖² + λ ‖Δ‖² among Δ = Δ P."""
    U = problem.moments.unused(problem.config.null_share).to(problem.W.device)
    kept = problem.kept
    if problem.config.steady:
        ridge = RIDGE * problem.own.diagonal().mean() * torch.eye(len(problem.own)).to(problem.own)
        kept = torch.cat([kept, factor(problem.own + ridge)], 1)
    return null_space(problem.W, problem.K, problem.V, U, problem.config.give_up, kept)


alphaedit = partial(write_batch, "alphaedit", solve)
