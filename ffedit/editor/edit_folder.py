"""Save an edit as a folder: `edit.safetensors` holds every number exactly, `manifest.json` describes them.

`edit_files` reads both without torch, and says what protects them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ffedit.algebra.low_rank import Dense, LowRank, Update
from ffedit.editor.edit_files import FORMAT, MANIFEST, TENSORS, Numbers, SavedEdit, checksum, digest
from ffedit.files.atomic import written
from ffedit.model.memory import Address

if TYPE_CHECKING:
    from ffedit.editor.edit import Edit


def save(edit: Edit, path: str | Path, force: bool = False) -> None:
    """Write the folder of an edit, whole or not at all.

    Raises:
        EditError: the folder exists (without `force`) or cannot be written.
    """
    manifest = {
        "format": FORMAT,
        "fingerprint": fingerprint(edit),
        "facts": [fact.to_dict() for fact in edit.facts],
        "provenance": dict(edit.provenance),
    }
    manifest["checksum"] = checksum(manifest)
    with written(Path(path), force) as folder:
        save_file({name: _own(tensor) for name, tensor in _tensors(edit)}, folder / TENSORS)
        text = json.dumps(manifest, indent=2, ensure_ascii=False) + "\n"
        (folder / MANIFEST).write_text(text, encoding="utf-8")


def load(kind: type[Edit], path: str | Path) -> Edit:
    """Read what `save` wrote.

    Raises:
        EditError: there is no edit, or it is damaged, changed by hand, or of another format.
    """
    saved = SavedEdit.read(Path(path))
    tensors = load_file(Path(path) / TENSORS)
    updates: dict[Address, Update] = {}
    keys, values = {}, {}
    for name in saved.addresses:
        layer, _, expert = name.partition(".")
        address = Address(int(layer), int(expert) if expert else None)
        if f"{name}/matrix" in tensors:
            updates[address] = Dense(tensors[f"{name}/matrix"])
        else:
            updates[address] = LowRank(tensors[f"{name}/left"], tensors[f"{name}/right"])
        keys[address], values[address] = tensors[f"{name}/keys"], tensors[f"{name}/values"]
    return kind(updates, keys, values, saved.facts, saved.provenance)


def fingerprint(edit: Edit) -> str:
    """Return the edit's identity: see `edit_files.digest`."""
    return digest(edit.facts, [(name, _numbers(tensor)) for name, tensor in _tensors(edit)])


def size(edit: Edit) -> int:
    """Return the size of an edit's numbers in bytes."""
    return sum(tensor.numel() * tensor.element_size() for _, tensor in _tensors(edit))


def _numbers(tensor: Tensor) -> Numbers:
    # As bytes, since numpy has no bfloat16.
    content = _own(tensor).flatten().view(torch.uint8).numpy().tobytes()
    return Numbers(str(tensor.dtype).removeprefix("torch."), list(tensor.shape), content)


def _factors(delta: Update) -> dict[str, Tensor]:
    return {"left": delta.left, "right": delta.right} if isinstance(delta, LowRank) else {"matrix": delta.matrix}


def _tensors(edit: Edit) -> Iterator[tuple[str, Tensor]]:
    for address, delta in edit.updates.items():
        solved = {"keys": edit.keys[address], "values": edit.values[address]}
        for name, tensor in {**_factors(delta), **solved}.items():
            yield f"{address}/{name}", tensor


def _own(tensor: Tensor) -> Tensor:
    # safetensors refuses tensors that share memory.
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
