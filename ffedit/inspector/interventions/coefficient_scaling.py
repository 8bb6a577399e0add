"""The memories whose coefficients to scale so that the model predicts a given token.

Give every memory one factor s_i for its coefficient, at every position of the prompt; 1 leaves it unchanged. Then

    log p(T | s) ≈ log p(T | 1) + Σ_i g_i (s_i − 1)        g_i = ∂ log p(T) / ∂s_i  at s = 1

and one backward pass gives all g_i exactly: with o the layer's output, g_i = Σ m_i v_i·∂ log p(T) / ∂o over the tokens
of the prompt. The gradient is used, not the direct logit attribution m_i v_i·E_T: it includes the effect of the layers
above, the attention and the final norm, and has the unit of the measured effect. The approximation holds for small
changes only: suppressing (s = 0) and amplifying (s = 3, Geva et al. 2022, arXiv 2203.14680) are large ones, so the
effect of each of the first memories is measured, alone and together with those before it. If these are not enough to
make T the prediction, more of them are scaled together, twice as many each time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ffedit.errors import EditError, FactError
from ffedit.inference import replay
from ffedit.inference.generation import log_softmax
from ffedit.inspector.analyses.distributions import Said, rank, said
from ffedit.inspector.views.slots import Slot, turned
from ffedit.inspector.views.view import View
from ffedit.model.editable import Editable
from ffedit.model.feed_forward import Keys
from ffedit.model.hooks import frozen, replace_output
from ffedit.model.memory import Address, KeyValueMemory
from ffedit.model.tokenization import decode
from ffedit.progress import Progress, silent

OFF, UP = 0.0, 3.0
# Largest number of memories scaled together.
MOST = 1024


@dataclass(frozen=True)
class Scaling(View):
    """Scaling of one memory in the direction that raises the token's probability.

    Attributes:
        slot: the memory.
        slope: g_i, nats per unit of the factor.
        factor: 0 where the slope is negative, 3 where it is positive.
        predicted: g_i (factor − 1), the first-order gain of log p(T), nats.
        gain: the measured gain with this memory alone scaled, nats.
        together: p(T) with this memory and all before it scaled.
        says: the model's prediction with these scaled.
    """

    slot: Slot
    slope: float
    factor: float
    predicted: float
    gain: float
    together: float
    says: Said


@dataclass(frozen=True)
class Promotion(View):
    """The memories to scale for a token.

    Attributes:
        token: the token T and its probability before scaling.
        rank: number of tokens that are more probable before scaling, plus one.
        turns: scalings by their predicted gain, the largest first.
        tried: number of memories in the ranking: those with a positive predicted gain, `MOST` at most.
        enough: number of its first memories that, scaled together, make T the prediction; None where all do not.
    """

    token: Said
    rank: int
    turns: tuple[Scaling, ...]
    tried: int
    enough: int | None


def token_after(editable: Editable, prompt: str, token: str) -> int:
    """Return the id of `token` where it follows `prompt`.

    Raises:
        EditError: the text is unknown to the tokenizer, or is several tokens.
    """
    try:
        ids = editable.encode(prompt, token, max_tokens=editable.max_tokens).target_ids
    except FactError as error:
        raise EditError(f"the token {token!r} cannot be promoted: {error}") from error
    if not ids:
        raise EditError(f"{token!r} cannot be promoted: it is no token after this prompt; give a word")
    if len(ids) > 1:
        parts = ", ".join(repr(decode(editable.tokenizer, [i])) for i in ids)
        raise EditError(f"{token!r} is {len(ids)} tokens after this prompt ({parts}); give one, the first of them say")
    return ids[0]


def promote(
    editable: Editable,
    ids: Tensor,
    token: int,
    scaled: Mapping[Slot, float],
    top: int = 10,
    progress: Progress = silent,
) -> Promotion:
    """Rank all memories by the predicted gain of `token` after `ids` [1, n] when scaled; measure the first `top`.

    Args:
        editable: the model.
        ids: the prompt.
        token: T.
        scaled: factors that are applied already; factors multiply.
        top: number of memories to measure.
        progress: progress callback.
    """
    with turned(editable.memories, scaled):
        before = next_log_probs(editable, ids)
        ranking = _ranked(slopes(editable, ids, token))
        turns = []
        for count, (slot, slope) in enumerate(ranking[:top], 1):
            factor = _factor(slope)
            alone = _log_probs_turned(editable, ids, [(slot, slope)])
            together = _log_probs_turned(editable, ids, ranking[:count])
            gain = float(alone[token] - before[token])
            then = said(editable.tokenizer, together)
            turns.append(Scaling(slot, slope, factor, slope * (factor - 1), gain, float(together[token].exp()), then))
            progress("turning memories", count, min(top, len(ranking)))
        enough = _enough(lambda n: int(_log_probs_turned(editable, ids, ranking[:n]).argmax()) == token, len(ranking))
    now = said(editable.tokenizer, before, token)
    return Promotion(now, rank(before, token), tuple(turns), len(ranking), enough)


def _factor(slope: float) -> float:
    return UP if slope > 0 else OFF


def _log_probs_turned(editable: Editable, ids: Tensor, some: Sequence[tuple[Slot, float]]) -> Tensor:
    """Return log p of the next token with memories scaled by 3 where the slope is positive, by 0 where it is not."""
    with turned(editable.memories, {slot: _factor(slope) for slot, slope in some}):
        return next_log_probs(editable, ids)


def _enough(works: Callable[[int], bool], most: int) -> int | None:
    """Search for a count 0 … `most` at which `works` holds: double it until it does, then bisect the last two."""
    low, high = -1, 0
    while not works(high):
        if high == most:
            return None
        low, high = high, min(2 * high or 1, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if works(middle) else (middle, high)
    return high


@torch.no_grad()
def next_log_probs(editable: Editable, ids: Tensor) -> Tensor:
    """Return log p [vocabulary] of the token after `ids` [1, n], on the CPU."""
    last = torch.tensor([[0, ids.shape[1] - 1]])
    return log_softmax(replay.forward(editable, ids, last))[0].cpu()


def slopes(editable: Editable, ids: Tensor, token: int) -> dict[Address, Tensor]:
    """Return g = ∂ log p(token) / ∂s of each layer's factors, [d_ff], nats, from one forward and one backward pass."""
    received: dict[Address, Keys] = {}
    beside: dict[int, Tensor] = {}

    def take(memory: KeyValueMemory, keys: Keys) -> None:
        received[memory.address] = keys._replace(keys=keys.keys.clone())

    def moved(layer: int, output: Tensor) -> Tensor:
        beside[layer] = torch.zeros_like(output, requires_grad=True)
        return output + beside[layer]

    last = torch.tensor([[0, ids.shape[1] - 1]])
    with ExitStack() as stack:
        stack.enter_context(frozen(editable.model))
        stack.enter_context(torch.enable_grad())
        for layer in editable.feed_forward:
            stack.enter_context(layer.watched(take))
            stack.enter_context(replace_output(layer.module, partial(moved, layer.layer)))
        log_p = log_softmax(replay.forward(editable, ids, last))[0, token]
        found = dict(zip(beside, torch.autograd.grad(log_p, list(beside.values())), strict=True))
    return {
        at: _slope(editable.memories[at], keys, found[at.layer].reshape(keys.tokens, -1)).cpu()
        for at, keys in received.items()
    }


def _slope(memory: KeyValueMemory, seen: Keys, gradient: Tensor) -> Tensor:
    """Return Σ m ⊙ Wᵀ ∂/∂o over the tokens, [d_ff]."""
    wide = torch.promote_types(gradient.dtype, torch.float32)
    here = gradient if seen.rows is None else gradient[seen.rows]
    return (seen.keys.to(wide) * (here.to(wide) @ memory.value.to(wide))).sum(0)


def _ranked(found: Mapping[Address, Tensor]) -> list[tuple[Slot, float]]:
    """Return the first `MOST` memories by predicted gain, g (UP − 1) where g > 0, else −g, and their slopes."""
    candidates = []
    for address, slope in found.items():
        promise = torch.where(slope > 0, slope * (UP - 1), slope * (OFF - 1))
        best = promise.topk(min(MOST, len(promise)))
        candidates += [
            (value, Slot(address, i)) for value, i in zip(best.values.tolist(), best.indices.tolist(), strict=True)
        ]
    candidates.sort(key=lambda one: (-one[0], one[1]))
    return [(slot, float(found[slot.address][slot.index])) for promise, slot in candidates[:MOST] if promise > 0]
