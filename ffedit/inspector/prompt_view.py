"""Contribution of each feed-forward layer at a prompt's end, and the memories that make it.

A layer adds its output to the residual stream, after = before + output. Each of the three is read through the final
norm and the unembedding (`views`), as the prediction of a model that ended there: without the layer, with the layer's
output alone, with both (Geva et al. 2021, arXiv 2012.14913, section 5). *Output* is the vector that is added: where a
norm follows the feed-forward layer (Gemma 2, OLMo 2), the output of that norm.

In most models *before* is the stream after the block's attention. Where a block runs attention and feed-forward in
parallel on one input (GPT-J, GPT-NeoX, Falcon), it is the block's input plus the attention's output.

The feed-forward output before any norm is o = Σ_i m_i v_i + b. The *strength* of memory i is |m_i| ‖v_i‖; its *share*
is m_i v_i·o / ‖o‖², negative where it points against o; the shares of all memories and the bias add up to 1. The
memories of a mixture are those of all experts that the last token is routed to; their coefficients include the router's
weight, k_e = g_e m_e, and b is the routed combination of the experts' biases.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ffedit.errors import EditError, FactError
from ffedit.inspector.scaling import check_scalings, next_log_probs, scaled_memories
from ffedit.inspector.views import Distribution, MemoryIndex, TokenProbability, View, log_probabilities, rank
from ffedit.model.editable import Editable, Seen, check_model
from ffedit.model.feed_forward import FeedForward
from ffedit.model.memory import Address
from ffedit.model.tokenization import decode
from ffedit.notebook import Displayed


@dataclass(frozen=True)
class ActiveMemory(View):
    """One memory's contribution at one position."""

    slot: MemoryIndex  # the memory
    coefficient: float  # m_i
    strength: float  # |m_i| ‖v_i‖
    share: float  # m_i v_i·o / ‖o‖², of the layer's output o
    promotes: TokenProbability  # the top token of v_i, or of −v_i where the coefficient is negative


@dataclass(frozen=True)
class Readout(View):
    """Prediction of a vector through final norm and unembedding."""

    says: TokenProbability  # its top token
    final: float  # the probability of the model's prediction in it
    rank: int  # rank of the model's prediction in it, 1 the most probable


@dataclass(frozen=True)
class ExpertView(View):
    """An expert that the last token is routed to."""

    address: Address  # the layer and the expert
    weight: float  # g_e, the router's weight; for an expert that all tokens share, the factor that scales it
    share: float  # its memories' share of the layer's output
    shared: bool  # whether all tokens go to it


@dataclass(frozen=True)
class LayerView(View):
    """One feed-forward layer at the last token."""

    address: Address
    before: Readout  # the residual stream without the layer
    output: Readout  # the vector that the layer adds
    after: Readout  # their sum
    firing: tuple[ActiveMemory, ...]  # the strongest memories, the strongest first
    experts: tuple[ExpertView, ...] = ()  # experts that the token is routed to, by falling weight, shared ones last


@dataclass(frozen=True)
class PromptView(View, Displayed):
    """A prompt, layer by layer."""

    model: str  # the model's name
    prompt: str  # the text
    tokens: tuple[str, ...]  # its tokens as text; all values are at the last one
    turned: Mapping[MemoryIndex, float]  # factors of coefficients, by memory
    prediction: Distribution  # of the next token
    untouched: Distribution | None  # the same without any scaling; None where nothing is scaled
    layers: tuple[LayerView, ...]  # from the first to the last
    appears: int  # the first layer after which the stream's top token is the prediction
    settles: int  # the first layer from which on the stream's top token stays the prediction
    norm: str | None  # path of the final norm; None where the model has none

    def __repr__(self) -> str:
        return (
            f"PromptView of {self.prompt!r}: {self.prediction}\n  the prediction comes first after layer "
            f"{self.appears}, and stays from layer {self.settles} of {len(self.layers)} on"
        )


