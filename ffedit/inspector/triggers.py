"""What a pass keeps of a text: the triggers of every key, and a random sample of positions.

The triggers of a key are the prefixes of a corpus on which its memory coefficient is largest. Geva et al. 2021 (arXiv
2012.14913, section 3.1) take every prefix of every sentence, and for each key the t with the largest coefficient. Three
properties allow one streaming pass over all keys of all layers at once:

- A coefficient that is not above the smallest kept one of its key cannot enter. After the first batches hardly any
  does, and the comparison costs little beside the forward pass.
- Equal prefixes have equal coefficients ("The" begins many sentences), so a prefix counts once, at its first
  occurrence, and is identified by a hash of its ids. Ties between different prefixes are broken by the hash. So the
  result does not depend on the batches, and the triggers of two texts merge into those of both.
- Only the flat index of the prefix's last position is kept, never the prefix itself (`rows`).

Only a positive coefficient makes a trigger: under ReLU a memory is zero on all other prefixes. Where a gate makes
coefficients negative, prefixes with the most negative ones are not triggers either.

The sample is for analyses that are too expensive at every position. Each position has a rank, a hash of its prefix, its
flat index and the seed; the sample is the positions of the smallest ranks. So it is drawn uniformly from a text of any
length in one pass, is the same after an interruption, and two samples can be merged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ffedit.inspector.rows import NOTHING, WIDTH, Context, RowStore

# A batch of which more than this many coefficients per key and kept trigger would enter is reduced to its top t first.
DENSE = 2
TINY = torch.finfo(torch.float32).tiny
MULTIPLIER = 0x5851F42D4C957F2D
NO_INDICES = torch.empty(0, dtype=torch.int64)


def prefix_hashes(ids: Tensor) -> Tensor:
    """Hash each prefix of each row of `ids` [n, tokens], [n, tokens] int64: h_j = h_{j−1} · M + id_j + 1."""
    hashes, columns = ids.new_zeros(len(ids), dtype=torch.int64), []
    for column in ids.long().unbind(1):
        hashes = hashes * MULTIPLIER + column + 1
        columns.append(mixed(hashes))
    return torch.stack(columns, 1)


def mixed(numbers: Tensor) -> Tensor:
    """Apply the last steps of splitmix64 (Steele et al. 2014), so that similar numbers give very different ones."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        numbers = numbers ^ ((numbers >> shift) & ((1 << (64 - shift)) - 1))
        numbers = numbers * (factor - (1 << 64) if factor >> 63 else factor)
    return numbers


class StoredTrigger(NamedTuple):
    """A trigger, its coefficient, and the id that follows it in the text; `NOTHING` where none does."""

    context: Context
    coefficient: float
    next: int


