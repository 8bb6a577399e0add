"""An edit as plain Δ for use without ffedit: one file with the matrix to add to each parameter."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ffedit.algebra.linalg import double
from ffedit.algebra.low_rank import Update
from ffedit.editor import Edit
from ffedit.exporter.rewrite_shards import identity_in, rows_of
from ffedit.files.tensor_ranges import of_expert, row_blocks, write

WEIGHTS, MANIFEST = "delta.safetensors", "manifest.json"


def write_delta(folder: Path, base: str, edit: Edit) -> None:
    """Write `delta.safetensors` {parameter: Δ as it is stored, float32} and `manifest.json` into an empty folder.

    `base` is the name of the model that the edit, with `provenance["matrices"]`, was computed on.
    """
    matrices, parameters = {}, {}
    for address, update in edit.updates.items():
        about = identity_in(edit, address)
        name, transposed = about["parameter"], about["transposed"]
        shape = (update.shape[1], update.shape[0]) if transposed else update.shape
        matrices[name] = (torch.float32, shape, blocks(update, transposed))
        parameters[name] = {"layer": address.layer, "shape": list(shape), "norm": update.norm()}
    write(folder / WEIGHTS, matrices)
    manifest = {
        "base": base,
        "base_fingerprint": edit.base,
        "edit": edit.fingerprint(),
        "parameters": parameters,
        "facts": [fact.to_dict() for fact in edit.facts],
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@torch.no_grad()
def add_(model: Any, deltas: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype]) -> None:
    """Add deltas to a model as the code in the folder's card does; `dtypes` are the checkpoint's, by parameter."""
    for name, change in deltas.items():
        parameter, expert = of_expert(name)
        weight = model.get_parameter(parameter).data
        weight = weight if expert is None else weight[expert]
        weight.copy_((double(weight) + change).to(dtypes[name]))


def blocks(update: Update, transposed: bool) -> Iterator[Tensor]:
    """Yield Δ in its stored orientation, float32, a block of rows at a time."""
    rows, columns = reversed(update.shape) if transposed else update.shape
    for first, last in row_blocks(rows, columns):
        yield rows_of(update, first, last, transposed).float()
