"""Keys and values that a pass left, from which other rows of token ids go on.

Rows of different lengths are aligned where they end: padded on the left, and masked, as in the generation from prompts
of several lengths. The model itself computes masks, rotary angles, windows and position biases. A model whose numbers
change with that is not `Editable.ragged`; in such a model only rows of one length go on together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from ffedit.model.editable import Editable


@dataclass(frozen=True, eq=False)
class Past:
    """Keys and values of the rows of one pass."""

    layers: list[tuple[Tensor, Tensor]]  # keys and values of each layer, [rows, heads, columns, d_head]
    first: Tensor  # column of each row's first token, [rows]

    @classmethod
    def of(cls, cache: DynamicCache, first: Tensor) -> Past:
        """Return what a pass left in `cache`; layers that the pass did not reach are left out."""
        layers: list[Any] = cache.layers
        return cls([(layer.keys, layer.values) for layer in layers], first)

    def aligned(self, rows: Tensor, lengths: Tensor, width: int, layer: int = 0) -> list[tuple[Tensor, Tensor]]:
        """Return keys and values of the first `lengths` [n] tokens of `rows` [n], in the last of `width` columns.

        The columns left of them hold numbers that are to be masked. For the layers below `layer`, which do not run,
        there is one row: of these, only the number of columns is read.
        """
        columns = self.first[rows, None] + lengths[:, None] - width + torch.arange(width)
        columns, taken = columns.clamp(min=0), []
        for index, sides in enumerate(self.layers):
            kept, at = (rows, columns) if index >= layer else (torch.zeros_like(rows[:1]), columns[:1])
            kept, at = kept.to(sides[0].device)[:, None], at.to(sides[0].device)
            keys, values = (side[kept, :, at].transpose(1, 2) for side in sides)
            taken.append((keys, values))
        return taken


def cache_of(layers: Sequence[tuple[Tensor, Tensor]]) -> DynamicCache:
    """Return a cache that holds these keys and values of each layer."""
    cache = DynamicCache()
    for index, (keys, values) in enumerate(layers):
        cache.update(keys, values, index)
    return cache


def join(parts: Sequence[list[tuple[Tensor, Tensor]]]) -> list[tuple[Tensor, Tensor]]:
    """Concatenate the rows of `parts`, aligned to one width."""
    if len(parts) == 1:
        return parts[0]
    by_layer = (zip(*sides, strict=True) for sides in zip(*parts, strict=True))
    return [(torch.cat(keys), torch.cat(values)) for keys, values in by_layer]


def inputs_after(editable: Editable, lengths: Tensor, width: int, new: int) -> dict[str, Tensor]:
    """Return the mask, and positions where the model takes them, of `new` tokens behind rows of `lengths` [n].

    Those are aligned to `width` columns. Empty where every row fills them: then the model needs neither.
    """
    left = lengths[:, None] - width + torch.arange(width)
    if bool((left >= 0).all()):
        return {}
    after = lengths[:, None] + torch.arange(new)
    inputs = {"attention_mask": torch.cat([left >= 0, after >= 0], 1).long().to(editable.device)}
    if "position_ids" in signature(editable.model.forward).parameters:
        inputs["position_ids"] = after.to(editable.device)
    return inputs
