"""Rerun of a model from a layer and a position, which avoids whole forward passes.

Restoring a state or adding δ at a layer's output changes nothing below that layer and nothing left of that token. So a
real forward pass is recorded once (the residual stream entering every layer, keys and values of every position), and an
intervention runs the model again *from its layer and its first changed position only*, for many interventions in one
batch, reading the unembedding only at the positions asked for.

The rerun is the model's own forward with a cache of the earlier positions, as in generation, so the model itself
computes masks, rotary angles, sliding windows and position biases; the layers below do not run. Rows of different
lengths are padded on the right, where causal attention cannot see the padding, so no row needs a mask.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from ffedit.inference.past import Past, cache_of, inputs_after
from ffedit.model.editable import Editable, Stack
from ffedit.model.hooks import capture, only_at, replace_input


@dataclass(frozen=True, eq=False)
class Recording:
    """Recording of one forward pass of a batch."""

    ids: Tensor  # token ids, right-padded, [batch, tokens]
    # `states[l]` is the residual stream entering layer l, `states[L]` the output of the last layer; each [batch,
    # tokens, d_model]. Empty where it was not asked for
    states: list[Tensor]
    # by part that was asked for, the output of each layer (of a feed-forward layer, the value matrix's), [batch,
    # tokens, d_model]
    outputs: dict[str, list[Tensor]]
    past: list[tuple[Tensor, Tensor]]  # keys and values of each layer, [batch, heads, tokens, d_head]
    logits: Tensor  # at the (row, position) pairs that were asked for, [k, vocabulary]


def unembedding(editable: Editable, read: Tensor) -> AbstractContextManager[None]:
    """Unembed only the (row, position) pairs `read` [k, 2] of a pass."""
    return replace_input(editable.unembedding, lambda hidden: hidden[tuple(read.to(hidden.device).T)][None])


def logits_at(editable: Editable, ids: Tensor, inputs: Mapping[str, Any], read: Tensor) -> Tensor:
    """Run `ids` with further inputs and return logits [k, vocabulary] at (row, position) pairs `read` [k, 2]."""
    with unembedding(editable, read):
        logits: Tensor = editable.run(input_ids=ids.to(editable.device), **inputs).logits[0]
    return logits


def forward(editable: Editable, ids: Tensor, read: Tensor) -> Tensor:
    """Return logits [k, vocabulary] of `ids` [batch, tokens], right-padded, at (row, position) pairs `read` [k, 2]."""
    return logits_at(editable, ids, {"use_cache": False}, read)


@torch.no_grad()
def run_to(stack: Stack, ids: Tensor, layer: int, *others: Tensor | None, **past: Any) -> None:
    """Run `ids` [batch, tokens], right-padded, through layers 0 … `layer` and no further, for hooks to read.

    `others` are mask, source and its mask, as of `Stack.forward`; or else `past` is the model's input beside `ids`, for
    rows that go on from a cache.
    """
    nothing = torch.zeros(*ids.shape, stack.d_model, dtype=stack.feed_forward[0].dtype, device=stack.device)
    with stack.skipping(stack.layers[layer + 1 :], nothing), stack.without_logits():
        if past:
            stack.run(input_ids=ids, **past)
        else:
            stack.forward(ids, *others)


@torch.no_grad()
def record(
    editable: Editable, ids: Tensor, read: Tensor, parts: Iterable[str] = (), only: tuple[int, int] | None = None
) -> Recording:
    """Run `ids` [batch, tokens], right-padded, through the whole model once and keep what a rerun needs.

    Args:
        editable: the model.
        ids: token ids.
        read: the (row, position) pairs [k, 2] at which logits are wanted.
        parts: the parts whose outputs are recorded too: "feed_forward", "attention".
        only: (layer, start): record what reruns from this layer and this position need, and nothing else.
    """
    ids = ids.to(editable.device)
    cache = DynamicCache()
    # Layers without keys and values (a recurrence, a convolution) would look for state that this cache does not have.
    caching: dict[str, Any] = {"use_cache": False}
    if editable.resumable:
        caching = {"use_cache": True, "cache": cache}
    depth = len(editable.layers)
    layers = dict(enumerate(editable.layers)) if only is None else {only[0]: editable.layers[only[0]]}
    last_layer = {depth: editable.layers[-1]} if only is None else {}
    parts = tuple(parts)
    modules = {(part, layer): m for part in parts for layer, m in enumerate(editable.outputs_of(part))}
    with (
        capture(layers, inputs=True) as entering,
        capture(last_layer) as leaving,
        capture(modules) as outputs,
        unembedding(editable, read),
    ):
        logits = editable.run(input_ids=ids, **caching).logits[0]
    shape = (*ids.shape, -1)  # some models (OPT) flatten batch and tokens before the feed-forward layer
    states, nothing = {**entering, **leaving}, logits.new_empty(0)
    return Recording(
        ids=ids,
        states=[states.get(layer, nothing) for layer in range(depth + 1)],
        outputs={part: [outputs[part, layer].reshape(shape) for layer in range(depth)] for part in parts},
        past=_past(cache, only) if editable.resumable else [],
        logits=logits,
    )


def _past(cache: DynamicCache, only: tuple[int, int] | None) -> list[tuple[Tensor, Tensor]]:
    """Return keys and values of each layer, as the attention left them in the cache."""
    layers: list[Any] = cache.layers
    if only is None:
        return [(layer.keys, layer.values) for layer in layers]
    first, start = only
    past = []
    for index, layer in enumerate(layers):
        rows = slice(None if index >= first else 1)  # of layers that do not run, only the number of positions is read
        past.append((layer.keys[rows, :, :start].clone(), layer.values[rows, :, :start].clone()))
    return past


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
    cache = DynamicCache()
    for index, (keys, values) in enumerate(recording.past if start else []):
        # For layers that do not run, only the number of positions is read from the cache.
        kept = rows if index >= layer else torch.zeros_like(rows[:1])
        cache.update(keys[kept, :, :start], values[kept, :, :start], index)
    inputs: dict[str, Any] = {"use_cache": True, "cache": cache} if start else {"use_cache": False}
    ids = recording.ids[rows, start : start + states.shape[1]]
    return _run_on(editable, layer, states, torch.stack([read[:, 0], read[:, 1] - start], 1), input_ids=ids, **inputs)


def resume_each(
    editable: Editable, recording: Recording, layer: int, states: Tensor, rows: Tensor, starts: Tensor, read: Tensor
) -> Tensor:
    """Run on as `resume` does, each rerun from its own position, `starts` [n]; only for models that are `ragged`.

    Positions left of it are padded on the left and masked, as in the generation from prompts of several lengths.
    """
    first, width = int(starts.max()), states.shape[1]
    ids, inside = recording.ids[rows], starts[:, None] + torch.arange(width)
    past = Past(recording.past, torch.zeros(len(recording.ids), dtype=torch.long))
    inputs: dict[str, Any] = {
        "input_ids": ids.gather(1, inside.clamp(max=ids.shape[1] - 1).to(ids.device)),
        "cache": cache_of(past.aligned(rows, starts, first, layer)),
        "use_cache": True,
        **inputs_after(editable, starts, first, width),
    }
    read = torch.stack([read[:, 0], read[:, 1] - starts[read[:, 0]]], 1)
    return _run_on(editable, layer, states, read, **inputs)


def _run_on(editable: Editable, layer: int, states: Tensor, read: Tensor, **inputs: Any) -> Tensor:
    """Run the layers from `layer` on, which `states` enter; positions of `read` are counted from the first of these."""
    with ExitStack() as stack:
        stack.enter_context(editable.skipping(editable.layers[:layer], states))
        if layer == 0:
            stack.enter_context(replace_input(editable.layers[0], lambda _: states))
        stack.enter_context(unembedding(editable, read))
        logits: Tensor = editable.run(**inputs).logits.squeeze(0)  # indexing would copy all logits in the backward pass
    return logits


def narrowed(editable: Editable, run: Tensor, at: Tensor) -> AbstractContextManager[None]:
    """Run the last feed-forward layer only at the positions that are read, since nothing reads its other outputs.

    That is in rerun `run` [k] at position `at` [k], negative and counted from the end of the rerun: a model that cannot
    be resumed runs the positions left of its start, too. Hooks on the layer would see another shape.
    """
    feed_forward = editable.last_feed_forward
    return nullcontext() if feed_forward is None else only_at(feed_forward, run, at)


def final_states(
    editable: Editable,
    recording: Recording,
    layer: int,
    states: Tensor,
    rows: Tensor,
    start: int,
    read: Tensor,
    narrow: bool = False,
) -> Tensor:
    """Return the last layer's output at `read`, [k, d_model], of a `resume`: `logits_of` many such runs is one product.

    With `narrow`, the last feed-forward layer is `narrowed` to `read`.
    """
    run, at = read[:, 0], read[:, 1] - start - states.shape[1]
    with capture({0: editable.layers[-1]}) as last, narrowed(editable, run, at) if narrow else nullcontext():
        resume(editable, recording, layer, states, rows, start, read[:0])
    return last[0][run, at]


@torch.no_grad()
def logits_of(editable: Editable, states: Tensor) -> Tensor:
    """Return logits [n, vocabulary] of last-layer outputs [n, d_model]: the model's own norm, unembedding, scaling."""
    ids = torch.zeros(len(states), 1, dtype=torch.long, device=editable.device)
    with editable.skipping(editable.layers, states[:, None]):
        logits: Tensor = editable.run(input_ids=ids, use_cache=False).logits[:, 0]
    return logits


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
    end, starts = ids.shape[1], torch.tensor([ids.shape[1] // 3, ids.shape[1] // 2])
    read = torch.tensor([[0, int(end - 1 - starts[1] + starts[0])], [1, end - 1]])
    recording = record(editable, ids.expand(2, -1), read)
    layer = len(editable.layers) // 2
    inside = starts[:, None] + torch.arange(end - int(starts[1]))
    states = recording.states[layer][torch.arange(2)[:, None], inside]
    rerun = resume_each(editable, recording, layer, states, torch.arange(2), starts, read)
    return float((rerun - recording.logits).abs().max())
