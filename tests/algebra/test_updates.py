"""The theorems of one fact's update and of its metric, and the factors that an update is kept in."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from ffedit.algebra.linalg import Updated, factor, whiten
from ffedit.algebra.low_rank import LowRank
from ffedit.algebra.updates import context_spread, direction, moment, rank_one
from ffedit.errors import EditError

D_OUT, D_IN = 7, 12
EQUAL = torch.full((4,), 0.25)  # shares in k* of four contexts


def problem(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """W, k, v and a C far from the identity."""
    g = torch.Generator().manual_seed(seed)
    W, k, v = (
        torch.randn(D_OUT, D_IN, generator=g),
        torch.randn(D_IN, generator=g),
        torch.randn(D_OUT, generator=g),
    )
    keys = torch.randn(D_IN, 50, generator=g, dtype=torch.float64) * torch.logspace(-1, 1, D_IN)[:, None]
    return W, k, v, keys @ keys.T / 50


def c_norm(delta: Tensor, C: Tensor) -> float:
    return float(torch.trace(delta @ C @ delta.T))


# rank_one -----------------------------------------------------------------------------------------


def test_the_direction_says_what_every_other_key_receives() -> None:
    """uᵀk = 1, and 0 for a key that C⁻¹ makes orthogonal; Δ x = (uᵀx) (v − W k) for any x."""
    W, k, v, C = problem()
    u, key = direction(k, C), k.double()
    x = torch.randn(D_IN, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    orthogonal = x - (u @ x) * key
    assert float(u @ key) == pytest.approx(1.0) and abs(float(u @ orthogonal)) < 1e-12 < float(orthogonal.norm())
    received = rank_one(W, k, v, C).dense @ x
    torch.testing.assert_close(received, (u @ x) * (v.double() - W.double() @ key), rtol=1e-9, atol=1e-12)
    with pytest.raises(EditError, match=r"the key k\* is zero"):
        direction(torch.zeros(D_IN), C)


def with_contexts(C: Tensor, keys: Sequence[tuple[Tensor, Tensor, Tensor]], weight: float) -> Tensor:
    """C and the spread of keys over their contexts."""
    return C.double() + moment(context_spread(keys, weight), [len(C)])


def test_with_the_contexts_counted_in_a_change_is_the_same_in_every_context() -> None:
    """Δ k_j nears Δ k* as the weight grows, and (W + Δ) k* = v* holds at every weight."""
    W, k, v, C = problem()
    same = k + 0.3 * torch.randn(4, D_IN, generator=torch.Generator().manual_seed(1))
    k, spread = same.mean(0), []
    for weight in (0.0, 1.0, 1e6):
        delta = rank_one(W, k, v, with_contexts(C, [(k, same, EQUAL)], weight)).dense
        torch.testing.assert_close((W.double() + delta) @ k.double(), v.double(), rtol=1e-9, atol=1e-9)
        residual = v.double() - W.double() @ k.double()
        spread.append(float((same.double() @ delta.T - residual).norm() / residual.norm()))
    assert spread[0] > spread[1] > 1e-2 > spread[2]


def test_the_spread_is_the_second_moment_about_each_key_by_the_shares_and_by_the_mean_of_subjects() -> None:
    """More facts leave no less of key space to text, and a context of more of k* counts more."""
    _, k, _, C = problem()
    g = torch.Generator().manual_seed(1)
    one, other = k + 0.3 * torch.randn(4, D_IN, generator=g), 2 * k + 0.3 * torch.randn(3, D_IN, generator=g)
    keys = [(k, one, EQUAL), (2 * k, other, torch.tensor([0.5, 0.3, 0.2]))]
    expected = C.double()
    for centre, same, shares in keys:
        away = same.double() - centre.double()
        expected = expected + 0.7 / 2 * away.T @ (shares.double()[:, None] * away)
    torch.testing.assert_close(with_contexts(C, keys, 0.7), expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(with_contexts(C, keys, 0.0), C.double())
    alone = with_contexts(C, [(k, k[None], torch.ones(1))], 0.7)
    assert torch.equal(alone, C.double()), "one context has no spread"


def test_a_corrected_factor_is_the_matrix_that_it_stands_for() -> None:
    """Woodbury: rows are added and taken away without another factorisation, and the update is the same."""
    W, k, v, C = problem()
    generator = torch.Generator().manual_seed(3)
    rows, signs = torch.randn(5, D_IN, dtype=torch.float64, generator=generator), torch.tensor([1.0, 1, 1, -1, -1])
    base = C.double() + rows[3:].T @ rows[3:]
    corrected = Updated(factor(base), rows, signs.double())
    dense = base + rows.T @ (signs.double()[:, None] * rows)
    columns = torch.randn(D_IN, 3, dtype=torch.float64, generator=generator)
    torch.testing.assert_close(corrected @ columns, dense @ columns, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(whiten(columns, corrected), whiten(columns, dense), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(rank_one(W, k, v, corrected).dense, rank_one(W, k, v, dense).dense)
    without = Updated(factor(base), rows[:0], signs[:0].double())
    torch.testing.assert_close(whiten(columns, without), whiten(columns, base), rtol=1e-9, atol=1e-9)


def test_statistics_that_are_not_positive_definite_are_refused() -> None:
    W, k, v, C = problem()
    for bad in (torch.zeros_like(C), -C, k[:, None] @ k[None, :]):
        with pytest.raises(EditError, match="positive definite"):
            rank_one(W, k, v, bad)


# LowRank ------------------------------------------------------------------------------------------


def test_product_norm_and_dense_matrix_of_factors_agree() -> None:
    delta = LowRank(torch.randn(D_OUT, 3).double(), torch.randn(3, D_IN).double())
    k = torch.randn(D_IN).double()
    torch.testing.assert_close(delta @ k, delta.dense @ k)
    torch.testing.assert_close(delta @ torch.stack([k, 2 * k], 1), delta.dense @ torch.stack([k, 2 * k], 1))
    assert delta.norm() == pytest.approx(float(delta.dense.norm()), rel=1e-12)
    assert delta.shape == (D_OUT, D_IN) and delta.rank == 3 and delta.is_finite()
    for bad in (float("nan"), float("inf")):
        assert not LowRank(torch.full((2, 1), bad), torch.ones(1, 2)).is_finite()
        assert not LowRank(torch.ones(2, 1), torch.full((1, 2), bad)).is_finite()


def test_factors_that_do_not_fit_are_refused_with_their_shapes() -> None:
    with pytest.raises(ValueError, match=r"\[7, 3\].*\[2, 12\]"):
        LowRank(torch.zeros(D_OUT, 3), torch.zeros(2, D_IN))
