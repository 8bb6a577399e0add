"""Undo an edit of a checkpoint by adding the remaining edits to the originals; Δ is subtracted only on request.

In whatever order edits are undone, the result is bit for bit the checkpoint without them; with all of them undone it
is the base.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from ffedit.algebra.low_rank import Dense, LowRank, Update
from ffedit.editor import Edit
from ffedit.errors import EditError
from ffedit.exporter.embedded_edits import embed, history, read_originals
from ffedit.exporter.exporting import Exported
from ffedit.exporter.model_card import undone_card
from ffedit.exporter.origin import origin_of
from ffedit.exporter.rewrite_shards import Plan, Rewrite, changed_by, identity_in, rewrite
from ffedit.exporter.subprocess_check import Task, check_fresh, check_how
from ffedit.files.atomic import check_free, written
from ffedit.files.tensor_ranges import Stored, contents
from ffedit.loading.load import local_folder


class UndoPlan(NamedTuple):
    """The matrices to rewrite and the edits to keep when an edit is undone."""

    tensors: dict[str, Stored]  # of the checkpoint
    edit: Edit  # to undo
    left: tuple[Edit, ...]  # the remaining edits, in order
    plan: Plan  # the matrices that change
    originals: dict[str, Stored]  # those that are still needed
    exact: bool  # the result is bit for bit what it would be without the edit


def undo(
    checkpoint: str | Path,
    out: str | Path,
    edit: int | str | None = None,
    inexact: bool = False,
    force: bool = False,
    verify: str = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Exported:
    """Write a checkpoint without one of its edits.

    Args:
        checkpoint: folder or hub id of a checkpoint that `export` made.
        out: the folder to make, atomically.
        edit: number (0 is the oldest) or fingerprint; None: the last.
        inexact: where exact undo is not possible, subtract Δ.
        force: replace an existing folder.
        verify: what a fresh process compares: "auto", "tensors" or "logits" (as `export`).
        revision: branch, tag or commit of a hub id.
        trust_remote_code: run code that comes with the checkpoint when it is verified.

    Returns:
        The folder, what was rewritten and verified, the undone edit, and whether the undo is exact.

    Raises:
        ModelError: the checkpoint cannot be found or read.
        EditError: there is no such edit in it, the originals are missing or do not lead to its weights, or the folder
            exists or cannot be written.
        CheckError: the verification failed; nothing is left then.
    """
    check_how(verify)
    check_free(Path(out), force)
    base = local_folder(checkpoint, revision)
    undoing = plan_undo(base, edit, inexact)
    with written(Path(out), force) as folder:
        moved = rewrite(base, undoing.tensors, undoing.plan, folder)
        if undoing.left:
            embed(folder, undoing.left, {name: stored.matrix() for name, stored in undoing.originals.items()})
        origin = origin_of(str(checkpoint), base, undoing.edit.provenance.get("source"))
        card = undone_card(origin, undoing.edit, undoing.left, undoing.exact)
        (folder / "README.md").write_text(card, encoding="utf-8")
        which = None if edit is None else str(edit)
        checked = check_fresh(
            Task("undo", str(folder), str(base.absolute()), verify, True, which, inexact, trust_remote_code)
        )
    return Exported(Path(out), moved, checked, undoing.edit, undoing.exact)


def plan_undo(folder: Path, which: int | str | None = None, inexact: bool = False) -> UndoPlan:
    """Plan the undoing of one edit of a checkpoint; errors are those of `undo`."""
    edits = history(folder)
    if not edits:
        raise EditError(f"{folder}: no edits in it, nothing to undo; a checkpoint of `ffedit export` was expected")
    number = len(edits) - 1 if which is None else _index_of(str(which), edits, folder)
    edit, left = edits[number], edits[:number] + edits[number + 1 :]
    tensors, originals = contents(folder), read_originals(folder)
    plan, subtracted = {}, set()
    for name, (address, transposed) in changed_by(edit, tensors).items():
        source, parameter = originals.get(name), identity_in(edit, address)["parameter"]
        if source is not None and _leads_to(source, _updates(tensors, edits, name), transposed, tensors[name]):
            plan[name] = Rewrite(source, _updates(tensors, left, name), transposed, parameter)
        elif inexact:
            plan[name] = Rewrite(tensors[name], (_negative(edit.updates[address]),), transposed, parameter)
            subtracted.add(name)
        else:
            why = "its original was left out" if source is None else "it was changed by something else than its edits"
            raise EditError(
                f"{folder}: {name} cannot be restored exactly ({why}); export from the base again, or subtract the "
                "edit with --inexact"
            )
    needed = {name for other in left for name in changed_by(other, tensors)} - subtracted
    still = {name: originals[name] for name in originals if name in needed}
    return UndoPlan(tensors, edit, left, plan, still, exact=not subtracted)


def _updates(tensors: Mapping[str, Stored], edits: Sequence[Edit], name: str) -> tuple[Update, ...]:
    """Return the updates that `edits` add to one tensor, in order."""
    changes = ((edit, changed_by(edit, tensors)) for edit in edits)
    return tuple(edit.updates[changed[name][0]] for edit, changed in changes if name in changed)


def _leads_to(source: Stored, updates: tuple[Update, ...], transposed: bool, stored: Stored) -> bool:
    """Check whether an original plus all updates gives the stored matrix, bit for bit."""
    if (source.kind, source.shape) != (stored.kind, stored.shape):
        return False
    rebuilt = Rewrite(source, updates, transposed, "").blocks()
    return all(torch.equal(a, b) for a, b in zip(rebuilt, stored.blocks(), strict=True))


def _negative(update: Update) -> Update:
    return LowRank(-update.left, update.right) if isinstance(update, LowRank) else Dense(-update.matrix)


def _index_of(which: str, edits: Sequence[Edit], folder: Path) -> int:
    """Return the index of an edit that is named by number or fingerprint."""
    prints = [edit.fingerprint() for edit in edits]
    if which.isdecimal() and int(which) < len(edits) and len(which) < len(prints[0]):
        return int(which)
    if which in prints:
        return prints.index(which)
    held = ", ".join(f"{i:03} {fingerprint}" for i, fingerprint in enumerate(prints))
    raise EditError(f"{folder}: edit {which} is not in it (undone already?); it holds {held}")
