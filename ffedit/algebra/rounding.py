"""Rounding of W + Δ to the precision of a checkpoint, and the share of Δ that it loses."""

from __future__ import annotations

import torch
from torch import Tensor

from ffedit.algebra.linalg import double
from ffedit.errors import EditError


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
