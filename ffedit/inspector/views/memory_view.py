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
from transformers import PreTrainedTokenizerBase

from ffedit.inference import replay
from ffedit.inference.text import Corpus
from ffedit.inspector.analyses.distributions import (
    Distribution,
    Prefix,
    Said,
    distribution,
    log_probabilities,
    named,
    prefix,
    rank,
    said,
)
from ffedit.inspector.analyses.removal import Removal, removals
from ffedit.inspector.analyses.shallow import PAIRS, Frequencies, Shallow, compared, pair_hash
from ffedit.inspector.corpus_pass.positions import Positions
from ffedit.inspector.corpus_pass.reading import Context
from ffedit.inspector.corpus_pass.rows import NOTHING
from ffedit.inspector.views.slots import Slot, find
from ffedit.inspector.views.view import View
from ffedit.model.editable import Stack
from ffedit.model.feed_forward import FeedForward, Keys
from ffedit.model.memory import KeyValueMemory
from ffedit.model.tokenization import decode
from ffedit.progress import Progress, silent

# Tokens of the corpus, by default.
READ_TOKENS = 2**13
TOKENS_PER_BATCH = 4096


@dataclass(frozen=True)
class Trigger(View):
    """Trigger of a key: a prefix or, in a stack that is not causal, a position of a text.

    Attributes:
        prefix: the text.
        coefficient: m_i at its last token, or at the position.
        next: the token that follows it in the text, with the probability that the value gives it; None where none does.
        rank: rank of that token in the value's distribution, 1 the most probable; None likewise.
    """

    prefix: Prefix
    coefficient: float
    next: Said | None
    rank: int | None

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, seen: Context, m: float, log_p: Tensor, following: int) -> Trigger:
        """Return the trigger of a key whose value reads as log p [vocabulary]; `following` may be `NOTHING`."""
        shown = prefix(tokenizer, *seen)
        if following == NOTHING:
            return cls(shown, m, None, None)
        return cls(shown, m, said(tokenizer, log_p, following), rank(log_p, following))


@dataclass(frozen=True)
class MemoryView(View):
    """One memory of a model.

    Attributes:
        model: the model's name.
        slot: the memory.
        memories: number of memories of its layer.
        layers: number of feed-forward layers of the model.
        norm: path of the final norm; None where the model has none.
        value_norm: ‖v‖.
        value: v through final norm and unembedding.
        corpus: the text that was read.
        tokens: number of positions that were read.
        active: share of them at which the coefficient is positive.
        triggers: the prefixes with the largest coefficients, equal ones once.
        shallow: their most frequent endings; None without triggers.
        endings: the last token, and the last two, that most of them end in, as text; None where there are none.
        agrees: whether the value's top token follows the top trigger; None without triggers, and in an encoder.
        agreeing: share of triggers that it follows; None in an encoder.
        chance: share of all positions of the text that it follows; None in an encoder.
        removal: change of the coefficient when a token is removed; None without triggers of two tokens, and where
            triggers are no prefixes.
        stack: "decoder" or "encoder".
        note: differences from a causal decoder, and what could not be measured; None for a causal decoder.
        sent: share of the tokens that the router sends to the expert; None where no router chooses.
    """

    model: str
    slot: Slot
    memories: int
    layers: int
    norm: str | None
    value_norm: float
    value: Distribution
    corpus: str
    tokens: int
    active: float
    triggers: tuple[Trigger, ...]
    shallow: Shallow | None
    endings: tuple[str, str | None] | None
    agrees: bool | None
    agreeing: float | None
    chance: float | None
    removal: Removal | None
    stack: str = "decoder"
    note: str | None = None
    sent: float | None = None


