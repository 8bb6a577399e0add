"""Decomposition of a layer's output into the contributions of its memories.

A layer's output is o = Σ_i m_i v_i + b. Memory i contributes m_i v_i. Its *strength* is the norm of that,
|m_i| ‖v_i‖; its *share* is m_i v_i·o / ‖o‖², its fraction of the output: negative where it points against o; the shares
of all memories and the bias add up to 1. A memory is *active by sign* where m_i > 0: under ReLU the others are
zero (Geva et al. 2021, arXiv 2012.14913, section 5). GELU and gates leave nearly every coefficient slightly off zero,
and a gated one may be negative and large: there a memory is *active by norm* where its strength is at least 1% of ‖o‖.
The *effective number* needs no threshold: it is the participation ratio (Σ s_i²)² / Σ s_i⁴ of the strengths s, n where
n memories are equally strong and the others zero. The memories of a mixture are those of all experts that the token is
routed to, with the router's weight inside m_i; b is the routed combination of the experts' biases.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ffedit.algebra.linalg import double
from ffedit.inspector.views import View

# The share of the output's norm from which a memory counts as active.
ACTIVE = 0.01


@dataclass(frozen=True)
class Activity(View):
    """Numbers of active memories of a layer at one position."""

    memories: int  # number of memories of the layer
    by_sign: int  # number with a positive coefficient
    by_norm: int  # number with |m_i| ‖v_i‖ >= 1% of ‖o‖
    effective: float  # participation ratio of the strengths
    bias_share: float  # b·o / ‖o‖², the bias's share of the output; 0 without a bias


@dataclass(frozen=True, eq=False)
class Contributions:
    """Contributions of each memory of a layer at one position."""

    coefficients: Tensor  # m [d_ff]
    strengths: Tensor  # |m_i| ‖v_i‖ [d_ff]
    shares: Tensor  # m_i v_i·o / ‖o‖² [d_ff]; 0 where the output is 0
    activity: Activity


def effective_number(strengths: Tensor) -> Tensor:
    """Return the participation ratio of strengths [.., n], [..] float64; 0 where all are 0."""
    energy = double(strengths).square()
    return (energy.sum(-1).square() / energy.square().sum(-1)).nan_to_num()


@torch.no_grad()
def contributions(value: Tensor, bias: Tensor | None, coefficients: Tensor) -> Contributions:
    """Decompose a layer's output, o = W m + b, with W [d_model, d_ff], b [d_model], m [d_ff]; in float32 at least."""
    wide = torch.promote_types(coefficients.dtype, torch.float32)
    m, value = coefficients.to(wide), value.to(wide)
    bias = torch.zeros_like(value[:, 0]) if bias is None else bias.to(wide)
    output = value @ m + bias
    squared = float(output @ output)
    strengths = m.abs() * torch.linalg.vector_norm(value, dim=0)
    shares = m * (output @ value) / squared if squared else torch.zeros_like(m)
    activity = Activity(
        memories=len(m),
        by_sign=int((m > 0).sum()),
        by_norm=int((strengths >= ACTIVE * squared**0.5).sum()) if squared else 0,
        effective=float(effective_number(strengths)),
        bias_share=float(bias @ output) / squared if squared else 0.0,
    )
    return Contributions(m, strengths, shares, activity)
