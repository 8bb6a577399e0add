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
from ffedit.inference.distributed import ALONE, ProcessGroup
from ffedit.model.editable import Editable
from ffedit.model.feed_forward import FeedForward
from ffedit.model.memory import Address, KeyValueMemory
from ffedit.progress import Progress, silent


@dataclass(frozen=True, eq=False)
class Job:
    """Specification of one edit to compute, which `Method.compute` is given.

    Attributes:
        editable: the model; a method leaves it unchanged, whether it returns or fails.
        facts: the facts to write.
        ff_layers: the feed-forward layers to write to, in ascending order, each with its memories.
        config: all numbers; the method's own are `config.of(name, kind)`.
        stats: second moments of the keys of these layers, for methods that use them.
        preserve: earlier edits, applied to the model, whose keys are to keep their outputs.
        progress: called with the progress.
        process_group: processes that share the work, all of which compute the same edit.
        names: second moment of the keys of other names by layer, where names count.
        protected: names and texts whose keys are to keep their outputs.
    """

    editable: Editable
    facts: Sequence[Fact]
    ff_layers: Sequence[FeedForward]
    config: EditConfig
    stats: Mapping[Address, KeyMoments]
    preserve: Sequence[Edit] = ()
    progress: Progress = silent
    process_group: ProcessGroup = ALONE
    names: Mapping[int, NameMoment] = field(default_factory=dict)
    protected: Protected | None = None

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
    """Equations (W + Δ) K = V of one layer, which `Method.solve` is given; all tensors are float64.

    Of a mixture of experts, d_ff is the sum over the experts that are written.

    Attributes:
        W: value matrix, [d_model, d_ff].
        K: keys of the facts' subjects, [d_ff, n].
        V: target values of the keys, [d_model, n].
        moments: second moment of the keys of ordinary text, of each memory.
        spread: rows A, [n, d_ff]; AᵀA is the weighted spread of the facts' keys (`updates.context_spread`).
        kept: keys of earlier edits, and those that are protected, whose values should stay, [d_ff, p].
        config: all numbers; the method's own are `config.of(name, kind)`.
        names: weighted second moment of the keys of other names, where they count.
    """

    W: Tensor
    K: Tensor
    V: Tensor
    moments: Sequence[KeyMoments]
    spread: Tensor
    kept: Tensor
    config: EditConfig
    names: NameMoment | None = None

    @cached_property
    def own(self) -> Moment:
        """Weighted second moment of the spread of the facts' keys over their contexts, [d_ff, d_ff]."""
        return moment(self.spread, [len(moments.sum) for moments in self.moments])

    @cached_property
    def C(self) -> Moment:
        """Second moment of the keys of other text and names, with the facts' own spread, [d_ff, d_ff]."""
        return as_matrix(self.moments, self.spread, self.names)

    @property
    def blocks(self) -> tuple[Tensor, ...]:
        """Blocks of C, one for each memory, [its d_ff, its d_ff]; of a layer without experts, C itself."""
        return blocks_of(self.C)

    @cached_property
    def metric(self) -> Metric:
        """C as `algebra.updates` takes it: a matrix, or, where keys are long, a factor that is kept and a few rows."""
        if is_long(self.moments, self.spread, self.names):
            return factored(self.moments, self.spread, self.names)
        return self.C
