"""Types of a method (`Method`) and of its inputs: the edit to compute (`Job`), the equations of a layer (`Problem`).

A method is one file that makes a `Method`, in `editor.methods` or in another package (entry points `ffedit.methods`,
each named as its method).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

from torch import Tensor

from ffedit.algebra.key_moments import KeyMoments
from ffedit.algebra.linalg import Metric, Moment, blocks_of
from ffedit.algebra.low_rank import LowRank
from ffedit.algebra.updates import moment
from ffedit.editor.config import EditConfig
from ffedit.editor.edit import Edit
from ffedit.editor.metric import as_matrix, metric
from ffedit.editor.name_keys import NameMoment
from ffedit.editor.protect import Protected
from ffedit.errors import EditError
from ffedit.facts.fact import Fact, by_subject
from ffedit.inference.distributed import ALONE, ProcessGroup
from ffedit.model.editable import Editable
from ffedit.model.feed_forward import FeedForward
from ffedit.model.memory import Address, KeyValueMemory
from ffedit.progress import Progress, silent


@dataclass(frozen=True, eq=False)
class Job:
    """Specification of one edit, the argument of `Method.compute`.

    Attributes:
        editable: the model; a method leaves it unchanged, whether it returns or fails.
        facts: the facts to write.
        ff_layers: the feed-forward layers to write to, in ascending order, each with its memories.
        config: all numbers; the method's own are `config.of(name, kind)`.
        stats: second moments of the keys of these layers, for methods that use them.
        preserve: earlier edits, applied to the model, whose keys should keep their outputs.
        progress: called with the stage, the steps done and the number of steps.
        process_group: processes that share the work, all of which compute the same edit.
        names: second moment of the keys of other names by layer, if names count.
        protected: names and texts whose keys should keep their outputs.
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
    """Equations (W + Δ) K = V of one layer, the argument of `Method.solve`; all tensors are float64.

    In a mixture of experts, d_ff is the sum over the experts that the facts are written to.

    Attributes:
        W: value matrix, [d_model, d_ff].
        K: keys of the facts' subjects, [d_ff, n].
        V: target values of the keys, [d_model, n].
        moments: second moment of the keys of ordinary text, one for each memory.
        spread: rows A, [n, d_ff]; AᵀA is the weighted spread of the facts' keys (`updates.context_spread`).
        kept: keys whose values should stay: of the start of texts, of earlier edits, and protected ones, [d_ff, p].
        config: all numbers; the method's own are `config.of(name, kind)`.
        names: weighted second moment of the keys of other names, if they count.
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
        """C as `algebra.updates` takes it: a matrix, or, where d_ff is large, a cached factor and a few rows."""
        return metric(self.moments, self.spread, self.names)


@dataclass(frozen=True)
class Method:
    """A way to write facts: by `solve`, or by `compute` where it needs more than keys and values.

    Attributes:
        name: the name of `--method`.
        solves: the equation, in a line.
        choose: when to choose it.
        source: where it was published.
        solve: returns the smallest change of one layer, from the facts' keys and values.
        compute: computes the whole edit.
        exact: `solve` has a solution for independent keys only, so dependent keys are refused before any value is
            chosen.
        one_by_one: `solve` gets one subject after another, each on top of those before it, and not all at once.
        layers: whether it writes to several layers.
        preserves: whether it keeps what earlier edits of a sequence stored, and so needs their keys (`preserve`).
        statistics: whether it needs the second moment of the keys.
        names: whether the keys of other names are part of its C (`key.names_weight`).
        numbers: frozen dataclass of the method's own numbers, each with a default; None if it has none.
        presets: configurations by the name of a preset; "default" is `EditConfig()` unless it is named here.
        package: the package that it comes from.
    """

    name: str
    solves: str
    choose: str
    source: str
    solve: Callable[[Problem], LowRank] | None = None
    compute: Callable[[Job], Edit] | None = None
    exact: bool = False
    one_by_one: bool = False
    layers: bool = False
    preserves: bool = False
    statistics: bool = True
    names: bool = True
    numbers: type[Any] | None = None
    presets: Mapping[str, EditConfig] = field(default_factory=dict)
    package: str = "ffedit"

    def __post_init__(self) -> None:
        if self.name in {record.name for record in fields(EditConfig)}:
            raise EditError(f"method {self.name!r}: this is the name of a group of settings; another name was expected")
        if (self.solve is None) == (self.compute is None):
            raise EditError(f"method {self.name!r}: either solve or compute was expected")
        if self.solve is not None and not self.statistics:
            raise EditError(
                f"method {self.name!r}: solve needs the second moments of keys; statistics=True was expected"
            )

    def complete(self, config: EditConfig) -> EditConfig:
        """Return `config` with this method's own numbers, by default or as set, and without those of other methods.

        Raises EditError where names or texts are to be protected, and the method does not use keys.
        """
        if config.key.protect and not self.statistics:
            raise EditError(
                f"{self.name} changes the layer for every text, so it protects nothing; use memit, or another method"
            )
        methods = {} if self.numbers is None else {self.name: config.of(self.name, self.numbers)}
        key = config.key if self.names and self.statistics else replace(config.key, names_weight=0.0)
        key = key if self.statistics else replace(key, keep_beginning=False)
        return replace(config, key=key, methods=methods)
