"""Memories that are scaled: the effect of a factor on the prediction, and the factors that raise a token.

Factor 0 suppresses a memory and 3 amplifies it (Geva et al. 2022, arXiv 2203.14680). Give every memory one factor s_i
for its coefficient, at every position of the prompt; 1 leaves it unchanged. Then

    log p(T | s) ≈ log p(T | 1) + Σ_i g_i (s_i − 1)        g_i = ∂ log p(T) / ∂s_i  at s = 1

and one backward pass gives all g_i exactly: with o the layer's output, g_i = Σ m_i v_i·∂ log p(T) / ∂o over the tokens
of the prompt. The gradient is used, not the direct logit attribution m_i v_i·E_T: it includes the effect of the layers
above, the attention and the final norm, and has the unit of the measured effect. The approximation holds for small
changes only, and suppressing and amplifying are large ones: so the effect of each of the first memories is measured,
alone and together with those before it. If these are not enough to make T the prediction, more of them are scaled
together, twice as many each time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from numbers import Real

import torch
from torch import Tensor

from ffedit.errors import EditError, FactError
from ffedit.inference import replay
from ffedit.inference.generation import log_softmax
from ffedit.inspector.views import MemoryIndex, TokenProbability, View, rank
from ffedit.model.editable import Editable
from ffedit.model.feed_forward import Keys
from ffedit.model.hooks import frozen, replace_output
from ffedit.model.memory import Address, KeyValueMemory, Memories
from ffedit.model.tokenization import decode
from ffedit.progress import Progress

OFF, UP = 0.0, 3.0
# Largest number of memories scaled together.
MOST = 1024


@dataclass(frozen=True)
class Scaling(View):
    """Scaling of one memory in the direction that raises the token's probability."""

    slot: MemoryIndex  # the memory
    slope: float  # g_i, nats per unit of the factor
    factor: float  # 0 where the slope is negative, 3 where it is positive
    predicted: float  # g_i (factor − 1), the first-order gain of log p(T), nats
    gain: float  # the measured gain with this memory alone scaled, nats
    together: float  # p(T) with this memory and all before it scaled
    says: TokenProbability  # the model's prediction with these scaled


@dataclass(frozen=True)
class Promotion(View):
    """The memories to scale for a token."""

    token: TokenProbability  # the token T and its probability before scaling
    rank: int  # number of tokens that are more probable before scaling, plus one
    turns: tuple[Scaling, ...]  # scalings by their predicted gain, the largest first
    tried: int  # number of memories in the ranking: those with a positive predicted gain, `MOST` at most
    # Number of its first memories that, scaled together, make T the prediction; None where all do not.
    enough: int | None


def parse_scalings(words: Sequence[str]) -> dict[MemoryIndex, float]:
    """Parse scalings, each `L.I=FACTOR`; EditError where one is malformed, or two name the same memory."""
    scalings: dict[MemoryIndex, float] = {}
    for word in words:
        name, _, factor = word.partition("=")
        try:
            number = float(factor)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            how = "write L.I=FACTOR: 3.17=0 suppresses memory 3.17, 3.17=3 amplifies"
            raise EditError(f"{word!r} scales no memory; {how}")
        if (slot := MemoryIndex.parse(name)) in scalings:
            raise EditError(f"memory {slot} is scaled twice; give one factor")
        scalings[slot] = number
    return scalings


def check_scalings(
    memories: Memories, scalings: Mapping[MemoryIndex, float] | Mapping[str, float]
) -> dict[MemoryIndex, float]:
    """Return factors by slot; EditError where there is no such memory, or a factor is no finite number of 32 bits."""
    EditError.require(scalings, Mapping, "factors by memory were expected, such as {'3.17': 0}")
    by_slot = {}
    for name, factor in scalings.items():
        EditError.require(factor, Real, f"a factor of memory {name} was expected")
        slot, number = MemoryIndex.find(memories, name), float(factor)
        if not abs(number) <= torch.finfo(torch.float32).max:
            raise EditError(f"memory {slot} cannot be scaled by {number}; a finite factor of 32 bits was expected")
        by_slot[slot] = number
    return by_slot


@contextmanager
def scaled_memories(memories: Memories, scalings: Mapping[MemoryIndex, float]) -> Iterator[None]:
    """Multiply the coefficient of every memory in `scalings` by its factor in every forward pass inside the block."""
    by_layer: dict[Address, dict[int, float]] = {}
    for slot, factor in scalings.items():
        by_layer.setdefault(slot.address, {})[slot.index] = factor
    with ExitStack() as stack:
        for address, factors in by_layer.items():
            stack.enter_context(memories[address].scaled(factors))
        yield


