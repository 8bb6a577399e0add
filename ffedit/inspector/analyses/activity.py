"""How much of a feed-forward layer is at work on one input.

    o = Σ_i m_i v_i + b

Memory i contributes m_i v_i. Its *strength* is the length of that, |m_i| ‖v_i‖; its *share* is m_i v_i·o / ‖o‖², the
part of the layer's output that it makes up: negative where it pulls the other way; all memories and the bias make 1.

A memory is *active by sign* where m_i > 0: under ReLU the others are silent (Geva et al. 2021, arXiv 2012.14913,
section 5). GELU and gates leave nearly every coefficient a little off zero, and a gated one may be negative and strong:
there a memory is *active by norm* where its strength is at least 1% of ‖o‖. The *effective number* needs no threshold:
it is the participation ratio (Σ s_i²)² / Σ s_i⁴ of the strengths s, n where n memories are equally strong and the
others silent.

The memories of a mixture are those of all experts that the token goes to, m_i with the router's weight inside, and b
what the router makes of the experts' biases.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ffedit.inspector.views.view import View

# The share of the output's norm from which a memory counts as active.
ACTIVE = 0.01


@dataclass(frozen=True)
class Activity(View):
    """How many memories of a layer are at work at one position.

    Attributes:
        memories: how many there are.
        by_sign: with a positive coefficient.
        by_norm: with |m_i| ‖v_i‖ >= 1% of ‖o‖.
        effective: participation ratio of the strengths.
        bias_share: b·o / ‖o‖², the part of the output that is no memory's; 0 without a bias.
    """

    memories: int
    by_sign: int
    by_norm: int
    effective: float
    bias_share: float


@dataclass(frozen=True, eq=False)
class Contributions:
    """What each memory of a layer adds at one position.

    Attributes:
        coefficients: m [d_ff].
        strengths: |m_i| ‖v_i‖ [d_ff].
        shares: m_i v_i·o / ‖o‖² [d_ff]; 0 where the output is 0.
        activity: how many are at work.
    """

    coefficients: Tensor
    strengths: Tensor
    shares: Tensor
    activity: Activity


@torch.no_grad()
def contributions(value: Tensor, bias: Tensor | None, coefficients: Tensor) -> Contributions:
    """Take a layer's output apart, o = W m + b, at one position; in float32 at least.

    Args:
        value: W [d_model, d_ff].
        bias: b [d_model].
        coefficients: m [d_ff].
    """
    wide = torch.promote_types(coefficients.dtype, torch.float32)
    m, value = coefficients.to(wide), value.to(wide)
    bias = torch.zeros_like(value[:, 0]) if bias is None else bias.to(wide)
    output = value @ m + bias
    squared = float(output @ output)
    strengths = m.abs() * torch.linalg.vector_norm(value, dim=0)
    shares = m * (output @ value) / squared if squared else torch.zeros_like(m)
    energy = strengths.double().square()
    activity = Activity(
        memories=len(m),
        by_sign=int((m > 0).sum()),
        by_norm=int((strengths >= ACTIVE * squared**0.5).sum()) if squared else 0,
        effective=float(energy.sum().square() / energy.square().sum()) if bool(energy.any()) else 0.0,
        bias_share=float(bias @ output) / squared if squared else 0.0,
    )
    return Contributions(m, strengths, shares, activity)
