"""The input of each kind of stack for a row of token ids, and the context of each position.

- A causal decoder reads a row without its last id. The context of a position is its *prefix*, the ids up to and
  including it; the id after it is the next token.
- An encoder reads the whole row, and the context of a position is all of it: a trigger is a text and a position in it.
  There is no next token, as none is predicted from those before it.
- The decoder of an encoder-decoder model reproduces its encoder's input: the encoder reads a row without its first id,
  which starts decoding, the decoder without its last one. Through the encoder, the context is the whole row here, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ffedit.model.editable import Stack
from ffedit.model.tokenization import pad


class Context(NamedTuple):
    """Context of a position: all that its coefficients depend on.

    Attributes:
        ids: the ids that the position attends to.
        at: index of the position in `ids`.
    """

    ids: tuple[int, ...]
    at: int


class Inputs(NamedTuple):
    """Rows as a stack runs them, padded on the right.

    Attributes:
        ids: token ids, [n, t].
        inside: True where an id is no padding, [n, t].
        given: further arguments of `Stack.forward`: mask, source and its mask, as far as they are needed.
    """

    ids: Tensor
    inside: Tensor
    given: tuple[Tensor, ...]


@dataclass(frozen=True)
class Reading:
    """Reading of rows by one kind of stack.

    Attributes:
        whole: whether the context of a position is the whole row.
        follows: whether a position predicts the id after it.
        note: how this differs from a causal decoder, for a report; None for a causal decoder.
    """

    whole: bool = False
    follows: bool = True
    note: str | None = None

    @classmethod
    def of(cls, stack: Stack) -> Reading:
        """Return the reading of a stack."""
        if stack.causal:
            return CAUSAL
        if stack.kind == "decoder":
            return BESIDE_ENCODER
        return OF_PAIR if stack.model.config.is_encoder_decoder else ENCODER

    def length(self, row: Sequence[int]) -> int:
        """Return the number of positions of a row."""
        return len(row) - self.follows

    def context(self, row: tuple[int, ...], position: int) -> Context:
        """Return the context of a position of a row."""
        return Context(row if self.whole else row[: position + 1], position)

    def inputs(self, rows: Sequence[tuple[int, ...]]) -> Inputs:
        """Pad rows into the inputs of one run."""
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
