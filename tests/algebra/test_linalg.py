"""Solutions from a factor in half the bits are those of float64."""

import pytest
import torch
from torch import Tensor

from ffedit.algebra import linalg
from ffedit.algebra.linalg import EXACT, RefinedInverse
from ffedit.errors import EditError


def matrix(spread: float, size: int = 60) -> tuple[Tensor, Tensor]:
    """A positive definite matrix whose eigenvalues span `spread`, and right sides, float64."""
    draw = torch.Generator().manual_seed(0)
    basis, _ = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64, generator=draw))
    values = torch.logspace(0, torch.tensor(spread).log10().item(), size, dtype=torch.float64)
    C = (basis * values) @ basis.T
    return (C + C.T) / 2, torch.randn(size, 5, dtype=torch.float64, generator=draw)


# The last ones are beyond float32: its factor does not exist, or refines nothing.
@pytest.mark.parametrize("spread", [1.0, 1e5, 1e7, 1e12])
def test_a_refined_solution_is_that_of_float64(spread: float) -> None:
    C, columns = matrix(spread)
    residual = C @ RefinedInverse(C)(columns) - columns
    plain = C @ torch.cholesky_solve(columns, torch.linalg.cholesky(C)) - columns
    assert float((residual.norm(dim=0) / columns.norm(dim=0)).max()) <= max(EXACT, 10 * float(plain.norm()))


def test_a_float32_factor_is_all_that_ordinary_statistics_need(monkeypatch: pytest.MonkeyPatch) -> None:
    C, columns = matrix(1e4)
    kept = linalg.factor_
    monkeypatch.setattr(linalg, "factor_", lambda C: kept(C) if C.dtype == torch.float32 else pytest.fail("float64"))
    assert torch.allclose(RefinedInverse(C)(columns), torch.linalg.solve(C, columns), rtol=1e-8, atol=1e-10)
    shifted, before = C + 2 * torch.eye(len(C), dtype=C.dtype), C.clone()
    solution = RefinedInverse(C, shift=2.0)(columns)
    assert torch.allclose(solution, torch.linalg.solve(shifted, columns), rtol=1e-8, atol=1e-10)
    assert torch.equal(C, before)
    zero = torch.zeros(len(C), 1, dtype=C.dtype)
    assert torch.equal(RefinedInverse(C)(zero), zero)


def test_what_is_not_positive_definite_is_refused() -> None:
    C, _ = matrix(1e3)
    with pytest.raises(EditError, match="not positive definite"):
        RefinedInverse(C - 2 * torch.eye(len(C), dtype=C.dtype))
