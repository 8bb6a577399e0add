"""Rerun of a model from a layer and a position, which avoids whole forward passes.

Restoring a state or adding δ at a layer's output changes nothing below that layer and nothing left of that token. So a
real forward pass is recorded once (the residual stream entering every layer, keys and values of every position), and an
intervention runs the model again *from its layer and its first changed position only*, for many interventions in one
batch, reading the unembedding only at the positions asked for.

The rerun is the model's own forward with a cache of the earlier positions, as in generation, so the model itself
computes masks, rotary angles, sliding windows and position biases; the layers below do not run. Rows of different
lengths are padded on the right, where causal attention cannot see the padding, so no row needs a mask. Rows with
different numbers of earlier positions are aligned at the end of these: padded on the left, and masked. A model whose
results change with that padding is not `Editable.ragged`; there, only rows of one length are rerun together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from inspect import signature
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from ffedit.model.editable import Editable
from ffedit.model.hooks import capture, only_at, replace_input


@dataclass(frozen=True, eq=False)
class Past:
    """Keys and values of the rows of one pass."""

    layers: list[tuple[Tensor, Tensor]]  # keys and values of each layer, [rows, heads, columns, d_head]

    @classmethod
    def of(cls, cache: DynamicCache) -> Past:
        """Return the keys and values that a pass left in `cache`."""
        layers: list[Any] = cache.layers
        return cls([(layer.keys, layer.values) for layer in layers])

    def above(self, layer: int) -> Past:
        """Return the keys and values that reruns from `layer` need; layers below keep one column, never read."""
        below = [(keys[:1, :, :1].clone(), values[:1, :, :1].clone()) for keys, values in self.layers[:layer]]
        return Past([*below, *self.layers[layer:]])


@dataclass(frozen=True, eq=False)
class Prefix:
    """Keys and values of the tokens that a text begins with, by their row and columns in a pass."""

    past: Past
    row: int
    columns: Sequence[int]  # the column of each token, in order

    def __len__(self) -> int:
        return len(self.columns)


def cache_of(prefixes: Sequence[Prefix], layer: int = 0) -> DynamicCache:
    """Return a cache of n rows, with each prefix in the last columns of its row.

    There are as many columns as the longest prefix has tokens; columns left of a shorter one must be masked. In layers
    below `layer`, which do not run, only the number of columns is right.
    """
    width, cache = max(map(len, prefixes)), DynamicCache()
    groups = [(past, list(members)) for past, members in groupby(prefixes, key=lambda prefix: prefix.past)]
    rows = [torch.tensor([prefix.row for prefix in members])[:, None] for _, members in groups]
    columns = [torch.tensor([[0] * (width - len(p)) + list(p.columns) for p in members]) for _, members in groups]
    for index, first in enumerate(groups[0][0].layers):
        if index < layer:
            keys, values = (side[:1, :, :1].expand(-1, -1, width, -1) for side in first)
        else:
            keys, values = (
                torch.cat(
                    [
                        past.layers[index][side][row.to(first[0].device), :, column.to(first[0].device)]
                        for (past, _), row, column in zip(groups, rows, columns, strict=True)
                    ]
                ).transpose(1, 2)
                for side in (0, 1)
            )
        cache.update(keys, values, index)
    return cache


def inputs_after(editable: Editable, lengths: Tensor, width: int, new: int) -> dict[str, Tensor]:
    """Return the mask, and the positions if the model takes any, of `new` tokens behind rows of `lengths` [n].

    Empty where every row fills all `width` columns: then the model needs neither.
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
    """Return True if the model takes the position of each token."""
    return "position_ids" in signature(editable.model.forward).parameters


@dataclass(frozen=True, eq=False)
class Recording:
    """Recording of one forward pass of a batch."""

    ids: Tensor  # token ids, right-padded, [batch, tokens]
    # `states[l]` is the residual stream entering layer l, `states[L]` the output of the last layer; each [batch,
    # tokens, d_model]
    states: list[Tensor]
    # by part, "feed_forward" (the value matrix) or "attention", the output of each layer, [batch, tokens, d_model]
    outputs: dict[str, list[Tensor]]
    past: list[tuple[Tensor, Tensor]]  # keys and values of each layer, [batch, heads, tokens, d_head]
    logits: Tensor  # logits at the (row, position) pairs that were asked for, [k, vocabulary]


