"""A checkpoint with an edit: made from the files of its base, or from a model in memory.

A rewritten matrix is W rounded once after each update, W ← round(W + Δ), in the order in which the updates were made:
bit for bit the matrix that the model in memory has after the same edits. An export rewrites the base's own matrices; an
exact undo rewrites the originals with the remaining edits.

A shard in which nothing changes becomes a hard link, which takes no space and no time. A shard in which a matrix
changes is copied first and then overwritten at that matrix's bytes, a block of rows at a time: memory use does not grow
with the model.

A model whose weights are in no checkpoint (passed as model and tokenizer, changed after loading, or from a GGUF file)
is written by `save_pretrained`, rounded to the precision of the checkpoint that it came from.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from ffedit.algebra.linalg import double
from ffedit.algebra.low_rank import LowRank, Update
from ffedit.algebra.rounding import rounded
from ffedit.editor.edit import Edit, applied_edits
from ffedit.editor.edit_files import EDITS
from ffedit.errors import EditError
from ffedit.files.atomic import os_errors, refuse_link
from ffedit.files.shards import INDEX
from ffedit.files.tensor_ranges import FLOATS, Matrix, Stored, contents, patch, row_blocks, sample_of
from ffedit.loading.gguf import SOURCE
from ffedit.loading.load import cached_folder
from ffedit.loading.reading import quiet
from ffedit.model.discover import saved
from ffedit.model.editable import Editable
from ffedit.model.hooks import eval_mode
from ffedit.model.memory import SAMPLE, Address
from ffedit.model.storage import fetched_from, is_offloaded, parameters

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

    def gives(self, stored: Stored) -> bool:
        """Return True if the new matrix is the stored one, bit for bit."""
        if (self.source.kind, self.source.shape) != (stored.kind, stored.shape):
            return False
        return all(torch.equal(a, b) for a, b in zip(self.blocks(), stored.blocks(), strict=True))


Plan: TypeAlias = "dict[str, Rewrite]"  # by name in the files


def rows_of(update: Update, first: int, last: int, transposed: bool) -> Tensor:
    """Return rows of Δ in its stored orientation, float64; a factored Δ is multiplied out for these rows only."""
    if not isinstance(update, LowRank):
        return double((update.matrix.T if transposed else update.matrix)[first:last])
    left, right = (update.right.T, update.left.T) if transposed else (update.left, update.right)
    return double(left[first:last]) @ double(right)


def export_plan(tensors: Mapping[str, Stored], edit: Edit) -> Plan:
    """Plan the rewriting of the base's `tensors` that an edit with `provenance["matrices"]` changes.

    Raises EditError where a matrix is missing, or has another shape.
    """
    plan = {}
    for address, update in edit.updates.items():
        matrix = identity_in(edit, address)
        parameter, transposed = matrix["parameter"], bool(matrix["transposed"])
        shape = update.shape[::-1] if transposed else update.shape
        name = file_name(tensors, parameter, matrix.get("saved_as", "")) or _by_numbers(tensors, edit, address, shape)
        if name is None or tensors[name].shape != shape:
            mismatch = "the base does not have" if name is None else f"is {list(tensors[name].shape)} in the base"
            raise EditError(
                f"the edit changes {parameter} {list(shape)}, which {mismatch}; give the base on which it was computed"
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


def named_as_in(tensors: Mapping[str, Stored], edit: Edit) -> Edit:
    """Return an edit that records the names of its matrices in a base's files, where it was computed on others.

    The names locate matrices whose numbers are no longer those that the edit was computed on. Raises EditError as
    `export_plan` does.
    """
    matrices = dict(edit.provenance["matrices"])
    for name, change in export_plan(tensors, edit).items():
        matrix = identity_in(edit, change.address)
        if file_name(tensors, matrix["parameter"], matrix.get("saved_as", "")) is None:
            matrices[str(change.address)] = {**matrix, "saved_as": name}
    return edit.noted(matrices=matrices) if matrices != edit.provenance["matrices"] else edit


def _by_numbers(tensors: Mapping[str, Stored], edit: Edit, address: Address, shape: tuple[int, ...]) -> str | None:
    """Find the only tensor with the numbers that an edit was computed on, in files that name tensors in another way."""
    floats = {name: stored for name, stored in tensors.items() if stored.shape == shape and stored.kind in FLOATS}
    alike = [name for name, stored in floats.items() if is_like(stored.sample(SAMPLE), stored.dtype, edit, address)]
    return alike[0] if len(alike) == 1 else None


def identity_in(edit: Edit, address: Address) -> Mapping[str, Any]:
    """Return an edit's description (`memory.identity`) of a matrix that it changes."""
    matrix: Mapping[str, Any] | None = edit.provenance.get("matrices", {}).get(str(address))
    if matrix is None:
        raise EditError(f"the edit does not say which matrix of layer {address} it changes; make it anew")
    return matrix


