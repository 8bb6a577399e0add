"""Mass-editing memory: thousands of facts by least squares, over one layer or several.

Meng et al. 2023, arXiv 2210.07229. What a fact may give up to ordinary text is relative to the facts' own keys
(`MemitConfig.ridge`); the published λ is a number for one model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ffedit.algebra.low_rank import LowRank
from ffedit.algebra.updates import least_squares
from ffedit.editor.config import check_numbers
from ffedit.editor.job import Method, Problem
from ffedit.editor.methods.rome import PAPER

# The numbers of MEMIT's authors for GPT-J (arXiv 2210.07229, appendix, and the parameters that came with it). Not as
# published, beside what `PAPER` lists: their δ is bounded by 0.75 of the residual stream, here as in ROME; their λ
# (15,000 for GPT-J, times E[k kᵀ]) is one model's, here `ridge` is relative to the keys.
PAPER_MEMIT = replace(
    PAPER,
    prompts=replace(PAPER.prompts, contexts=5, context_tokens=(10,)),
    value=replace(PAPER.value, steps=25),
)


@dataclass(frozen=True)
class MemitConfig:
    """Numbers of MEMIT's solution.

    Attributes:
        ridge: share of its residual that a fact alone gives up to ordinary text: λ relative to the keys' own weight.
    """

    ridge: float = 0.003

    def __post_init__(self) -> None:
        check_numbers("memit", self, weights=("ridge",))


def solve(problem: Problem) -> LowRank:
    """Return argmin_Δ ‖(W + Δ) K − V‖² + ‖Δ K_p‖² + λ ‖Δ‖_C²."""
    ridge = problem.config.of("memit", MemitConfig).ridge
    return least_squares(problem.W, problem.K, problem.V, problem.metric, ridge, problem.kept)


MEMIT = Method(
    "memit",
    solves="min ‖(W+Δ)K − V‖² + λ‖Δ‖²_C, spread over the layers",
    choose="a batch of any size; each fact is slightly weakened to spare other text",
    source="Meng et al. 2023, arXiv 2210.07229",
    solve=solve,
    layers=True,
    numbers=MemitConfig,
    presets={"paper": PAPER_MEMIT},
)
