"""Mass-editing memory: thousands of facts by least squares, over one layer or several.

Meng et al. 2023, arXiv 2210.07229. What a fact may give up to ordinary text is relative to the facts' own keys
(`EditConfig.memit_ridge`), where the published λ is a number for one model.
"""

from __future__ import annotations

from dataclasses import replace

from ffedit.algebra.low_rank import LowRank
from ffedit.algebra.updates import least_squares
from ffedit.editor.methods.method import Method
from ffedit.editor.methods.rome import PAPER
from ffedit.editor.solve import Problem, Solver

# Those of MEMIT's authors for GPT-J (arXiv 2210.07229, appendix, and the parameters that came with it). Not as
# published beside the above: their δ is bounded by 0.75 of the residual stream, here as ROME's; their λ (15,000 for
# GPT-J, times E[k kᵀ]) is one model's, here `memit_ridge` is relative to the keys.
PAPER_MEMIT = replace(PAPER, contexts=5, context_tokens=(10,), steps=25)


def solve(problem: Problem) -> LowRank:
    """Return argmin_Δ ‖(W + Δ) K − V‖² + ‖Δ K_p‖² + λ ‖Δ‖_C²."""
    return least_squares(problem.W, problem.K, problem.V, problem.C, problem.config.memit_ridge, problem.kept)


MEMIT = Method(
    "memit",
    solves="min ‖(W+Δ)K − V‖² + λ‖Δ‖²_C, spread over the layers",
    choose="a batch of any size; facts yield a little to other text",
    source="Meng et al. 2023, arXiv 2210.07229",
    solver=Solver("memit", solve),
    layers=True,
    presets={"paper": PAPER_MEMIT},
)
