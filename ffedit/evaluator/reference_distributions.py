"""Next-token distributions of the unedited model after neighbors, kept as the reference of divergence.

Whole distributions are large: of 5,000 neighbors and 50,000 tokens, 1 GB. Beyond about `MOST_BYTES`, a sample of the
neighbors is kept, and divergence is measured on these only. Membership in the sample depends on a neighbor's own tokens
alone, so that several processes draw the same sample as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256

import torch
from torch import Tensor

from ffedit.evaluator.metrics import divergence
from ffedit.evaluator.responses import Context

MOST_BYTES = 2**30


class ReferenceDistributions:
    """Next-token distributions of the unedited model after some contexts, in float32 on the CPU.

    Args:
        contexts: the contexts; sampled where those of all processes would take more than `most` bytes.
        vocabulary: entries of a distribution.
        count: number of contexts of all processes.
        most: limit in bytes.
    """

    def __init__(self, contexts: Sequence[Context], vocabulary: int, count: int, most: int = MOST_BYTES) -> None:
        room = most / (4 * vocabulary * max(1, count))
        self.contexts = frozenset(context for context in contexts if room >= 1 or _draw(context) < room)
        self._kept: dict[Context, Tensor] = {}

    def keep(self, contexts: Sequence[Context], log_probs: Tensor) -> None:
        """Store the unedited model's log-probabilities [k, vocabulary] after `contexts`."""
        self._kept.update(zip(contexts, log_probs.float().cpu(), strict=True))

    def compare(self, contexts: Sequence[Context], log_probs: Tensor) -> list[float]:
        """Return KL(unedited ‖ now) after each of `contexts`, nats; `log_probs` [k, vocabulary] are the model's now."""
        before = torch.stack([self._kept[context] for context in contexts]).to(log_probs.device)
        found: list[float] = divergence(before, log_probs.float()).tolist()
        return found


def _draw(context: Context) -> float:
    """Return a number from 0 to 1, a hash of the tokens."""
    return int.from_bytes(sha256(repr(context).encode()).digest()[:8], "big") / 2**64
