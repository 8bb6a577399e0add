"""How a stack reads a row of token ids, and what a position of it sees.

- A causal decoder reads a row without its last id. A position sees the ids up to it, its *prefix*, and the id behind it
  is what follows.
- An encoder reads the whole row, and a position sees all of it: what fires a key is a text with a position in it. No id
  follows, as none is predicted from those before it.
- The decoder of a pair says once more what its encoder reads: the encoder reads a row without its first id, with which
  decoding starts, the decoder without its last one. Through the encoder, a position sees all of it here, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ffedit.model.stacks import Stack
from ffedit.model.tokenization import pad


class Context(NamedTuple):
    """All that the coefficients of a position depend on.

    Attributes:
        ids: what it sees.
        at: where it is in them.
    """

    ids: tuple[int, ...]
    at: int


class Inputs(NamedTuple):
    """Rows as a stack runs them, padded on the right.

    Attributes:
        ids: [n, t].
        inside: which of them are no padding, [n, t].
        given: what `Stack.forward` takes beside ids: mask, source and its mask, as far as they are needed.
    """

    ids: Tensor
    inside: Tensor
    given: tuple[Tensor, ...]


@dataclass(frozen=True)
class Reading:
    """How rows are read.

    Attributes:
        whole: whether a position sees the whole row.
        follows: whether the id behind a position is what it should predict.
        note: what a reader of a report must know of it; None for a causal decoder.
    """

    whole: bool = False
    follows: bool = True
    note: str | None = None

    @classmethod
    def of(cls, stack: Stack) -> Reading:
        """That of a stack."""
        if stack.causal:
            return CAUSAL
        if stack.name == "decoder":
            return BESIDE_ENCODER
        return OF_PAIR if stack.model.config.is_encoder_decoder else ENCODER

    def length(self, row: Sequence[int]) -> int:
        """How many positions a row has."""
        return len(row) - self.follows

    def context(self, row: tuple[int, ...], position: int) -> Context:
        """What a position of a row sees."""
        return Context(row if self.whole else row[: position + 1], position)

    def inputs(self, rows: Sequence[tuple[int, ...]]) -> Inputs:
        """Some rows, to be run."""
        ids = pad([row[: self.length(row)] for row in rows])
        inside = torch.arange(ids.shape[1]) < torch.tensor([self.length(row) for row in rows])[:, None]
        if not self.whole:
            return Inputs(ids, inside, ())
        mask = inside.long()
        return Inputs(ids, inside, (mask, pad([row[1:] for row in rows]), mask) if self.follows else (mask,))


_BOTH_SIDES = (
    "An encoder sees both sides of a position and predicts no next token: what follows a trigger and the removal of "
    "tokens from a prefix are not measured."
)
CAUSAL = Reading()
ENCODER = Reading(True, False, f"{_BOTH_SIDES} States are read through its masked-language head.")
OF_PAIR = Reading(
    True,
    False,
    f"{_BOTH_SIDES} The model never reads this stack as tokens: here its states go through its own final norm and the "
    "decoder's unembedding.",
)
BESIDE_ENCODER = Reading(
    True,
    True,
    "The decoder says each text again that its encoder reads, and sees all of it through the encoder: the removal of "
    "tokens from a prefix is not measured.",
)
