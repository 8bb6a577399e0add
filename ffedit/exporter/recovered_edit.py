"""The difference of two checkpoints as an edit of the first.

The part of a value matrix's change above the rounding noise has low rank (`ffedit.exporter.diff`), and a change of
value matrices is an edit: it can be applied, undone, exported for other precisions or as an adapter. If the second
checkpoint stores its own edits, their facts are included. Keys and values are not in the weights, so such an edit can
be added but not solved again.
"""

from __future__ import annotations

from pathlib import Path

from ffedit.algebra.linalg import double
from ffedit.algebra.low_rank import LowRank, Update
from ffedit.editor import Edit
from ffedit.editor.provenance import dtypes, versions
from ffedit.errors import EditError
from ffedit.exporter.diff import Diff
from ffedit.exporter.embedded_edits import history
from ffedit.exporter.shard_plan import file_name
from ffedit.facts.fact import Fact
from ffedit.facts.text import counted
from ffedit.model.editable import Editable
from ffedit.model.fingerprint import fingerprint
from ffedit.model.memory import Address, identity


def recovered(editable: Editable, found: Diff) -> Edit:
    """Compute the edit that takes `found.base` to `found.edited`, up to rounding.

    Args:
        editable: the first checkpoint, loaded.
        found: the result of `ffedit.diff`, with updates of the rank that it was asked for.

    Raises:
        EditError: no change is above the rounding noise, or tensors other than value matrices differ.
    """
    memories = {
        name: memory for memory in editable.memories.values() for name in (memory.saved_as, memory.parameter) if name
    }
    others = [*found.missing, *found.added, *found.reshaped]
    updates: dict[Address, Update] = {}
    for change in found.changes:
        name = file_name(memories, change.name)
        if name is None or change.update is None:
            others.append(change.name)
        elif change.update.rank:
            memory, delta = memories[name], change.update
            updates[memory.address] = LowRank(delta.right.T, delta.left.T) if memory.stored_transposed else delta
    if others:
        many = f"{counted(len(others), 'tensor')} {'differs that is' if len(others) == 1 else 'differ that are'}"
        raise EditError(
            f"{many} no value matrix of {found.base} ({', '.join(others[:3])}), which no edit can hold; ship the whole "
            "checkpoint"
        )
    if not updates:
        raise EditError(f"{found.edited} differs from {found.base} by no more than rounding; there is no edit to save")
    changed = {at: editable.memories[at] for at in sorted(updates)}
    norms = {str(at): float(double(memory.value).norm()) for at, memory in changed.items()}
    about = {
        "method": "diff",
        "model": editable.name,
        **({"source": editable.source} if editable.source else {}),
        "edited": found.edited,
        "base": fingerprint(editable),
        **dtypes(editable.feed_forward[0].parts[0]),
        "layers": sorted(at.layer for at in updates),
        "matrices": {str(at): identity(memory) for at, memory in changed.items()},
        "norms": norms,
        "norm_ratio": max(delta.norm() / norms[str(at)] for at, delta in updates.items()),
        "versions": versions(),
    }
    return Edit(dict(sorted(updates.items())), {}, {}, _facts(found), about)


def _facts(found: Diff) -> tuple[Fact, ...]:
    """Collect the facts of the edits that are stored in the second checkpoint and not in the first."""
    before, after = (history(Path(name)) for name in (found.base, found.edited))
    known = {edit.fingerprint() for edit in before}
    return tuple(fact for edit in after if edit.fingerprint() not in known for fact in edit.facts)
