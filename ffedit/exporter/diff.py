"""Differences between two checkpoints, tensor by tensor, without either model in memory.

Files are read one tensor at a time. Of each changed tensor, the size of the change and the share of changed entries are
computed in float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ffedit.algebra.linalg import double
from ffedit.errors import ModelError
from ffedit.files.tensor_ranges import Stored, contents, of_expert
from ffedit.loading.load import folder_of, path_of
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


@dataclass(frozen=True)
class Diff(Displayed):
    """Differences between two checkpoints.

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
        """Return the fields as plain JSON."""
        return vars(self) | {"identical": self.identical, "changes": [vars(change) for change in self.changes]}


def diff(base: str | Path, edited: str | Path, *, progress: Progress = silent) -> Diff:
    """Compare two checkpoints of one architecture.

    Args:
        base: a built-in name of ffedit, a folder, a GGUF file, or a hub id in the local cache.
        edited: the same.
        progress: progress callback.

    Raises:
        ModelError: one of them does not exist, has no safetensors, or is damaged.
    """
    for checkpoint in (base, edited):
        ModelError.require(checkpoint, (str, Path), "a checkpoint's name or folder was expected")
    ours, theirs = (contents(_folder(checkpoint, progress)) for checkpoint in (base, edited))
    changes: list[Change] = []
    reshaped, retyped, same = [], [], 0
    shared = sorted(ours.keys() & theirs.keys())
    for i, name in enumerate(shared):
        progress("comparing", i, len(shared))
        a, b = ours[name], theirs[name]
        if a.same_bytes(b):
            same += 1
        elif a.shape != b.shape:
            reshaped.append(f"{name}: {list(a.shape)} → {list(b.shape)}")
        elif change := _change(name, a, b):
            changes.append(change)
        elif a.kind != b.kind:
            retyped.append(f"{name}: {a.kind} → {b.kind}")
        else:  # the bytes differ in the sign of zeros only
            same += 1
    progress("comparing", len(shared), len(shared))
    missing, added = (tuple(sorted(side.keys() - other.keys())) for side, other in ((ours, theirs), (theirs, ours)))
    return Diff(str(base), str(edited), tuple(changes), missing, added, tuple(reshaped), tuple(retyped), same)


def _folder(name: str | Path, progress: Progress) -> Path:
    """Return the local folder of a checkpoint."""
    path = path_of(str(name), progress)
    folder = Path(path) if Path(path).is_dir() else folder_of(path)
    if folder is None:
        raise ModelError(f"{name}: no such folder, and not in the cache of the hub; a checkpoint was expected")
    return folder


def _change(name: str, a: Stored, b: Stored) -> Change | None:
    """Compute the change of one tensor; None where only the dtype differs."""
    ours, theirs = (_read(stored, name) for stored in (a, b))
    coarse = max(ours.dtype, theirs.dtype, key=lambda dtype: torch.finfo(dtype).eps if dtype.is_floating_point else 0)
    if torch.equal(ours.to(coarse), theirs.to(coarse)):
        return None
    delta = double(theirs) - double(ours)
    norm, before = (float(torch.linalg.vector_norm(double(tensor))) for tensor in (delta, ours))
    share = float(double(delta != 0).mean())
    kind = a.kind if a.kind == b.kind else f"{a.kind} → {b.kind}"
    return Change(name, tuple(ours.shape), kind, norm, norm / before if before else float("inf"), share)


def _read(stored: Stored, name: str) -> Tensor:
    """Read a tensor by the name that `contents` gives it: `name[2]` is one matrix of several."""
    whole, expert = of_expert(name)
    try:
        with safe_open(stored.file, framework="pt") as file:
            tensor: Tensor = file.get_tensor(whole) if expert is None else file.get_slice(whole)[expert]
    except SafetensorError as error:
        raise ModelError(f"{stored.file}: {name} cannot be read ({error}); fetch the checkpoint anew") from error
    return tensor
