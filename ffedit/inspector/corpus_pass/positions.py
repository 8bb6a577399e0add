"""The positions of a text that was read, for those who score each of them and show a few.

A position stands for what it sees, the prefix that ends there (see `reading`); of several that see the same, one is
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
from ffedit.model.editable import Editable
from ffedit.model.stacks import Stack
from ffedit.progress import Progress, silent


@dataclass(frozen=True, eq=False)
class Positions:
    """All n positions of some rows, row by row."""

    rows: tuple[Row, ...]
    reading: Reading = CAUSAL

    @classmethod
    def of(cls, editable: Editable | Stack, corpus: Corpus, progress: Progress = silent) -> Positions:
        """Those of a corpus.

        Raises:
            EditError: it cannot be read, or is no text to look for triggers in.
        """
        found = cls(tuple(rows_of(editable, corpus, progress)), Reading.of(Stack.of(editable)))
        if len(found) < 2:
            raise EditError(f"{corpus}: one token is no text to look for triggers in; some thousands are needed")
        return found

    @cached_property
    def _places(self) -> list[tuple[int, int]]:
        return [(row, last) for row, ids in enumerate(self.rows) for last in range(self.reading.length(ids))]

    def __len__(self) -> int:
        return len(self._places)

    def context(self, position: int) -> Context:
        """What is seen at a position."""
        row, last = self._places[position]
        return self.reading.context(self.rows[row], last)

    def next(self, position: int) -> int:
        """The id that follows a position; `NOTHING` where none does."""
        row, last = self._places[position]
        return self.rows[row][last + 1] if self.reading.follows else NOTHING

    def largest(self, scores: Tensor, count: int) -> list[int]:
        """The positions with the largest positive `scores` [n], those that see the same once."""
        chosen: dict[Context, int] = {}
        for position in scores.argsort(descending=True, stable=True).tolist():
            if len(chosen) == count or scores[position] <= 0:
                break
            chosen.setdefault(self.context(position), position)
        return list(chosen.values())

    def batches(self, tokens: int) -> Iterator[Inputs]:
        """Rows in order, about `tokens` positions at a time."""
        size = max(1, tokens // max(map(self.reading.length, self.rows)))
        for first in range(0, len(self.rows), size):
            yield self.reading.inputs(self.rows[first : first + size])
