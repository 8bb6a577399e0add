"""Specify what a method is given: the edit to compute (`Job`), and the equations of one layer (`Problem`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from ffedit.algebra.key_moments import KeyMoments
from ffedit.algebra.linalg import Metric, Moment, blocks_of
from ffedit.algebra.updates import moment
from ffedit.editor.config import EditConfig
from ffedit.editor.edit import Edit
from ffedit.editor.metric import as_matrix, factored, is_long
from ffedit.editor.name_keys import NameMoment
from ffedit.editor.protect import Protected
from ffedit.facts.fact import Fact, by_subject
from ffedit.loading.distributed import ALONE, ProcessGroup
from ffedit.model.editable import Editable
from ffedit.model.feed_forward import FeedForward
from ffedit.model.memory import Address, KeyValueMemory
from ffedit.progress import Progress, silent


@dataclass(frozen=True, eq=False)
class Job:
    """Specification of one edit to compute."""

    editable: Editable  # the model; a method leaves it unchanged, whether it returns or fails
    facts: Sequence[Fact]  # what to write
    ff_layers: Sequence[FeedForward]  # the memories of each layer to write to, in ascending order
    config: EditConfig  # all numbers
    stats: Mapping[Address, KeyMoments]  # second moments of the keys of these layers, for methods that use them
    preserve: Sequence[Edit] = ()  # earlier edits, applied to the model, whose keys are to keep their outputs
    progress: Progress = silent  # called with the progress
    process_group: ProcessGroup = ALONE  # processes that share the work, all of which compute the same edit
    names: Mapping[int, NameMoment] = field(default_factory=dict)  # of the same layers, where names count
    protected: Protected | None = None  # names and texts whose keys are to keep their outputs

    @property
    def memories(self) -> list[KeyValueMemory]:
        """All memories that may change."""
        return [memory for ff in self.ff_layers for memory in ff.memories]

    @property
    def groups(self) -> list[list[Fact]]:
        """Facts grouped by subject."""
        return by_subject(self.facts)


@dataclass(frozen=True, eq=False)
class Problem:
    """Equations that one layer is to satisfy."""

    W: Tensor  # value matrix, of all memories joined, [d_model, Σ d_ff], float64
    K: Tensor  # keys, [Σ d_ff, n]
    V: Tensor  # target values of the keys, [d_model, n]
    moments: Sequence[KeyMoments]  # second moment of the keys of other text, of each memory
    spread: Tensor  # rows A, [n, Σ d_ff]: AᵀA is the weighted spread of the facts' keys (`updates.context_spread`)
    kept: Tensor  # keys of earlier edits, and those that are protected, [Σ d_ff, p]
    config: EditConfig  # all numbers; the method's own are `config.of(name, kind)`
    names: NameMoment | None = None  # weighted second moment of the keys of other names

    @cached_property
    def own(self) -> Moment:
        """Weighted second moment of the spread of the facts' keys over their contexts, [Σ d_ff, Σ d_ff]."""
        return moment(self.spread, [len(moments.sum) for moments in self.moments])

    @cached_property
    def C(self) -> Moment:
        """Second moment of the keys of other text and names, with the facts' own spread, [Σ d_ff, Σ d_ff]."""
        return as_matrix(self.moments, self.spread, self.names)

    @property
    def blocks(self) -> tuple[Tensor, ...]:
        """Blocks of C, one for each memory, [d_ff, d_ff]: of a layer without experts, C itself."""
        return blocks_of(self.C)

    @cached_property
    def metric(self) -> Metric:
        """C as `updates` takes it: as a matrix, or, where keys are long, as a factor that is kept and a few rows."""
        return (
            factored(self.moments, self.spread, self.names)
            if is_long(self.moments, self.spread, self.names)
            else self.C
        )
