"""Null-space editing: change only what ordinary text hardly uses, and keep what earlier edits stored.

Fang et al. 2025, arXiv 2410.02355. C determines which directions may be used; within them all cost the same, but
for the keys of earlier edits, and the spread of the facts' keys over contexts (`algebra.updates.context_spread`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ffedit.algebra.linalg import blocks_of, diagonal
from ffedit.algebra.low_rank import LowRank
from ffedit.algebra.updates import null_space, projector
from ffedit.editor.config import check_numbers
from ffedit.editor.job import Method, Problem
from ffedit.editor.methods.memit import PAPER_MEMIT
from ffedit.editor.statistics import cached_eigh

# Share of the mean eigenvalue, added to the contexts' second moment, which may lack directions, so that it is positive
# definite. It bounds Δ along these directions where `AlphaEditConfig.ridge` is 0.
RIDGE = 1e-9


@dataclass(frozen=True)
class AlphaEditConfig:
    """Numbers of AlphaEdit's solution.

    Attributes:
        ridge: share of a fact that is given up for a smaller Δ: λ relative to the keys' part in the null space.
        null_share: largest share of trace(C) that the null space holds.
    """

    ridge: float = 0.001
    null_share: float = 0.1

    def __post_init__(self) -> None:
        check_numbers("alphaedit", self, weights=("ridge", "null_share"))


def solve(problem: Problem) -> LowRank:
    """Return argmin_Δ ‖(W + Δ) K − V‖² + ‖Δ K_p‖² + tr(Δ S Δᵀ) + λ ‖Δ‖² among Δ = Δ P, with S the contexts' spread."""
    spread, device, numbers = None, problem.W.device, problem.config.of("alphaedit", AlphaEditConfig)
    if problem.config.key.context_weight:
        blocks = blocks_of(problem.own)
        small = RIDGE * float(torch.cat([block.diagonal() for block in blocks]).mean())
        spread = diagonal([block + small * torch.eye(len(block)).to(block) for block in blocks])
    bases = [projector(*cached_eigh(moments.C, device), numbers.null_share).to(device) for moments in problem.moments]
    return null_space(problem.W, problem.K, problem.V, diagonal(bases), numbers.ridge, problem.kept, spread)


# AlphaEdit takes MEMIT's procedure for v*, and so its numbers; its threshold of eigenvalues (0.02) is one model's, so
# the default `null_share` is kept.
ALPHAEDIT = Method(
    "alphaedit",
    solves="min ‖(W+Δ)K − V‖² + ‖ΔK_p‖² + λ‖Δ‖², Δ = ΔP",
    choose="a few batches, one after another: earlier edits are kept",
    source="Fang et al. 2025, arXiv 2410.02355",
    solve=solve,
    layers=True,
    preserves=True,
    names=False,  # its directions are those that text hardly uses, and within them all cost the same
    numbers=AlphaEditConfig,
    presets={"paper": PAPER_MEMIT},
)
