"""The plan of a new checkpoint: the tensors of an old one, of which a few matrices are rewritten.

A rewritten matrix is W rounded once after each update, W ← round(W + Δ), in the order in which the updates were made:
bit for bit the matrix that the model in memory has after the same edits. An export is such a plan over the base's own
matrices; an exact undo is one over the originals with the remaining edits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ffedit.algebra.low_rank import LowRank, Update
from ffedit.editor import Edit
from ffedit.errors import EditError
from ffedit.files.tensor_ranges import Stored, row_blocks
from ffedit.model.editable import Editable
from ffedit.model.memory import SAMPLE, Address, identity


@dataclass(frozen=True)
class Rewrite:
    """One matrix of the new checkpoint.

    Attributes:
        source: the matrix that the updates are added to.
        updates: Δ [d_out, d_in] each, in order.
        transposed: the matrix is stored as [d_in, d_out].
        parameter: its name in the loaded model (`KeyValueMemory.parameter`).
    """

    source: Stored
    updates: tuple[Update, ...]
    transposed: bool
    parameter: str

    def blocks(self) -> Iterator[Tensor]:
        """Yield the new matrix in its stored orientation and dtype, a block of rows at a time.

        Raises:
            EditError: a number is NaN or too large for the dtype.
        """
        for first, last in row_blocks(*self.source.shape):
            block = self.source.rows(first, last)
            for update in self.updates:
                block = (block.double() + rows_of(update, first, last, self.transposed)).to(self.source.dtype)
            if not torch.isfinite(block).all():
                raise EditError(
                    "the edit holds NaN, infinity or numbers too large for the weights; nothing was written"
                )
            yield block


Plan: TypeAlias = "dict[str, Rewrite]"


def rows_of(update: Update, first: int, last: int, transposed: bool) -> Tensor:
    """Return rows of Δ in its stored orientation, float64; a factored Δ is multiplied out for these rows only."""
    if not isinstance(update, LowRank):
        return (update.matrix.T if transposed else update.matrix)[first:last].double()
    if transposed:
        return update.right[:, first:last].double().T @ update.left.double().T
    return update.left[first:last].double() @ update.right.double()


def export_plan(tensors: Mapping[str, Stored], edit: Edit) -> Plan:
    """Plan the rewriting of the base's matrices that an edit changes.

    Args:
        tensors: tensors of the base.
        edit: an edit with `provenance["matrices"]`.

    Raises:
        EditError: a matrix is missing, or has another shape.
    """
    return {
        name: Rewrite(tensors[name], (edit.updates[address],), transposed, matrix(edit, address)["parameter"])
        for name, (address, transposed) in touched(tensors, edit).items()
    }


def touched(tensors: Mapping[str, Stored], edit: Edit) -> dict[str, tuple[Address, bool]]:
    """Return, by name in the files, the address and orientation (True: transposed) of each tensor an edit changes.

    Raises:
        EditError: a matrix is missing, or has another shape.
    """
    found = {}
    for address, update in edit.updates.items():
        about = matrix(edit, address)
        name = file_name(tensors, about["parameter"], about.get("saved_as", ""))
        shape = tuple(reversed(update.shape)) if about["transposed"] else update.shape
        if name is None or tensors[name].shape != shape:
            seen = "which is not in it" if name is None else f"which is {list(tensors[name].shape)} in it"
            raise EditError(
                f"the edit changes {about['parameter']} {list(shape)}, {seen}; give the base that it was computed on"
            )
        found[name] = (address, bool(about["transposed"]))
    return found


def file_name(tensors: Iterable[str], parameter: str, saved_as: str = "") -> str | None:
    """Find a parameter's name in the files, where the base model's prefix may be missing or added.

    The files may also have it under the name `saved_as` (`KeyValueMemory.saved_as`). None if it is not found.
    """
    names = list(tensors)
    if parameter in names:
        return parameter
    if saved_as in names:
        return saved_as
    alike = [name for name in names if name.endswith(f".{parameter}") or parameter.endswith(f".{name}")]
    return alike[0] if len(alike) == 1 else None


def matrix(edit: Edit, address: Address) -> Mapping[str, Any]:
    """Return an edit's description of a matrix that it changes.

    Raises:
        EditError: it is missing or malformed.
    """
    about = edit.provenance.get("matrices", {})
    found = about.get(str(address)) if isinstance(about, Mapping) else None
    if not isinstance(found, Mapping) or not (
        isinstance(found.get("parameter"), str)
        and isinstance(found.get("transposed"), bool)
        and isinstance(found.get("sample"), Sequence)
        and all(isinstance(number, int | float) for number in found["sample"])
    ):
        raise EditError(f"the edit does not say which matrix of layer {address} it changes; make it anew")
    return found


def recognise(tensors: Mapping[str, Stored], kept: Mapping[str, Stored], edit: Edit, base: str) -> bool:
    """Check that the edit was computed on this base: a sample of each matrix must agree within the coarser rounding.

    Args:
        tensors: tensors of the base.
        kept: originals of the matrices that earlier edits of the base changed.
        edit: an edit with `provenance["matrices"]`.
        base: name of the base in messages.

    Returns:
        True if the edit was computed on the base with its earlier edits, False if on the base before them.

    Raises:
        EditError: neither; it is another model, or edited already.
    """
    as_it_is = True
    for name, (address, _) in touched(tensors, edit).items():
        if _is_like(tensors[name], edit, address):
            continue
        as_it_is = False
        if name not in kept or not _is_like(kept[name], edit, address):
            raise EditError(
                f"{base}: {name} is not the matrix that the edit was computed on (another model, or edited already); "
                "give its base with --model"
            )
    return as_it_is


def _is_like(stored: Stored, edit: Edit, address: Address) -> bool:
    """Check whether a stored matrix is, up to rounding, the one that an edit was computed on."""
    found = stored.sample(SAMPLE)
    expected = torch.tensor(matrix(edit, address)["sample"], dtype=torch.float64)
    computed = edit.computed_in or stored.dtype
    computed = torch.float32 if computed == torch.float64 else computed  # samples are recorded in float32 at most
    # Each number was rounded to one dtype or the other; the smallest ones to zero.
    infos = [torch.finfo(dtype) for dtype in (stored.dtype, computed)] if computed != stored.dtype else []
    relative = max((info.eps for info in infos), default=0.0)
    absolute = max((info.smallest_normal * info.eps for info in infos), default=0.0)
    allowed = relative * found.abs() + absolute
    return found.shape == expected.shape and bool(((found - expected).abs() <= allowed).all())


def identified(edit: Edit, editable: Editable) -> Edit:
    """Return the edit with `provenance["matrices"]`, the description of each matrix that it changes."""
    if "matrices" in edit.provenance:
        return edit
    matrices = {str(address): identity(editable.memories[address]) for address in edit.updates}
    return replace(edit, provenance={**edit.provenance, "matrices": matrices})
