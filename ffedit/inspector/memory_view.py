"""One memory: the distribution of its value, the triggers of its key, and whether the two agree.

The value is read as a distribution over the vocabulary; the key by its triggers, the prefixes of a text on which its
coefficient is largest (Geva et al. 2021, arXiv 2012.14913, sections 3 and 4). They *agree* where the value's top token
is the one that follows the top trigger.

The coefficient of an expert's memory has its router's weight inside, k_e = g_e m_e: it is 0 at a token that the router
does not send to the expert.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ffedit.algebra.linalg import double
from ffedit.inference import replay
from ffedit.inference.corpus import Corpus
from ffedit.inspector.keys import TOKENS_PER_BATCH, Frequencies, Removal, Shallow, removal
from ffedit.inspector.rows import NOTHING, Positions
from ffedit.inspector.views import (
    Distribution,
    MemoryIndex,
    Prefix,
    TokenProbability,
    View,
    log_probabilities,
    rank,
    token_text,
)
from ffedit.model.editable import Stack, check_model
from ffedit.model.feed_forward import FeedForward, Keys
from ffedit.model.memory import KeyValueMemory
from ffedit.model.tokenization import decode
from ffedit.notebook import Displayed
from ffedit.progress import Progress, silent

# Tokens of the corpus, by default.
READ_TOKENS = 2**13


@dataclass(frozen=True)
class Trigger(View):
    """Trigger of a key: a prefix or, in a stack that is not causal, a position of a text."""

    prefix: Prefix  # the text
    coefficient: float  # m_i at its last token, or at the position
    # The token that follows it in the text, with the probability that the value gives it; None where none does.
    next: TokenProbability | None
    rank: int | None  # rank of that token in the value's distribution, 1 the most probable; None likewise


@dataclass(frozen=True)
class MemoryView(View, Displayed):
    """One memory of a model."""

    model: str  # the model's name
    slot: MemoryIndex  # the memory
    memories: int  # number of memories of its layer
    layers: int  # number of feed-forward layers of the model
    norm: str | None  # path of the final norm; None where the model has none
    value_norm: float  # ‖v‖
    value: Distribution  # v through final norm and unembedding
    corpus: str  # the text that was read
    tokens: int  # number of positions that were read
    active: float  # share of them at which the coefficient is positive
    triggers: tuple[Trigger, ...]  # the prefixes with the largest coefficients, equal ones once
    shallow: Shallow | None  # their most frequent endings; None without triggers
    endings: tuple[str, str | None] | None  # the last token, and the last two, that most of them end in, as text
    agrees: bool | None  # whether the value's top token follows the top trigger; None without triggers, in an encoder
    agreeing: float | None  # share of triggers that it follows; None in an encoder
    chance: float | None  # share of all positions of the text that it follows; None in an encoder
    # Change of the coefficient when a token is removed; None without prefixes of two tokens.
    removal: Removal | None
    stack: str = "decoder"  # or "encoder"
    # Differences from a causal decoder, and what could not be measured; None for a causal decoder.
    note: str | None = None
    sent: float | None = None  # share of the tokens that the router sends to the expert; None where no router chooses

    def __repr__(self) -> str:
        triggers = ", ".join(repr(f"{t.prefix.text}{t.prefix.last}"[-30:]) for t in self.triggers[:3])
        return f"MemoryView of {self.slot} in {self.model}: {self.value}\n  triggers: {triggers or 'none'}"


def inspect_memory(
    editable: Stack,
    memory: str | MemoryIndex,
    *,
    corpus: Corpus | None = None,
    top: int = 10,
    progress: Progress = silent,
) -> MemoryView:
    """Inspect one memory: the distribution of its value, and its triggers in a text.

    Args:
        editable: the model, or a stack of one; what cannot be measured on a stack is None.
        memory: "L.I" for memory I of layer L, "L.E.I" in expert E; or a `MemoryIndex`.
        corpus: the text to look for triggers in; by default text that the model samples, if it is a decoder.
        top: number of triggers, and of tokens at each end of the distribution.
        progress: progress callback.

    Raises:
        EditError: there is no such memory, or the corpus cannot be used.
        ModelError: the model has no unembedding.
    """
    check_model(editable)
    slot = MemoryIndex.find(editable.memories, memory)
    matrix = editable.memories[slot.address]
    feed_forward = editable.feed_forward[slot.address.layer].only([slot.address])
    corpus, tokenizer = corpus or Corpus(tokens=READ_TOKENS), editable.tokenizer
    value = matrix.value[:, slot.index]
    log_p = log_probabilities(editable, value[None])[0]
    positions = Positions.of(editable, corpus, progress)
    coefficients, sent = _coefficients(editable, feed_forward, slot.index, positions, progress)
    best = positions.largest(coefficients, top)
    contexts = [positions.context(position) for position in best]
    following = torch.tensor([positions.next(position) for position in range(len(positions))])
    predicts_next, agrees = positions.layout.predicts_next, following == log_p.argmax()
    triggers = []
    for position, context in zip(best, contexts, strict=True):
        token = int(following[position])
        next_token = None if token == NOTHING else TokenProbability.of(tokenizer, log_p, token)
        next_rank = None if token == NOTHING else rank(log_p, token)
        triggers.append(Trigger(Prefix.of(tokenizer, *context), float(coefficients[position]), next_token, next_rank))
    text = Frequencies.of(row[: positions.layout.length(row)] for row in positions.rows)
    shallow = Shallow.of(contexts, text)
    endings = None
    if shallow is not None:
        pair = None if shallow.pair is None else decode(tokenizer, shallow.pair)
        endings = token_text(tokenizer, shallow.last), pair
    prefixes = [context.ids for context in contexts] if editable.causal else []
    return MemoryView(
        model=editable.name,
        slot=slot,
        memories=matrix.d_ff,
        layers=len(editable.layers),
        norm=editable.norm or None,
        value_norm=float(torch.linalg.vector_norm(value.float())),
        value=Distribution.of(tokenizer, log_p, top),
        corpus=str(corpus),
        tokens=len(positions),
        active=float(double(coefficients > 0).mean()),
        triggers=tuple(triggers),
        shallow=shallow,
        endings=endings,
        agrees=bool(agrees[best[0]]) if best and predicts_next else None,
        agreeing=int(agrees[best].sum()) / max(1, len(best)) if predicts_next else None,
        chance=float(double(agrees).mean()) if predicts_next else None,
        removal=removal(editable, feed_forward, slot.index, prefixes),
        stack=editable.kind,
        note=positions.layout.note,
        sent=None if matrix.slot is None else sent,
    )


@torch.no_grad()
def _coefficients(
    stack: Stack, layer: FeedForward, index: int, positions: Positions, progress: Progress
) -> tuple[Tensor, float]:
    """Return a memory's coefficient at every position, [n] float32, and the share of positions routed to its expert."""
    coefficients: list[Tensor] = []
    routed: list[Tensor] = []

    def take(memory: KeyValueMemory, keys: Keys) -> None:
        coefficients.append(keys.whole[:, index].float().cpu())
        routed.append(torch.full((keys.tokens,), keys.rows is None))
        if keys.rows is not None:
            routed[-1][keys.rows.cpu()] = True

    done = 0
    with layer.watched(take):
        for ids, inside, others in positions.batches(TOKENS_PER_BATCH):
            replay.run_to(stack, ids, layer.layer, *others)
            for column in (coefficients, routed):
                column[-1] = column[-1].reshape(ids.shape)[inside]
            progress("reading text", done := done + int(inside.sum()), len(positions))
    return torch.cat(coefficients), float(double(torch.cat(routed)).mean())
