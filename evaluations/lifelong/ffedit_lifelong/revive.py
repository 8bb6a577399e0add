"""REVIVE: leave the dominant singular directions of the unedited weights alone (Zhang et al. 2026, arXiv 2601.11042).

With W₀ = U S Vᵀ, the change is written in the basis of the singular vectors, Uᵀ Δ V, and every component that reads
from or writes to one of the dominant directions, which hold a share of ‖W₀‖², is removed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ffedit.editor.config import check_numbers
from ffedit.editor.methods.alphaedit import ALPHAEDIT, solve as alphaedit

if TYPE_CHECKING:
    from torch import Tensor

    from ffedit.algebra.low_rank import LowRank
    from ffedit.editor.edit import Edit
    from ffedit.editor.job import Job, Problem


@dataclass(frozen=True)
class ReviveConfig:
    """Numbers of REVIVE.

    Attributes:
        energy: share of ‖W₀‖² that the protected singular directions hold.
    """

    energy: float = 0.1

    def __post_init__(self) -> None:
        check_numbers("revive", self, weights=("energy",))


def filtered(delta: LowRank, W: Tensor, energy: float) -> LowRank:
    """Return Δ without what it reads from and writes to the dominant singular directions of W [d_model, d_ff]."""
    import torch

    from ffedit.algebra.low_rank import LowRank

    U, S, Vt = torch.linalg.svd(W, full_matrices=False)
    held = S.square().cumsum(0) / S.square().sum()
    count = int((held < energy).sum()) + 1 if energy else 0
    U, Vt = U[:, :count], Vt[:count]
    return LowRank(delta.left - U @ (U.T @ delta.left), delta.right - (delta.right @ Vt.T) @ Vt)


def compute(job: Job) -> Edit:
    """Write as AlphaEdit does, with each change filtered by the singular directions of the unedited matrix."""
    import torch

    from ffedit.algebra.linalg import double
    from ffedit.editor.solve import solve as solve_job

    (ff,) = job.ff_layers
    originals = [job.editable.history.originals.get(memory.address, memory.value) for memory in ff.memories]
    W = torch.cat([double(original) for original in originals], 1).to(ff.solve_device)

    def solve(problem: Problem) -> LowRank:
        return filtered(alphaedit(problem), W, problem.config.of("revive", ReviveConfig).energy)

    return solve_job(replace(ALPHAEDIT, name="revive", solve=solve), job)


REVIVE = replace(
    ALPHAEDIT,
    name="revive",
    solves="AlphaEdit's Δ without the dominant singular directions of W₀",
    choose="to be compared with alphaedit in long sequences; one layer",
    source="Zhang et al. 2026, arXiv 2601.11042",
    solve=None,
    compute=compute,
    layers=False,
    numbers=ReviveConfig,
    presets={},
)
