"""The smallest change of a linear associative memory that stores facts.

The value matrix W [d_out, d_in] maps a key k to the value W k. Writing facts means W K = V afterwards, one column
per fact, while the values of the keys of other text, known through their second moment C = E[k kᵀ], should not change.
"Small" is therefore measured as ‖Δ‖_C² = tr(Δ C Δᵀ) = E‖Δ k‖²: the mean squared change of what ordinary text
reads. The values of kept keys K_p, such as those of earlier edits, should not change either. With the residual
R = V − W K, all methods solve one problem:

    minimise over Δ   ‖Δ K − R‖² + ‖Δ K_p‖² + λ ‖Δ‖_C²

    rank_one        λ → 0, one fact                               ROME
    equality        λ → 0: Δ K = R and Δ K_p = 0 hold exactly     EMMET
    least_squares   λ > 0: close to all facts, exact for none     MEMIT
    null_space      Δ = Δ P and C = I: Δ acts only on directions  AlphaEdit
                    of key space that ordinary text hardly uses

Where C is block-diagonal (`Blocks`: a mixture of experts, whose keys are stacked), this divides the change among
experts: Δ_e = R (Kᵀ C⁻¹ K)⁻¹ K_eᵀ C_e⁻¹.

All functions are pure and compute in float64 on the device of their inputs (on the CPU where the device has none).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ffedit.algebra.linalg import Metric, Moment, blocks_of, diagonal, double, whiten
from ffedit.algebra.low_rank import LowRank
from ffedit.errors import EditError

# Share of a key's squared norm that is independent of all other keys. Below this (1e-4 of the norm) it is the rounding
# of 32-bit activations, which C⁻¹ magnifies, and no direction to write along.
ROUNDING = 1e-8


def context_spread(keys: Iterable[tuple[Tensor, Tensor, Tensor]], weight: float) -> Tensor:
    """Return A, [Σ n, d_in], float64, with C' = C + AᵀA: the spread of subjects' keys over their contexts.

        C' = C + w mean over subjects of Σ_j s_j (k_j − k*)(k_j − k*)ᵀ        k* = Σ_j s_j k_j

    In ROME's norm the smallest change gives v* to the mean key k*; in one context the subject receives a third of the
    change and in another more than all of it. In the norm of C' a change costs what it does differently to the subject
    from context to context, so that Δ k_j ≈ Δ k* while (W + Δ) k* = v* still holds exactly. The mean, not the sum: a
    hundred subjects with ten contexts each would leave little of key space to text.

    `keys` are, for each subject, k* [d_in], the keys k_j at its last token in several contexts, [n, d_in], and the
    shares s_j of these in k*, [n]. Weight 0 is ROME: then A has no rows.
    """
    keys = list(keys)
    each = weight / len(keys)
    rows = [
        (double(same).to(k.device) - double(k)) * (each * double(shares).to(k.device)).sqrt()[:, None]
        for k, same, shares in keys
    ]
    spread = torch.cat(rows)
    return spread if weight else spread[:0]


def moment(rows: Tensor, sizes: Sequence[int]) -> Moment:
    """Return AᵀA of the rows A [n, Σ sizes]; of several sizes, that of each block's columns."""
    return diagonal([part.T @ part for part in rows.split(list(sizes), 1)])


def rank_one(W: Tensor, k: Tensor, v: Tensor, C: Metric) -> LowRank:
    """Return the update of smallest C-norm with (W + Δ) k = v.

        Δ = (v − W k) (C⁻¹k)ᵀ / (kᵀ C⁻¹ k)

    ROME (Meng et al. 2022, arXiv 2202.05262, eq. 2), in the shapes and with the errors of `equality`. The same k stands
    in the residual, the numerator and the denominator; where they differ, the denominator can become tiny and the
    update destroys the model (Gupta et al. 2024, arXiv 2403.07175).
    """
    return equality(W, k[:, None], v[:, None], C)


def direction(k: Tensor, C: Metric, kept: Tensor | None = None) -> Tensor:
    """Return u, [d_in], float64, the right factor of `equality` for one key: Δ x = (uᵀx) (v − W k) for any key x.

    Of all vectors with uᵀk = 1 and uᵀK_p = 0 it has the least E(uᵀx)² over ordinary text: without K_p, `kept`, it is
    C⁻¹k / (kᵀC⁻¹k). Errors are those of `equality`.
    """
    return equality(k.new_zeros(1, len(k)), k[:, None], k.new_ones(1, 1), C, kept).right[0]


