"""Check that the edits that are to be preserved are in the weights.

The keys of preserved edits are solved with, and what they give is read from the weights: an edit that is not there
would be kept as if it were. The model's history knows what ffedit wrote, in this process or in the checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence

from ffedit.editor.edit import Edit
from ffedit.errors import EditError
from ffedit.model.editable import Editable
from ffedit.model.fingerprint import fingerprint


def check_after(editable: Editable, after: Sequence[Edit]) -> None:
    """Refuse earlier edits of another model, and those that are not in its history.

    An edit that was computed on the weights as they are is not in them; its keys may be kept nonetheless.

    Args:
        editable: the model as it is.
        after: the edits, oldest first.

    Raises:
        EditError: one is another model's, or not in the history.
    """
    unknown = {}
    for edit in after:
        name = edit.fingerprint()
        for at, delta in edit.updates.items():
            found = list(editable.memories[at].shape) if at in editable.memories else "none"
            if found != list(delta.shape):
                raise EditError(
                    f"the earlier edit {name} changes a value matrix {list(delta.shape)} in layer {at}, where "
                    f"{editable.name} has {found}; leave it out, or load the model that it was made for"
                )
        if name not in editable.history.known:
            unknown[name] = edit
    now = fingerprint(editable) if unknown else ""
    for name, edit in unknown.items():
        if edit.base != now:
            raise EditError(
                f"the earlier edit {name} was computed on other weights than {editable.name} has, and is not in its "
                "history (a checkpoint that ffedit exports carries one); apply it first, or leave it out"
            )
