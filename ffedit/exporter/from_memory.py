"""A checkpoint of a model whose weights are not on disk: given as model and tokenizer, or changed after loading.

The weights are written by `save_pretrained`, rounded to the precision of the checkpoint that they came from.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from textwrap import shorten

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from ffedit.algebra.linalg import double
from ffedit.editor import Edit, applied_edits
from ffedit.errors import EditError
from ffedit.exporter.rewrite_shards import file_name
from ffedit.files.tensor_ranges import FLOATS, Matrix, Stored, contents, sample_of
from ffedit.model.discover import saved
from ffedit.model.editable import Editable
from ffedit.model.memory import SAMPLE
from ffedit.model.storage import fetched_from, is_offloaded, parameters


def write_from_memory(editable: Editable, edit: Edit, folder: Path) -> tuple[tuple[Edit, ...], dict[str, Matrix]]:
    """Write the model with `edit` applied.

    Returns:
        The edits that were in its weights before, and the known originals of the matrices that these and `edit` change.

    Raises:
        EditError: some of its weights are offloaded.
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
    """Write the current weights, config and tokenizer of the model."""
    dtype = _saved_dtype(editable)
    # Tied weights must stay one tensor to be written once.
    cast: dict[int, Tensor] = {}
    weights = {
        name: cast.setdefault(weight.data_ptr(), weight.to(dtype)) if weight.is_floating_point() else weight
        for name, weight in editable.model.state_dict().items()
    }
    try:
        editable.model.save_pretrained(folder, state_dict=weights)
    except SafetensorError as error:
        raise OSError(shorten(str(error), 200)) from error
    # The dtype written may differ from the one computed in.
    config = folder / "config.json"
    content = json.loads(config.read_text(encoding="utf-8")) | {"dtype": _name(dtype)}
    config.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    editable.tokenizer.save_pretrained(folder)


def _saved_dtype(editable: Editable) -> torch.dtype:
    return next(iter(editable.memories.values())).saved_dtype


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@torch.no_grad()
def save_expected(editable: Editable, path: Path) -> None:
    """Save what a fresh process compares with: probe ids, the model's logits on them, and a hash of each weight."""
    ids = editable.probe_ids(min(32, editable.max_tokens)).to(editable.device)
    logits = editable.run(input_ids=ids, use_cache=False).logits
    dtype = _saved_dtype(editable)
    about = {
        "hashes": json.dumps({name: digest(weight, dtype) for name, weight in editable.model.state_dict().items()}),
        "dtype": _name(editable.model.dtype),
        "saved": _name(dtype),
        "device": str(editable.device),
    }
    save_file({"ids": ids.cpu(), "logits": logits.cpu().contiguous()}, path, metadata=about)


def digest(weight: Tensor, dtype: torch.dtype) -> str:
    """Hash a tensor's numbers (SHA-256), floats rounded to `dtype`."""
    plain = weight.detach().to(dtype) if weight.is_floating_point() else weight.detach()
    flat = plain.cpu().contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()


def is_on_disk(editable: Editable, folder: Path) -> bool:
    """Check whether a folder holds the model's weights, which may be computed with in another precision.

    A sample of every parameter is compared, in the model's precision. The result is False for a model that was edited
    in place or trained further, and for one whose edits are rounded to another precision than the folder's.
    """
    tensors = contents(folder)
    model = editable.model
    if not all(_is_stored(model, fetched_from(model, name), tensors, name) for name, _ in parameters(model)):
        return False
    memories = [layer.memories[0] for layer in editable.feed_forward]
    names = [file_name(tensors, memory.parameter, memory.saved_as) for memory in memories]
    return all(n is None or tensors[n].dtype == memory.saved_dtype for n, memory in zip(names, memories, strict=True))


def _is_stored(model: PreTrainedModel, weight: Tensor, tensors: dict[str, Stored], name: str) -> bool:
    known = file_name(tensors, name)
    if known is None:
        matrices: dict[str, Tensor] = {}
        for path, tensor in saved(model, name, weight).items():  # under the names of `contents`
            matrices |= (
                {f"{path}[{i}]": matrix for i, matrix in enumerate(tensor)} if tensor.ndim == 3 else {path: tensor}
            )
        return name not in matrices and all(_is_stored(model, matrix, tensors, own) for own, matrix in matrices.items())
    if tensors[known].shape != tuple(weight.shape) or tensors[known].kind not in FLOATS:
        return False
    return torch.equal(double(tensors[known].sample(SAMPLE).to(weight.dtype)), sample_of(weight, SAMPLE))