def equality(W: Tensor, K: Tensor, V: Tensor, C: Metric, kept: Tensor | None = None) -> LowRank:
    """Return the update of smallest C-norm with (W + Δ) K = V and Δ K_p = 0.

        Δ = (V − W K) (Kᵀ C⁻¹ K)⁻¹ Kᵀ C⁻¹

    EMMET (Gupta et al. 2024, arXiv 2403.14236): ROME for several facts, and MEMIT as λ → 0. The preserved keys K_p are
    facts with zero residual, so the same formula holds for [K_p, K] and [0, R].

    Args:
        W: value matrix, [d_out, d_in].
        K: keys, [d_in, N].
        V: values they should give, [d_out, N].
        C: second moment of keys, [d_in, d_in].
        kept: K_p, keys whose values do not change, [d_in, p].

    Returns:
        Δ as factors [d_out, N] and [N, d_in], float64.

    Raises:
        EditError: C is not positive definite, a key is zero, there are more keys than d_in, or a key is a linear
            combination of the others, so that it cannot be given a value of its own.
    """
    return least_squares(W, K, V, C, 0.0, kept)


def check_exact(K: Tensor, kept: Tensor | None = None) -> None:
    """Refuse keys that cannot each be given an exact value beside `kept`, whatever the values and C are.

    Values are expensive to choose and keys cheap to read, so this is checked first, with C = I: whether keys are
    independent does not depend on C. Errors are those of `equality`.
    """
    _smallest(double(K).new_zeros(0, K.shape[1]), double(K), kept, 0.0)


def least_squares(W: Tensor, K: Tensor, V: Tensor, C: Metric, weight: float, kept: Tensor | None = None) -> LowRank:
    """Return the update that gives all facts nearly their values and disturbs ordinary text little.

        Δ = (V − W K) Kᵀ (λC + K_p K_pᵀ + K Kᵀ)⁻¹        λ = weight · mean_i k_iᵀ C⁻¹ k_i

    MEMIT (Meng et al. 2023, arXiv 2210.07229, eq. 14). λ is relative to the keys, so that one weight suits every model:
    a fact that is written alone loses the share weight / (1 + weight) of its residual.

    Shapes are those of `equality`, which is `weight` 0; K may be more than d_in and equal, and the values of `kept` may
    change a little.

    Raises:
        EditError: C is not positive definite, or a key is zero; with weight 0 all that `equality` raises.
    """
    W, K, V = double(W), double(K), double(V)
    return _smallest(V - W @ K, K, kept, weight, C)


def projector(eigenvalues: Tensor, eigenvectors: Tensor, share: float) -> Tensor:
    """Return AlphaEdit's projector P = U Uᵀ, as the directions U [d_in, m] of key space that text hardly uses.

    They are the eigenvectors of C, the second moment of keys, with the smallest eigenvalues, as many as together hold
    at most `share` of tr(C), so that E‖Uᵀk‖² <= share · E‖k‖². AlphaEdit (Fang et al. 2025, arXiv 2410.02355, eq. 5-7)
    takes all eigenvalues below a fixed number; a share means the same in every model.

    Args:
        eigenvalues: those of C, ascending, [d_in], float64.
        eigenvectors: those of C, [d_in, d_in], as columns.
        share: a share of tr(C).

    Raises:
        EditError: no direction is that little used, or all are.
    """
    used = eigenvalues.clamp(min=0).cumsum(0)
    size = int((used <= share * used[-1]).sum())
    if size == 0:
        raise EditError(
            f"every direction of key space holds more than {share:g} of the trace of C: "
            f"the least used holds {float(used[0] / used[-1]):.2g}; use a larger share"
        )
    if size == len(eigenvalues):
        raise EditError(f"a share of {share:g} leaves nothing of ordinary text to protect; use one below 1")
    return eigenvectors[:, :size]


