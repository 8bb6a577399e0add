"""The edits in a model's weights and the original matrices, for undoing without subtraction.

W + Δ − Δ is not W in floating point. So the first edit of a matrix stores the original, once, and undoing rebuilds the
matrix from it: the original plus the edits that remain, in their order, each rounded once as it was when it was
applied. Undone in any order, the weights are bit for bit those of a model that the undone edit never touched.

The originals of edits that came with a checkpoint may be missing. Such edits are permanent: known, never
undone, and part of what later edits count as original.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ffedit.model.memory import Address, KeyValueMemory


@dataclass(eq=False)
class History:
    """Edits (`ffedit.editor.Edit`) in a model's weights."""

    base: str | None = None  # fingerprint of the weights before the oldest of `edits`; None while there is none
    edits: dict[str, Any] = field(default_factory=dict)  # what is applied and can be undone, by fingerprint, in order
    # the matrices that these edits changed, as they were before, [d_model, d_ff] in the weights' dtype
    originals: dict[Address, Tensor] = field(default_factory=dict)
    # what was in the weights before all these and cannot be undone, by fingerprint, in order
    lasting: dict[str, Any] = field(default_factory=dict)

    @property
    def known(self) -> dict[str, Any]:
        """All edits in the weights, by fingerprint, the oldest first."""
        return self.lasting | self.edits

    def apply_(self, memories: Mapping[Address, KeyValueMemory], name: str, edit: Any, weights: str) -> None:
        """Write `edit`, whose fingerprint is `name`, on top of the others; if that fails, restore the weights.

        `weights` is the fingerprint of the weights as they are now.
        """
        self.originals |= {at: memories[at].value.clone() for at in edit.updates if at not in self.originals}
        self.base = weights if self.base is None else self.base
        self.edits[name] = edit
        try:
            for at, delta in edit.updates.items():
                memories[at].write_(delta)
        except BaseException:
            self.undo_(memories, name)
            raise

    def undo_(self, memories: Mapping[Address, KeyValueMemory], name: str) -> None:
        """Rebuild the matrices that the edit `name` changed: the originals with the other edits in their order."""
        others = [edit for other, edit in self.edits.items() if other != name]
        touched = self.edits[name].updates
        for at in touched:
            memories[at].set_(self.originals[at])
            for edit in others:
                if at in edit.updates:
                    memories[at].write_(edit.updates[at])
        # Deleted only now: if an interrupt came before, undo can be called again.
        del self.edits[name]
        for at in touched:
            if not any(at in edit.updates for edit in others):
                del self.originals[at]
        if not self.edits:
            self.base = None
