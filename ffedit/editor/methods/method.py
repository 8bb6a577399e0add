"""What a method is: its equation, where it was published, its numbers, and what computes the edit.

A method is one file that makes a `Method`: of this folder, or of another package (entry points `ffedit.methods`, each
of its method's name).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from ffedit.algebra.low_rank import LowRank
from ffedit.editor.config import EditConfig
from ffedit.editor.edit import Edit
from ffedit.editor.job import Job, Problem
from ffedit.errors import EditError


@dataclass(frozen=True)
class Method:
    """A way to write facts. Give it `solve`, or, where keys and values are not all that it needs, `compute`.

    Attributes:
        name: the name of `--method`.
        solves: the equation, in a line.
        choose: when to choose it.
        source: where it was published.
        solve: returns the smallest change of one layer, from the facts' keys and values.
        compute: computes the whole edit.
        exact: `solve` has a solution for independent keys only, so dependent keys are refused before any value is
            chosen.
        guarantee: returns what the method guarantees of a solution, and its measured value, for the provenance, plain
            JSON.
        one_by_one: `solve` is given one subject after another, each on top of those before it, and not all at once.
        layers: whether it writes to several layers.
        preserves: whether it keeps what earlier edits of a sequence stored, and so is given their keys (`preserve`).
        statistics: whether it needs the second moment of the keys.
        names: whether the keys of other names count for it (`key.names_weight`), in the C that it is given.
        numbers: frozen dataclass of the method's own numbers, each with a default; None if it has none.
        presets: numbers by the name of a preset; "default" is `EditConfig()` unless it is named here.
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
    guarantee: Callable[[Problem, LowRank], Mapping[str, Any]] = lambda problem, delta: {}
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
        """Return `config` with the numbers that this method uses: its own, by default or as set, and no other's.

        Raises EditError where names and texts are to be protected and the method has no keys to do it by.
        """
        if config.key.protect and not self.statistics:
            raise EditError(
                f"{self.name} changes the layer for every text, so it protects nothing; use memit, or another method"
            )
        own = {} if self.numbers is None else {self.name: config.of(self.name, self.numbers)}
        key = config.key if self.names and self.statistics else replace(config.key, names_weight=0.0)
        return replace(config, key=key, methods=own)
