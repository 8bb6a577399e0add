"""The positions of a text, for analyses that score all positions and show the highest ones.

A position stands for its context, the prefix that ends there (see `reading`); of several with the same context, one is
shown.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from ffedit.errors import EditError
from ffedit.inference.text import Corpus
from ffedit.inspector.corpus_pass.reading import CAUSAL, Context, Inputs, Reading
from ffedit.inspector.corpus_pass.rows import NOTHING, Row, rows_of
from ffedit.model.editable import Stack
from ffedit.progress import Progress, silent


@dataclass(frozen=True, eq=False)
class Positions:
    """All n positions of a sequence of rows, row by row."""

    rows: tuple[Row, ...]
    reading: Reading = CAUSAL

    @classmethod
    def of(cls, stack: Stack, corpus: Corpus, progress: Progress = silent) -> Positions:
        """Return the positions of a corpus.

        Raises:
            EditError: the corpus cannot be read, or has fewer than two positions.
        """
        found = cls(tuple(rows_of(stack, corpus, progress)), Reading.of(stack))
        if len(found) < 2:
            raise EditError(f"{corpus}: one token is no text to look for triggers in; some thousands are needed")
        return found

    @cached_property
    def _places(self) -> list[tuple[int, int]]:
        return [(row, last) for row, ids in enumerate(self.rows) for last in range(self.reading.length(ids))]

    def __len__(self) -> int:
        return len(self._places)

    def context(self, position: int) -> Context:
        """Return the context of a position."""
        row, last = self._places[position]
        return self.reading.context(self.rows[row], last)

    def next(self, position: int) -> int:
        """Return the id that follows a position; `NOTHING` where none does."""
        row, last = self._places[position]
        return self.rows[row][last + 1] if self.reading.follows else NOTHING

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
        size = max(1, tokens // max(map(self.reading.length, self.rows)))
        for first in range(0, len(self.rows), size):
            yield self.reading.inputs(self.rows[first : first + size])
