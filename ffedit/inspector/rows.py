"""Text as rows of token ids, and how each kind of stack reads a row.

- A causal decoder reads a row without its last id. The context of a position is its *prefix*, the ids up to and
  including it; the id after it is the next token.
- An encoder reads the whole row, which is the context of each of its positions. There is no next token.
- The decoder of an encoder-decoder model reproduces its encoder's input: the encoder reads a row without its first id,
  which starts decoding, the decoder without its last one. Through the encoder, the context is the whole row here, too.

For a causal decoder a longer text is cut into rows that share the token at the cut, which is run once; each begins with
the tokens that the tokenizer puts in front of a text. A document of a corpus of documents begins a row of its own, as
the sentences of Geva et al. do (arXiv 2012.14913, section 3.1). For other stacks each row is a text of its own, with
the special tokens that the tokenizer puts around one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ffedit.errors import EditError
from ffedit.inference.corpus import Corpus
from ffedit.inference.own_text import sampled
from ffedit.inference.text import ROW_TOKENS, identity, texts
from ffedit.model.editable import Editable, Stack
from ffedit.model.tokenization import pad, plain_ids, special_tokens
from ffedit.progress import Progress, silent

Row = tuple[int, ...]

NOTHING = -1


class Context(NamedTuple):
    """All that the coefficients of a position depend on: the ids that it attends to, and its index in them."""

    ids: Row
    at: int


class Inputs(NamedTuple):
    """Rows as a stack runs them, padded on the right."""

    ids: Tensor  # token ids, [n, t]
    inside: Tensor  # True where an id is no padding, [n, t]
    others: tuple[Tensor, ...]  # further arguments of `Stack.forward`: mask, source and its mask, where needed


@dataclass(frozen=True)
class RowLayout:
    """How one kind of stack reads rows."""

    whole: bool = False  # whether the context of a position is the whole row
    predicts_next: bool = True  # whether a position predicts the id after it
    note: str | None = None  # how this differs from a causal decoder, for a report; None for a causal decoder

    @classmethod
    def of(cls, stack: Stack) -> RowLayout:
        """Return the layout of a stack's rows."""
        if stack.causal:
            return CAUSAL
        if stack.kind == "decoder":
            return BESIDE_ENCODER
        return ENCODER_OF_PAIR if stack.model.config.is_encoder_decoder else ENCODER

    def length(self, row: Sequence[int]) -> int:
        """Return the number of positions of a row."""
        return len(row) - self.predicts_next

    def context(self, row: Row, index: int) -> Context:
        """Return the context of the position at `index` of a row."""
        return Context(row if self.whole else row[: index + 1], index)

    def inputs(self, rows: Sequence[Row]) -> Inputs:
        """Pad rows into the inputs of one run."""
        ids = pad([row[: self.length(row)] for row in rows])
        inside = torch.arange(ids.shape[1]) < torch.tensor([self.length(row) for row in rows])[:, None]
        if not self.whole:
            return Inputs(ids, inside, ())
        mask = inside.long()
        return Inputs(ids, inside, (mask, pad([row[1:] for row in rows]), mask) if self.predicts_next else (mask,))


_BOTH_SIDES = (
    "An encoder sees both sides of a position and predicts no next token: what follows a trigger is not measured."
)
CAUSAL = RowLayout()
ENCODER = RowLayout(True, False, f"{_BOTH_SIDES} States are read through its masked-language head.")
ENCODER_OF_PAIR = RowLayout(
    whole=True,
    predicts_next=False,
    note=f"{_BOTH_SIDES} The model never reads this stack as tokens: here its states go through its own final norm and "
    "the decoder's unembedding.",
)
BESIDE_ENCODER = RowLayout(
    whole=True,
    note="The decoder says each text again that its encoder reads, and sees all of it through the encoder.",
)


