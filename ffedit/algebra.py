"""The smallest change of a linear associative memory that stores facts.

The value matrix W [d_out, d_in] maps a key k to the value W k. Writing facts means W K = V afterwards, one column
per fact, while the keys of other text, known through their second moment C = E[k kᵀ], should go on giving what they
gave. "Small" is therefore measured as ‖Δ‖_C² = tr(Δ C Δᵀ) = E‖Δ k‖²: the mean squared change of what ordinary text
reads. The keys K_p of earlier edits should go on giving what they give too. With the residual R = V − W K, all methods
solve one problem:

    minimise over Δ   ‖Δ K − R‖² + ‖Δ K_p‖² + λ ‖Δ‖_C²

    rank_one        λ → 0, one fact                               ROME
    equality        λ → 0: Δ K = R and Δ K_p = 0 hold exactly     EMMET
    least_squares   λ > 0: close to all facts, exact for none     MEMIT
    null_space      Δ = Δ P and C = I: Δ acts only on directions  AlphaEdit
                    of key space that ordinary text hardly uses

Where C is block-diagonal (`blocks`: a mixture of experts, whose keys stand one below the other), C⁻¹ is taken block by
block, and how the experts share the work follows: Δ_e = R (Kᵀ C⁻¹ K)⁻¹ K_eᵀ C_e⁻¹.

All functions are pure and compute in float64 on the device of their inputs (on the CPU where the device has none).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from ffedit.blocks import Moment, blocks_of, diagonal, split
from ffedit.errors import EditError
from ffedit.lowrank import LowRank

# Share of a key's squared norm that is its own and no other key's. Below this (1e-4 of the norm) it is the rounding of
# 32-bit activations, which C⁻¹ magnifies, and no direction to write along.
ROUNDING = 1e-8
# A power iteration ends where its estimate, which only grows, grows by less than this share.
SETTLED = 1e-4


def double(tensor: Tensor) -> Tensor:
    """`tensor` in float64; moved to the CPU first where its device has no float64 (Apple's)."""
    return tensor.cpu().double() if tensor.device.type == "mps" else tensor.double()


def whiten(k: Tensor, C: Moment) -> Tensor:
    """C⁻¹ k by a Cholesky factorisation, never by an inverse; of `Blocks`, block by block.

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
    """The Cholesky factor of a second moment.

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
    """(L Lᵀ)⁻¹ `columns` [d, n]; `torch.cholesky_solve` would copy L [d, d], which may be large."""
    half = torch.linalg.solve_triangular(lower, columns, upper=False)
    found: Tensor = torch.linalg.solve_triangular(lower.mT, half, upper=True)
    return found


def condition(C: Tensor, steps: int = 50) -> float:
    """Condition number of C, largest over smallest eigenvalue, by power and inverse iteration.

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
    """Of a symmetric, positive definite map of columns, by power iteration from `at` [d, 1]."""
    found = 0.0
    for _ in range(steps):
        at = apply(at / at.norm())
        before, found = found, float(at.norm())
        if found <= before * (1 + SETTLED):
            break
    return found


def steadied(C: Moment, k: Tensor, same: Tensor, others: Sequence[Tensor], weight: float) -> Moment:
    """C with the texts about the subject counted in, `weight` times as much as all ordinary text.

        C' = C + w ( E[(k_j − k*)(k_j − k*)ᵀ] + Σ E[k' k'ᵀ] )

    In ROME's norm the smallest change gives v* to the mean key k* and to nothing else: in one context the subject
    receives a third of the change, in another more than all of it, and the word behind the subject receives some too,
    and so does a name that could stand there instead. In the norm of C' a change costs what it does to the words beside
    the subject and to its namesakes, and what it does differently to the subject from context to context, so that
    Δ k_j ≈ Δ k* and Δ k' ≈ 0 while (W + Δ) k* = v* still holds exactly.

    Of `Blocks`, each block counts its own part of these keys.

    Args:
        C: second moment of the keys of ordinary text, [d_in, d_in].
        k: k*, [d_in].
        same: the keys k_j at the subject's last token in several contexts, [n, d_in].
        others: keys k' that are to give what they give, each kind [m, d_in]: of all other tokens of these contexts,
            and of namesakes.
        weight: w; 0 is ROME.

    Returns:
        C', [d_in, d_in], float64.
    """
    return counted_in(C, (double(same) - double(k), *others), weight)


def counted_in(C: Moment, kinds: Sequence[Tensor], weight: float) -> Moment:
    """C + weight · Σ E[a aᵀ], a the rows of each of `kinds`, [m, d_in]; one matrix of its size is made."""
    of = [split(double(rows), C) for rows in kinds]
    return diagonal([_counted_in(*parts, weight=weight) for parts in zip(blocks_of(C), *of, strict=True)])


def _counted_in(C: Tensor, *kinds: Tensor, weight: float) -> Tensor:
    """`counted_in` for one block."""
    found = double(C).clone()
    for rows in kinds:
        a = rows.to(found)
        found.addmm_(a.T, a, alpha=weight / max(1, len(a)))
    return found


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
    return equality(W, k[:, None], v[:, None], C)


def equality(W: Tensor, K: Tensor, V: Tensor, C: Moment, kept: Tensor | None = None) -> LowRank:
    """The update of smallest C-norm with (W + Δ) K = V and Δ K_p = 0.

        Δ = (V − W K) (Kᵀ C⁻¹ K)⁻¹ Kᵀ C⁻¹

    EMMET (Gupta et al. 2024, arXiv 2403.14236): ROME for several facts, and MEMIT as λ → 0. Kept keys are facts with
    the residual zero, so the same formula holds for [K_p, K] and [0, R].

    Args:
        W: value matrix, [d_out, d_in].
        K: keys, [d_in, N].
        V: values they should give, [d_out, N].
        C: second moment of keys, [d_in, d_in].
        kept: K_p, keys of earlier edits, whose values do not move, [d_in, p].

    Returns:
        Δ as factors [d_out, N] and [N, d_in], float64.

    Raises:
        EditError: C is not positive definite, a key is zero, there are more keys than d_in, or a key is a mixture of
            the others, so that it cannot be given a value of its own.
    """
    return least_squares(W, K, V, C, 0.0, kept)


def check_exact(K: Tensor, kept: Tensor | None = None) -> None:
    """Refuse keys that cannot each be given an exact value beside `kept`, whatever the values and C are.

    Values are expensive to choose and keys cheap to read, so this is asked first. It looks at the keys as they are,
    C = I: whether they are independent does not depend on C.

    Args:
        K: keys, [d_in, N].
        kept: K_p, keys whose values do not move, [d_in, p].

    Raises:
        EditError: as `equality`, but for C.
    """
    _smallest(double(K).new_zeros(0, K.shape[1]), double(K), kept, 0.0)


def least_squares(W: Tensor, K: Tensor, V: Tensor, C: Moment, weight: float, kept: Tensor | None = None) -> LowRank:
    """The update that gives all facts nearly their values and disturbs ordinary text little.

        Δ = (V − W K) Kᵀ (λC + K_p K_pᵀ + K Kᵀ)⁻¹        λ = weight · mean_i k_iᵀ C⁻¹ k_i

    MEMIT (Meng et al. 2023, arXiv 2210.07229, eq. 14). λ is relative to the keys, so that one weight suits every model:
    a fact that is written alone gives up the share weight / (1 + weight) of its residual.

    Args:
        W: value matrix, [d_out, d_in].
        K: keys, [d_in, N]; they may be more than d_in, and alike.
        V: values they should give, [d_out, N].
        C: second moment of keys, [d_in, d_in].
        weight: what ordinary text counts against a fact; 0 is `equality`.
        kept: K_p, keys of earlier edits, whose values should hardly move, [d_in, p].

    Returns:
        Δ as factors [d_out, N] and [N, d_in], float64.

    Raises:
        EditError: C is not positive definite, or a key is zero; with weight 0 all that `equality` raises.
    """
    W, K, V = double(W), double(K), double(V)
    return _smallest(V - W @ K, K, kept, weight, C)


def projector(C: Tensor, share: float) -> Tensor:
    """Directions of key space that ordinary text hardly uses: P = U Uᵀ projects on them.

    The eigenvectors of C with the smallest eigenvalues, as many as together hold at most `share` of tr(C), so that
    E‖Uᵀk‖² <= share · E‖k‖². AlphaEdit (Fang et al. 2025, arXiv 2410.02355, eq. 5-7) takes all eigenvalues below a
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


def null_space(W: Tensor, K: Tensor, V: Tensor, U: Moment, ridge: float, kept: Tensor | None = None) -> LowRank:
    """The update that acts on the directions U alone, which ordinary text hardly uses.

        Δ = (V − W K) Kᵀ P (K_p K_pᵀ P + K Kᵀ P + λI)⁻¹      P = U Uᵀ      λ = ridge · mean_i ‖Uᵀk_i‖²

    AlphaEdit (Fang et al. 2025, arXiv 2410.02355, eq. 12 and 14), in the coordinates of U: the published matrix is not
    symmetric, there it is.

    Args:
        W: value matrix, [d_out, d_in].
        K: keys, [d_in, N].
        V: values they should give, [d_out, N].
        U: orthonormal directions that may be used, [d_in, m] (`projector`).
        ridge: what the size of Δ counts against a fact; a fact written alone gives up the share ridge / (1 + ridge).
        kept: K_p, keys of earlier edits, whose values should hardly move, [d_in, p].

    Returns:
        Δ = Δ P as factors [d_out, N] and [N, d_in], float64.

    Raises:
        EditError: a key is zero or has no part along U; with ridge 0 all that `equality` raises, for keys UᵀK.
    """
    W, K, V, U = double(W), double(K), double(V), diagonal([double(block) for block in blocks_of(U)])
    inside, total = (U.T @ K).square().sum(0), K.square().sum(0)
    lost = inside < ROUNDING * total
    if bool(lost.any()):
        raise EditError(
            f"key {_first(lost)} of {K.shape[1]} has no part in the null space of ordinary text "
            f"({U.shape[1]} of {U.shape[0]} directions): use a larger share, or memit"
        )
    delta = _smallest(V - W @ K, U.T @ K, None if kept is None else U.T @ double(kept), ridge)
    return LowRank(delta.left, (U @ delta.right.T).T)


def _smallest(R: Tensor, K: Tensor, kept: Tensor | None, weight: float, C: Moment | None = None) -> LowRank:
    """argmin_Δ ‖Δ K − R‖² + ‖Δ K_p‖² + λ‖Δ‖_C², λ = weight · mean_i k_iᵀ C⁻¹ k_i; C is I where it is None.

    With J = [K_p, K], Δ = [0, R] (JᵀC⁻¹J + λI)⁻¹ JᵀC⁻¹: the dual form, as large as there are keys and exact at λ = 0,
    where it is the equality-constrained solution. The zeros leave the last N rows of the right factor.
    """
    kept = K[:, :0] if kept is None else double(kept)
    if weight == 0:
        kept = _basis(kept)  # kept keys may repeat each other: it is their span that must not move
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
    gram.diagonal().add_(weight * energy.mean())
    factor, info = torch.linalg.cholesky_ex(gram)
    own = factor.diagonal().square() / gram.diagonal()  # of each key, the share that those before it do not hold
    if int(info) != 0:
        own[int(info) - 1 :] = 0.0
    mixed = own[before:] < (ROUNDING if weight == 0 else len(gram) * torch.finfo(gram.dtype).eps)
    if bool(mixed.any()):
        raise EditError(
            f"key {_first(mixed)} of {count} is the same as another, or a mixture of those before it and of kept keys, "
            "so it has no value of its own: facts that share a subject do this; write them jointly, or use memit"
        )
    return LowRank(R, torch.cholesky_solve(whitened.T, factor)[before:])


def _basis(keys: Tensor) -> Tensor:
    """Orthonormal columns that span `keys` [d_in, p], [d_in, rank]."""
    left, sizes, _ = torch.linalg.svd(keys, full_matrices=False)
    basis: Tensor = left[:, sizes > sizes[:1] * max(keys.shape) * torch.finfo(sizes.dtype).eps]
    return basis


def _first(where: Tensor) -> int:
    """Number of the first true entry, counted from 1."""
    return int(where.nonzero()[0]) + 1
