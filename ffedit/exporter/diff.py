"""The differences between two checkpoints, tensor by tensor, without either model in memory.

Files are read one tensor at a time. A changed matrix is split into rounding noise and a low-rank change above it
(`ffedit.algebra.rounding`): an edit shows as a change of low rank, fine-tuning as one of high rank.

A low-rank change of value matrices is an edit again: `edit_from_diff` makes one, which can be applied, undone, exported
for other precisions or as an adapter. If the second checkpoint stores its own edits, their facts are included. Keys and
values are not in the weights, so such an edit can be added but not solved again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ffedit.algebra.linalg import double
from ffedit.algebra.low_rank import LowRank, Update
from ffedit.algebra.rounding import INDEPENDENT, noise_floor, recover
from ffedit.editor.edit import Edit
from ffedit.editor.provenance import dtypes, versions
from ffedit.errors import EditError, ModelError
from ffedit.exporter.checkpoint import file_name
from ffedit.exporter.embedded_edits import history
from ffedit.facts.text import counted
from ffedit.files.tensor_ranges import Stored, contents, of_expert
from ffedit.loading.load import folder_of, path_of
from ffedit.model.editable import Editable
from ffedit.model.fingerprint import fingerprint
from ffedit.model.memory import Address, identity
from ffedit.notebook import Displayed
from ffedit.progress import Progress, silent


@dataclass(frozen=True)
class Change:
    """One tensor that changed, or one matrix of a tensor that holds several."""

    name: str  # name of the tensor; `name[3]` is the fourth matrix in it
    shape: tuple[int, ...]  # [d_out, d_in] as stored, or [d]
    dtype: str  # stored dtype by safetensors' name; `base → edited` where they differ
    norm: float  # ‖Δ‖, Frobenius
    norm_ratio: float  # ‖Δ‖ / ‖W‖
    share: float  # share of the entries that changed
    # Number of singular values of Δ above the rounding noise; None where Δ is no matrix of finite floats.
    rank: int | None = None
    exact: bool = True  # whether the rank is neither an estimate (see `ffedit.algebra.rounding`) nor a lower bound
    more: bool = False  # whether the rank is a lower bound
    floor: float = 0.0  # largest singular value that rounding explains
    values: tuple[float, ...] = ()  # the largest singular values of Δ
    # The change, of this rank or of the one asked for, float64, in the stored orientation.
    update: LowRank | None = None


@dataclass(frozen=True)
class Diff(Displayed):
    """The differences between two checkpoints.

    Attributes:
        base: name of the first checkpoint.
        edited: name of the second.
        changes: tensors that are in both with different numbers.
        missing: tensors in the first only.
        added: tensors in the second only.
        reshaped: tensors with different shapes, with both shapes.
        retyped: tensors with different dtypes that are equal in the coarser one, with both dtypes.
        same: number of equal tensors.
    """

    base: str
    edited: str
    changes: tuple[Change, ...]
    missing: tuple[str, ...]
    added: tuple[str, ...]
    reshaped: tuple[str, ...]
    retyped: tuple[str, ...]
    same: int

    def __repr__(self) -> str:
        return f"Diff({self.base} → {self.edited}: {len(self.changes)} tensors changed, {self.same} the same)"

    @property
    def identical(self) -> bool:
        """True if all weights are the same."""
        return not (self.changes or self.missing or self.added or self.reshaped or self.retyped)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON, without the factors of the updates."""
        changes = [{name: value for name, value in vars(change).items() if name != "update"} for change in self.changes]
        return vars(self) | {"identical": self.identical, "changes": changes}


def diff(base: str | Path, edited: str | Path, *, rank: int | None = None, progress: Progress = silent) -> Diff:
    """Compare two checkpoints of one architecture.

    Args:
        base: a built-in name of ffedit, a folder, a GGUF file, or a hub id in the local cache.
        edited: the same.
        rank: number of directions of each change to recover; None: those above the rounding noise.
        progress: callback for the progress.

    Raises:
        ModelError: one of them does not exist, has no safetensors, or is damaged.
    """
    for checkpoint in (base, edited):
        ModelError.require(checkpoint, (str, Path), "a checkpoint's name or folder was expected")
    ours, theirs = (contents(_folder(checkpoint, progress)) for checkpoint in (base, edited))
    changes: list[Change] = []
    reshaped, retyped, same = [], [], 0
    shared = sorted(ours.keys() & theirs.keys())
    for done, name in enumerate(shared):
        progress("comparing", done, len(shared))
        a, b = ours[name], theirs[name]
        if a.same_bytes(b):
            same += 1
        elif a.shape != b.shape:
            reshaped.append(f"{name}: {list(a.shape)} → {list(b.shape)}")
        elif change := _change(name, a, b, rank):
            changes.append(change)
        elif a.kind != b.kind:
            retyped.append(f"{name}: {a.kind} → {b.kind}")
        else:  # the bytes differ in the sign of zeros only
            same += 1
    progress("comparing", len(shared), len(shared))
    missing, added = (tuple(sorted(one.keys() - other.keys())) for one, other in ((ours, theirs), (theirs, ours)))
    return Diff(str(base), str(edited), tuple(changes), missing, added, tuple(reshaped), tuple(retyped), same)


