"""Undo an edit of a checkpoint by adding the remaining edits to the originals; Δ is subtracted only on request.

In whatever order edits are undone, the result is bit for bit the checkpoint without them; with all of them undone it
is the base.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ffedit.algebra.low_rank import Dense, LowRank, Update
from ffedit.editor import Edit
from ffedit.errors import EditError
from ffedit.exporter.embedded_edits import history, keep, originals
from ffedit.exporter.exporting import Exported
from ffedit.exporter.model_card import undone_card
from ffedit.exporter.rewrite_shards import stream
from ffedit.exporter.shard_plan import Plan, Rewrite, matrix, touched
from ffedit.exporter.subprocess_check import Task, check_fresh, check_how
from ffedit.files.atomic import check_free, written
from ffedit.files.tensor_ranges import Stored, contents
from ffedit.loading.load import local_folder


@dataclass(frozen=True)
class UndoPlan:
    """The matrices to rewrite and the edits to keep when an edit is undone.

    Attributes:
        tensors: the tensors of the checkpoint.
        edit: the edit to undo.
        left: the remaining edits, in order.
        plan: the matrices that change.
        originals: the originals that are still needed.
        exact: whether the result is bit for bit what it would be without the edit.
    """

    tensors: dict[str, Stored]
    edit: Edit
    left: tuple[Edit, ...]
    plan: Plan
    originals: dict[str, Stored]
    exact: bool


def undo(
    checkpoint: str | Path,
    out: str | Path,
    edit: int | str | None = None,
    inexact: bool = False,
    force: bool = False,
    verify: str = "auto",
) -> Path:
    """Write a checkpoint without one of its edits.

    Args:
        checkpoint: folder or hub id of a checkpoint that `export` made.
        out: the folder to make, atomically.
        edit: number (0 is the oldest) or fingerprint; None: the last.
        inexact: where exact undo is not possible, subtract Δ.
        force: replace an existing folder.
        verify: what a fresh process compares: "auto", "tensors" or "logits" (as `export`).

    Returns:
        The folder.

    Raises:
        ModelError: the checkpoint cannot be found or read.
        EditError: there is no such edit in it, the originals are missing or do not lead to its weights, or the folder
            exists or cannot be written.
        CheckError: the verification failed; nothing is left then.
    """
    return restore_checkpoint(checkpoint, out, edit, inexact, force, verify).folder


def restore_checkpoint(
    checkpoint: str | Path,
    out: str | Path,
    edit: int | str | None = None,
    inexact: bool = False,
    force: bool = False,
    verify: str = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Exported:
    """Write a checkpoint as `undo` does, and return the details; the further arguments are those of `ship`."""
    check_how(verify)
    check_free(Path(out), force)
    base = local_folder(checkpoint, revision)
    undoing = plan_undo(base, edit, inexact)
    with written(Path(out), force) as folder:
        moved = stream(base, undoing.tensors, undoing.plan, folder)
        if undoing.left:
            keep(folder, undoing.left, {name: stored.matrix() for name, stored in undoing.originals.items()})
        card = undone_card(str(checkpoint), undoing.edit, undoing.left, undoing.exact)
        (folder / "README.md").write_text(card, encoding="utf-8")
        which = None if edit is None else str(edit)
        checked = check_fresh(
            Task("undo", str(folder), str(base.absolute()), verify, True, which, inexact, trust_remote_code)
        )
    return Exported(Path(out), moved, checked, undoing.edit, undoing.exact)


def plan_undo(folder: Path, which: int | str | None = None, inexact: bool = False) -> UndoPlan:
    """Plan the undoing of one edit of a checkpoint.

    Raises:
        EditError: as `undo`.
    """
    edits = history(folder)
    if not edits:
        raise EditError(f"{folder}: no edits in it, nothing to undo; a checkpoint of `ffedit export` was expected")
    number = len(edits) - 1 if which is None else _find(folder, edits, str(which))
    left = edits[:number] + edits[number + 1 :]
    tensors, kept = contents(folder), originals(folder)
    plan, guessed = {}, set()
    for name, (address, transposed) in touched(tensors, edits[number]).items():
        source, parameter = kept.get(name), matrix(edits[number], address)["parameter"]
        if source is not None and _leads_to(source, updates_of(tensors, edits, name), transposed, tensors[name]):
            plan[name] = Rewrite(source, updates_of(tensors, left, name), transposed, parameter)
        elif inexact:
            plan[name] = Rewrite(tensors[name], (_negative(edits[number].updates[address]),), transposed, parameter)
            guessed.add(name)
        else:
            why = "its original was left out" if source is None else "it was changed by something else than its edits"
            raise EditError(
                f"{folder}: {name} cannot be restored exactly ({why}); export from the base again, or subtract the "
                "edit with --inexact"
            )
    still = {name for edit in left for name in touched(tensors, edit)} - guessed
    return UndoPlan(
        tensors, edits[number], left, plan, {name: kept[name] for name in kept if name in still}, exact=not guessed
    )


def updates_of(tensors: Mapping[str, Stored], edits: Sequence[Edit], name: str) -> tuple[Update, ...]:
    """Return the updates that `edits` add to one tensor, in order."""
    found = ((edit, touched(tensors, edit).get(name)) for edit in edits)
    return tuple(edit.updates[at[0]] for edit, at in found if at is not None)


def _leads_to(source: Stored, updates: tuple[Update, ...], transposed: bool, stored: Stored) -> bool:
    """Check whether an original plus all updates gives the stored matrix, bit for bit."""
    if (source.kind, source.shape) != (stored.kind, stored.shape):
        return False
    rebuilt = Rewrite(source, updates, transposed, "").blocks()
    return all(torch.equal(a, b) for a, b in zip(rebuilt, stored.blocks(), strict=True))


def _negative(update: Update) -> Update:
    return LowRank(-update.left, update.right) if isinstance(update, LowRank) else Dense(-update.matrix)


def _find(folder: Path, edits: Sequence[Edit], which: str) -> int:
    """Return the number of an edit that is named by number or fingerprint."""
    prints = [edit.fingerprint() for edit in edits]
    if which.isdecimal() and int(which) < len(edits) and len(which) < len(prints[0]):
        return int(which)
    if which in prints:
        return prints.index(which)
    held = ", ".join(f"{i:03} {fingerprint}" for i, fingerprint in enumerate(prints))
    raise EditError(f"{folder}: edit {which} is not in it (undone already?); it holds {held}")
