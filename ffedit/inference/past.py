"""Keys and values that a pass left, from which other token ids go on.

Rows that begin with different numbers of tokens are aligned where these end: padded on the left, and masked, as in the
generation from prompts of several lengths. The model itself computes masks, rotary angles, windows and position biases.
A model whose numbers change with that is not `Editable.ragged`; in such a model only rows of one length go on together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from inspect import signature
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from ffedit.model.editable import Editable


@dataclass(frozen=True, eq=False)
class Past:
    """Keys and values of the rows of one pass."""

    layers: list[tuple[Tensor, Tensor]]  # keys and values of each layer, [rows, heads, columns, d_head]

    @classmethod
    def of(cls, cache: DynamicCache) -> Past:
        """Return what a pass left in `cache`."""
        layers: list[Any] = cache.layers
        return cls([(layer.keys, layer.values) for layer in layers])

    def above(self, layer: int) -> Past:
        """Return what reruns from `layer` on need: of the layers below, one column, which is not read."""
        one = [(keys[:1, :, :1].clone(), values[:1, :, :1].clone()) for keys, values in self.layers[:layer]]
        return Past([*one, *self.layers[layer:]])


@dataclass(frozen=True, eq=False)
class Prefix:
    """Keys and values of the tokens that a text begins with, by their row and columns in a pass."""

    past: Past
    row: int
    columns: Sequence[int]  # of each token, in order

    def __len__(self) -> int:
        return len(self.columns)


def aligned(prefixes: Sequence[Prefix], layer: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Return keys and values of each layer, [n, heads, columns, d_head], each prefix in the last columns.

    There are as many columns as the longest has tokens; those left of a shorter one hold numbers that are to be masked.
    Of the layers below `layer`, which do not run, only the number of columns is right.
    """
    width = max(map(len, prefixes))
    parts = [(past, list(own)) for past, own in groupby(prefixes, key=lambda prefix: prefix.past)]
    rows = [torch.tensor([prefix.row for prefix in own])[:, None] for _, own in parts]
    columns = [torch.tensor([[0] * (width - len(p)) + list(p.columns) for p in own]) for _, own in parts]
    taken = []
    for index, first in enumerate(parts[0][0].layers):
        if index < layer:
            keys, values = (side[:1, :, :1].expand(-1, -1, width, -1) for side in first)
        else:
            keys, values = (
                torch.cat(
                    [
                        past.layers[index][side][own.to(first[0].device), :, at.to(first[0].device)]
                        for (past, _), own, at in zip(parts, rows, columns, strict=True)
                    ]
                ).transpose(1, 2)
                for side in (0, 1)
            )
        taken.append((keys, values))
    return taken


def cache_of(layers: Sequence[tuple[Tensor, Tensor]]) -> DynamicCache:
    """Return a cache that holds these keys and values of each layer."""
    cache = DynamicCache()
    for index, (keys, values) in enumerate(layers):
        cache.update(keys, values, index)
    return cache


def inputs_after(editable: Editable, lengths: Tensor, width: int, new: int) -> dict[str, Tensor]:
    """Return the mask, and positions where the model takes them, of `new` tokens behind rows of `lengths` [n].

    Those are aligned to `width` columns. Empty where every row fills them: then the model needs neither.
    """
    left = lengths[:, None] - width + torch.arange(width)
    if bool((left >= 0).all()):
        return {}
    # What pads a row on the right may lie beyond the model's last position.
    after = (lengths[:, None] + torch.arange(new)).clamp(max=editable.max_tokens - 1)
    inputs = {"attention_mask": torch.cat([left >= 0, after >= 0], 1).long().to(editable.device)}
    if takes_positions(editable):
        inputs["position_ids"] = after.to(editable.device)
    return inputs


def takes_positions(editable: Editable) -> bool:
    """Return whether the model takes the position of each token."""
    return "position_ids" in signature(editable.model.forward).parameters