def logits_at(editable: Editable, ids: Tensor, inputs: Mapping[str, Any], read: Tensor) -> Tensor:
    """Run `ids` with further inputs and return logits [k, vocabulary] at (row, position) pairs `read` [k, 2]."""
    with replace_input(editable.unembedding, lambda hidden: hidden[tuple(read.to(hidden.device).T)][None]):
        logits: Tensor = editable.run(input_ids=ids.to(editable.device), **inputs).logits
    return logits.squeeze(0)  # indexing would copy all logits in the backward pass


def forward(editable: Editable, ids: Tensor, read: Tensor) -> Tensor:
    """Return logits [k, vocabulary] of `ids` [batch, tokens], right-padded, at (row, position) pairs `read` [k, 2]."""
    return logits_at(editable, ids, {"use_cache": False}, read)


@torch.no_grad()
def run_to(editable: Editable, ids: Tensor, layer: int, **inputs: Any) -> None:
    """Run `ids` [batch, tokens], right-padded, through layers 0 … `layer` and no further, for hooks to read.

    `inputs` are further inputs of the model.
    """
    zeros = torch.zeros(*ids.shape, editable.d_model, dtype=editable.feed_forward[0].dtype, device=editable.device)
    with editable.skipping(editable.layers[layer + 1 :], zeros), editable.without_logits():
        editable.run(input_ids=ids.to(editable.device), **(inputs or {"use_cache": False}))


@torch.no_grad()
def record(editable: Editable, ids: Tensor, read: Tensor, parts: Iterable[str] = ()) -> Recording:
    """Run `ids` [batch, tokens], right-padded, through the whole model once and keep what a rerun needs.

    Args:
        editable: the model.
        ids: token ids.
        read: the (row, position) pairs [k, 2] at which logits are wanted.
        parts: the parts whose outputs are recorded too: "feed_forward", "attention".
    """
    ids = ids.to(editable.device)
    # Layers without keys and values (a recurrence, a convolution) would look for state that this cache does not have.
    cache = DynamicCache() if editable.resumable else None
    depth = len(editable.layers)
    parts = tuple(parts)
    modules = {(part, layer): m for part in parts for layer, m in enumerate(editable.outputs_of(part))}
    with (
        capture(dict(enumerate(editable.layers)), inputs=True) as entering,
        capture({depth: editable.layers[-1]}) as leaving,
        capture(modules) as outputs,
    ):
        logits = logits_at(editable, ids, {"cache": cache, "use_cache": cache is not None}, read)
    shape = (*ids.shape, -1)  # some models (OPT) flatten batch and tokens before the feed-forward layer
    states = {**entering, **leaving}
    return Recording(
        ids=ids,
        states=[states[layer] for layer in range(depth + 1)],
        outputs={part: [outputs[part, layer].reshape(shape) for layer in range(depth)] for part in parts},
        past=[] if cache is None else Past.of(cache).layers,
        logits=logits,
    )


def resume(
    editable: Editable, recording: Recording, layer: int, states: Tensor, rows: Tensor, start: int, read: Tensor
) -> Tensor:
    """Run on from `layer` with other states.

    Args:
        editable: the model.
        recording: the pass that is altered.
        layer: first layer to run, 0 … L; L reads the unembedding only.
        states: residual stream entering `layer` at the positions from `start` on, [n, positions, d_model]; positions
            right of them do not run.
        rows: the row of the recording that each of the n reruns alters, [n].
        start: first position that is run; positions left of it are taken from the recording.
        read: pairs (rerun, absolute position >= start) at which logits are wanted, [k, 2].

    Returns:
        Logits, [k, vocabulary]; gradients flow to `states` and to whatever hooks add on the way.
    """
    if not editable.resumable and start:
        kept = recording.states[layer][rows, :start]
        return resume(editable, recording, layer, torch.cat([kept, states], 1), rows, 0, read)
    past = Past(recording.past)
    prefixes = [Prefix(past, row, range(start)) for row in rows.tolist()]
    ids = recording.ids[rows, start : start + states.shape[1]]
    return resume_after(editable, prefixes, layer, ids, states, torch.stack([read[:, 0], read[:, 1] - start], 1))


