"""The edits in a checkpoint and the matrices before them: `ffedit_edits/000`, `001`, … and `originals.safetensors`.

W + Δ − Δ is not W in floating point. So a checkpoint stores its edits in order of application and each matrix that
they changed as it was before the oldest of them: with these, any edit can be undone exactly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ffedit.editor import Edit
from ffedit.editor.edit_files import EDITS, embedded
from ffedit.exporter.rewrite_shards import file_name
from ffedit.files.tensor_ranges import Matrix, Stored, read_header, write
from ffedit.loading.load import Source, cached_folder, load_model
from ffedit.model.editable import Editable, History
from ffedit.model.memory import Address
from ffedit.model.storage import device_of

ORIGINALS = "originals.safetensors"


def history(folder: str | Path) -> tuple[Edit, ...]:
    """Load the edits in the weights of a checkpoint folder, oldest first.

    Raises:
        EditError: one of them is damaged, changed by hand, or missing.
    """
    return tuple(Edit.load(path) for path in embedded(Path(folder)))


def read_originals(folder: Path) -> dict[str, Stored]:
    """Locate the matrices as they were before the oldest edit, by their names in the files; empty if left out."""
    path = folder / EDITS / ORIGINALS
    return read_header(path) if path.is_file() else {}


def embed(folder: Path, edits: Sequence[Edit], originals: Mapping[str, Matrix]) -> None:
    """Write the edits of a checkpoint, oldest first, and the originals by their names in the files, into its folder."""
    for i, edit in enumerate(edits):
        edit.save(folder / EDITS / f"{i:03}")
    if originals:
        write(folder / EDITS / ORIGINALS, originals)


def load_with_edits(name_or_path: Source, **options: Any) -> Editable:
    """Load a model and add its checkpoint's edits to its history; `options` are those of `loading.load.load_model`.

    The edits can be undone in the model unless originals were left out or do not fit its memories.
    """
    editable = load_model(name_or_path, **options)
    folder = cached_folder(editable) if isinstance(name_or_path, str | Path) else None
    if folder and (edits := history(folder)):
        by_name = {edit.fingerprint(): edit for edit in edits}
        originals = _load_originals(editable, edits, read_originals(folder))
        if originals is None:
            editable.history = History(lasting=by_name)
        else:
            editable.history = History(edits[0].base, by_name, originals)
    return editable


def _load_originals(
    editable: Editable, edits: Sequence[Edit], stored: Mapping[str, Stored]
) -> dict[Address, Tensor] | None:
    """Load the originals of all matrices that `edits` change, oriented as W; None if one cannot be put back."""
    originals: dict[Address, Tensor] = {}
    for at in {at for edit in edits for at in edit.updates}:
        memory = editable.memories.get(at)
        name = None if memory is None else file_name(stored, memory.parameter, memory.saved_as)
        if memory is None or memory.quantised or name is None or stored[name].shape != tuple(memory.weight.shape):
            return None
        original = torch.cat(list(stored[name].blocks())).to(device_of(memory.module), memory.weight.dtype)
        originals[at] = original.T if memory.stored_transposed else original
    return originals
