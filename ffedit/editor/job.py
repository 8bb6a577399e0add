"""Input of a method: the facts, the layers, the hyperparameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from ffedit.algebra.key_moments import KeyMoments
from ffedit.algebra.low_rank import LowRank
from ffedit.editor.config import EditConfig
from ffedit.editor.edit import Edit
from ffedit.facts.fact import Fact, by_subject
from ffedit.model.editable import Editable
from ffedit.model.feed_forward import FeedForward
from ffedit.model.memory import Address, KeyValueMemory
from ffedit.progress import Progress, silent


@dataclass(frozen=True, eq=False)
class Job:
    """Specification of one edit to compute.

    Attributes:
        editable: the model; a method leaves it unchanged, whether it returns or fails.
        facts: what to write.
        ff_layers: the memories of each layer to write to, in ascending order.
        config: all hyperparameters.
        stats: second moments of the keys of these layers, for methods that use them.
        after: earlier edits, applied to the model, whose keys are to keep their outputs.
        progress: called with the progress.
    """

    editable: Editable
    facts: Sequence[Fact]
    ff_layers: Sequence[FeedForward]
    config: EditConfig
    stats: Mapping[Address, KeyMoments]
    after: Sequence[Edit] = ()
    progress: Progress = silent

    @property
    def memories(self) -> list[KeyValueMemory]:
        """All memories that may change."""
        return [memory for ff in self.ff_layers for memory in ff.memories]

    @property
    def groups(self) -> list[list[Fact]]:
        """Facts grouped by subject."""
        return by_subject(self.facts)


def write_(ff: FeedForward, delta: LowRank) -> None:
    """Add `delta` [d_model, Σ d_ff] to the value matrices of a layer's memories, W ← W + Δ, in place."""
    for memory, right in zip(ff.memories, ff.split(delta.right, 1).values(), strict=True):
        memory.write_(LowRank(delta.left, right))


@contextmanager
def unedited(editable: Editable) -> Iterator[None]:
    """Put the original of every edited matrix back for the length of a block."""
    originals = editable.history.originals
    with restored([editable.memories[at] for at in originals]):
        for at, original in originals.items():
            editable.memories[at].set_(original)
        yield


@contextmanager
def restored(memories: Sequence[KeyValueMemory]) -> Iterator[None]:
    """Restore `memories` after the block, bit for bit."""
    written = [memory for memory in memories if not memory.quantised]  # quantised ones cannot be written to
    originals = [memory.value.clone() for memory in written]
    try:
        yield
    finally:
        for memory, original in zip(written, originals, strict=True):
            memory.set_(original)
