"""The files of an edit's folder, by which it is recognised before torch is imported."""

from __future__ import annotations

from pathlib import Path

from ffedit.errors import EditError

TENSORS, MANIFEST = "edit.safetensors", "manifest.json"
EDITS = "ffedit_edits"  # in a checkpoint: the folder of the edits that are in its weights


def check_edit(folder: Path) -> None:
    """Refuse a folder that holds no edit; `edit_folder.load` checks what is in the files.

    Raises:
        EditError: it has no manifest.
    """
    if not (folder / MANIFEST).is_file():
        raise EditError(f"{folder}: holds no edit ({MANIFEST} and {TENSORS} were expected)")
