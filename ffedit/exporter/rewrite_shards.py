"""A checkpoint made from the files of another one: unchanged shards are linked, changed matrices rewritten.

A rewritten matrix is W rounded once after each update, W ← round(W + Δ), in the order in which the updates were made:
bit for bit the matrix that the model in memory has after the same edits. An export rewrites the base's own matrices; an
exact undo rewrites the originals with the remaining edits.

A shard in which nothing changes becomes a hard link, which takes no space and no time. A shard in which a matrix
changes is copied first and then overwritten at that matrix's bytes, a block of rows at a time: memory use does not grow
with the model.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ffedit.algebra.linalg import double
from ffedit.algebra.low_rank import LowRank, Update
from ffedit.algebra.rounding import rounded
from ffedit.editor import Edit
from ffedit.editor.edit_files import EDITS
from ffedit.errors import EditError
from ffedit.files.tensor_ranges import INDEX, Stored, patch, row_blocks
from ffedit.model.memory import SAMPLE, Address

# Weights in other formats are not copied: they would be the base's unedited ones.
WEIGHTS = (
    *(".bin", ".safetensors", ".pt", ".pth", ".ckpt", ".h5"),
    *(".msgpack", ".onnx", ".gguf", ".pkl", ".npz", ".tflite"),
)


@dataclass(frozen=True)
class Rewrite:
    """One matrix of the new checkpoint."""

    source: Stored  # the matrix that the updates are added to
    updates: tuple[Update, ...]  # Δ [d_out, d_in] each, in order
    transposed: bool  # the matrix is stored as [d_in, d_out]
    parameter: str  # its name in the loaded model (`KeyValueMemory.parameter`)
    address: Address  # the memory whose value matrix it is

    def blocks(self) -> Iterator[Tensor]:
        """Yield the new matrix in its stored orientation and dtype, a block of rows at a time."""
        for first, last in row_blocks(*self.source.shape):
            block = self.source.rows(first, last)
            for update in self.updates:
                block = rounded(double(block) + rows_of(update, first, last, self.transposed), self.source.dtype)
            yield block


Plan: TypeAlias = "dict[str, Rewrite]"  # by name in the files


def rows_of(update: Update, first: int, last: int, transposed: bool) -> Tensor:
    """Return rows of Δ in its stored orientation, float64; a factored Δ is multiplied out for these rows only."""
    if not isinstance(update, LowRank):
        return double((update.matrix.T if transposed else update.matrix)[first:last])
    if transposed:
        return double(update.right[:, first:last]).T @ double(update.left).T
    return double(update.left[first:last]) @ double(update.right)


def export_plan(tensors: Mapping[str, Stored], edit: Edit) -> Plan:
    """Plan the rewriting of the base's `tensors` that an edit with `provenance["matrices"]` changes.

    Raises:
        EditError: a matrix is missing, or has another shape.
    """
    plan = {}
    for address, update in edit.updates.items():
        about = identity_in(edit, address)
        parameter, transposed = about["parameter"], bool(about["transposed"])
        name = file_name(tensors, parameter, about.get("saved_as", ""))
        shape = tuple(reversed(update.shape)) if transposed else update.shape
        if name is None or tensors[name].shape != shape:
            seen = "which is not in it" if name is None else f"which is {list(tensors[name].shape)} in it"
            raise EditError(
                f"the edit changes {parameter} {list(shape)}, {seen}; give the base that it was computed on"
            )
        plan[name] = Rewrite(tensors[name], (update,), transposed, parameter, address)
    return plan


def file_name(names: Iterable[str], parameter: str, saved_as: str = "") -> str | None:
    """Find a parameter among `names` in files, where the base model's prefix may be missing or added; None if absent.

    The files may also have it under the name `saved_as` (`KeyValueMemory.saved_as`).
    """
    names = list(names)
    if exact := [name for name in (parameter, saved_as) if name in names]:
        return exact[0]
    alike = [name for name in names if name.endswith(f".{parameter}") or parameter.endswith(f".{name}")]
    return alike[0] if len(alike) == 1 else None


def identity_in(edit: Edit, address: Address) -> Mapping[str, Any]:
    """Return an edit's description (`memory.identity`) of a matrix that it changes."""
    about: Mapping[str, Any] | None = edit.provenance.get("matrices", {}).get(str(address))
    if about is None:
        raise EditError(f"the edit does not say which matrix of layer {address} it changes; make it anew")
    return about