def null_space(
    W: Tensor,
    K: Tensor,
    V: Tensor,
    U: Moment,
    ridge: float,
    kept: Tensor | None = None,
    own: Moment | None = None,
) -> LowRank:
    """Return the update that acts only on the directions U, which ordinary text hardly uses.

        Δ = (V − W K) Kᵀ P (K_p K_pᵀ P + K Kᵀ P + λI)⁻¹      P = U Uᵀ      λ = ridge · mean_i ‖Uᵀk_i‖²

    AlphaEdit (Fang et al. 2025, arXiv 2410.02355, eq. 12 and 14), in the coordinates of U: the published matrix is not
    symmetric, in these coordinates it is.

    Args:
        W: value matrix; it, K, V and `kept` are those of `equality`, but the values of `kept` may change a little.
        K: keys.
        V: values they should give.
        U: orthonormal directions that may be used, [d_in, m] (`projector`).
        ridge: weight of the size of Δ relative to a fact; a fact written alone loses the share ridge / (1 + ridge).
        kept: K_p.
        own: S, [d_in, d_in], positive definite, added to K_p K_pᵀ; a fact then loses some residual at λ = 0, too.

    Returns:
        Δ = Δ P as factors [d_out, N] and [N, d_in], float64.

    Raises:
        EditError: a key is zero or has no part along U; with ridge 0 and without `own` all that `equality` raises, for
            keys UᵀK.
    """
    W, K, V, U = double(W), double(K), double(V), diagonal([double(block) for block in blocks_of(U)])
    inside, total = (U.T @ K).square().sum(0), K.square().sum(0)
    lost = inside < ROUNDING * total
    if bool(lost.any()):
        raise EditError(
            f"key {_first(lost)} of {K.shape[1]} has no part in the null space of ordinary text "
            f"({U.shape[1]} of {U.shape[0]} directions): use a larger share, or memit"
        )
    kept = None if kept is None else U.T @ double(kept)
    if own is None:
        delta = _smallest(V - W @ K, U.T @ K, kept, ridge)
    else:
        blocks = [u.T @ (double(c) @ u) for u, c in zip(blocks_of(U), blocks_of(own), strict=True)]
        for block in blocks:
            block.diagonal().add_(ridge * float(inside.mean()))
        delta = _smallest(V - W @ K, U.T @ K, kept, 1.0, diagonal(blocks), relative=False)
    return LowRank(delta.left, (U @ delta.right.T).T)


def _smallest(
    R: Tensor, K: Tensor, kept: Tensor | None, weight: float, C: Metric | None = None, relative: bool = True
) -> LowRank:
    """Return argmin_Δ ‖Δ K − R‖² + ‖Δ K_p‖² + λ‖Δ‖_C²; C is I where it is None.

    λ is `weight`, or, if `relative`, weight · mean_i k_iᵀ C⁻¹ k_i.

    With J = [K_p, K], Δ = [0, R] (JᵀC⁻¹J + λI)⁻¹ JᵀC⁻¹: the dual form, of the size of the number of keys and exact at
    λ = 0, where it is the equality-constrained solution. The zeros leave the last N rows of the right factor.
    """
    kept = K[:, :0] if kept is None else double(kept)
    if weight == 0:  # kept keys may repeat each other: only their span is constrained, by an orthonormal basis
        left, sizes, _ = torch.linalg.svd(kept, full_matrices=False)
        kept = left[:, sizes > sizes[:1] * max(kept.shape) * torch.finfo(sizes.dtype).eps]
    dimensions, count, before = len(K), K.shape[1], kept.shape[1]
    if weight == 0 and before + count > dimensions:
        raise EditError(
            f"{count} facts and {before} independent kept keys, but only {dimensions} keys of this layer can each be "
            "given an exact value: write smaller batches, keep fewer, or use memit"
        )
    keys = torch.cat([kept, K], 1)
    whitened = keys if C is None else whiten(keys, C)
    gram = keys.T @ whitened
    energy = gram.diagonal()[before:].clone()
    silent = ~(energy > 0)
    if bool(silent.any()):
        raise EditError(
            f"the key k* is zero (key {_first(silent)} of {count}): "
            "nothing in this layer responds to the subject; choose another layer"
        )
    gram.diagonal().add_(weight * energy.mean() if relative else weight)
    factor, info = torch.linalg.cholesky_ex(gram)
    own = factor.diagonal().square() / gram.diagonal()  # share of each key that is orthogonal to those before it
    if int(info) != 0:
        own[int(info) - 1 :] = 0.0
    mixed = own[before:] < (ROUNDING if weight == 0 else len(gram) * torch.finfo(gram.dtype).eps)
    if bool(mixed.any()):
        raise EditError(
            f"key {_first(mixed)} of {count} is the same as another, or a mixture of those before it and of kept keys, "
            "so it cannot have a value of its own (do facts share a subject?); write them jointly, or use memit"
        )
    return LowRank(R, torch.cholesky_solve(whitened.T, factor)[before:])


def _first(where: Tensor) -> int:
    """Return the number of the first true entry, counted from 1."""
    return int(where.nonzero()[0]) + 1
