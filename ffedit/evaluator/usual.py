"""What the unedited model had to say, kept for comparison: distributions after neighbors, and unrelated answers.

Whole distributions are large: of 5,000 neighbors and 50,000 tokens, 1 GB. Beyond `MOST_BYTES`, a sample of the
neighbors drawn with a seed is kept, and divergence is measured on these only.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import torch
from torch import Tensor

from ffedit.evaluator.asking import Context
from ffedit.evaluator.metrics import divergence

MOST_BYTES = 2**30
SEED = 0


class Usual:
    """Next-token distributions of the unedited model after some contexts, in float32 on the CPU.

    Args:
        contexts: after which; sampled where all would take more than `most` bytes.
        vocabulary: entries of a distribution.
        most: bytes.
    """

    def __init__(self, contexts: Sequence[Context], vocabulary: int, most: int = MOST_BYTES) -> None:
        some = list(dict.fromkeys(contexts))
        room = most // (4 * vocabulary)
        self.contexts = frozenset(some if len(some) <= room else Random(SEED).sample(some, room))
        self._kept: dict[Context, Tensor] = {}

    def keep(self, contexts: Sequence[Context], log_probs: Tensor) -> None:
        """Take what the unedited model says, log-probabilities [k, vocabulary]."""
        self._kept.update(zip(contexts, log_probs.float().cpu(), strict=True))

    def compare(self, contexts: Sequence[Context], log_probs: Tensor) -> list[float]:
        """KL(unedited ‖ now) after each of `contexts`, nats, where the model now gives `log_probs` [k, vocabulary]."""
        before = torch.stack([self._kept[context] for context in contexts]).to(log_probs.device)
        found: list[float] = divergence(before, log_probs.float()).tolist()
        return found
