"""Linear algebra on a second moment of keys, in float64: solving, condition number, little used directions.

`Blocks` are processed block by block, at the size of one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ffedit.algebra.block_diagonal import Moment, blocks_of, split
from ffedit.errors import EditError

# A power iteration ends where its estimate, which only grows, grows by less than this share.
SETTLED = 1e-4


def double(tensor: Tensor) -> Tensor:
    """Convert `tensor` to float64; move it to the CPU first where its device has no float64 (Apple's)."""
    return tensor.cpu().double() if tensor.device.type == "mps" else tensor.double()


def whiten(k: Tensor, C: Moment) -> Tensor:
    """Return C⁻¹ k by a Cholesky factorisation, never by an inverse; of `Blocks`, block by block.

    Args:
        k: keys, [d_in] or [d_in, n].
        C: second moment of the keys, [d_in, d_in]; symmetric, positive definite.

    Returns:
        [d_in] or [d_in, n], float64.

    Raises:
        EditError: C is not positive definite.
    """
    columns = split(double(k).reshape(k.shape[0], -1).T, C)
    whitened = [solved_by(factor(double(B)), c.T) for c, B in zip(columns, blocks_of(C), strict=True)]
    return torch.cat(whitened).reshape(k.shape)


def factor(C: Tensor) -> Tensor:
    """Return the Cholesky factor of a second moment.

    Raises:
        EditError: it is not positive definite.
    """
    lower: Tensor
    lower, info = torch.linalg.cholesky_ex(C)
    if int(info) != 0:
        raise EditError(
            f"the keys' second moment is not positive definite (leading minor {int(info)} of {C.shape[0]}): "
            "collect it over more text, or use a larger ridge"
        )
    return lower


def solved_by(lower: Tensor, columns: Tensor) -> Tensor:
    """Return (L Lᵀ)⁻¹ `columns` [d, n]; `torch.cholesky_solve` would copy L [d, d], which may be large."""
    half = torch.linalg.solve_triangular(lower, columns, upper=False)
    found: Tensor = torch.linalg.solve_triangular(lower.mT, half, upper=True)
    return found


def condition(C: Tensor, steps: int = 50) -> float:
    """Return the condition number of C, largest over smallest eigenvalue, by power and inverse iteration.

    Args:
        C: symmetric, positive definite, [d, d].
        steps: the most of each iteration, which ends where the estimate hardly grows; it is from below, and on a nearly
            flat spectrum it may end early.

    Raises:
        EditError: C is not positive definite.
    """
    C = double(C)
    lower = factor(C)
    start = torch.ones(len(C), 1, dtype=C.dtype, device=C.device)
    start[::2] = -0.5  # not orthogonal to a vector of ones, nor one itself
    maps = partial(torch.matmul, C), partial(solved_by, lower)
    largest, inverse = (_largest_eigenvalue(apply, start, steps) for apply in maps)
    return largest * inverse


def _largest_eigenvalue(apply: Callable[[Tensor], Tensor], at: Tensor, steps: int) -> float:
    """Return the largest eigenvalue of a symmetric, positive definite map by power iteration from `at` [d, 1]."""
    found = 0.0
    for _ in range(steps):
        at = apply(at / at.norm())
        before, found = found, float(at.norm())
        if found <= before * (1 + SETTLED):
            break
    return found


def projector(C: Tensor, share: float) -> Tensor:
    """Return directions of key space that ordinary text hardly uses: P = U Uᵀ projects on them.

    They are the eigenvectors of C with the smallest eigenvalues, as many as together hold at most `share` of tr(C), so
    that E‖Uᵀk‖² <= share · E‖k‖². AlphaEdit (Fang et al. 2025, arXiv 2410.02355, eq. 5-7) takes all eigenvalues below a
    fixed number; a share means the same in every model.

    Args:
        C: second moment of keys, [d_in, d_in].
        share: of the keys' mean squared norm that may lie in these directions, between 0 and 1.

    Returns:
        U, orthonormal columns, [d_in, m], float64.

    Raises:
        EditError: no direction is that little used, or all are.
    """
    eigenvalues, eigenvectors = torch.linalg.eigh(double(C))
    used = eigenvalues.clamp(min=0).cumsum(0)
    size = int((used <= share * used[-1]).sum())
    if size == 0:
        raise EditError(
            f"no direction of key space holds at most {share:g} of what ordinary text uses: "
            f"the least used holds {float(used[0] / used[-1]):.2g}; use a larger share"
        )
    if size == len(C):
        raise EditError(f"a share of {share:g} leaves nothing of ordinary text to protect; use one below 1")
    smallest: Tensor = eigenvectors[:, :size]
    return smallest
