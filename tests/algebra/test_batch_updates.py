"""The theorems of writing several facts at once: equality (EMMET), least squares (MEMIT), null space (AlphaEdit)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from ffedit.algebra.key_moments import KeyMoments
from ffedit.algebra.low_rank import LowRank
from ffedit.algebra.updates import equality, least_squares, null_space, projector, rank_one
from ffedit.editor import job
from ffedit.editor.config import EditConfig, KeyConfig
from ffedit.editor.methods import memit
from ffedit.editor.methods.memit import MemitConfig
from ffedit.errors import EditError

SHARE = 0.05


def directions(C: Tensor, share: float) -> Tensor:
    return projector(*torch.linalg.eigh(C), share)


@dataclass
class Problem:
    """Tiny and random, with a C far from the identity."""

    W: Tensor
    K: Tensor
    V: Tensor
    C: Tensor
    kept: Tensor
    U: Tensor

    @property
    def R(self) -> Tensor:
        return self.V.double() - self.W.double() @ self.K.double()


def problem(
    seed: int = 0, d_out: int = 7, d_in: int = 12, facts: int = 4, kept: int = 3, dtype=torch.float64
) -> Problem:
    g = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)  # noqa: E731
    text = torch.linalg.qr(draw(d_in, d_in).double())[0] * torch.logspace(-2, 1, d_in) @ draw(d_in, 5 * d_in).double()
    C = text @ text.T / (5 * d_in)
    return Problem(draw(d_out, d_in), draw(d_in, facts), draw(d_out, facts), C, draw(d_in, kept), directions(C, SHARE))


PROBLEMS = [
    pytest.param(problem(0), id="plain"),
    pytest.param(problem(1, d_out=3, d_in=20, facts=6, kept=5), id="wide"),
    pytest.param(problem(2, facts=1, kept=1), id="one fact"),
    pytest.param(problem(188, d_out=12, facts=9, kept=3), id="as many keys as d_in"),
    pytest.param(problem(4, dtype=torch.float32), id="float32"),
]
every_problem = pytest.mark.parametrize("p", PROBLEMS)

Method = Callable[[Problem, Tensor | None], LowRank]
METHODS: dict[str, Method] = {
    "equality": lambda p, kept: equality(p.W, p.K, p.V, p.C, kept),
    "least squares": lambda p, kept: least_squares(p.W, p.K, p.V, p.C, 0.3, kept),
    "null space": lambda p, kept: null_space(p.W, p.K, p.V, p.U, 0.3, kept),
}
every_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)


def close(found: Tensor, expected: Tensor | float, tolerance: float = 1e-9) -> None:
    expected = torch.as_tensor(expected, dtype=torch.float64).expand_as(found)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def c_norm(delta: Tensor, C: Tensor) -> float:
    return float((delta @ C * delta).sum())


# All methods --------------------------------------------------------------------------------------


@every_problem
@every_method
def test_rank_is_the_number_of_facts_and_factors_are_float64(p: Problem, method: Method) -> None:
    for kept in (None, p.kept):
        delta = method(p, kept)
        assert delta.rank == p.K.shape[1] and delta.shape == p.W.shape
        assert delta.left.dtype == delta.right.dtype == torch.float64 and delta.norm() > 0


@every_method
def test_a_zero_key_is_refused_by_its_number(method: Method) -> None:
    p = problem()
    p.K[:, 2] = 0
    with pytest.raises(EditError, match=r"key k\* is zero \(key 3 of 4\)"):
        method(p, None)


# equality: EMMET ----------------------------------------------------------------------------------


@every_problem
def test_all_keys_give_their_values_and_kept_ones_what_they_gave(p: Problem) -> None:
    alone, beside = equality(p.W, p.K, p.V, p.C), equality(p.W, p.K, p.V, p.C, p.kept)
    for delta in (alone, beside):
        close((p.W.double() + delta.dense) @ p.K.double(), p.V.double())
    close(beside @ p.kept.double(), 0.0)


@every_problem
def test_no_other_solution_has_a_smaller_c_norm(p: Problem) -> None:
    for kept in (p.kept[:, :0], p.kept):
        if (fixed := torch.cat([kept, p.K], 1).double()).shape[1] == len(p.K):
            continue  # as many conditions as unknowns: there is no other solution
        delta, away = equality(p.W, p.K, p.V, p.C, kept).dense, torch.eye(len(p.K)).double()
        away -= fixed @ torch.linalg.pinv(fixed)
        for trial in range(20):
            other = torch.randn(p.W.shape, generator=torch.Generator().manual_seed(trial), dtype=torch.float64) @ away
            for size in (1e-3, 1.0):
                assert c_norm(delta + size * other, p.C) > c_norm(delta, p.C)
            assert abs(torch.trace(delta @ p.C @ other.T)) < 1e-9 * c_norm(other, p.C), "no first-order change"


def test_one_fact_is_rome() -> None:
    p = problem(facts=1)
    k, u = p.K[:, 0], torch.linalg.solve(p.C, p.K[:, 0])
    close(rank_one(p.W, k, p.V[:, 0], p.C).dense, equality(p.W, p.K, p.V, p.C).dense, 1e-15)
    close(rank_one(p.W, k, p.V[:, 0], p.C).dense, p.R @ u[None, :] / (k @ u))


def test_kept_keys_may_repeat_each_other() -> None:
    p = problem()
    once = equality(p.W, p.K, p.V, p.C, p.kept)
    mixture = p.kept @ torch.randn(3, 1, dtype=torch.float64)
    close(equality(p.W, p.K, p.V, p.C, torch.cat([p.kept, p.kept, mixture], 1)).dense, once.dense)


def test_more_facts_than_the_layer_has_room_for_are_refused_with_numbers() -> None:
    p = problem(facts=13)
    with pytest.raises(EditError, match=r"13 facts and 0 independent kept keys.* 12 keys.*smaller batches.*memit"):
        equality(p.W, p.K, p.V, p.C)
    with pytest.raises(EditError, match=r"10 facts and 3 independent kept keys.* 12 keys"):
        equality(p.W, p.K[:, :10], p.V[:, :10], p.C, p.kept)
    assert 0 < (p.R - least_squares(p.W, p.K, p.V, p.C, 1e-9) @ p.K).norm() < p.R.norm()


def test_keys_without_a_direction_of_their_own_are_refused_by_number() -> None:
    p = problem()
    same, mixed, rounded = (p.K.clone() for _ in range(3))
    same[:, 2] = 5 * p.K[:, 0]
    mixed[:, 3] = p.K[:, 0] - 2 * p.K[:, 1] + p.K[:, 2]
    rounded[:, 1] = p.K[:, 0] + 1e-7 * p.kept[:, 0]
    for K, number in ((same, 3), (mixed, 4), (rounded, 2)):
        with pytest.raises(EditError, match=rf"key {number} of 4 is the same.*subject.*memit"):
            equality(p.W, K, p.V, p.C)
        R = p.V - p.W @ K
        assert 0 < (R - least_squares(p.W, K, p.V, p.C, 1e-9) @ K).norm() < R.norm(), "a little weight is enough"
    with pytest.raises(EditError, match=r"key 3 of 4"):
        least_squares(p.W, same, p.V, p.C, 1e-20)  # no weight at all once it is rounded
    with pytest.raises(EditError, match=r"key 2 of 4 is the same.*kept keys"):
        equality(p.W, p.K, p.V, p.C, p.K[:, 1:2])


# least_squares: MEMIT -----------------------------------------------------------------------------


@every_problem
@pytest.mark.parametrize("weight", [1e-3, 1e3])
def test_the_normal_equations_hold(p: Problem, weight: float) -> None:
    K, kept = p.K.double(), p.kept.double()
    penalty = weight * (K * torch.linalg.solve(p.C, K)).sum(0).mean()
    matrix = penalty * p.C + kept @ kept.T + K @ K.T
    close(least_squares(p.W, p.K, p.V, p.C, weight, p.kept) @ matrix, p.R @ K.T, 1e-8)
    matrix = penalty * p.C + K @ K.T
    close(least_squares(p.W, p.K, p.V, p.C, weight) @ matrix, p.R @ K.T, 1e-8)


@every_problem
@pytest.mark.parametrize("with_kept", [False, True])
def test_least_squares_tend_to_equality(p: Problem, with_kept: bool) -> None:
    kept = p.kept if with_kept else None
    exact = equality(p.W, p.K, p.V, p.C, kept).dense
    near = [least_squares(p.W, p.K, p.V, p.C, weight, kept).dense for weight in (1e-2, 1e-8, 1e-14, 0.0)]
    far = [float((delta - exact).norm() / exact.norm()) for delta in near]
    assert far[0] > 1e-3 and far[1] < 1e-2 * far[0] and far[2] < 1e-7 and far[3] == 0


# null_space: AlphaEdit ----------------------------------------------------------------------------


@every_problem
@pytest.mark.parametrize("with_kept", [False, True])
def test_both_published_forms_of_alphaedit_agree_with_ours(p: Problem, with_kept: bool) -> None:
    K, kept = p.K.double(), p.kept.double() * with_kept
    P, I = p.U @ p.U.T, torch.eye(len(p.K)).double()
    penalty = 0.3 * (p.U.T @ K).square().sum(0).mean() * I
    published = p.R @ K.T @ P @ torch.linalg.inv(kept @ kept.T @ P + K @ K.T @ P + penalty)
    symmetric = p.R @ K.T @ torch.linalg.inv(P @ (kept @ kept.T + K @ K.T) @ P + penalty) @ P
    ours = null_space(p.W, p.K, p.V, p.U, 0.3, p.kept if with_kept else None).dense
    close(ours, published)
    close(ours, symmetric)


@every_problem
def test_the_change_stays_in_the_null_space(p: Problem) -> None:
    delta, P = null_space(p.W, p.K, p.V, p.U, 0.3, p.kept), p.U @ p.U.T
    close(delta.dense @ P, delta.dense)
    other = torch.randn(len(p.K), 50, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    outside, nearly = other - P @ other, other - 0.99 * P @ other
    close(delta @ outside, 0.0)
    assert 0 < (delta @ nearly).norm() <= delta.norm() * (P @ nearly).norm()
    assert c_norm(delta.dense, p.C) <= delta.norm() ** 2 * SHARE * float(p.C.trace())


def test_without_a_ridge_facts_are_stored_exactly_in_the_null_space() -> None:
    p = problem(facts=2, kept=1)
    delta = null_space(p.W, p.K, p.V, p.U, 0.0, p.kept)
    close(delta @ p.K, p.R)
    close(delta @ p.kept, 0.0)


@every_problem
def test_own_texts_count_as_kept_keys_do_at_any_ridge(p: Problem) -> None:
    K, F = p.K.double(), torch.linalg.cholesky(0.1 * p.C)
    for ridge in (0.3, 1e-6):
        as_keys = null_space(p.W, p.K, p.V, p.U, ridge, torch.cat([p.kept.double(), F], 1))
        close(null_space(p.W, p.K, p.V, p.U, ridge, p.kept, F @ F.T).dense, as_keys.dense, 1e-6)
    # Without a ridge there are more of them than directions: what is asked for is still one change.
    inside = p.U.T @ (K @ K.T + p.kept.double() @ p.kept.double().T + F @ F.T) @ p.U
    expected = p.R @ K.T @ p.U @ torch.linalg.solve(inside, p.U.T)
    alone = null_space(p.W, p.K, p.V, p.U, 0.0, p.kept, F @ F.T)
    close(alone.dense, expected, 1e-6)
    close(null_space(p.W, p.K, p.V, p.U, 1e-12, p.kept, F @ F.T).dense, alone.dense, 1e-6)
    assert alone.rank == K.shape[1]


def test_a_key_outside_the_null_space_is_refused_by_number() -> None:
    p = problem()
    p.K[:, 1] -= p.U @ (p.U.T @ p.K[:, 1])
    with pytest.raises(EditError, match=r"key 2 of 4 has no part in the null space.*larger share"):
        null_space(p.W, p.K, p.V, p.U, 0.3)


# projector ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [1e-3, 0.02, 0.5])
def test_the_null_space_holds_at_most_its_share_and_as_much_as_it_may(share: float) -> None:
    C = problem().C
    U = directions(C, share)
    assert 0 < U.shape[1] < len(C)
    close(U.T @ U, torch.eye(U.shape[1]).double(), 1e-12)
    held, next_one = float(torch.trace(U.T @ C @ U)), float(torch.linalg.eigvalsh(C)[U.shape[1]])
    assert held <= share * float(C.trace()) < held + next_one
    close(C @ U, U * torch.linalg.eigvalsh(C)[: U.shape[1]])  # the eigenvectors of the smallest eigenvalues


def test_directions_that_no_text_uses_are_free_at_any_share() -> None:
    C = torch.diag(torch.tensor([0.0, 3.0, 0.0, 1.0]))
    assert directions(C, 0.0).shape == (4, 2) == directions(C, 0.2).shape


def test_a_share_that_leaves_nothing_or_everything_is_refused() -> None:
    C = torch.eye(4)
    with pytest.raises(EditError, match=r"more than 0\.1 .*least used holds 0\.25; use a larger share"):
        directions(C, 0.1)
    with pytest.raises(EditError, match=r"share of 1 leaves nothing.*below 1"):
        directions(C, 1.0)


def test_a_fact_gives_up_as_much_among_many_as_alone() -> None:
    """MEMIT's λ is relative to C, however many facts' contexts stand in it, here themselves like ordinary text."""
    p, config = problem(0, kept=0), EditConfig(key=KeyConfig(context_weight=0.05))
    moments = KeyMoments(p.C, 1, "text", "model")
    C, shares = moments.C, []
    root = torch.linalg.cholesky(config.key.context_weight * C).mT
    for count in (1, 2, 4):
        K, V = p.K[:, :count], p.V[:, :count]
        delta = memit.solve(job.Problem(p.W, K, V, [moments], count**0.5 * root, p.kept, config)).dense
        # (V − (W + Δ) K) Kᵀ = λ Δ C', and C' is a multiple of C.
        left, right = (V - p.W @ K - delta @ K) @ K.T, delta @ C
        weight = float((left * right).sum() / right.square().sum())
        torch.testing.assert_close(left, weight * right, rtol=1e-6, atol=1e-9)
        energy = float((K * torch.linalg.solve(C, K)).sum(0).mean())
        shares.append(weight / energy)
    assert shares == pytest.approx([MemitConfig().ridge] * 3)