def _folder(name: str | Path, progress: Progress) -> Path:
    """Return the local folder of a checkpoint."""
    path = path_of(str(name), progress)
    folder = Path(path) if Path(path).is_dir() else folder_of(path)
    if folder is None:
        raise ModelError(f"{name}: no such folder, and not in the cache of the hub; a checkpoint was expected")
    return folder


def _change(name: str, a: Stored, b: Stored, rank: int | None) -> Change | None:
    """Compute the change of one tensor; None where only the dtype differs."""
    ours, theirs = (_read(stored, name) for stored in (a, b))
    coarse = max(ours.dtype, theirs.dtype, key=lambda dtype: torch.finfo(dtype).eps if dtype.is_floating_point else 0)
    if torch.equal(ours.to(coarse), theirs.to(coarse)):
        return None
    delta = double(theirs) - double(ours)
    norm, before = (float(torch.linalg.vector_norm(double(tensor))) for tensor in (delta, ours))
    share = float(double(delta != 0).mean())
    kind = a.kind if a.kind == b.kind else f"{a.kind} → {b.kind}"
    change = Change(name, tuple(ours.shape), kind, norm, norm / before if before else float("inf"), share)
    if delta.ndim != 2 or not coarse.is_floating_point or not torch.isfinite(delta).all():
        return change
    floor = noise_floor(theirs, coarse)
    above = recover(delta, floor, rank)
    return replace(
        change,
        rank=above.rank,
        exact=share >= INDEPENDENT and not above.more,
        more=above.more,
        floor=floor,
        values=tuple(above.values.tolist()),
        update=above.update,
    )


def _read(stored: Stored, name: str) -> Tensor:
    """Read a tensor by the name that `contents` gives it: `name[2]` is one matrix of several."""
    whole, expert = of_expert(name)
    try:
        with safe_open(stored.file, framework="pt") as file:
            tensor: Tensor = file.get_tensor(whole) if expert is None else file.get_slice(whole)[expert]
    except SafetensorError as error:
        raise ModelError(f"{stored.file}: {name} cannot be read ({error}); fetch the checkpoint anew") from error
    return tensor


# As an edit ---------------------------------------------------------------------------------------


def edit_from_diff(editable: Editable, difference: Diff) -> Edit:
    """Compute the edit that takes `difference.base` to `difference.edited`, up to rounding.

    Args:
        editable: the first checkpoint, loaded.
        difference: the result of `ffedit.diff`, with updates of the rank that it was asked for.

    Raises:
        EditError: no change is above the rounding noise, or tensors other than value matrices differ.
    """
    memories = {
        name: memory for memory in editable.memories.values() for name in (memory.saved_as, memory.parameter) if name
    }
    others = [*difference.missing, *difference.added, *difference.reshaped]
    updates: dict[Address, Update] = {}
    for change in difference.changes:
        name = file_name(memories, change.name)
        if name is None or change.update is None:
            others.append(change.name)
        elif change.update.rank:
            memory, delta = memories[name], change.update
            updates[memory.address] = LowRank(delta.right.T, delta.left.T) if memory.stored_transposed else delta
    if others:
        raise EditError(
            f"{counted(len(others), 'changed tensor')} of {difference.edited} ({', '.join(others[:3])}) cannot be part "
            "of an edit, which changes only value matrices; use the whole checkpoint"
        )
    if not updates:
        raise EditError(
            f"{difference.edited} differs from {difference.base} by no more than rounding; there is no edit to save"
        )
    changed = {at: editable.memories[at] for at in sorted(updates)}
    norms = {str(at): float(double(memory.value).norm()) for at, memory in changed.items()}
    about = {
        "method": "diff",
        "model": editable.name,
        **({"source": editable.source} if editable.source else {}),
        "edited": difference.edited,
        "base": fingerprint(editable),
        **dtypes(editable.feed_forward[0].memories[0]),
        "layers": sorted(at.layer for at in updates),
        "matrices": {str(at): identity(memory) for at, memory in changed.items()},
        "norms": norms,
        "norm_ratio": max(delta.norm() / norms[str(at)] for at, delta in updates.items()),
        "versions": versions(),
    }
    known = {edit.fingerprint() for edit in history(difference.base)}
    added = [edit for edit in history(difference.edited) if edit.fingerprint() not in known]
    return Edit(dict(sorted(updates.items())), {}, {}, tuple(fact for edit in added for fact in edit.facts), about)