def rows_of(stack: Stack, corpus: Corpus, progress: Progress = silent) -> Iterator[Row]:
    """Yield the rows of `corpus`; the model runs `corpus.tokens` positions of them, or fewer where the text ends.

    EditError where the text is missing, no text, or holds no two tokens in a row.
    """
    length, left, layout = min(ROW_TOKENS, stack.max_tokens), corpus.tokens, RowLayout.of(stack)
    rows: Iterator[Sequence[int]] = _enclosed(stack, corpus, length)
    if stack.causal:
        start, room = stack.start_tokens, length - len(stack.start_tokens)
        documents = _documents(stack, corpus, room, progress)
        rows = ([*start, *ids[at : at + room + 1]] for ids in documents for at in range(0, len(ids) - 1, room))
    for ids in rows:
        row = tuple(ids[: left + layout.predicts_next])
        left -= layout.length(row)
        yield row
        if not left:
            return
    if left == corpus.tokens:
        raise EditError(
            f"{corpus}: holds fewer than two tokens in a row, so no token has a next one; give a longer text"
        )


def _enclosed(stack: Stack, corpus: Corpus, length: int) -> Iterator[Row]:
    """Yield rows of at most `length` ids, with the tokenizer's special tokens; in a decoder, with its start id, too."""
    if corpus.named is None:
        raise EditError(f"{stack.name}: its {stack.kind} samples no text; give a text file with --corpus")
    front, after = special_tokens(stack.tokenizer)
    before, room = [*_start(stack), *front], length - len(front) - len(after)
    for text in texts(corpus)[0]:
        ids = plain_ids(stack.tokenizer, text)
        for first in range(0, len(ids) - 1, room):
            yield (*before, *ids[first : first + room], *after)


def _start(stack: Stack) -> list[int]:
    """Return the start id of the decoder of an encoder-decoder model; nothing for an encoder."""
    if stack.kind == "encoder":
        return []
    names = ("decoder_start_token_id", "bos_token_id", "pad_token_id")
    ids = [getattr(config, name, None) for name in names for config in (stack.model.config, stack.tokenizer)]
    return [next((int(i) for i in ids if i is not None), 0)]


def _documents(stack: Stack, corpus: Corpus, length: int, progress: Progress) -> Iterator[Sequence[int]]:
    """Yield the plain ids of each document; of running text, those of whole rows, beginning with the last id before."""
    if corpus.named is None:
        assert isinstance(stack, Editable)
        for row in sampled(stack, corpus, identity(stack, corpus)[0], progress).split(length):
            yield row.tolist()
        return
    pieces, documents = texts(corpus)
    held: list[int] = []
    for text in pieces:
        ids = plain_ids(stack.tokenizer, text)
        if documents:
            yield ids
            continue
        held += ids
        ready = (len(held) - 1) // length * length
        if ready > 0:
            yield held[: ready + 1]
            held = held[ready:]
    yield held


@dataclass(frozen=True, eq=False)
class Positions:
    """All n positions of a short text in memory, row by row, for analyses that score all and show the highest ones."""

    rows: tuple[Row, ...]
    layout: RowLayout

    @classmethod
    def of(cls, stack: Stack, corpus: Corpus, progress: Progress = silent) -> Positions:
        """Return the positions of a corpus; EditError where it cannot be read, or has fewer than two positions."""
        positions = cls(tuple(rows_of(stack, corpus, progress)), RowLayout.of(stack))
        if len(positions) < 2:
            raise EditError(f"{corpus}: a single token was found; the search for triggers needs some thousands")
        return positions

    @cached_property
    def _indices(self) -> list[tuple[int, int]]:  # row, and index in it
        return [(number, i) for number, row in enumerate(self.rows) for i in range(self.layout.length(row))]

    def __len__(self) -> int:
        return len(self._indices)

    def context(self, position: int) -> Context:
        """Return the context of a position."""
        number, index = self._indices[position]
        return self.layout.context(self.rows[number], index)

    def next(self, position: int) -> int:
        """Return the id that follows a position; `NOTHING` where none does."""
        number, index = self._indices[position]
        return self.rows[number][index + 1] if self.layout.predicts_next else NOTHING

    def largest(self, scores: Tensor, count: int) -> list[int]:
        """Return the `count` positions with the largest positive `scores` [n], one of each context."""
        chosen: dict[Context, int] = {}
        for position in scores.argsort(descending=True, stable=True).tolist():
            if len(chosen) == count or scores[position] <= 0:
                break
            chosen.setdefault(self.context(position), position)
        return list(chosen.values())

    def batches(self, tokens: int) -> Iterator[Inputs]:
        """Yield the rows in order, about `tokens` positions at a time."""
        size = max(1, tokens // max(map(self.layout.length, self.rows)))
        for first in range(0, len(self.rows), size):
            yield self.layout.inputs(self.rows[first : first + size])
