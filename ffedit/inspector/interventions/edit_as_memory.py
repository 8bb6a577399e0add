"""An edit in the memories' own terms: the memory that it adds.

    W + Δ,  Δ = v wᵀ:    (W + Δ) m = W m + (w·m) v

A change of rank one is one more memory in the layer. Its coefficient is c = w·m, so its key is a pattern over the
coefficients of all others; its value is v. A change of higher rank is several, those of its singular value
decomposition. Each is scaled so that c = 1 at the key it was written for: v = Δ k* is then what the fact reads in
addition, and c says how much of that another text reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ffedit.algebra.linalg import double
from ffedit.algebra.low_rank import LowRank, Update
from ffedit.facts.fact import Fact
from ffedit.model.editable import Editable
from ffedit.model.memory import Address


class Change(Protocol):
    """What this module needs to know of an edit."""

    @property
    def updates(self) -> Mapping[Address, Update]:
        """Δ per layer."""
        ...

    @property
    def keys(self) -> Mapping[Address, Tensor]:
        """The keys that were solved for, per layer, [d_ff, n]."""
        ...

    @property
    def facts(self) -> tuple[Fact, ...]:
        """What it writes."""
        ...

    def fingerprint(self) -> str:
        """Its identity."""
        ...

    def check(self, editable: Editable) -> str:
        """Refuse a model that it does not fit."""
        ...

    def applied(self, editable: Editable) -> AbstractContextManager[None]:
        """The edited model for a block."""
        ...


@dataclass(frozen=True, eq=False)
class Added:
    """One memory that a change amounts to.

    Attributes:
        address: the layer that it is added to.
        key: w [d_ff], float64; its coefficient is w·m.
        value: v [d_model], float64.
        share: of ‖Δ‖², what this memory is of the change.
        written: whether c = 1 at a key that was solved for; else ‖w‖ = 1.
    """

    address: Address
    key: Tensor
    value: Tensor
    share: float
    written: bool


def added_memories(address: Address, update: Update, keys: Tensor, count: int) -> list[Added]:
    """The first `count` memories of a change, the largest first.

    Args:
        address: the layer that changes.
        update: Δ [d_model, d_ff].
        keys: the keys that it was solved for, [d_ff, n]; n may be 0.
        count: at most so many.
    """
    left, sizes, right = _singular(update)
    total = float(sizes.square().sum()) or 1.0
    found = []
    for u, size, w in zip(left.T[:count], sizes[:count], right[:count], strict=True):
        if float(size) <= 1e-12 * float(sizes[0]):
            break
        responses = w @ double(keys.cpu())
        strongest = responses[responses.abs().argmax()] if len(responses) else responses.new_zeros(())
        written = bool(strongest.abs() > 1e-12)
        scale = strongest if written else w[w.abs().argmax()].sign()
        found.append(Added(address, w / scale, u * size * scale, float(size) ** 2 / total, written))
    return found


def _singular(update: Update) -> tuple[Tensor, Tensor, Tensor]:
    """Δ = U diag(σ) Vᵀ in float64: U [d_model, r], σ [r], Vᵀ [r, d_ff]; from the factors where Δ is thin."""
    if not isinstance(update, LowRank):
        left, sizes, right = torch.linalg.svd(double(update.dense), full_matrices=False)
        return left, sizes, right
    (q, r), (p, s) = (torch.linalg.qr(double(side)) for side in (update.left, update.right.T))
    left, sizes, right = torch.linalg.svd(r @ s.T, full_matrices=False)
    return q @ left, sizes, right @ p.T


def column_norms(update: Update) -> Tensor:
    """‖Δ_i‖ of every value column, [d_ff], without the dense matrix where Δ is thin."""
    if not isinstance(update, LowRank):
        norms: Tensor = torch.linalg.vector_norm(double(update.dense), dim=0)
        return norms
    left, right = double(update.left), double(update.right)
    squared: Tensor = ((left.T @ left @ right) * right).sum(0)
    return squared.clamp(min=0).sqrt()


def columns(update: Update, indices: Sequence[int]) -> Tensor:
    """Δ_i of some value columns, [n, d_model], float64."""
    if isinstance(update, LowRank):
        return (double(update.left) @ double(update.right[:, list(indices)])).T
    return double(update.dense[:, list(indices)]).T
