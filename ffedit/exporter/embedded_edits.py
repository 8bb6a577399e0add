"""Edits in a checkpoint and the matrices before them: `ffedit_edits/000`, `001`, … and `originals.safetensors`.

W + Δ − Δ is not W in floating point. So a checkpoint stores its edits in order of application and each matrix that
they changed as it was before the oldest of them. An edit is undone by adding the remaining ones to the originals: in
whatever order edits are undone, the result is bit for bit the checkpoint without them, and with all of them undone it
is the base.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ffedit.algebra.low_rank import Update
from ffedit.editor.edit import Edit
from ffedit.editor.edit_files import EDITS, embedded
from ffedit.errors import EditError
from ffedit.exporter.checkpoint import Plan, export_plan, file_name
from ffedit.files.seal import check
from ffedit.files.tensor_ranges import Matrix, Stored, contents, read_header, write
from ffedit.loading.load import Source, cached_folder, load_model
from ffedit.model.editable import Editable, History
from ffedit.model.memory import Address
from ffedit.model.storage import device_of

ORIGINALS = "originals.safetensors"


def history(folder: str | Path) -> tuple[Edit, ...]:
    """Load the edits in the weights of a checkpoint folder, oldest first; EditError where one is damaged or missing."""
    return tuple(Edit.load(path) for path in embedded(Path(folder)))


def read_originals(folder: Path) -> dict[str, Stored]:
    """Locate the matrices as they were before the oldest edit, by their names in the files; empty if there are none.

    EditError where the file is damaged.
    """
    path = folder / EDITS / ORIGINALS
    if not path.is_file():
        return {}
    try:
        check(path)
    except (OSError, ValueError) as error:
        raise EditError(f"{path}: the original matrices are damaged ({error}); export from the base again") from error
    return read_header(path)


def embed(folder: Path, edits: Sequence[Edit], originals: Mapping[str, Matrix]) -> None:
    """Write the edits of a checkpoint, oldest first, and the originals by their names in the files, into its folder."""
    for i, edit in enumerate(edits):
        edit.save(folder / EDITS / f"{i:03}")
    if originals:
        write(folder / EDITS / ORIGINALS, originals)


def load_with_edits(name_or_path: Source, **options: Any) -> Editable:
    """Load a model and add its checkpoint's edits to its history; `options` are those of `loading.load.load_model`.

    The edits can be undone in the model unless originals are missing or do not fit its memories.
    """
    editable = load_model(name_or_path, **options)
    folder = cached_folder(editable) if isinstance(name_or_path, str | Path) else None
    if folder and (edits := history(folder)):
        by_name = {edit.fingerprint(): edit for edit in edits}
        originals = _load_originals(editable, edits, read_originals(folder))
        # `base` stays open: that of the oldest edit may hold an edit undone since, or have another precision.
        editable.history = History(lasting=by_name) if originals is None else History("", by_name, originals)
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


# Undoing ------------------------------------------------------------------------------------------


class UndoPlan(NamedTuple):
    """Matrices to rewrite and the edits to keep when an edit is undone."""

    tensors: dict[str, Stored]  # the checkpoint's, by name
    edit: Edit  # the edit to undo
    left: tuple[Edit, ...]  # the remaining edits, in order
    plan: Plan  # the matrices that change
    originals: dict[str, Stored]  # the originals that are still needed


def plan_undo(folder: Path, which: str | None = None) -> UndoPlan:
    """Plan the undoing of one edit of a checkpoint; `which` and errors are those of `exporting.undo`."""
    edits = history(folder)
    if not edits:
        raise EditError(
            f"{folder}: no edits in it, so there is nothing to undo; a checkpoint of `ffedit export` was expected"
        )
    index = len(edits) - 1 if which is None else _index_of(which, edits, folder)
    edit, tensors, originals = edits[index], contents(folder), read_originals(folder)
    plans = [export_plan(tensors, other) for other in edits]

    def updates(name: str, without: int | None = None) -> tuple[Update, ...]:
        """Return the updates of one tensor, in order; those of the edit `without` are left out."""
        return tuple(change[name].updates[0] for i, change in enumerate(plans) if name in change and i != without)

    plan = {}
    for name, change in plans[index].items():
        source = originals.get(name)
        if source is None or not replace(change, source=source, updates=updates(name)).gives(tensors[name]):
            why = "its original is missing" if source is None else "it was changed by something else than its edits"
            raise EditError(f"{folder}: {name} cannot be restored exactly ({why}); export from the base again")
        plan[name] = replace(change, source=source, updates=updates(name, without=index))
    needed = {name for i, change in enumerate(plans) if i != index for name in change}
    kept = {name: originals[name] for name in originals if name in needed}
    return UndoPlan(tensors, edit, edits[:index] + edits[index + 1 :], plan, kept)


def _index_of(which: str, edits: Sequence[Edit], folder: Path) -> int:
    """Return the index of an edit that is named by number or fingerprint."""
    fingerprints = [edit.fingerprint() for edit in edits]
    if which.isdecimal() and int(which) < len(edits) and len(which) < len(fingerprints[0]):
        return int(which)
    if which in fingerprints:
        return fingerprints.index(which)
    names = ", ".join(f"{i:03} {fingerprint}" for i, fingerprint in enumerate(fingerprints))
    raise EditError(f"{folder}: edit {which} is not in it (undone already?); it holds {names}")
