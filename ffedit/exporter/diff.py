"""The differences between two checkpoints, tensor by tensor, without either model in memory.

Files are read one tensor at a time. A changed matrix is split into rounding noise and a low-rank change above it
(`ffedit.algebra.rounding`): an edit shows as a change of low rank, fine-tuning as one of high rank.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ffedit.algebra.low_rank import LowRank
from ffedit.algebra.rounding import INDEPENDENT, noise_floor, recover
from ffedit.errors import ModelError
from ffedit.files.tensor_ranges import Stored, contents, of_expert
from ffedit.loading.load import path_of
from ffedit.progress import Progress, silent


@dataclass(frozen=True)
class Change:
    """One tensor that changed, or one matrix of a tensor that holds several.

    Attributes:
        name: name of the tensor; `name[3]` is the fourth matrix in it.
        shape: [d_out, d_in] as stored, or [d].
        dtype: stored dtype by safetensors' name; `base → edited` where they differ.
        norm: ‖Δ‖, Frobenius.
        norm_ratio: ‖Δ‖ / ‖W‖.
        share: share of the entries that changed.
        rank: number of singular values of Δ above the rounding noise; None where Δ is no matrix of finite floats.
        exact: whether the rank is neither an estimate (see `ffedit.algebra.rounding`) nor a lower bound.
        more: whether the rank is a lower bound.
        floor: largest singular value that rounding explains.
        values: the largest singular values of Δ.
        update: the change, of this rank or of the one asked for, float64, in the stored orientation.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    norm: float
    norm_ratio: float
    share: float
    rank: int | None = None
    exact: bool = True
    more: bool = False
    floor: float = 0.0
    values: tuple[float, ...] = ()
    update: LowRank | None = None


@dataclass(frozen=True)
class Diff:
    """The differences between two checkpoints.

    Attributes:
        base: the first checkpoint, as named by the caller.
        edited: the second checkpoint, as named by the caller.
        changes: tensors that are in both with different numbers.
        missing: tensors in the first only.
        added: tensors in the second only.
        reshaped: tensors with different shapes, with both shapes.
        retyped: tensors with different dtypes that are equal in the coarser one, with both dtypes.
        files: other files that differ, and how.
        same: number of equal tensors.
    """

    base: str
    edited: str
    changes: tuple[Change, ...]
    missing: tuple[str, ...]
    added: tuple[str, ...]
    reshaped: tuple[str, ...]
    retyped: tuple[str, ...]
    files: tuple[str, ...]
    same: int

    @property
    def identical(self) -> bool:
        """True if all weights are the same, whatever the other files."""
        return not (self.changes or self.missing or self.added or self.reshaped or self.retyped)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON, without the factors of the updates."""
        told = {name: value for name, value in vars(self).items() if name != "changes"}
        rows = [{name: value for name, value in vars(change).items() if name != "update"} for change in self.changes]
        return {**told, "identical": self.identical, "changes": rows}


def diff(base: str | Path, edited: str | Path, rank: int | None = None, progress: Progress = silent) -> Diff:
    """Compare two checkpoints of one architecture.

    Args:
        base: a built-in name of ffedit, a folder, a GGUF file, or a hub id in the local cache.
        edited: the same.
        rank: number of directions of each change to recover; None: those above the rounding noise.
        progress: callback for the progress.

    Raises:
        ModelError: one of them does not exist, has no safetensors, or is damaged.
    """
    folders = _folder(base, progress), _folder(edited, progress)
    ours, theirs = (contents(folder) for folder in folders)
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
        elif found := _compared(name, a, b, rank):
            changes.append(found)
        elif a.kind != b.kind:
            retyped.append(f"{name}: {a.kind} → {b.kind}")
        else:  # the bytes differ in the sign of zeros only
            same += 1
    progress("comparing", len(shared), len(shared))
    return Diff(
        str(base),
        str(edited),
        tuple(changes),
        tuple(sorted(ours.keys() - theirs.keys())),
        tuple(sorted(theirs.keys() - ours.keys())),
        tuple(reshaped),
        tuple(retyped),
        tuple(_files(*folders)),
        same,
    )


def _folder(name: str | Path, progress: Progress) -> Path:
    """Return the local folder of a checkpoint."""
    path = Path(path_of(str(name), progress))
    if path.is_dir():
        return path
    try:
        config = huggingface_hub.try_to_load_from_cache(str(name), "config.json")
    except ValueError:
        config = None
    if not isinstance(config, str):
        raise ModelError(f"{name}: no such folder, and no hub id that is in the cache; a checkpoint was expected")
    return Path(config).parent


def _compared(name: str, a: Stored, b: Stored, rank: int | None) -> Change | None:
    """Compute the change of one tensor; None where only the dtype differs."""
    ours, theirs = (_read(stored, name) for stored in (a, b))
    coarse = max(ours.dtype, theirs.dtype, key=_eps)
    if torch.equal(ours.to(coarse), theirs.to(coarse)):
        return None
    return _change(name, a.kind if a.kind == b.kind else f"{a.kind} → {b.kind}", ours, theirs, coarse, rank)


def _read(stored: Stored, name: str) -> Tensor:
    """Read a tensor by the name that `contents` gives it: `name[2]` is one matrix of several."""
    whole, expert = of_expert(name)
    try:
        with safe_open(stored.file, framework="pt") as file:
            found: Tensor = file.get_tensor(whole) if expert is None else file.get_slice(whole)[expert]
    except SafetensorError as error:
        raise ModelError(f"{stored.file}: {name} cannot be read ({error}); fetch the checkpoint anew") from error
    return found


def _eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if dtype.is_floating_point else 0.0


def _change(name: str, kind: str, ours: Tensor, theirs: Tensor, coarse: torch.dtype, rank: int | None) -> Change:
    delta = theirs.double() - ours.double()
    before = float(torch.linalg.vector_norm(ours.double()))
    norm = float(torch.linalg.vector_norm(delta))
    share = float((delta != 0).double().mean())
    change = (name, tuple(ours.shape), kind, norm, norm / before if before else float("inf"), share)
    if delta.ndim != 2 or not coarse.is_floating_point or not torch.isfinite(delta).all():
        return Change(*change)
    found = recover(delta, noise_floor(theirs, coarse), rank)
    exact = share >= INDEPENDENT and not found.more
    values = tuple(found.values.tolist())
    return Change(*change, found.rank, exact, found.more, found.floor, values, found.update)


def _files(base: Path, edited: Path) -> Iterator[str]:
    """Yield the files beside the weights that differ, by name; for JSON, with the entries that differ."""
    sides = [{path.name: path for path in folder.iterdir() if not _is_weight(path)} for folder in (base, edited)]
    ours, theirs = sides
    for name in sorted(ours.keys() | theirs.keys()):
        if name not in theirs:
            yield f"{name} is missing"
        elif name not in ours:
            yield f"{name} is new"
        elif (
            ours[name].is_file()
            and theirs[name].is_file()
            and (a := ours[name].read_bytes()) != (b := theirs[name].read_bytes())
        ):
            yield f"{name} differs{_entries(a, b)}"


def _is_weight(path: Path) -> bool:
    return ".safetensors" in path.suffixes


def _entries(a: bytes, b: bytes) -> str:
    """Name the top-level entries in which two JSON objects differ; an empty string if they are not JSON objects."""
    try:
        ours, theirs = json.loads(a), json.loads(b)
    except ValueError:
        return ""
    if not (isinstance(ours, dict) and isinstance(theirs, dict)):
        return ""
    names = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
    return f" in {', '.join(names)}" if names else " in its layout only"