def token_after(editable: Editable, prompt: str, token: str) -> int:
    """Return the id of `token` where it follows `prompt`; EditError where it is unknown, or several tokens."""
    try:
        ids = editable.encode(prompt, token, max_tokens=editable.max_tokens).target_ids
    except FactError as error:
        raise EditError(f"the token {token!r} cannot be promoted: {error}") from error
    if not ids:
        raise EditError(f"{token!r} cannot be promoted: it gives no token after this prompt; give a word")
    if len(ids) > 1:
        parts = ", ".join(repr(decode(editable.tokenizer, [i])) for i in ids)
        raise EditError(f"{token!r} is {len(ids)} tokens after this prompt ({parts}); give one, such as the first")
    return ids[0]


def promote(
    editable: Editable, ids: Tensor, token: int, scaled: Mapping[MemoryIndex, float], top: int, progress: Progress
) -> Promotion:
    """Rank memories by predicted gain of `token` after `ids` [1, n], on top of `scaled`; measure the first `top`."""

    def log_probs(ranking: Sequence[tuple[MemoryIndex, float]]) -> Tensor:
        with scaled_memories(editable.memories, {slot: factor_of(slope) for slot, slope in ranking}):
            return next_log_probs(editable, ids)

    with scaled_memories(editable.memories, scaled):
        before = next_log_probs(editable, ids)
        ranking = ranked(slopes(editable, ids, token))
        turns = []
        for count, (slot, slope) in enumerate(ranking[:top], 1):
            alone, together = log_probs([(slot, slope)]), log_probs(ranking[:count])
            turns.append(
                Scaling(
                    slot=slot,
                    slope=slope,
                    factor=factor_of(slope),
                    predicted=slope * (factor_of(slope) - 1),
                    gain=float(alone[token] - before[token]),
                    together=float(together[token].exp()),
                    says=TokenProbability.of(editable.tokenizer, together),
                )
            )
            progress("scaling memories", count, min(top, len(ranking)))
        enough = smallest_count(lambda n: int(log_probs(ranking[:n]).argmax()) == token, len(ranking))
    now = TokenProbability.of(editable.tokenizer, before, token)
    return Promotion(now, rank(before, token), tuple(turns), len(ranking), enough)


def factor_of(slope: float) -> float:
    """Return the factor that raises the token's probability: 3 where the slope is positive, 0 where it is not."""
    return UP if slope > 0 else OFF


def smallest_count(works: Callable[[int], bool], most: int) -> int | None:
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
    added: dict[int, Tensor] = {}

    def take(memory: KeyValueMemory, keys: Keys) -> None:
        received[memory.address] = keys._replace(keys=keys.keys.clone())

    def add_zeros(layer: int, output: Tensor) -> Tensor:
        added[layer] = torch.zeros_like(output, requires_grad=True)
        return output + added[layer]

    last = torch.tensor([[0, ids.shape[1] - 1]])
    with ExitStack() as stack:
        stack.enter_context(frozen(editable.model))
        stack.enter_context(torch.enable_grad())
        for layer in editable.feed_forward:
            stack.enter_context(layer.watched(take))
            stack.enter_context(replace_output(layer.module, partial(add_zeros, layer.layer)))
        log_p = log_softmax(replay.forward(editable, ids, last))[0, token]
        gradients = dict(zip(added, torch.autograd.grad(log_p, list(added.values())), strict=True))
    result = {}
    for at, keys in received.items():
        gradient = gradients[at.layer].reshape(keys.tokens, -1)
        wide = torch.promote_types(gradient.dtype, torch.float32)
        gradient = gradient if keys.rows is None else gradient[keys.rows]
        per_token = keys.keys.to(wide) * (gradient.to(wide) @ editable.memories[at].value.to(wide))
        result[at] = per_token.sum(0).cpu()  # Σ m ⊙ Wᵀ ∂/∂o
    return result


def ranked(slopes: Mapping[Address, Tensor]) -> list[tuple[MemoryIndex, float]]:
    """Return the first `MOST` memories by predicted gain and their slopes."""
    candidates = []
    for address, slope in slopes.items():
        gain = torch.where(slope > 0, slope * (UP - 1), slope * (OFF - 1))
        best = gain.topk(min(MOST, len(gain)))
        columns = best.values.tolist(), best.indices.tolist()
        candidates += [(value, MemoryIndex(address, i)) for value, i in zip(*columns, strict=True)]
    candidates.sort(key=lambda candidate: (-candidate[0], candidate[1]))
    return [(slot, float(slopes[slot.address][slot.index])) for gain, slot in candidates[:MOST] if gain > 0]
