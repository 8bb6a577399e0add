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

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from ffedit.inference.past import Past, Prefix, aligned, cache_of, inputs_after
from ffedit.model.editable import Editable
from ffedit.model.hooks import capture, only_at, replace_input


@dataclass(frozen=True, eq=False)
class Recording:
    """Recording of one forward pass of a batch."""

    ids: Tensor  # token ids, right-padded, [batch, tokens]
    # `states[l]` is the residual stream entering layer l, `states[L]` the output of the last layer; each [batch,
    # tokens, d_model]
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
def run_to(editable: Editable, ids: Tensor, layer: int, **inputs: Any) -> None:
    """Run `ids` [batch, tokens], right-padded, through layers 0 … `layer` and no further, for hooks to read.

    `inputs` are the model's own beside `ids`.
    """
    nothing = torch.zeros(*ids.shape, editable.d_model, dtype=editable.feed_forward[0].dtype, device=editable.device)
    with editable.skipping(editable.layers[layer + 1 :], nothing), editable.without_logits():
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
    cache = DynamicCache()
    # Layers without keys and values (a recurrence, a convolution) would look for state that this cache does not have.
    caching: dict[str, Any] = {"use_cache": False}
    if editable.resumable:
        caching = {"use_cache": True, "cache": cache}
    depth = len(editable.layers)
    parts = tuple(parts)
    modules = {(part, layer): m for part in parts for layer, m in enumerate(editable.outputs_of(part))}
    with (
        capture(dict(enumerate(editable.layers)), inputs=True) as entering,
        capture({depth: editable.layers[-1]}) as leaving,
        capture(modules) as outputs,
        unembedding(editable, read),
    ):
        logits = editable.run(input_ids=ids, **caching).logits[0]
    shape = (*ids.shape, -1)  # some models (OPT) flatten batch and tokens before the feed-forward layer
    states = {**entering, **leaving}
    return Recording(
        ids=ids,
        states=[states[layer] for layer in range(depth + 1)],
        outputs={part: [outputs[part, layer].reshape(shape) for layer in range(depth)] for part in parts},
        past=Past.of(cache).layers if editable.resumable else [],
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
    cache = DynamicCache()
    for index, (keys, values) in enumerate(recording.past if start else []):
        # For layers that do not run, only the number of positions is read from the cache.
        kept = rows if index >= layer else torch.zeros_like(rows[:1])
        cache.update(keys[kept, :, :start], values[kept, :, :start], index)
    inputs: dict[str, Any] = {"use_cache": True, "cache": cache} if start else {"use_cache": False}
    ids = recording.ids[rows, start : start + states.shape[1]]
    return _run_on(editable, layer, states, torch.stack([read[:, 0], read[:, 1] - start], 1), input_ids=ids, **inputs)


def resume_after(
    editable: Editable, prefixes: Sequence[Prefix], layer: int, ids: Tensor, states: Tensor, read: Tensor
) -> Tensor:
    """Run on as `resume` does, each rerun behind a prefix of any pass.

    Args:
        editable: the model; one that is not `ragged` takes prefixes of one length, or none (`resumable`).
        prefixes: the beginning that each of the n reruns continues; none if they are whole texts.
        layer: first layer to run.
        ids: token ids to run, right-padded, [n, positions].
        states: residual stream entering `layer` there, [n, positions, d_model].
        read: pairs (rerun, position) at which logits are wanted, [k, 2].
    """
    inputs: dict[str, Any] = {"use_cache": False}
    lengths = torch.tensor([len(prefix) for prefix in prefixes])
    if prefixes and (width := int(lengths.max())):
        cache = cache_of(aligned(prefixes, layer))
        inputs = {"use_cache": True, "cache": cache, **inputs_after(editable, lengths, width, ids.shape[1])}
    return _run_on(editable, layer, states, read, input_ids=ids.to(editable.device), **inputs)


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
    if not editable.resumable and start:  # whole rows: what is skipped has to give the shape of what runs
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
    starts, layer = (ids.shape[1] // 3, ids.shape[1] // 2), len(editable.layers) // 2
    many = ids.shape[1] - starts[1]
    recording = record(editable, ids, torch.tensor([[0, start + many - 1] for start in starts]))
    prefixes = [Prefix(Past(recording.past), 0, range(start)) for start in starts]
    again, states = (
        torch.cat([of[:, start : start + many] for start in starts]) for of in (ids, recording.states[layer])
    )
    rerun = resume_after(editable, prefixes, layer, again, states, torch.tensor([[0, many - 1], [1, many - 1]]))
    return float((rerun - recording.logits).abs().max())
