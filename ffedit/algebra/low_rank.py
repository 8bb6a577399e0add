"""Changes of a matrix: as the product of two thin factors, or dense.

Every locate-then-edit method changes a value matrix by Δ = left @ right of rank at most the number of facts. With the
factors an edit takes kilobytes instead of gigabytes and its norm is cheap; the dense matrix is computed only at the
write. Fine-tuning changes every entry independently: its Δ is `Dense`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

AnyChange = TypeVar("AnyChange", bound="_Change")


@dataclass(frozen=True, eq=False)
class _Change:
    """Change of a matrix, in fields that are tensors."""

    def cpu(self: AnyChange) -> AnyChange:
        """Return a copy in CPU memory."""
        return replace(self, **{name: tensor.cpu() for name, tensor in vars(self).items()})

    def is_finite(self) -> bool:
        """Return True if no entry is NaN or infinite."""
        return all(bool(torch.isfinite(tensor).all()) for tensor in vars(self).values())


@dataclass(frozen=True, eq=False)
class LowRank(_Change):
    """Low-rank change Δ = left @ right.

    Attributes:
        left: [d_out, r].
        right: [r, d_in].
    """

    left: Tensor
    right: Tensor

    def __post_init__(self) -> None:
        if self.left.ndim != 2 or self.right.ndim != 2 or self.left.shape[1] != self.right.shape[0]:
            raise ValueError(
                f"factors [d_out, r] and [r, d_in] expected, found {list(self.left.shape)} and {list(self.right.shape)}"
            )

    def __repr__(self) -> str:
        return f"LowRank({list(self.shape)}, rank {self.rank})"

    @property
    def shape(self) -> tuple[int, int]:
        """(d_out, d_in) of the dense matrix."""
        return self.left.shape[0], self.right.shape[1]

    @property
    def rank(self) -> int:
        """Number of columns of `left`: an upper bound of the rank of Δ."""
        return self.left.shape[1]

    @property
    def dense(self) -> Tensor:
        """Δ itself, [d_out, d_in]."""
        return self.left @ self.right

    def __matmul__(self, keys: Tensor) -> Tensor:
        """Return Δ @ keys without the dense matrix; keys is [d_in] or [d_in, n]."""
        return self.left @ (self.right @ keys)

    def norm(self) -> float:
        """Return the Frobenius norm of Δ, from two r × r Gram matrices: ‖Δ‖² = ⟨leftᵀ left, right rightᵀ⟩."""
        squared = ((self.left.T @ self.left) * (self.right @ self.right.T)).sum()
        return float(squared.clamp(min=0).sqrt())


@dataclass(frozen=True, eq=False)
class Dense(_Change):
    """Dense change Δ of any rank: its `matrix` [d_out, d_in]."""

    matrix: Tensor

    def __post_init__(self) -> None:
        if self.matrix.ndim != 2:
            raise ValueError(f"a matrix [d_out, d_in] expected, found {list(self.matrix.shape)}")

    def __repr__(self) -> str:
        return f"Dense({list(self.shape)})"

    @property
    def shape(self) -> tuple[int, int]:
        """(d_out, d_in)."""
        return self.matrix.shape[0], self.matrix.shape[1]

    @property
    def rank(self) -> int:
        """Smaller side: an upper bound of the rank of Δ."""
        return min(self.shape)

    @property
    def dense(self) -> Tensor:
        """Δ itself, [d_out, d_in]."""
        return self.matrix

    def __matmul__(self, keys: Tensor) -> Tensor:
        """Return Δ @ keys; keys is [d_in] or [d_in, n]."""
        return self.matrix @ keys

    def norm(self) -> float:
        """Return the Frobenius norm of Δ."""
        return float(torch.linalg.matrix_norm(self.matrix))


Update: TypeAlias = LowRank | Dense
