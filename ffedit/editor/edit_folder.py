"""Save an edit as a folder: `edit.safetensors` holds every number exactly, `manifest.json` describes them.

Two hashes protect it. The *fingerprint* is the edit's identity: factors, keys, values and facts, but not the
provenance. The *checksum* covers the whole manifest, provenance included, so that any change by hand is detected. An
edit that was scored is the same edit, with the same fingerprint and, once saved, another checksum.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ffedit.algebra.low_rank import Dense, LowRank, Update
from ffedit.editor.edit_files import MANIFEST, TENSORS, check_edit
from ffedit.errors import EditError, FactError
from ffedit.facts.fact import Fact
from ffedit.files.atomic import written
from ffedit.model.memory import Address

if TYPE_CHECKING:
    from ffedit.editor.edit import Edit

FORMAT = 2


def save(edit: Edit, path: str | Path, force: bool = False) -> None:
    """Write the folder of an edit, whole or not at all.

    Raises:
        EditError: the folder exists (without `force`) or cannot be written.
    """
    manifest = {
        "format": FORMAT,
        "fingerprint": digest(edit),
        "facts": [fact.to_dict() for fact in edit.facts],
        "provenance": dict(edit.provenance),
    }
    manifest["checksum"] = _checksum(manifest)
    with written(Path(path), force) as folder:
        save_file({name: _own(tensor) for name, tensor in _tensors(edit)}, folder / TENSORS)
        text = json.dumps(manifest, indent=2, ensure_ascii=False) + "\n"
        (folder / MANIFEST).write_text(text, encoding="utf-8")


def load(kind: type[Edit], path: str | Path) -> Edit:
    """Read what `save` wrote.

    Raises:
        EditError: there is no edit, or it is damaged, changed by hand, or of another format.
    """
    folder = Path(path)
    check_edit(folder)
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            raise EditError(f"{folder}: an edit of format {manifest['format']}; this version reads {FORMAT}")
        with safe_open(folder / TENSORS, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        edit = _assembled(kind, tensors, manifest)
        if "base" not in edit.provenance:
            raise KeyError("base")
        same_numbers = manifest["fingerprint"] == digest(edit)
        same_manifest = manifest.pop("checksum") == _checksum(manifest)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, AttributeError, FactError) as error:
        raise EditError(f"{folder}: the edit is damaged or foreign ({error}); make it anew") from error
    if not same_numbers:
        raise EditError(f"{folder}: numbers or facts were changed after the edit was saved; make it anew")
    if not same_manifest:
        raise EditError(f"{folder}: {MANIFEST} was changed after the edit was saved; make the edit anew")
    return edit


def digest(edit: Edit) -> str:
    """Hash facts, changes as they are factored, keys and values to 16 hexadecimal digits."""
    hashed = hashlib.sha256(json.dumps([fact.to_dict() for fact in edit.facts]).encode())
    for name, tensor in sorted(_tensors(edit), key=lambda named: named[0]):
        hashed.update(f"{name}{list(tensor.shape)}{tensor.dtype}".encode())
        hashed.update(_bytes(tensor))
    return hashed.hexdigest()[:16]


def size(edit: Edit) -> int:
    """Return the size of an edit's numbers in bytes."""
    return sum(tensor.numel() * tensor.element_size() for _, tensor in _tensors(edit))


def _bytes(tensor: Tensor) -> bytes:
    # numpy has no bfloat16.
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _parts(delta: Update) -> dict[str, Tensor]:
    return {"left": delta.left, "right": delta.right} if isinstance(delta, LowRank) else {"matrix": delta.matrix}


def _tensors(edit: Edit) -> Iterable[tuple[str, Tensor]]:
    for address, delta in edit.updates.items():
        solved = {"keys": edit.keys[address], "values": edit.values[address]}
        for name, tensor in {**_parts(delta), **solved}.items():
            yield f"{address}/{name}", tensor


def _own(tensor: Tensor) -> Tensor:
    # safetensors refuses tensors that share memory.
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)


def _assembled(kind: type[Edit], tensors: Mapping[str, Tensor], manifest: Mapping[str, Any]) -> Edit:
    updates: dict[Address, Update] = {}
    keys, values = {}, {}
    for text in {name.split("/")[0] for name in tensors}:
        layer, _, expert = text.partition(".")
        address = Address(int(layer), int(expert) if expert else None)
        if f"{text}/matrix" in tensors:
            updates[address] = Dense(tensors[f"{text}/matrix"])
        else:
            updates[address] = LowRank(tensors[f"{text}/left"], tensors[f"{text}/right"])
        keys[address], values[address] = tensors[f"{text}/keys"], tensors[f"{text}/values"]
    facts = tuple(Fact.from_dict(fact) for fact in manifest["facts"])
    return kind(dict(sorted(updates.items())), keys, values, facts, manifest["provenance"])


def _checksum(manifest: Mapping[str, Any]) -> str:
    """Hash the manifest as it will be read back: JSON has no tuples, and only strings as keys."""
    plain = json.loads(json.dumps(manifest))
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]
