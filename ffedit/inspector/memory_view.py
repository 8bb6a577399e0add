"""One memory: the distribution of its value, and the triggers of its key.

The value is read as a distribution over the vocabulary; the key by its triggers, the prefixes of a text on which its
coefficient is largest (Geva et al. 2021, arXiv 2012.14913, sections 3 and 4).

The coefficient of an expert's memory includes the router's weight, k_e = g_e m_e: it is 0 at a token that the router
does not send to the expert.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ffedit.algebra.linalg import double
from ffedit.errors import EditError
from ffedit.inference import replay
from ffedit.inference.corpus import Corpus, check_corpus
from ffedit.inspector.rows import Positions
from ffedit.inspector.views import Distribution, MemoryIndex, Prefix, TokenProbability, View, log_probabilities, rank
from ffedit.model.editable import Editable, check_model
from ffedit.model.feed_forward import FeedForward, Keys
from ffedit.model.memory import KeyValueMemory
from ffedit.notebook import Displayed
from ffedit.progress import Progress, silent

# Default number of tokens in the corpus.
READ_TOKENS = 2**13
TOKENS_PER_BATCH = 4096


@dataclass(frozen=True)
class Trigger(View):
    """Trigger of a key."""

    prefix: Prefix  # the text
    coefficient: float  # m_i at its last token
    next: TokenProbability  # the token that follows it in the text, with the probability that the value gives it
    rank: int  # rank of that token in the value's distribution, 1 the most probable


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
    triggers: tuple[Trigger, ...]  # the prefixes with the largest coefficients, each once
    sent: float | None = None  # share of the tokens that the router sends to the expert; None where no router chooses

    def __repr__(self) -> str:
        triggers = ", ".join(repr(f"{t.prefix.text}{t.prefix.last}"[-30:]) for t in self.triggers[:3])
        return f"MemoryView of {self.slot} in {self.model}: {self.value}\n  triggers: {triggers or 'none'}"


def inspect_memory(
    editable: Editable,
    memory: str | MemoryIndex,
    *,
    corpus: Corpus | None = None,
    top: int = 10,
    progress: Progress = silent,
) -> MemoryView:
    """Inspect one memory: the distribution of its value, and its triggers in a text.

    Args:
        editable: the model.
        memory: "L.I" for memory I of layer L, "L.E.I" in expert E; or a `MemoryIndex`.
        corpus: the text to look for triggers in; by default text that the model samples.
        top: number of triggers, and of tokens at each end of the distribution.
        progress: progress callback.

    Raises:
        EditError: there is no such memory, or the corpus cannot be used.
    """
    check_model(editable)
    check_corpus(corpus)
    EditError.whole("top", top, 1)
    slot = MemoryIndex.find(editable.memories, memory)
    matrix = editable.memories[slot.address]
    feed_forward = editable.feed_forward[slot.address.layer].only([slot.address])
    corpus, tokenizer = corpus or Corpus(tokens=READ_TOKENS), editable.tokenizer
    value = matrix.value[:, slot.index]
    log_p = log_probabilities(editable, value[None])[0]
    positions = Positions.of(editable, corpus, progress)
    coefficients, sent = _coefficients(editable, feed_forward, slot.index, positions, progress)
    triggers = []
    for position in positions.largest(coefficients, top):
        token = positions.next(position)
        prefix, follows = Prefix.of(tokenizer, positions.prefix(position)), TokenProbability.of(tokenizer, log_p, token)
        triggers.append(Trigger(prefix, float(coefficients[position]), follows, rank(log_p, token)))
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
        sent=None if matrix.slot is None else sent,
    )


@torch.no_grad()
def _coefficients(
    editable: Editable, layer: FeedForward, index: int, positions: Positions, progress: Progress
) -> tuple[Tensor, float]:
    """Return a memory's coefficient at every position, [n] float32, and the share of positions routed to its expert."""
    coefficients: list[Tensor] = []
    routed: list[Tensor] = []

    def take(memory: KeyValueMemory, keys: Keys) -> None:
        coefficients.append(keys.whole[:, index].float().cpu())
        routed.append(torch.full((keys.tokens,), keys.rows is None))
        if keys.rows is not None:
            routed[-1][keys.rows.cpu()] = True

    completed = 0
    with layer.watched(take):
        for ids, inside in positions.batches(TOKENS_PER_BATCH):
            replay.run_to(editable, ids, layer.layer)
            for column in (coefficients, routed):
                column[-1] = column[-1].reshape(ids.shape)[inside]
            progress("reading text", completed := completed + int(inside.sum()), len(positions))
    return torch.cat(coefficients), float(double(torch.cat(routed)).mean())
