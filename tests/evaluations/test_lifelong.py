"""What post-processing of Δ promises: entries kept, directions left alone, singular values bounded."""

from __future__ import annotations

import sys
from math import log
from pathlib import Path

import torch

from ffedit.algebra.low_rank import LowRank

sys.path.append(str(Path(__file__).parents[2] / "evaluations" / "lifelong"))

from ffedit_lifelong.prune import restrained
from ffedit_lifelong.rect import RECT, kept
from ffedit_lifelong.revive import REVIVE, filtered

GENERATOR = torch.Generator().manual_seed(0)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=GENERATOR, dtype=torch.float64)


def test_rect_keeps_the_entries_that_change_most_relative_to_the_weights() -> None:
    W, delta = drawn(8, 20), drawn(8, 20)
    result = kept(W, delta, 0.25)
    chosen = result != 0
    assert int(chosen.sum()) == 40 and torch.equal(result[chosen], delta[chosen])
    assert (delta / W).abs()[chosen].min() > (delta / W).abs()[~chosen].max()


def test_revive_neither_reads_nor_writes_the_dominant_directions() -> None:
    W, delta = drawn(8, 20), LowRank(drawn(8, 3), drawn(3, 20))
    U, S, Vt = torch.linalg.svd(W, full_matrices=False)
    energy = float(S[:2].square().sum() / S.square().sum()) - 1e-9  # two directions hold it
    result = filtered(delta, W, energy)
    assert float((U[:, :2].T @ result.dense).abs().max()) < 1e-12
    assert float((result.dense @ Vt[:2].T).abs().max()) < 1e-12
    inside = U[:, 2:] @ U[:, 2:].T @ delta.dense @ (torch.eye(20) - Vt[:2].T @ Vt[:2])
    assert torch.allclose(result.dense, inside) and result.rank == 3
    assert torch.equal(filtered(delta, W, 0.0).dense, delta.dense)


def test_prune_bounds_singular_values_and_leaves_small_ones() -> None:
    W, change = drawn(8, 20), drawn(8, 20)
    largest = float(torch.linalg.svdvals(W)[0])
    assert torch.allclose(restrained(W, 0.1 * change), 0.1 * change)
    S, after = torch.linalg.svdvals(10 * change), torch.linalg.svdvals(restrained(W, 10 * change, alpha=2.0))
    large = largest < S
    assert int(large.sum()) > 3
    assert torch.allclose(after[large], largest + (S[large] / largest).log() / log(2.0))
    assert torch.allclose(after[~large], S[~large])


def test_both_keep_earlier_edits_as_alphaedit_does() -> None:
    assert RECT.preserves and REVIVE.preserves
