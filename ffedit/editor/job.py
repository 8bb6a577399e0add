"""What is asked of a method: which facts, where, with which numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from ffedit.anatomy import Editable
from ffedit.editor.config import EditConfig
from ffedit.editor.edit import Edit
from ffedit.facts import Fact, by_subject
from ffedit.memory import Address, KeyValueMemory
from ffedit.moments import KeyMoments
from ffedit.progress import Progress, silent


@dataclass(frozen=True, eq=False)
class Job:
    """One edit to compute.

    Attributes:
        editable: the model as it is; a method leaves it so, whether it returns or fails.
        facts: what to write.
        layers: where, in rising order.
        config: all numbers.
        stats: second moments of the keys of these layers, for methods that use them.
        after: earlier edits, in the model already, whose keys are to give what they give.
        progress: told how far it is.
    """

    editable: Editable
    facts: Sequence[Fact]
    layers: Sequence[int]
    config: EditConfig
    stats: Mapping[Address, KeyMoments]
    after: Sequence[Edit] = ()
    progress: Progress = silent

    @property
    def memories(self) -> list[KeyValueMemory]:
        """The memories of the layers."""
        return [self.editable.memories[layer] for layer in self.layers]

    @property
    def groups(self) -> list[list[Fact]]:
        """The facts, those of one subject together."""
        return by_subject(self.facts)


@contextmanager
def restored(memories: Sequence[KeyValueMemory]) -> Iterator[None]:
    """What the block writes into `memories` is gone afterwards, bit for bit."""
    originals = [memory.value.clone() for memory in memories]
    try:
        yield
    finally:
        for memory, original in zip(memories, originals, strict=True):
            memory.set_(original)
