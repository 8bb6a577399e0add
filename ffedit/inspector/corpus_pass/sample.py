"""A random sample of positions of a text, for analyses that are too expensive at every position.

Each position has a rank, a hash of its prefix, its flat index and the seed; the sample is the positions of the smallest
ranks. So it is drawn uniformly from a text of any length in one pass, is the same after an interruption, and two
samples can be merged. For each position it stores the values of every layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ffedit.inspector.corpus_pass.triggers import mixed


def ranks_of(hashes: Tensor, positions: Tensor, seed: int) -> Tensor:
    """Return the rank of each position, [n] int64."""
    return mixed(mixed(hashes ^ mixed(positions + 1)) ^ mixed(torch.tensor(seed + 1)))


@dataclass(eq=False)
class Sample:
    """The `size` positions of the smallest ranks so far; mutable, by `take`."""

    size: int  # largest number of positions
    # Ranks of the positions, ascending, [n] int64.
    ranks: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    # Their flat indices, [n] int64.
    positions: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    values: dict[str, Tensor] = field(default_factory=dict)  # by name, the values stored for each of them, [n, ..]

    def entering(self, ranks: Tensor) -> Tensor:
        """Return which of a batch's positions, with `ranks` [n], enter the sample: indices by rank, int64."""
        best = ranks.sort().indices[: self.size]
        full = self.size and len(self.ranks) == self.size
        return best[ranks[best] < self.ranks[-1]] if full else best

    def take(self, ranks: Tensor, positions: Tensor, values: Mapping[str, Tensor]) -> None:
        """Add the positions that enter, with their values, and drop those beyond `size`."""
        order = torch.cat([self.ranks, ranks]).sort(stable=True).indices[: self.size]
        self.values = {
            name: torch.cat([self.values[name], new])[order] if name in self.values else new[order]
            for name, new in values.items()
        }
        self.positions = torch.cat([self.positions, positions])[order]
        self.ranks = torch.cat([self.ranks, ranks])[order]

    def tensors(self) -> dict[str, Tensor]:
        """Return the sample as tensors by name, for a file."""
        values = {f"sample/values/{name}": tensor for name, tensor in self.values.items()}
        return {"sample/ranks": self.ranks, "sample/positions": self.positions, **values}

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], size: int) -> Sample:
        """Return the sample in `tensors`, as `tensors()` made them; KeyError where they hold none."""
        start = "sample/values/"
        values = {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}
        return cls(size, tensors["sample/ranks"], tensors["sample/positions"], values)
