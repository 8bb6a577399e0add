"""Rounding of W + Δ to the precision of a checkpoint: what it loses of Δ, and recovery of Δ from what was stored.

A checkpoint stores fl(W + Δ), not W + Δ. The difference D of two checkpoints is Δ plus the rounding of every entry,
which has full rank whatever the rank of Δ. But its size is known: half a unit in the last place at most, spread evenly,
with standard deviation σ_ij = ulp(x_ij) / √12. The largest singular value of such noise is at most about

    max_i (Σ_j σ_ij²)^½ + max_j (Σ_i σ_ij²)^½                 (Bandeira and van Handel 2016, arXiv 1408.6185)

Singular values above this floor belong to Δ. Where Δ is so small that many entries round back to W, rounding depends on
Δ and leaves singular values of its own above the floor: the rank is then an estimate.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ffedit.algebra.linalg import double
from ffedit.algebra.low_rank import LowRank
from ffedit.errors import EditError

# The noise of a matrix that was written twice is √2 as large.
WRITES = 1.5
# A matrix whose smaller side is at most this is decomposed whole; of larger ones, the first MOST directions are found.
WHOLE, MOST = 1024, 256
# Below this share of changed entries, rounding is not independent of Δ.
INDEPENDENT = 0.9


def rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Round the numbers of an edited matrix to `dtype`; EditError where one is NaN, infinite or too large for it."""
    result = values.to(dtype)
    if not torch.isfinite(result).all():
        raise EditError("the edit holds NaN, infinity or numbers too large for the weights; nothing was written")
    return result


def lost_in_rounding(W: Tensor, change: Tensor, dtype: torch.dtype) -> float:
    """Compute the share of Δ (Frobenius norm) that is lost when W + Δ is rounded to `dtype`."""
    size = float(change.norm())
    return float((double((W + change).to(dtype)) - W - change).norm()) / size if size else 0.0


@dataclass(frozen=True, eq=False)
class Recovered:
    """Component of a difference that rounding does not explain."""

    update: LowRank  # its first singular directions, float64: those above the floor, or as many as were asked for
    rank: int  # number of singular values above the floor
    more: bool  # there may be more above the floor, which were not computed
    values: Tensor  # the largest singular values, [at most MOST], in descending order


def noise_floor(stored: Tensor, dtype: torch.dtype) -> float:
    """Return about the largest singular value of the rounding noise in a matrix [d_out, d_in] stored in `dtype`."""
    about = torch.finfo(dtype)
    exponent = torch.frexp(double(stored).abs().clamp(min=about.tiny))[1]
    variance = torch.pow(2.0, double(exponent) - 1).mul_(about.eps).square_().div_(12)
    edges = variance.sum(0).max().sqrt() + variance.sum(1).max().sqrt()
    return WRITES * float(edges)


def recover(difference: Tensor, floor: float, rank: int | None = None) -> Recovered:
    """Return the low-rank component of a difference D [d_out, d_in], float64, finite.

    Instead of the directions whose singular value is above `floor` (`noise_floor`), `rank` of them may be asked for.
    """
    smaller = min(difference.shape)
    count = smaller if smaller <= WHOLE else 64
    while True:
        left, values, right = _first_singular(difference, count)
        above = int((values > floor).sum())
        if count >= min(smaller, MOST) or (above < count and count >= (rank or 0)):
            break
        count = min(2 * count, MOST)
    kept = above if rank is None else min(rank, count)
    update = LowRank(left[:, :kept] * values[:kept], right[:kept])
    return Recovered(update, above, above == count < smaller, values[:MOST])


def _first_singular(matrix: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Find the first `count` singular triplets, all by LAPACK, few by subspace iteration (Halko et al. 0909.4061)."""
    if count == min(matrix.shape):
        left, values, right = torch.linalg.svd(matrix, full_matrices=False)
        return left, values, right
    start = torch.randn(matrix.shape[1], count + 8, dtype=matrix.dtype, generator=torch.Generator().manual_seed(0))
    basis = torch.linalg.qr(matrix @ start)[0]
    for _ in range(4):
        basis = torch.linalg.qr(matrix @ torch.linalg.qr(matrix.T @ basis)[0])[0]
    left, values, right = torch.linalg.svd(basis.T @ matrix, full_matrices=False)
    return (basis @ left)[:, :count], values[:count], right[:count]