def is_of_edited_base(edit: Edit, tensors: Mapping[str, Stored], originals: Mapping[str, Stored], base: str) -> bool:
    """Return True if an edit was computed on the base with its earlier edits, False if on the base before them.

    A sample of each matrix is compared, which must agree within the coarser rounding; `originals` are those that
    earlier edits changed, as they were before.

    Raises:
        EditError: the edit was computed on neither; it is another model, or edited already.
    """
    plan = export_plan(tensors, edit)
    others = [name for name, change in plan.items() if not _is_like(tensors[name], edit, change.address)]
    for name in others:
        if name not in originals or not _is_like(originals[name], edit, plan[name].address):
            raise EditError(
                f"{base}: {name} is not the matrix that the edit was computed on (another model, or edited already); "
                "give its base with --model"
            )
    return not others


def _is_like(stored: Stored, edit: Edit, address: Address) -> bool:
    """Check whether a stored matrix is, up to rounding, the one that an edit was computed on."""
    sample = stored.sample(SAMPLE)
    expected = torch.tensor(identity_in(edit, address)["sample"], dtype=torch.float64)
    computed = edit.computed_in or stored.dtype
    computed = torch.float32 if computed == torch.float64 else computed  # samples are recorded in float32 at most
    if sample.shape != expected.shape or computed == stored.dtype:
        return torch.equal(sample, expected)
    # Each number was rounded to one dtype or the other; the smallest ones to zero.
    infos = [torch.finfo(dtype) for dtype in (stored.dtype, computed)]
    relative, absolute = max(info.eps for info in infos), max(info.smallest_normal * info.eps for info in infos)
    return bool(((sample - expected).abs() <= relative * sample.abs() + absolute).all())


# Writing ------------------------------------------------------------------------------------------


@dataclass
class Moved:
    """Bytes of shards that are hard links, of shards that were copied, and of matrices that were rewritten."""

    linked: int = 0
    copied: int = 0
    rewritten: int = 0


def rewrite(base: Path, tensors: Mapping[str, Stored], plan: Plan, folder: Path) -> Moved:
    """Fill the empty `folder` with the checkpoint in `base`, its `tensors` as in `plan`."""
    moved = Moved()
    for shard in sorted({stored.file for stored in tensors.values()}):
        target = folder / shard.relative_to(base)
        target.parent.mkdir(parents=True, exist_ok=True)
        changed = [name for name in plan if tensors[name].file == shard]
        size = shard.stat().st_size
        if not changed:
            try:
                os.link(shard.resolve(), target)  # the hub's cache holds symbolic links, which would dangle elsewhere
            except OSError:  # another file system, or one without links: copied
                pass
            else:
                moved.linked += size
                continue
        shutil.copyfile(shard, target)
        moved.copied += size
        for name in changed:
            patch(replace(tensors[name], file=target), plan[name].blocks())
            moved.rewritten += tensors[name].size
    for path in sorted(base.iterdir()):  # all else but weights, the model card and the edits, which are written anew
        if path.name.startswith(".") or path.name in ("README.md", EDITS):
            continue
        other_index = path.name.endswith(".index.json") and path.name != INDEX
        if path.is_dir() and path.name == "additional_chat_templates":
            shutil.copytree(path, folder / path.name)
        elif path.is_file() and path.suffix not in WEIGHTS and not other_index:
            shutil.copyfile(path, folder / path.name)
    return moved
