"""RECT: of each change keep only the entries that change most, relative to the weights (Gu et al., arXiv 2401.04700).

The small entries are taken for what is learnt of the wording and not of the fact.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ffedit.editor.config import check_numbers
from ffedit.editor.methods.alphaedit import ALPHAEDIT, solve as alphaedit

if TYPE_CHECKING:
    from torch import Tensor

    from ffedit.algebra.low_rank import LowRank
    from ffedit.editor.job import Problem


@dataclass(frozen=True)
class RectConfig:
    """Numbers of RECT.

    Attributes:
        share: of the entries that are kept.
    """

    share: float = 0.4

    def __post_init__(self) -> None:
        check_numbers("rect", self, weights=("share",))


def kept(W: Tensor, delta: Tensor, share: float) -> Tensor:
    """Return Δ [d_model, d_ff] with all entries set to 0 but the `share` of largest |Δ| / |W|."""
    import torch

    change = (delta / W).abs().nan_to_num(0.0)
    least = change.flatten().kthvalue(max(1, round((1 - share) * change.numel()))).values
    return torch.where(change > least, delta, 0.0)


def solve(problem: Problem) -> LowRank:
    """Return AlphaEdit's change without its small entries; it has full rank."""
    import torch

    from ffedit.algebra.low_rank import LowRank

    share = problem.config.of("rect", RectConfig).share
    delta = kept(problem.W, alphaedit(problem).dense, share)
    return LowRank(torch.eye(len(delta)).to(delta), delta)


RECT = replace(
    ALPHAEDIT,
    name="rect",
    solves="AlphaEdit's Δ, of which the entries of largest |Δ| / |W| are kept",
    choose="to be compared with alphaedit in long sequences",
    source="Gu et al. 2024, arXiv 2401.04700",
    solve=solve,
    numbers=RectConfig,
    presets={},
)