def is_of_edited_base(edit: Edit, tensors: Mapping[str, Stored], originals: Mapping[str, Stored], base: str) -> bool:
    """Return True if an edit was computed on the base with its earlier edits, False if on the base before them.

    A sample of each matrix is compared, which must agree within the coarser rounding; `originals` are those that
    earlier edits changed, as they were before. Raises EditError where the edit was computed on neither.
    """
    plan = export_plan(tensors, edit)

    def computed_on(stored: Stored, change: Rewrite) -> bool:
        return is_like(stored.sample(SAMPLE), stored.dtype, edit, change.address)

    differing = [name for name, change in plan.items() if not computed_on(tensors[name], change)]
    for name in differing:
        if name not in originals or not computed_on(originals[name], plan[name]):
            raise EditError(
                f"{base}: {name} is not the matrix on which the edit was computed (another model, or edited already); "
                "give its base with --model"
            )
    return not differing


def is_like(sample: Tensor, dtype: torch.dtype, edit: Edit, address: Address) -> bool:
    """Check by its `sample_of` whether a matrix stored in `dtype` is, up to rounding, the one an edit was made on."""
    expected = torch.tensor(identity_in(edit, address)["sample"], dtype=torch.float64)
    computed = edit.computed_in or dtype
    computed = torch.float32 if computed == torch.float64 else computed  # samples are recorded in float32 at most
    if sample.shape != expected.shape or computed == dtype:
        return torch.equal(sample, expected)
    # Each number was rounded to one dtype or the other; the smallest ones to zero.
    infos = [torch.finfo(kind) for kind in (dtype, computed)]
    relative, absolute = max(info.eps for info in infos), max(info.smallest_normal * info.eps for info in infos)
    return bool(((sample - expected).abs() <= relative * sample.abs() + absolute).all())


# From files ---------------------------------------------------------------------------------------


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
                moved.linked += size
                continue
            except OSError:  # another file system, or one without links: copied
                pass
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
            for inner in path.rglob("*"):
                refuse_link(inner, base)
            shutil.copytree(path, folder / path.name)
        elif path.is_file() and path.suffix not in WEIGHTS and not other_index:
            refuse_link(path, base)
            shutil.copyfile(path, folder / path.name)
    return moved


# From memory --------------------------------------------------------------------------------------


def write_from_memory(editable: Editable, edit: Edit, folder: Path) -> tuple[tuple[Edit, ...], dict[str, Matrix]]:
    """Write the model with `edit` applied.

    Returns the edits that were in its weights before, and the known originals of the matrices that these and `edit`
    change. Raises EditError where some of its weights are offloaded.
    """
    if is_offloaded(editable.model):
        raise EditError(
            f"{editable.name}: some of its weights are offloaded, and they are not those of its folder (edited); undo "
            "what was applied, or load the model without offloading"
        )
    memories, history = editable.memories, editable.history
    originals = {at: memories[at].value.clone() for at in edit.updates} | history.originals
    # A matrix that holds a lasting edit is no original.
    lost = {at for other in history.lasting.values() for at in other.updates}
    with edit.applied(editable):
        _save(editable, folder)
    stored = contents(folder)
    matrices: dict[str, Matrix] = {}
    for at, value in originals.items():
        memory = memories[at]
        name = file_name(stored, memory.parameter, memory.saved_as)
        if name is not None and at not in lost:
            weight = (value.T if memory.stored_transposed else value).to(memory.saved_dtype).cpu()
            matrices[name] = (weight.dtype, tuple(weight.shape), [weight])
    return applied_edits(editable), matrices