def resume_after(
    editable: Editable, prefixes: Sequence[Prefix], layer: int, ids: Tensor, states: Tensor, read: Tensor
) -> Tensor:
    """Run on as `resume` does, each rerun behind a prefix of any pass.

    Args:
        editable: the model; one that is not `ragged` takes prefixes of one length, or none (`resumable`).
        prefixes: the prefix that each of the n reruns continues; empty if they are whole texts.
        layer: first layer to run.
        ids: token ids to run, right-padded, [n, positions].
        states: residual stream entering `layer` at these tokens, [n, positions, d_model].
        read: pairs (rerun, position) at which logits are wanted, [k, 2].
    """
    inputs: dict[str, Any] = {"use_cache": False}
    lengths = torch.tensor([len(prefix) for prefix in prefixes])
    if prefixes and (width := int(lengths.max())):
        cache = cache_of(prefixes, layer)
        inputs = {"use_cache": True, "cache": cache, **inputs_after(editable, lengths, width, ids.shape[1])}
    below = editable.layers[:layer]
    with editable.skipping(below, states) if below else replace_input(editable.layers[0], lambda _: states):
        return logits_at(editable, ids, inputs, read)


def narrowed(editable: Editable, run: Tensor, at: Tensor) -> AbstractContextManager[None]:
    """Run the last feed-forward layer only at the positions that are read, since nothing reads its other outputs.

    These are positions `at` [k] of reruns `run` [k], negative, counted from the end: a model that is not `resumable`
    runs the positions left of the start, too. Hooks on the layer would see another shape.
    """
    feed_forward = editable.last_feed_forward
    return nullcontext() if feed_forward is None else only_at(feed_forward, run, at)


def run_layers(
    editable: Editable,
    recording: Recording,
    layers: range,
    states: Tensor,
    rows: Tensor,
    start: int,
    read: Tensor | None = None,
) -> Tensor:
    """Run `layers` as `resume` does and return the output of the last of them, [n, positions, d_model].

    With `read`, pairs (rerun, absolute position >= start) [k, 2], the last feed-forward layer is `narrowed` to these.
    """
    if not layers:
        return states
    if not editable.resumable and start:  # whole rows: skipped layers must return the shape of those that run
        whole = torch.cat([recording.states[layers.start][rows, :start], states], 1)
        return run_layers(editable, recording, layers, whole, rows, 0, read)[:, start:]
    with (
        capture({0: editable.layers[layers[-1]]}) as last,
        editable.skipping(editable.layers[layers.stop :], states),
        nullcontext() if read is None else narrowed(editable, read[:, 0], read[:, 1] - start - states.shape[1]),
    ):
        resume(editable, recording, layers.start, states, rows, start, torch.zeros(0, 2, dtype=torch.long))
    return last[0]


@torch.no_grad()
def check(editable: Editable, ids: Tensor) -> float:
    """Compare a rerun from the middle with the whole pass: largest absolute difference of logits on `ids` [1, n]."""
    last = torch.tensor([[0, ids.shape[1] - 1]])
    recording = record(editable, ids, last)
    layer, start = len(editable.layers) // 2, ids.shape[1] // 2
    states = recording.states[layer][:, start:]
    rerun = resume(editable, recording, layer, states, torch.tensor([0]), start, last)
    return float((rerun - recording.logits).abs().max())


@torch.no_grad()
def check_each(editable: Editable, ids: Tensor) -> float:
    """Compare as `check` does, for two reruns of `ids` [1, n] that begin at different positions."""
    starts, layer = (ids.shape[1] // 3, ids.shape[1] // 2), len(editable.layers) // 2
    length = ids.shape[1] - starts[1]
    recording = record(editable, ids, torch.tensor([[0, start + length - 1] for start in starts]))
    prefixes = [Prefix(Past(recording.past), 0, range(start)) for start in starts]
    pieces, states = (
        torch.cat([whole[:, start : start + length] for start in starts]) for whole in (ids, recording.states[layer])
    )
    rerun = resume_after(editable, prefixes, layer, pieces, states, torch.tensor([[0, length - 1], [1, length - 1]]))
    return float((rerun - recording.logits).abs().max())