@dataclass(eq=False)
class Triggers:
    """The top t triggers of every key of one layer, over the text read so far; mutable, by `update`."""

    coefficients: Tensor  # [keys, t] float32, the largest first; 0 where there is none
    positions: Tensor  # flat index of the end of each prefix, [keys, t] int64; `NOTHING` where there is none
    hashes: Tensor  # hash of each prefix, [keys, t] int64

    @classmethod
    def none(cls, keys: int, top: int) -> Triggers:
        """Return empty triggers of a number of keys."""
        positions = torch.full((keys, top), NOTHING)
        return cls(torch.zeros(keys, top), positions, torch.zeros_like(positions))

    def to_(self, device: torch.device) -> None:
        """Move the triggers to `device`, where the coefficients are computed."""
        for name, tensor in vars(self).items():
            setattr(self, name, tensor.to(device))

    def read(self, store: RowStore, key: int, top: int | None = None) -> list[StoredTrigger]:
        """Return the first `top` triggers of a key, with their texts."""
        positions = self.positions[key, :top].cpu()
        columns = positions.tolist(), self.coefficients[key].tolist(), store.next(positions).tolist()
        return [
            StoredTrigger(store.context(position), coefficient, following)
            for position, coefficient, following in zip(*columns, strict=False)
            if position != NOTHING
        ]

    def update(self, coefficients: Tensor, positions: Tensor, hashes: Tensor) -> None:
        """Update with m [n, keys] of n different prefixes, the flat indices of their ends [n] and their hashes [n]."""
        kept, top = self.coefficients.shape
        # Where TINY is 0 in this dtype (float16), its smallest positive number: a zero coefficient must not pass.
        numbers = torch.finfo(coefficients.dtype)
        floor = self.coefficients[:, -1].clamp(min=max(TINY, numbers.tiny * numbers.eps)).to(coefficients.dtype)
        enters = coefficients >= floor
        if int(enters.count_nonzero()) > DENSE * kept * top and len(coefficients) > top:
            batch = coefficients.T.contiguous().topk(top, dim=1, sorted=False).values.amin(1)
            enters &= coefficients >= batch
        at, key = enters.nonzero(as_tuple=True)
        if not len(key):
            return
        key, order = key.sort(stable=True)
        at = at[order]
        rows, row, counts = key.unique_consecutive(return_inverse=True, return_counts=True)
        column = torch.arange(len(key), device=key.device) - (counts.cumsum(0) - counts)[row]

        def spread(values: Tensor, nothing: int) -> Tensor:
            result = values.new_full((len(rows), int(counts.max())), nothing)
            result[row, column] = values
            return result

        entering = spread(coefficients[at, key].float(), 0)
        self._keep(rows, entering, spread(positions[at], NOTHING), spread(hashes[at], 0))

    def extend(self, other: Triggers, rows: int) -> None:
        """Take in the triggers of the next text, `other`; the text so far has `rows` rows."""
        positions = torch.where(other.positions == NOTHING, NOTHING, other.positions + rows * WIDTH)
        self._keep(torch.arange(len(positions)), other.coefficients, positions, other.hashes)

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Return the tensors for a file, each under `name`/…; `of` is the inverse."""
        return {f"{name}/{field}": tensor.contiguous().cpu() for field, tensor in vars(self).items()}

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], name: str) -> Triggers:
        """Return the triggers that `tensors` holds under `name`."""
        return cls(*(tensors[f"{name}/{field}"] for field in ("coefficients", "positions", "hashes")))

    def _keep(self, rows: Tensor, coefficients: Tensor, positions: Tensor, hashes: Tensor) -> None:
        """Keep, for the keys `rows`, the top t of the present triggers and the candidates, each [rows, n]."""
        top = self.coefficients.shape[1]
        pairs = ((self.coefficients, coefficients), (self.positions, positions), (self.hashes, hashes))
        m, ends, names = (torch.cat([kept[rows], new], 1) for kept, new in pairs)
        by_hash = names.sort(dim=1, stable=True).indices
        m, ends, names = (column.gather(1, by_hash) for column in (m, ends, names))
        again = (names[:, 1:] == names[:, :-1]) & (ends[:, :-1] != NOTHING) & (ends[:, 1:] != NOTHING)
        ends[:, :-1] = torch.where(again, torch.minimum(ends[:, :-1], ends[:, 1:]), ends[:, :-1])
        m[:, 1:].masked_fill_(again, 0)
        # The sort is stable, so ties stay ordered by hash.
        largest = m.sort(dim=1, descending=True, stable=True).indices[:, :top]
        m, ends, names = (column.gather(1, largest) for column in (m, ends, names))
        self.coefficients[rows] = m
        self.positions[rows] = ends.masked_fill(m == 0, NOTHING)
        self.hashes[rows] = names.masked_fill(m == 0, 0)


@dataclass(eq=False)
class Sample:
    """The `size` positions of the smallest ranks so far; mutable, by `take`."""

    size: int  # largest number of positions
    ranks: Tensor = NO_INDICES  # ranks of the positions, ascending, [n] int64
    positions: Tensor = NO_INDICES  # their flat indices, [n] int64
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
        """Return the sample as tensors by name, for a file; `of` is the inverse."""
        values = {f"sample/values/{name}": tensor for name, tensor in self.values.items()}
        return {"sample/ranks": self.ranks, "sample/positions": self.positions, **values}

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], size: int) -> Sample:
        """Return the sample that `tensors` holds."""
        start = "sample/values/"
        values = {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}
        return cls(size, tensors["sample/ranks"], tensors["sample/positions"], values)
