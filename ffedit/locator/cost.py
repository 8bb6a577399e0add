"""Arithmetic of a trace, counted before it is made, and the layers that a budget of it allows.

A restoration at token i and layer l runs the tokens from i on through the layers from its first on (`restore`), and
unembeds one state. The count depends on the model and the prompt alone, so that a trace within a budget restores the
same layers on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence

from ffedit.locator.result import Tokens, positions_of, span_of
from ffedit.model.editable import Editable
from ffedit.model.tokenization import Encoded


def layer_passes(depth: int, prompt: Encoded, tokens: Tokens, window: int, layers: Sequence[int]) -> int:
    """Count token passes through a single layer in one corrupted run of all restorations of feed-forward outputs."""
    assert prompt.subject is not None
    length = len(prompt.ids)
    windows = sum(length - position for position in positions_of(tokens, prompt.subject, length))
    alone = length - prompt.subject_last if window > 1 else 0
    return sum(windows * (depth - span_of(layer, window, depth)[0]) + alone * (depth - layer) for layer in layers)


def multiply_accumulates(
    editable: Editable, prompt: Encoded, tokens: Tokens, window: int, samples: int, layers: Sequence[int]
) -> int:
    """Count the multiply-accumulates of the restorations at `layers`, answers of one token; attention is neglected."""
    assert prompt.subject is not None
    passes = layer_passes(len(editable.layers), prompt, tokens, window, layers)
    read = len(layers) * (len(positions_of(tokens, prompt.subject, len(prompt.ids))) + (window > 1))
    vocabulary = int(editable.model.config.get_text_config().vocab_size)
    return samples * (passes * _weights(editable) + read * vocabulary * editable.d_model)


def _weights(editable: Editable) -> int:
    """Count the weights that a token meets in a layer, on average over the layers; of experts, those that it goes to."""
    count = 0
    for layer, feed_forward in zip(editable.layers, editable.feed_forward, strict=True):
        count += sum(weight.numel() for weight in layer.parameters())
        if feed_forward.mixture is not None:
            experts = feed_forward.mixture.experts
            used = getattr(editable.model.config.get_text_config(), "num_experts_per_tok", len(experts))
            count -= sum(weight.numel() for weight in experts.module.parameters()) * (len(experts) - used) // len(experts)
    return count // len(editable.layers)


def layers_within(
    editable: Editable, prompt: Encoded, tokens: Tokens, window: int, samples: int, budget: int
) -> range:
    """Return the layers to restore at: every one, or as many as `budget` multiply-accumulates allow, evenly spaced.

    Of these, every 2nd, 4th, 8th, ... is left; of a prompt that is too long for any, the middle layer.
    """
    depth = len(editable.layers)
    step = 1
    while True:
        layers = range(step // 2, depth, step)
        if len(layers) == 1 or multiply_accumulates(editable, prompt, tokens, window, samples, layers) <= budget:
            return layers
        step *= 2
