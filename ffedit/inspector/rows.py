"""Text as rows of token ids, and the positions in them.

A model reads a row without its last id. The context of a position is its *prefix*, the ids up to and including it; the
id after it is the next token. A longer text is cut into rows that share the token at the cut, which is run once. Each
document of a corpus begins a row of its own, as the sentences of Geva et al. do (arXiv 2012.14913, section 3.1).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ffedit.errors import EditError
from ffedit.inference.corpus import Corpus
from ffedit.inference.own_text import sampled
from ffedit.inference.text import ROW_TOKENS, identity, texts
from ffedit.model.editable import Editable
from ffedit.model.tokenization import pad, plain_ids
from ffedit.progress import Progress, silent

Row = tuple[int, ...]


def rows_of(editable: Editable, corpus: Corpus, progress: Progress = silent) -> Iterator[Row]:
    """Yield the rows of `corpus`, which have `corpus.tokens` positions in all, or fewer."""
    start, remaining = editable.start_tokens, corpus.tokens
    length = min(ROW_TOKENS, editable.max_tokens) - len(start)
    for ids in _documents(editable, corpus, length, progress):
        for first in range(0, len(ids) - 1, length):
            row = (*start, *ids[first : first + length + 1])[: remaining + 1]
            remaining -= len(row) - 1
            yield row
            if not remaining:
                return


def _documents(editable: Editable, corpus: Corpus, length: int, progress: Progress) -> Iterator[Sequence[int]]:
    """Yield the plain ids of each document, or running text in pieces of whole rows, each from the last id before."""
    if corpus.named is None:
        for row in sampled(editable, corpus, identity(editable, corpus)[0], progress).split(length):
            yield row.tolist()
        return
    pieces, documents = texts(corpus)
    pending: list[int] = []
    for text in pieces:
        ids = plain_ids(editable.tokenizer, text)
        if documents:
            yield ids
            continue
        pending += ids
        whole = (len(pending) - 1) // length * length
        if whole > 0:
            yield pending[: whole + 1]
            pending = pending[whole:]
    yield pending


@dataclass(frozen=True, eq=False)
class Positions:
    """All n positions of a short text in memory, row by row, for analyses that score all and show the highest ones."""

    rows: tuple[Row, ...]

    @classmethod
    def of(cls, editable: Editable, corpus: Corpus, progress: Progress = silent) -> Positions:
        """Return the positions of a corpus; EditError where it cannot be read, or has fewer than two positions."""
        positions = cls(tuple(rows_of(editable, corpus, progress)))
        if len(positions) < 2:
            raise EditError(f"{corpus}: holds fewer than two tokens that another follows; give a longer text")
        return positions

    @cached_property
    def _indices(self) -> list[tuple[int, int]]:  # number of the row, and index in it
        return [(number, i) for number, row in enumerate(self.rows) for i in range(len(row) - 1)]

    def __len__(self) -> int:
        return len(self._indices)

    def prefix(self, position: int) -> Row:
        """Return the ids up to a position."""
        number, index = self._indices[position]
        return self.rows[number][: index + 1]

    def next(self, position: int) -> int:
        """Return the id that follows a position."""
        number, index = self._indices[position]
        return self.rows[number][index + 1]

    def largest(self, scores: Tensor, count: int) -> list[int]:
        """Return the `count` positions with the largest positive `scores` [n], one of each prefix."""
        chosen: dict[Row, int] = {}
        for position in scores.argsort(descending=True, stable=True).tolist():
            if len(chosen) == count or scores[position] <= 0:
                break
            chosen.setdefault(self.prefix(position), position)
        return list(chosen.values())

    def batches(self, tokens: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the rows in order, about `tokens` positions at a time: ids [n, t], and a mask, False at padding."""
        size = max(1, tokens // (max(map(len, self.rows)) - 1))
        for first in range(0, len(self.rows), size):
            rows = self.rows[first : first + size]
            ids = pad([row[:-1] for row in rows])
            yield ids, torch.arange(ids.shape[1]) < torch.tensor([len(row) - 1 for row in rows])[:, None]
