"""A matrix kept as the product of two thin factors.

Every locate-then-edit method changes a value matrix by Δ = left @ right of rank at most the number of facts.
Keeping the factors makes an edit kilobytes instead of gigabytes and its norm cheap; the dense matrix is a
property that is asked for only at the write.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class LowRank:
    """Δ = left @ right.

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

    @property
    def shape(self) -> tuple[int, int]:
        """(d_out, d_in) of the dense matrix."""
        return self.left.shape[0], self.right.shape[1]

    @property
    def rank(self) -> int:
        """The number of columns of `left`: an upper bound of the rank of Δ."""
        return self.left.shape[1]

    @property
    def dense(self) -> Tensor:
        """Δ itself, [d_out, d_in]."""
        return self.left @ self.right

    def __matmul__(self, keys: Tensor) -> Tensor:
        """Δ @ keys without the dense matrix; keys is [d_in] or [d_in, n]."""
        return self.left @ (self.right @ keys)

    def norm(self) -> float:
        """Frobenius norm of Δ, from two r × r Gram matrices: ‖Δ‖² = ⟨leftᵀ left, right rightᵀ⟩."""
        squared = ((self.left.T @ self.left) * (self.right @ self.right.T)).sum()
        return float(squared.clamp(min=0).sqrt())

    def is_finite(self) -> bool:
        """Whether no entry of either factor is NaN or infinite."""
        return bool(torch.isfinite(self.left).all() and torch.isfinite(self.right).all())
