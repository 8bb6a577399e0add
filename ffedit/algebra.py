"""The smallest change of a linear associative memory that stores a fact.

The value matrix W [d_out, d_in] maps a key k to the value W k. Writing a fact means W k* = v* afterwards, while the
keys of other text, known through their second moment C = E[k kᵀ], should go on giving what they gave. "Small" is
therefore measured as ‖Δ‖_C² = tr(Δ C Δᵀ) = E‖Δ k‖²: the mean squared change of what ordinary text reads.

All functions are pure and compute in float64 on the device of their inputs (on the CPU where the device has none).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ffedit.errors import EditError
from ffedit.lowrank import LowRank


def double(tensor: Tensor) -> Tensor:
    """`tensor` in float64; moved to the CPU first where its device has no float64 (Apple's)."""
    return tensor.cpu().double() if tensor.device.type == "mps" else tensor.double()


def whiten(k: Tensor, C: Tensor) -> Tensor:
    """C⁻¹ k by a Cholesky factorisation, never by an inverse.

    Args:
        k: keys, [d_in] or [d_in, n].
        C: second moment of the keys, [d_in, d_in]; symmetric, positive definite.

    Returns:
        [d_in] or [d_in, n], float64.

    Raises:
        EditError: C is not positive definite.
    """
    columns = double(k).reshape(k.shape[0], -1)
    factor, info = torch.linalg.cholesky_ex(double(C))
    if int(info) != 0:
        raise EditError(
            f"the keys' second moment is not positive definite (leading minor {int(info)} of {C.shape[0]}): "
            "collect it over more text, or use a larger ridge"
        )
    return torch.cholesky_solve(columns, factor).reshape(k.shape)


def condition(C: Tensor, steps: int = 50) -> float:
    """Condition number of C, largest over smallest eigenvalue, by power and inverse iteration.

    Args:
        C: symmetric, positive definite, [d, d].
        steps: of each iteration; the estimate is from below.
    """
    C = double(C)
    factor = torch.linalg.cholesky(C)
    start = torch.ones(len(C), 1, dtype=C.dtype, device=C.device)
    start[::2] = -0.5  # not orthogonal to a vector of ones, nor one itself
    largest, smallest = start, start
    for _ in range(steps):
        largest = C @ (largest / largest.norm())
        smallest = torch.cholesky_solve(smallest / smallest.norm(), factor)
    return float(largest.norm() * smallest.norm())


def steadied(C: Tensor, k: Tensor, same: Tensor, beside: Tensor, weight: float) -> Tensor:
    """C with the texts about the subject counted in, `weight` times as much as all ordinary text.

        C' = C + w ( E[(k_j − k*)(k_j − k*)ᵀ] + E[k' k'ᵀ] )

    In ROME's norm the smallest change gives v* to the mean key k* and to nothing else: in one context the subject
    receives a third of the change, in another more than all of it, and the word behind the subject receives some too.
    In the norm of C' a change costs what it does to the words beside the subject, and what it does differently to the
    subject from context to context, so that Δ k_j ≈ Δ k* and Δ k' ≈ 0 while (W + Δ) k* = v* still holds exactly.

    Args:
        C: second moment of the keys of ordinary text, [d_in, d_in].
        k: k*, [d_in].
        same: the keys k_j at the subject's last token in several contexts, [n, d_in].
        beside: the keys k' of all other tokens of these contexts, [m, d_in].
        weight: w; 0 is ROME.

    Returns:
        C', [d_in, d_in], float64.
    """
    apart, others = double(same) - double(k), double(beside)
    scatter = apart.T @ apart / max(1, len(apart)) + others.T @ others / max(1, len(others))
    return double(C) + weight * scatter.to(C.device)


def rank_one(W: Tensor, k: Tensor, v: Tensor, C: Tensor) -> LowRank:
    """The update of smallest C-norm with (W + Δ) k = v.

        Δ = (v − W k) (C⁻¹k)ᵀ / (kᵀ C⁻¹ k)

    ROME (Meng et al. 2022, arXiv 2202.05262, eq. 2). The same k stands in the residual, the numerator and the
    denominator; where they differ, the denominator can become tiny and the update destroys the model
    (Gupta et al. 2024, arXiv 2403.07175).

    Args:
        W: value matrix, [d_out, d_in].
        k: key, [d_in].
        v: value it should give, [d_out].
        C: second moment of keys, [d_in, d_in].

    Returns:
        Δ as factors [d_out, 1] and [1, d_in], float64.

    Raises:
        EditError: C is not positive definite, or the key is zero.
    """
    W, k, v = double(W), double(k), double(v)
    u = whiten(k, C)
    division = k @ u
    if not division > 0:
        raise EditError("the key k* is zero: nothing in this layer responds to the subject; choose another layer")
    return LowRank((v - W @ k)[:, None], (u / division)[None, :])
