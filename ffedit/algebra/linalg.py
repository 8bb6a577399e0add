"""Linear algebra on a second moment of keys, in float64: solving; and block-diagonal matrices.

The keys of a mixture of experts are stacked, and their second moment has one block for each expert (`Blocks`). The
entries off the blocks (two experts active at one token) are left out, so all is computed expert by expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import torch
from torch import Tensor

from ffedit.errors import EditError

# A refined solution's residual, as a share of the right side, and the steps in which it has to be reached.
EXACT, REFINEMENTS = 1e-10, 4


@dataclass(frozen=True, eq=False)
class Blocks:
    """Block-diagonal matrix diag(B_1, …, B_p), stored as its `blocks` of any shapes, in order."""

    blocks: tuple[Tensor, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """[Σ rows, Σ columns]."""
        return sum(len(block) for block in self.blocks), sum(block.shape[1] for block in self.blocks)

    @property
    def T(self) -> Blocks:
        """Transpose."""
        return Blocks(tuple(block.T for block in self.blocks))

    def __matmul__(self, columns: Tensor) -> Tensor:
        """Return the product with `columns` [Σ columns, n]."""
        pieces = columns.split([block.shape[1] for block in self.blocks])
        return torch.cat([block @ piece for block, piece in zip(self.blocks, pieces, strict=True)])


@dataclass(frozen=True, eq=False)
class Updated:
    """Symmetric matrix L Lᵀ + Σ_i s_i r_i r_iᵀ: a factored matrix plus a correction of low rank."""

    lower: Tensor  # L, Cholesky factor, [d, d], float64
    rows: Tensor  # r_i, [p, d], float64
    signs: Tensor  # s_i, 1 or −1, [p], float64

    def __matmul__(self, columns: Tensor) -> Tensor:
        """Return the product with `columns` [d, n]."""
        correction = self.rows.T @ (self.signs[:, None] * (self.rows @ columns))
        return self.lower @ (self.lower.T @ columns) + correction

    def solve(self, columns: Tensor) -> Tensor:
        """Return the inverse times `columns` [d, n], by Woodbury's identity: nothing of size d is factored."""
        Y, Z = _solve(self.lower, torch.cat([columns, self.rows.T], 1)).split([columns.shape[1], len(self.rows)], 1)
        small = torch.diag(self.signs) + self.rows @ Z  # 1 / s = s
        solution: Tensor = Y - Z @ torch.linalg.solve(small, self.rows @ Y)
        return solution


Moment: TypeAlias = Tensor | Blocks
Metric: TypeAlias = Moment | Updated


def blocks_of(matrix: Moment) -> tuple[Tensor, ...]:
    """Return the blocks of a matrix; a Tensor is its own only block."""
    return matrix.blocks if isinstance(matrix, Blocks) else (matrix,)


def diagonal(blocks: Sequence[Tensor]) -> Moment:
    """Return the matrix of these blocks: a single block as it is, several as `Blocks`."""
    return blocks[0] if len(blocks) == 1 else Blocks(tuple(blocks))


def double(tensor: Tensor) -> Tensor:
    """Convert `tensor` to float64; move it to the CPU first where its device has no float64."""
    return tensor.double() if has_float64(tensor.device) else tensor.cpu().double()


@lru_cache
def has_float64(device: torch.device) -> bool:
    """Return True if a device computes in float64; Apple's and some of Intel's do not."""
    try:
        torch.ones(1, dtype=torch.float64, device=device).add_(1)
    except (RuntimeError, TypeError):  # each backend refuses in its own way
        return False
    return True


def whiten(k: Tensor, C: Metric) -> Tensor:
    """Return C⁻¹ k, [d_in, n], float64, by a Cholesky factorisation of C, never by an inverse; for keys k [d_in, n].

    EditError where C [d_in, d_in] is not positive definite. `Blocks` are solved block by block.
    """
    columns = double(k)
    if isinstance(C, Updated):
        return C.solve(columns)
    pieces = columns.split([len(block) for block in blocks_of(C)])
    return torch.cat([_solve(factor(double(B)), piece) for piece, B in zip(pieces, blocks_of(C), strict=True)])


def factor(C: Tensor) -> Tensor:
    """Return the Cholesky factor of a second moment; EditError where it is not positive definite."""
    return _checked(*torch.linalg.cholesky_ex(C))


def _checked(lower: Tensor, info: Tensor) -> Tensor:
    if int(info) != 0:
        raise EditError(
            f"the keys' second moment is not positive definite (leading minor {int(info)} of {len(lower)}): "
            "collect it over more text, or use a larger ridge"
        )
    return lower


def factor_(C: Tensor) -> Tensor:
    """Replace the numbers of C [d, d] by those of its Cholesky factor, and return it; errors as of `factor`.

    LAPACK stores matrices by columns, so that its upper factor is the lower one of a matrix stored by rows.
    """
    info = torch.zeros((), dtype=torch.int32, device=C.device)
    torch.linalg.cholesky_ex(C.mT, upper=True, out=(C.mT, info))
    return _checked(C, info)


def _solve(lower: Tensor, columns: Tensor) -> Tensor:
    """Return (L Lᵀ)⁻¹ `columns` [d, n]; `torch.cholesky_solve` would copy L [d, d], which may be large."""
    half = torch.linalg.solve_triangular(lower, columns, upper=False)
    solution: Tensor = torch.linalg.solve_triangular(lower.mT, half, upper=True)
    return solution


class RefinedInverse:
    """Inverse of C + s I, a symmetric, positive definite matrix, from a factor in half the bits.

    The Cholesky factor is in float32, which takes half the time and memory. Each solution is refined by the
    residual in float64 until it is as exact as by a float64 factor (Higham 2002, Accuracy and Stability of Numerical
    Algorithms, ch. 12); where float32 is too coarse, the factor is in float64. Nothing else as large as C is held.
    """

    def __init__(self, C: Tensor, shift: float = 0.0) -> None:
        """Factor C + `shift` I, [d, d], float64; the residual of a solution is at most `EXACT` of the right side."""
        self._C, self._shift = C, shift
        try:
            self._lower = self._factor(torch.float32)
        except EditError:
            self._lower = self._factor(C.dtype)

    def _factor(self, dtype: torch.dtype) -> Tensor:
        shifted = self._C.to(dtype, copy=True)
        shifted.diagonal().add_(self._shift)
        return factor_(shifted)

    def __call__(self, columns: Tensor) -> Tensor:
        """Return (C + s I)⁻¹ `columns` [d, n], float64."""
        solution = torch.zeros_like(columns)
        residual = columns
        for _ in range(REFINEMENTS):
            solution += _solve(self._lower, residual.to(self._lower)).to(columns)
            if self._lower.dtype == columns.dtype:
                return solution
            residual = columns - self._C @ solution - self._shift * solution
            if bool((residual.norm(dim=0) <= EXACT * columns.norm(dim=0)).all()):
                return solution
        self._lower = self._factor(self._C.dtype)
        return self(columns)