def inspect_memory(
    editable: Stack,
    memory: str | Slot,
    corpus: Corpus | None = None,
    top: int = 10,
    progress: Progress = silent,
) -> MemoryView:
    """Inspect one memory: the distribution of its value, and its triggers in a text.

    Args:
        editable: the model, or a stack of one; what cannot be measured on a stack is None.
        memory: "L.I" for memory I of layer L, "L.E.I" in expert E; or a `Slot`.
        corpus: the text to look for triggers in; by default text that the model samples, if it is a decoder.
        top: number of triggers, and of tokens at each end of the distribution.
        progress: progress callback.

    Raises:
        EditError: there is no such memory, or the corpus cannot be used.
        ModelError: the model has no unembedding.
    """
    slot, holder = find(editable.memories, memory)
    place = editable.feed_forward[slot.address.layer].only([slot.address])
    corpus, tokenizer = corpus or Corpus(tokens=READ_TOKENS), editable.tokenizer
    value = holder.value[:, slot.index]
    log_p = log_probabilities(editable, value[None])[0]
    positions = Positions.of(editable, corpus, progress)
    coefficients, sent = fired(editable, place, slot.index, positions, progress)
    best = positions.largest(coefficients, top)
    seen = [positions.context(position) for position in best]
    triggers = tuple(
        Trigger.of(tokenizer, one, float(coefficients[position]), log_p, positions.next(position))
        for position, one in zip(best, seen, strict=True)
    )
    followed = torch.tensor([positions.next(position) for position in range(len(positions))])
    follows, says = positions.reading.follows, int(log_p.argmax())
    agreeing = [positions.next(position) == says for position in best]
    prefixes = [one.ids for one in seen] if editable.causal else []
    shallow = _shallow(seen, positions, len(log_p)) if seen else None
    return MemoryView(
        model=editable.name,
        slot=slot,
        memories=holder.d_ff,
        layers=len(editable.layers),
        norm=editable.norm or None,
        value_norm=float(torch.linalg.vector_norm(value.float())),
        value=distribution(tokenizer, log_p, top),
        corpus=str(corpus),
        tokens=len(positions),
        active=float((coefficients > 0).double().mean()),
        triggers=triggers,
        shallow=shallow,
        endings=_endings(tokenizer, shallow),
        agrees=agreeing[0] if agreeing and follows else None,
        agreeing=sum(agreeing) / max(1, len(agreeing)) if follows else None,
        chance=float((followed == says).double().mean()) if follows else None,
        removal=removals(editable, place, [slot.index], [prefixes])[0] if prefixes else None,
        stack=editable.kind,
        note=positions.reading.note,
        sent=None if holder.slot is None else sent,
    )


@torch.no_grad()
def fired(
    stack: Stack, place: FeedForward, index: int, positions: Positions, progress: Progress = silent
) -> tuple[Tensor, float]:
    """Compute the coefficients of one memory over a text.

    Args:
        stack: the layers.
        place: the part of a layer that holds the memory.
        index: index of the memory in that part.
        positions: the positions of the text.
        progress: progress callback.

    Returns:
        Its coefficient at every position, [n] float32, and the share of the positions that are routed to its expert.
    """
    found: list[Tensor] = []
    asked: list[Tensor] = []

    def take(memory: KeyValueMemory, keys: Keys) -> None:
        found.append(keys.whole[:, index].float().cpu())
        asked.append(torch.full((keys.tokens,), keys.rows is None))
        if keys.rows is not None:
            asked[-1][keys.rows.cpu()] = True

    done = 0
    with place.watched(take):
        for ids, inside, given in positions.batches(TOKENS_PER_BATCH):
            replay.run_to(stack, ids, place.layer, *given)
            found[-1], asked[-1] = (one[-1].reshape(ids.shape)[inside] for one in (found, asked))
            progress("reading text", done := done + int(inside.sum()), len(positions))
    return torch.cat(found), float(torch.cat(asked).double().mean())


def _shallow(seen: list[Context], positions: Positions, vocabulary: int) -> Shallow | None:
    """Return the most frequent endings of one key's triggers, with their frequencies in the text."""
    run = [torch.tensor(row[: positions.reading.length(row)]) for row in positions.rows]
    pairs = torch.cat([pair_hash(ids[:-1], ids[1:]) for ids in run])
    text = Frequencies(torch.cat(run).bincount(minlength=vocabulary), pairs.bincount(minlength=PAIRS))
    last = torch.tensor([[ids[at] for ids, at in seen]])
    previous = torch.tensor([[ids[at - 1] if at else NOTHING for ids, at in seen]])
    return compared(previous, last, text).of(0)


def _endings(tokenizer: PreTrainedTokenizerBase, shallow: Shallow | None) -> tuple[str, str | None] | None:
    if shallow is None:
        return None
    pair = None if shallow.pair is None else decode(tokenizer, shallow.pair)
    return named(tokenizer, shallow.last), pair