def _save(editable: Editable, folder: Path) -> None:
    dtype = next(iter(editable.memories.values())).saved_dtype
    # Tied weights must stay one tensor to be written once.
    cast: dict[int, Tensor] = {}
    weights = {
        name: cast.setdefault(weight.data_ptr(), weight.to(dtype)) if weight.is_floating_point() else weight
        for name, weight in editable.model.state_dict().items()
    }
    with os_errors(), quiet():
        editable.model.save_pretrained(folder, state_dict=weights)
        editable.tokenizer.save_pretrained(folder)
        if (loaded_from := cached_folder(editable)) is not None and (loaded_from / SOURCE).is_file():
            shutil.copyfile(loaded_from / SOURCE, folder / SOURCE)
    # The dtype written may differ from the one computed in.
    config = folder / "config.json"
    content = json.loads(config.read_text(encoding="utf-8")) | {"dtype": str(dtype).removeprefix("torch.")}
    content.pop("quantization_config", None)  # it describes the files that the model was loaded from
    config.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


@torch.no_grad()
def save_expected(editable: Editable, path: Path) -> None:
    """Save what a fresh process compares with: probe ids, the model's logits on them, and hashes of its weights.

    Weights are hashed under their names in memory, and again as they are named and divided in files.
    """
    ids = editable.probe_ids(min(32, editable.max_tokens)).to(editable.device)
    with eval_mode(editable.model):  # as in the other process, which has no `Editable`
        logits = editable.model(input_ids=ids, use_cache=False).logits
    dtype, weights = next(iter(editable.memories.values())).saved_dtype, editable.model.state_dict()
    hashes = {name: digest(weight, dtype) for name, weight in weights.items()}
    in_files = {
        name: hashes[name] if tensor is weights.get(name) else digest(tensor, dtype)
        for name, tensor in _by_name_in_files(editable.model, weights).items()
    }
    metadata = {
        "hashes": json.dumps(hashes),
        "in_files": json.dumps(in_files),
        "dtype": str(editable.model.dtype).removeprefix("torch."),
        "saved": str(dtype).removeprefix("torch."),
        "device": str(editable.device),
    }
    save_file({"ids": ids.cpu(), "logits": logits.cpu().contiguous()}, path, metadata=metadata)


def _by_name_in_files(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors that `save_pretrained` makes of a model's weights, by their names in `contents`."""
    kept = {name: weight for name, weight in weights.items() if name not in (model._keys_to_ignore_on_save or ())}
    tensors: dict[str, Tensor] = {}
    for name, tensor in revert_weight_conversion(model, kept).items():
        experts = tensor.ndim == 3 and all(tensor.shape)
        tensors |= {f"{name}[{i}]": matrix for i, matrix in enumerate(tensor)} if experts else {name: tensor}
    return tensors


def digest(weight: Tensor, dtype: torch.dtype) -> str:
    """Hash a tensor's numbers (SHA-256), floats rounded to `dtype`."""
    plain = weight.detach().to(dtype) if weight.is_floating_point() else weight.detach()
    flat = plain.cpu().contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()


def is_on_disk(editable: Editable, folder: Path) -> bool:
    """Check whether a folder holds the model's weights, up to the precision that the model computes in.

    A sample of every parameter is compared, in the model's precision. The result is False for a model that was edited
    in place or trained further, and for one whose edits are rounded to another precision than the folder's.
    """
    tensors, model = contents(folder), editable.model
    if not all(_is_stored(model, fetched_from(model, name), tensors, name) for name, _ in parameters(model)):
        return False
    memories = [layer.memories[0] for layer in editable.feed_forward]
    names = [file_name(tensors, memory.parameter, memory.saved_as) for memory in memories]
    return all(n is None or tensors[n].dtype == memory.saved_dtype for n, memory in zip(names, memories, strict=True))


def _is_stored(model: PreTrainedModel, weight: Tensor, tensors: dict[str, Stored], name: str) -> bool:
    stored_as = file_name(tensors, name)
    if stored_as is None:
        matrices: dict[str, Tensor] = {}
        for path, tensor in saved(model, name, weight).items():  # under the names of `contents`
            experts = tensor.ndim == 3
            matrices |= {f"{path}[{i}]": matrix for i, matrix in enumerate(tensor)} if experts else {path: tensor}
        return name not in matrices and all(_is_stored(model, part, tensors, path) for path, part in matrices.items())
    if tensors[stored_as].shape != tuple(weight.shape) or tensors[stored_as].kind not in FLOATS:
        return False
    return torch.equal(double(tensors[stored_as].sample(SAMPLE).to(weight.dtype)), sample_of(weight, SAMPLE))