def inspect_prompt(
    editable: Editable,
    prompt: str,
    *,
    scaled: Mapping[MemoryIndex, float] | Mapping[str, float] | None = None,
    top: int = 5,
) -> PromptView:
    """Inspect the active memories at a prompt's last token, and the prediction after each layer.

    Args:
        editable: the model.
        prompt: the text.
        scaled: factors of coefficients by memory (`MemoryIndex`, or "L.I"): 0 suppresses, 3 amplifies.
        top: number of memories of a layer, and of tokens of a distribution.

    Raises:
        EditError: the prompt is empty, a memory does not exist, or the model overflows.
        FactError: the prompt is too long, or not a string.
    """
    check_model(editable)
    EditError.whole("top", top, 1)
    FactError.require(prompt, str, "a prompt, some text, was expected")
    if not prompt.strip():
        raise EditError("the prompt is empty; give some words")
    turns = check_scalings(editable.memories, scaled or {})
    ids = torch.tensor([editable.encode(prompt, max_tokens=editable.max_tokens).ids])
    tokenizer = editable.tokenizer
    untouched = Distribution.of(tokenizer, next_log_probs(editable, ids), top) if turns else None
    with scaled_memories(editable.memories, turns):
        log_p = next_log_probs(editable, ids)
        if log_p.isnan().any():
            why = ": the scaled memories are too strong; give smaller factors" if turns else "; use --dtype float32"
            raise EditError(f"the model overflows on this prompt{why}")
        final = int(log_p.argmax())
        layers = _layers(editable, ids, final, top)
    # The last stream is the prediction itself, even where rounding breaks a tie differently.
    says = [*(layer.after.says.id == final for layer in layers[:-1]), True]
    return PromptView(
        model=editable.name,
        prompt=prompt,
        tokens=tuple(decode(tokenizer, [i]) for i in ids[0].tolist()),
        turned=turns,
        prediction=Distribution.of(tokenizer, log_p, top),
        untouched=untouched,
        layers=layers,
        appears=says.index(True),
        settles=len(says) - [*says[::-1], False].index(False),
        norm=editable.norm or None,
    )


@torch.no_grad()
def _layers(editable: Editable, ids: Tensor, final: int, top: int) -> tuple[LayerView, ...]:
    """Return the views of all layers at the last token of `ids` [1, n]; all vectors are unembedded in one batch."""
    vectors, contributions = [], []
    for seen in editable.activations(ids):
        layer, weights, m, bias = _reached(editable.feed_forward[seen.layer], seen)
        wide = torch.promote_types(m.dtype, torch.float32)
        m, value = m.to(wide), layer.value.to(wide)
        output = value @ m + (0 if bias is None else bias.to(wide))
        strengths = m.abs() * torch.linalg.vector_norm(value, dim=0)
        squared = output @ output
        shares = m * (output @ value) / squared if squared else torch.zeros_like(m)
        strongest = strengths.topk(min(top, layer.d_ff)).indices.tolist()
        streams = (stream[0, -1].float() for stream in (seen.before, seen.added, seen.total))
        vectors += [*streams, *(value[:, strongest].float() * m[strongest].sign()).T]
        contributions.append((layer, weights, m, strengths, shares, strongest))
    log_probs = iter(log_probabilities(editable, torch.stack([vector.cpu() for vector in vectors])))

    def readout() -> Readout:
        log_p = next(log_probs)
        return Readout(TokenProbability.of(editable.tokenizer, log_p), float(log_p[final].exp()), rank(log_p, final))

    views = []
    for layer, weights, m, strengths, shares, strongest in contributions:
        before, added, after = readout(), readout(), readout()
        firing = tuple(
            ActiveMemory(
                slot=MemoryIndex(*layer.at(i)),
                coefficient=float(m[i]),
                strength=float(strengths[i]),
                share=float(shares[i]),
                promotes=TokenProbability.of(editable.tokenizer, next(log_probs)),
            )
            for i in strongest
        )
        experts = _experts(layer, weights, shares)
        views.append(LayerView(Address(layer.layer), before, added, after, firing, experts))
    return tuple(views)


def _reached(layer: FeedForward, seen: Seen) -> tuple[FeedForward, Tensor, Tensor, Tensor | None]:
    """Return the memories of a layer that the last token reaches, their router weights, their coefficients, and b."""
    m = seen.key[0, -1]
    if layer.mixture is None or seen.routed is None:
        bias = layer.bias()
        return layer, torch.ones(1), m, None if bias is None else bias[0]
    last = seen.routed.at(torch.tensor([-1]))
    weights, bias = layer.mixture.weights(last)[0], layer.bias(last)
    chosen = [memory.address for memory, g in zip(layer.memories, weights, strict=True) if g != 0]
    used, pieces = layer.only(chosen), layer.split(m, -1)
    return used, weights[weights != 0], torch.cat([pieces[at] for at in chosen]), None if bias is None else bias[0]


def _experts(layer: FeedForward, weights: Tensor, shares: Tensor) -> tuple[ExpertView, ...]:
    """Return the experts that a token is routed to, by weight, the shared ones after the others."""
    if layer.mixture is None:
        return ()
    experts = [
        ExpertView(at, g, float(share.sum()), at.expert in layer.mixture.shared)
        for (at, share), g in zip(layer.split(shares, -1).items(), weights.tolist(), strict=True)
    ]
    return tuple(sorted(experts, key=lambda expert: (expert.shared, -expert.weight)))
