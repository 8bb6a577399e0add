"""Second moments: the streamed sum is that of float64, and halves tell how sure it is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from ffedit import EditError
from ffedit.algebra.key_moments import (
    BLOCK,
    CONVERGED,
    RIDGES,
    ROUNDING,
    KeyMoments,
    KeyMomentsFitter,
    second_moment,
    solved,
    spared,
)
from ffedit.algebra.updates import projector

D = 24
SCALES = torch.logspace(0, -1, D)


def keys_of(seed: int, count: int = 400, size: int = D) -> Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(seed))


def fitted(keys: Tensor, step: int = 50, **about: object) -> KeyMoments:
    fitter = KeyMomentsFitter()
    for batch in keys.split(step):
        fitter.update(batch, torch.ones(len(batch)))
    known = {"texts": ("a",), "model": "m", "address": "1", "dtype": "float32"}
    return fitter.moments("text a", "model:1", **known, **about)


@pytest.mark.parametrize("size", [D, BLOCK - 1, BLOCK + 5])
def test_the_sum_is_that_of_float64_whatever_the_blocks(size: int) -> None:
    # Means far from zero: nothing cancels, and a long sum in float32 would drift.
    keys = keys_of(0, 6000, size) + 3.0
    weights = torch.rand(6000, dtype=torch.float64)
    fitter, single = KeyMomentsFitter(), torch.zeros(size, size)
    for batch, some in zip(keys.split(200), weights.split(200), strict=True):
        fitter.update(batch, some)
        single += (batch * some[:, None].float()).T @ batch
    found = fitter.moments("t", "f").sum
    exact = (keys.double() * weights[:, None]).T @ keys.double()
    error = float((found - exact).norm() / exact.norm())
    assert error < 1e-6 and torch.equal(found, found.T)
    if size == D:
        assert error < 0.5 * float((single.double() - exact).norm() / exact.norm())


# Convergence --------------------------------------------------------------------------------------


def probes_of(keys: Tensor, step: int) -> Tensor:
    """The keys at which the convergence of `fitted` is measured."""
    fitter = KeyMomentsFitter()
    fitter.update(keys[:step], torch.ones(step))
    assert fitter.probes is not None
    return fitter.probes


def added(moments: KeyMoments, probes: Tensor, C: Tensor) -> Tensor:
    """Root mean square of uᵀx over text of the second moment C, for u of each probe: what an update adds there."""
    u = solved(moments.C, probes)
    return (u * (C @ u)).sum(0).sqrt()


@pytest.mark.parametrize(("count", "size"), [(400, 24), (400, 60), (3000, 96), (12_000, 96)])
def test_convergence_is_what_endless_text_would_spare(count: int, size: int) -> None:
    scales = torch.logspace(0, -1, size)
    keys = keys_of(0, count, size) * scales
    moments, endless = fitted(keys, count // 8), torch.diag(scales.double() ** 2)
    probes = probes_of(keys, count // 8)
    least = added(replace(moments, sum=endless * count), probes, endless)
    spare = float(1 - (least / added(moments, probes, endless)).log().mean().exp())
    assert moments.convergence == pytest.approx(spare, rel=0.3)


def test_halves_of_other_texts_do_not_converge() -> None:
    keys = keys_of(0, 4000)
    torn = torch.cat([batch * (SCALES if i % 2 else SCALES.flip(0)) for i, batch in enumerate(keys.split(50))])
    assert fitted(torn).convergence > 10 * fitted(keys).convergence  # type: ignore[operator]


def test_convergence_is_the_stated_figure() -> None:
    keys = keys_of(0)
    moments, probes = fitted(keys, 200), probes_of(keys, 200)
    parts = [half.double().T @ half.double() for half in keys.split(200)]
    below = RIDGES[max(0, RIDGES.index(moments.ridge) - 1)]
    a, b = (second_moment(part, 200, below) for part in parts)
    logs = []
    for k in probes.double():
        u, v = (torch.linalg.solve(C, k) / (k @ torch.linalg.solve(C, k)) for C in (a, b))
        own = (u @ parts[0] @ u) * (v @ parts[1] @ v)
        logs.append(float((own / ((u @ parts[1] @ u) * (v @ parts[0] @ v))).log()))
    rho = torch.tensor(logs).mean().div(4).exp().double()
    assert moments.convergence == pytest.approx(float(1 - ((1 + rho) / 2).sqrt()), rel=1e-4)
    assert any(torch.equal(probes[0], key) for key in keys)
    assert fitted(keys, 400).convergence is None, "one batch has no halves"


def test_texts_of_unlike_lengths_count_as_they_are_long() -> None:
    for a, b, d in ((300, 300, 24), (1000, 100, 24), (100, 1000, 24)):
        whole = 1 - (1 - d / (a + b)) ** 0.5
        assert spared((1 - d / a) * (1 - d / b), a, b) == pytest.approx(whole)
    assert spared(1.2, 5, 5) == 0.0, "by chance a text may be easier than the one that it was solved with"


def test_a_text_too_short_to_tell_does_not_seem_to_have_converged() -> None:
    for count, enough in ((D - 4, False), (D, False), (20 * D, True)):
        convergence = fitted(keys_of(0, count) * SCALES, count // 2).convergence
        assert convergence is not None and (convergence < CONVERGED) == enough


# What cannot be used ------------------------------------------------------------------------------


def test_keys_that_are_zero_or_not_finite_and_no_text_are_refused() -> None:
    with pytest.raises(EditError, match="all zero"):
        fitted(torch.zeros(100, D))
    for number in (float("nan"), float("inf")):
        bad = keys_of(0)
        bad[7, 3] = number
        with pytest.raises(EditError, match=r"layer 1.*not finite"):
            fitted(bad)
    with pytest.raises(EditError, match="no text"):
        KeyMomentsFitter().moments("an empty file", "")


def test_everything_is_saved_and_loaded(tmp_path: Path) -> None:
    moments = fitted(keys_of(0), seconds=2.5)
    moments.save(tmp_path / "m.safetensors")
    again = KeyMoments.load(tmp_path / "m.safetensors", "model:1")
    assert torch.equal(again.sum, moments.sum)
    assert vars(replace(again, sum=moments.sum)) == vars(replace(moments))
    assert again.numbers == moments.numbers == replace(again).numbers != fitted(keys_of(1)).numbers
    with pytest.raises(EditError, match=r"model:1.*model:2"):
        KeyMoments.load(tmp_path / "m.safetensors", "model:2")


def test_foreign_damaged_and_missing_files_are_refused_in_one_line(tmp_path: Path) -> None:
    foreign, damaged, cut, none = (tmp_path / f"{name}.safetensors" for name in ("foreign", "damaged", "cut", "none"))
    save_file({"sum": torch.zeros(2, 2)}, foreign)
    damaged.write_bytes(b"no tensors at all")
    fitted(keys_of(0)).save(cut)
    cut.write_bytes(cut.read_bytes()[:-100])
    for path in (foreign, damaged, cut, none):
        with pytest.raises(EditError, match="not a file of key statistics") as caught:
            KeyMoments.load(path)
        assert "\n" not in str(caught.value)


def test_what_float32_rounds_away_makes_no_second_moment_indefinite() -> None:
    basis = torch.linalg.qr(keys_of(0, D, D).double())[0]
    mean, rare = basis[:, :1], basis[:, 1:2]
    # Keys that share a mean: its eigenvalue is rounded by more than a small ridge, which leaves less than nothing.
    total = 1e6 * (mean @ mean.T - 14 * 2.0**-23 * rare @ rare.T)  # the most that was measured
    assert float(torch.linalg.eigvalsh(total + 1e-9 * total.trace() / D * torch.eye(D))[0]) < 0
    C = second_moment(total, 1, 1e-9)
    least = ROUNDING * float(total.norm()) * torch.eye(D, dtype=torch.float64)
    assert float(torch.linalg.eigvalsh(C)[0]) > 0
    torch.testing.assert_close(C - total, least, rtol=1e-6, atol=1e-6)
    spread = keys_of(1).double()
    ridge = second_moment(spread.T @ spread, 400, 1e-4) - spread.T @ spread / 400
    median = float(spread.square().mean(0).median())
    torch.testing.assert_close(ridge.diagonal(), torch.full((D,), 1e-4 * median).double())


# Sinks --------------------------------------------------------------------------------------------


def with_sinks(keys: Tensor, length: float = 500.0) -> Tensor:
    """Every fiftieth key is a sink: all of them in one direction, much longer than any other."""
    sink = keys.clone()
    sink[::50] = length * torch.nn.functional.normalize(torch.ones(D), dim=0)
    return sink


def test_a_few_huge_keys_change_neither_the_ridge_nor_the_rest() -> None:
    keys = keys_of(0, 4000) * SCALES
    plain, sunk = fitted(keys), fitted(with_sinks(keys))
    assert sunk.sinks == 80 and plain.sinks == 0 and sunk.keys == plain.keys == 4000
    ridge = [float((one.C - one.sum / one.count).diagonal()[0]) / one.ridge for one in (plain, sunk)]
    assert ridge[1] / ridge[0] < 3, "keys as long as they are would make it thousands of times larger"
    k = keys_of(1, 1) * SCALES
    u, v = solved(plain.C, k), solved(sunk.C, k)
    away = torch.ones(D, 1).double() / D**0.5
    across = u - away @ (away.T @ u), v - away @ (away.T @ v)
    assert float(torch.nn.functional.cosine_similarity(*across, dim=0)) > 0.9


def test_the_direction_of_sinks_stays_protected() -> None:
    sunk, k = fitted(with_sinks(keys_of(0, 4000))), keys_of(1, 1) + 1.0
    sink = torch.ones(D, 1).double()
    left_out = fitted(torch.cat([batch[1:] for batch in with_sinks(keys_of(0, 4000)).split(50)]), 49)
    moved, free = (float((solved(one.C, k).T @ sink).abs()) for one in (sunk, left_out))
    assert moved < 0.3 * free


def test_the_null_space_of_text_with_sinks_protects_the_rest() -> None:
    keys = keys_of(0, 4000) * torch.logspace(0, -2, D)
    sunk = fitted(with_sinks(keys))
    raw = with_sinks(keys).double()
    dropped = projector(*torch.linalg.eigh(raw.T @ raw / 4000), 0.1)
    assert dropped.shape[1] == D - 1, "where sinks weigh as much as they are long, all else seems unused"
    U, C = projector(*torch.linalg.eigh(sunk.C), 0.1), keys.double().T @ keys.double() / 4000
    assert U.shape[1] < D - 3
    assert float((U * (C @ U)).sum() / C.trace()) < 0.35


def test_keys_of_no_weight_are_left_out() -> None:
    keys, weights = keys_of(0), torch.ones(400, dtype=torch.float64)
    weights[::50] = 0
    fitter, rest = KeyMomentsFitter(), torch.cat([batch[1:] for batch in keys.split(50)]).double()
    keys[::50] = 1e6
    for batch, some in zip(keys.split(50), weights.split(50), strict=True):
        fitter.update(batch, some)
    found = fitter.moments("t", "f")
    assert (found.keys, found.left_out, found.count, found.sinks) == (392, 8, 400, 0)
    torch.testing.assert_close(found.sum, rest.T @ rest, rtol=1e-5, atol=1e-4)


def test_rows_for_which_memory_fails_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("the products do not fit")

    fitter, once = KeyMomentsFitter(), KeyMomentsFitter()
    keys, weights = with_sinks(keys_of(0, 200)), torch.ones(200)
    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(Tensor, "new_empty", fail)
        fitter.update(keys, weights)
    assert fitter.state()[1] == KeyMomentsFitter().state()[1] and fitter.probes is None
    for half, last in ((slice(100), False), (slice(100, 200), True)):
        fitter.update(keys[half], weights[half], last)
        once.update(keys[half], weights[half], last)
    assert fitter.sinks == 4 and fitter.state()[1] == once.state()[1]
    assert torch.equal(fitter.moments("t", "f").sum, once.moments("t", "f").sum)


# The ridge ----------------------------------------------------------------------------------------


def test_the_ridge_is_what_disturbs_the_other_half_least() -> None:
    few, many = fitted(keys_of(0, 100) * SCALES, 10), fitted(keys_of(0, 40_000) * SCALES, 5000)
    assert few.ridge > many.ridge, "the less text, the less its inverse is to be trusted"
    keys, fresh = keys_of(0, 100) * SCALES, (keys_of(7, 4000) * SCALES).double()
    probes = keys_of(3, 20) * SCALES

    def disturbed(ridge: float) -> float:
        return float(
            (fresh @ solved(second_moment(keys.double().T @ keys.double(), 100, ridge), probes)).square().mean()
        )

    assert disturbed(few.ridge) < disturbed(1e-4)
    assert few.ridge in RIDGES and many.ridge in RIDGES
