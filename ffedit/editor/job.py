"""What is asked of a method: which facts, where, with which numbers."""

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
    """One edit to compute.

    Attributes:
        editable: the model as it is; a method leaves it so, whether it returns or fails.
        facts: what to write.
        ff_layers: where: the memories of each layer, in rising order.
        config: all numbers.
        stats: second moments of the keys of these layers, for methods that use them.
        after: earlier edits, in the model already, whose keys are to give what they give.
        progress: told how far it is.
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
        return [part for ff in self.ff_layers for part in ff.parts]

    @property
    def groups(self) -> list[list[Fact]]:
        """The facts, those of one subject together."""
        return by_subject(self.facts)


def write_(ff: FeedForward, delta: LowRank) -> None:
    """W ← W + Δ in the memories of a layer, for `delta` [d_model, Σ d_ff]."""
    for part, right in zip(ff.parts, ff.split(delta.right, 1).values(), strict=True):
        part.write_(LowRank(delta.left, right))


@contextmanager
def unedited(editable: Editable) -> Iterator[None]:
    """In the block, the originals are in the place of all matrices that edits changed."""
    originals = editable.history.originals
    with restored([editable.memories[at] for at in originals]):
        for at, original in originals.items():
            editable.memories[at].set_(original)
        yield


@contextmanager
def restored(memories: Sequence[KeyValueMemory]) -> Iterator[None]:
    """What the block writes into `memories` is gone afterwards, bit for bit."""
    written = [memory for memory in memories if not memory.quantised]  # the others cannot be written to
    originals = [memory.value.clone() for memory in written]
    try:
        yield
    finally:
        for memory, original in zip(written, originals, strict=True):
            memory.set_(original)
