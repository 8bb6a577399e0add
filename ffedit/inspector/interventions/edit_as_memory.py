"""An edit as key-value memories that it adds to a layer.

    W + Δ,  Δ = v wᵀ:    (W + Δ) m = W m + (w·m) v

An update of rank one is one more memory in the layer. Its coefficient is c = w·m, so its key is a pattern over the
coefficients of all others; its value is v. An update of higher rank is several memories, those of its singular value
decomposition. Each is scaled so that c = 1 at the key it was solved for: v = Δ k* is then what the edit adds to the
layer's output at the fact, and c the multiple of v that it adds on another text.
"""

from __future__ import annotations

from collections.abc import Mapping
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
    """Protocol of an edit, as far as inspection uses it."""

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
        """Facts that the edit writes."""
        ...

    def fingerprint(self) -> str:
        """Return the edit's fingerprint."""
        ...

    def check(self, editable: Editable) -> str:
        """Refuse a model that the edit does not fit."""
        ...

    def applied(self, editable: Editable) -> AbstractContextManager[None]:
        """Apply the edit to the model inside a `with` block."""
        ...


@dataclass(frozen=True, eq=False)
class Added:
    """One memory of an update.

    Attributes:
        address: the layer that it is added to.
        key: w [d_ff], float64; its coefficient is w·m.
        value: v [d_model], float64.
        share: share of ‖Δ‖².
        written: whether c = 1 at a key that was solved for; else ‖w‖ = 1.
    """

    address: Address
    key: Tensor
    value: Tensor
    share: float
    written: bool


def added_memories(address: Address, update: Update, keys: Tensor, count: int) -> list[Added]:
    """Decompose an update into memories and return the first `count`, the largest first.

    Args:
        address: the layer that changes.
        update: Δ [d_model, d_ff].
        keys: the keys that it was solved for, [d_ff, n]; n may be 0.
        count: largest number of memories.
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
    """Return Δ = U diag(σ) Vᵀ in float64: U [d_model, r], σ [r], Vᵀ [r, d_ff]; from the factors of a `LowRank` Δ."""
    if not isinstance(update, LowRank):
        left, sizes, right = torch.linalg.svd(double(update.dense), full_matrices=False)
        return left, sizes, right
    (q, r), (p, s) = (torch.linalg.qr(double(side)) for side in (update.left, update.right.T))
    left, sizes, right = torch.linalg.svd(r @ s.T, full_matrices=False)
    return q @ left, sizes, right @ p.T
