"""The theorems that the algebra states, and the statistics that it rests on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from ffedit.algebra.key_moments import KeyMoments, KeyMomentsFitter
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


def test_the_moment_of_the_contexts_is_that_of_their_spread() -> None:
    _, k, _, C = problem()
    same = k + 0.3 * torch.randn(4, D_IN, generator=torch.Generator().manual_seed(1))
    away = same.double() - k.double()
    expected = C.double() + 0.7 * sum(torch.outer(one, one) for one in away) / 4
    torch.testing.assert_close(with_contexts(C, [(k, same, EQUAL)], 0.7), expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(with_contexts(C, [(k, same, EQUAL)], 0.0), C.double())
    alone = with_contexts(C, [(k, k[None], torch.ones(1))], 0.7)
    assert torch.equal(alone, C.double()), "one context has no spread"


def test_the_spread_of_several_subjects_counts_by_its_mean() -> None:
    """Two equal subjects add what one does: more facts leave no less of key space to text."""
    _, k, _, C = problem()
    one = k, k + 0.3 * torch.randn(4, D_IN, generator=torch.Generator().manual_seed(1)), EQUAL
    alone, both = with_contexts(C, [one], 0.7), with_contexts(C, [one, one], 0.7)
    torch.testing.assert_close(both, alone, rtol=1e-12, atol=1e-12)


def test_a_context_of_more_of_the_key_counts_more_in_its_spread() -> None:
    """A share of two equal contexts in one is what they have in two."""
    _, k, _, C = problem()
    one, two = k + 0.3 * torch.randn(2, D_IN, generator=torch.Generator().manual_seed(2))
    split = with_contexts(C, [(k, torch.stack([one, one, two]), torch.tensor([0.5, 0.25, 0.25]))], 0.7)
    joined = with_contexts(C, [(k, torch.stack([one, two]), torch.tensor([0.75, 0.25]))], 0.7)
    torch.testing.assert_close(split, joined, rtol=1e-12, atol=1e-12)


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


def test_statistics_unlike_the_identity_change_the_update() -> None:
    W, k, v, C = problem()
    plain = rank_one(W, k, v, torch.eye(D_IN))
    assert c_norm(plain.dense, C) > 1.5 * c_norm(rank_one(W, k, v, C).dense, C)


def test_whitening_solves_for_keys() -> None:
    _, k, _, C = problem()
    keys = torch.stack([k, 2 * k], 1)
    torch.testing.assert_close(C @ whiten(keys, C), keys.double())


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


def test_factors_that_do_not_fit_are_refused_with_their_shapes() -> None:
    with pytest.raises(ValueError, match=r"\[7, 3\].*\[2, 12\]"):
        LowRank(torch.zeros(D_OUT, 3), torch.zeros(2, D_IN))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_factors_that_are_not_finite_say_so(bad: float) -> None:
    assert not LowRank(torch.full((2, 1), bad), torch.ones(1, 2)).is_finite()
    assert not LowRank(torch.ones(2, 1), torch.full((1, 2), bad)).is_finite()


# KeyMoments ---------------------------------------------------------------------------------------


def streamed(keys: Tensor, step: int) -> KeyMoments:
    fitter = KeyMomentsFitter()
    for batch in keys.split(step):
        fitter.update(batch, torch.ones(len(batch)))
    return fitter.moments("a test", "model:1")


def test_fewer_tokens_than_keys_still_give_a_positive_definite_matrix() -> None:
    moments = streamed(torch.randn(3, D_IN), 3)
    assert torch.linalg.eigvalsh(moments.C)[0] > 0
    W, k, v, _ = problem()
    assert rank_one(W, k, v, moments.C).is_finite()


def test_no_text_and_infinite_keys_are_refused() -> None:
    with pytest.raises(EditError, match="no text"):
        KeyMomentsFitter().moments("an empty file", "")
    with pytest.raises(EditError, match="not finite"):
        streamed(torch.full((2, D_IN), float("inf")), 2)


def test_statistics_of_another_model_are_refused_by_name(tmp_path: Path) -> None:
    streamed(torch.randn(40, D_IN), 40).save(tmp_path / "m.safetensors")
    with pytest.raises(EditError, match=r"model:1.*model:2"):
        KeyMoments.load(tmp_path / "m.safetensors", "model:2")


def test_foreign_and_damaged_files_are_refused_in_one_line(tmp_path: Path) -> None:
    foreign, damaged, cut = (tmp_path / f"{name}.safetensors" for name in ("foreign", "damaged", "cut"))
    save_file({"sum": torch.zeros(2, 2)}, foreign)
    damaged.write_bytes(b"no tensors at all")
    streamed(torch.randn(40, D_IN), 40).save(cut)
    cut.write_bytes(cut.read_bytes()[:-100])
    for path in (foreign, damaged, cut):
        with pytest.raises(EditError, match="not a file of key statistics") as caught:
            KeyMoments.load(path)
        assert "\n" not in str(caught.value)
