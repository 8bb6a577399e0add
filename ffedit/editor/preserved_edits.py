"""Are the edits that are to be kept in the weights?

Keys of edits that are to be kept are solved with, and what they give is read from the weights: one that is not there
would be kept as if it were. History knows what ffedit wrote. Other edits, of a model that was saved and loaded without
its history, say, are looked for: each has noted some entries of the matrices that it was computed on. Take one change
after another out of the weights, the newest first. Once the edit's own is out, the entries must be there again, up to
rounding: an edit that is lost in the rounding of these entries cannot be told from one that is not there, and is taken
at its word.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import sub

import torch
from torch import Tensor

from ffedit.algebra.low_rank import Update
from ffedit.editor.edit import Edit
from ffedit.errors import EditError
from ffedit.model.editable import Editable
from ffedit.model.fingerprint import fingerprint
from ffedit.model.memory import KeyValueMemory, sample_of


def check_after(editable: Editable, after: Sequence[Edit]) -> None:
    """Refuse earlier edits of another model, and those that are not in the weights.

    An edit that was computed on the weights as they are is not in them; its keys may be kept nonetheless.

    Args:
        editable: the model as it is.
        after: the edits, oldest first.

    Raises:
        EditError: one is another model's, or not in the weights.
    """
    named = {edit.fingerprint(): edit for edit in after}
    for name, edit in named.items():
        for at, delta in edit.updates.items():
            found = list(editable.memories[at].shape) if at in editable.memories else "none"
            if found != list(delta.shape):
                raise EditError(
                    f"the earlier edit {name} changes a value matrix {list(delta.shape)} in layer {at}, where "
                    f"{editable.name} has {found}; leave it out, or load the model that it was made for"
                )
    history = editable.history
    unknown = {name: edit for name, edit in named.items() if name not in history.known}
    now = fingerprint(editable) if unknown else ""
    unknown = {name: edit for name, edit in unknown.items() if edit.base != now}
    for name, edit in unknown.items():
        if edit.base == history.base:
            raise EditError(
                f"the earlier edit {name} was computed on {editable.name} before the edits that are applied and is "
                "none of them; apply it first, or leave it out"
            )
    for at in {at for edit in unknown.values() for at in edit.updates}:
        memory, there = editable.memories[at], [name for name, edit in unknown.items() if at in edit.updates]
        # What history does not know was there before what it knows.
        changes = [edit.updates[at] for edit in (*unknown.values(), *history.lasting.values()) if at in edit.updates]
        states = _states(memory, history.originals.get(at, memory.value), changes)
        for i, name in enumerate(there):
            if not _may_hold(memory, states, unknown[name], i):
                raise EditError(
                    f"one of the earlier edits {', '.join(there)} is not in the weights of {editable.name}: with their "
                    f"changes taken out, layer {at} is not what {name} was computed on; apply it first, or leave it out"
                )


def _states(memory: KeyValueMemory, W: Tensor, changes: Sequence[Update]) -> Tensor:
    """Some entries of W before each of `changes`, which are in order, and behind them, [n + 1, entries], float64."""
    backwards = [_entries(memory, change.dense) for change in reversed(changes)]
    return torch.stack(list(accumulate(backwards, sub, initial=_entries(memory, W)))[::-1])


def _may_hold(memory: KeyValueMemory, states: Tensor, edit: Edit, i: int) -> bool:
    """Whether what `edit`, the change number `i`, was computed on is found, up to rounding, where that is taken out."""
    about = edit.provenance.get("matrices", {}).get(str(memory.address))
    if memory.quantised or about is None or about["transposed"] != memory.stored_transposed:
        return True
    gaps = (states[: i + 1] - torch.tensor(about["sample"], dtype=torch.float64)).abs()
    # Each write was rounded, and so were the entries that were noted.
    dtypes = (torch.float32, memory.saved_dtype, memory.dtype, edit.computed_in or memory.dtype)
    relative = max(torch.finfo(dtype).eps for dtype in dtypes)
    absolute = max(torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps for dtype in dtypes)
    return bool((gaps <= len(states) * (relative * states.abs().amax(0) + absolute)).all(1).any())


def _entries(memory: KeyValueMemory, matrix: Tensor) -> Tensor:
    return sample_of(matrix.T if memory.stored_transposed else matrix).double().cpu()
