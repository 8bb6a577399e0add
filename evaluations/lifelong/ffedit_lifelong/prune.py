"""PRUNE: after a sequence, restrain the singular values of all that it changed (Ma et al., arXiv 2405.16821).

With σ the largest singular value of the unedited W₀, those s of W − W₀ that exceed it become

    F(s) = log_α s − log_α σ + σ

so that the condition number of the edited matrix stays bounded. It is applied once, to the sum of all edits.
"""

from __future__ import annotations

from math import log

import torch
from torch import Tensor

# The larger, the more is restrained.
ALPHA = 1.2


def restrained(W: Tensor, change: Tensor, alpha: float = ALPHA) -> Tensor:
    """Return `change` [d_model, d_ff] with its singular values above the largest of W restrained, float64."""
    U, S, Vt = torch.linalg.svd(change.double(), full_matrices=False)
    largest = float(torch.linalg.matrix_norm(W.double(), 2))
    small = (S.clamp(min=largest).log() - log(largest)) / log(alpha) + largest
    return U @ (torch.where(largest < S, small, S)[:, None] * Vt)
