"""Arithmetic of a trace, counted before it is made, and the layers that a budget of it allows.

A restoration at token i and layer l runs the tokens from i on through the layers from its first on (`restore`), and
unembeds one state. The count depends on the model and the prompt alone, so that a trace within a budget restores the
same layers on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence

from ffedit.facts.fact import Fact
from ffedit.locator.result import Tokens, positions_of, span_of
from ffedit.locator.trace import resolve_window
from ffedit.model.editable import Editable


def layer_passes(editable: Editable, fact: Fact, tokens: Tokens, layers: Sequence[int]) -> tuple[int, int]:
    """Count a corrupted run's passes of a token through one layer, and its unembedded states, for default windows.

    The answer's own tokens, which follow the first, are not counted.
    """
    prompt, depth = editable.encode(fact.text, span=fact.span, max_tokens=editable.max_tokens), len(editable.layers)
    assert prompt.subject is not None
    length, window = len(prompt.ids), resolve_window(depth, "feed_forward", None)
    positions = positions_of(tokens, prompt.subject, length)
    windows = sum(length - position for position in positions)
    alone = length - prompt.subject_last if window > 1 else 0
    passes = sum(windows * (depth - span_of(layer, window, depth)[0]) + alone * (depth - layer) for layer in layers)
    return passes, len(layers) * (len(positions) + (window > 1))


def layers_within(editable: Editable, fact: Fact, tokens: Tokens, samples: int, budget: int) -> range:
    """Return the layers to trace within a budget of multiply-accumulates: every one, or as many as it allows.

    Where it does not allow all, every 2nd, 4th, 8th, ... is traced, from the middle of the first so many on; the fewest
    is one. The products of attention weights are not counted.
    """
    depth, weights = len(editable.layers), _weights(editable)
    unembedding = int(editable.model.config.get_text_config().vocab_size) * editable.d_model
    step = 1
    while True:
        layers = range(step // 2, depth, step)
        passes, read = layer_passes(editable, fact, tokens, layers)
        if len(layers) == 1 or samples * (passes * weights + read * unembedding) <= budget:
            return layers
        step *= 2


def _weights(editable: Editable) -> int:
    """Count the weights that a token meets in a layer, mean over the layers; of experts, those that it goes to."""
    count = 0
    for layer, feed_forward in zip(editable.layers, editable.feed_forward, strict=True):
        count += sum(weight.numel() for weight in layer.parameters())
        if feed_forward.mixture is not None:
            experts = feed_forward.mixture.experts
            used = getattr(editable.model.config.get_text_config(), "num_experts_per_tok", len(experts))
            spared = sum(weight.numel() for weight in experts.module.parameters()) * (len(experts) - used)
            count -= spared // len(experts)
    return count // len(editable.layers)
