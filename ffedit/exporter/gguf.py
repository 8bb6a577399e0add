"""An edit in the GGUF file that its base was loaded from: the same file, with the changed value matrices packed anew.

In a GGUF file layer l's value matrix is `blk.l.ffn_down.weight` [d_model, d_ff], whatever its orientation in
transformers; a sample of its numbers is compared with the edit's base. W + Δ is packed in the type that W had. With few
bits, Δ is often smaller than a step of the grid that W lies on, and rounds back to W: where more than `MOST_LOST` of
the change at the edit's keys is lost, or `gguf` cannot pack the type (K- and I-quants), the matrix is stored as Q8_0,
or else F16. Files of several types are ordinary in llama.cpp, and one matrix is a small part of a file.

The header stays as it is, except for the tensors' types and offsets and the entry `ffedit.edits`, which describes what
was written. All other tensors are copied byte for byte, a few MiB at a time.

An edit can also be a LoRA adapter that llama.cpp loads beside the base's file: α, and B and A of each matrix, to which
(α / rank) B A is added. α is the largest rank of all, so B of a smaller rank r is stored multiplied by r / α.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ffedit.algebra.linalg import double
from ffedit.algebra.low_rank import LowRank, Update
from ffedit.algebra.rounding import rounded
from ffedit.editor.edit import Edit
from ffedit.errors import EditError, brief
from ffedit.exporter.adapter import Factors, balanced
from ffedit.exporter.checkpoint import Moved, identity_in, is_like
from ffedit.facts.form import OBJECT, check_form
from ffedit.files.tensor_ranges import Stored, sample_of
from ffedit.loading.gguf import converted
from ffedit.loading.gguf_reader import entry, gguf, open_gguf
from ffedit.loading.load import cached_folder
from ffedit.loading.names import gguf_file
from ffedit.model.editable import Editable
from ffedit.model.fingerprint import fingerprint
from ffedit.model.memory import SAMPLE, Address

ENTRY = "ffedit.edits"
FALLBACKS = ("Q8_0", "F16")
MOST_LOST = 0.1


@dataclass(frozen=True, eq=False)
class Packed:
    """A changed value matrix as a GGUF file stores it."""

    name: str  # the tensor's name in the file
    was: str  # its GGML type in the base's file
    kind: str  # its GGML type now
    # Share of the change at the edit's keys that packing loses, ‖(W' − W − Δ) K‖ / ‖Δ K‖; of Δ itself, where the edit
    # has no keys.
    lost: float
    data: Any  # its bytes, as `gguf.quantize` returns them
    change: Tensor  # W' − W [d_model, d_ff], float64; W' is what the bytes unpack to

    @property
    def weight(self) -> Tensor:
        """W' [d_model, d_ff], float32."""
        return _unpacked(self.data, gguf.GGMLQuantizationType[self.kind])

    def to_dict(self) -> dict[str, Any]:
        """Return the name, the types and the loss as plain JSON."""
        return {"name": self.name, "was": self.was, "kind": self.kind, "lost": round(self.lost, 6)}


def source_file(name: str, editable: Editable | None) -> Path:
    """Return the GGUF file of a base by its name; EditError where there is none, or `editable` is not what it holds."""
    file = gguf_file(name)
    if file is None:
        raise EditError(
            f"{name}: was not loaded from a GGUF file, so it cannot be exported as one; give --model FILE.gguf"
        )
    if editable is not None and (
        converted(name, file, weights=False) != cached_folder(editable) or fingerprint(editable) != editable.as_read
    ):
        raise EditError(
            f"{name}: its weights in memory are not those of {file} (edited, or the file changed); load it anew"
        )
    return file


def pack(file: Path, edit: Edit) -> dict[Address, Packed]:
    """Pack the matrices of a GGUF file that an edit with `provenance["matrices"]` changes.

    Raises EditError where a matrix is an expert's, is not in the file as the edit knows it, or would not be finite.
    """
    tensors = {tensor.name: tensor for tensor in open_gguf(file).tensors}
    packed = {}
    for at, update in edit.updates.items():
        name = tensor_name(at)
        tensor = tensors.get(name) if at.expert is None else None
        weight = torch.empty(0, 0) if tensor is None else _unpacked(tensor.data, tensor.tensor_type)
        stored = weight.T if identity_in(edit, at)["transposed"] else weight
        if tensor is None or not is_like(sample_of(stored, SAMPLE), stored.dtype, edit, at):
            raise EditError(
                f"{file}: the value matrix of layer {at} is not its tensor {name} (an expert's?), and no other "
                "tensor of a GGUF file can be edited; export a checkpoint, and convert it"
            )
        packed[at] = _packed(name, tensor.tensor_type, weight, update, edit.keys[at])
    return packed


def tensor_name(at: Address) -> str:
    """Return the name of a layer's value matrix in a GGUF file."""
    return f"{gguf.TENSOR_NAMES[gguf.MODEL_TENSOR.FFN_DOWN].format(bid=at.layer)}.weight"


def _packed(name: str, was: Any, weight: Tensor, update: Update, keys: Tensor) -> Packed:
    """Pack W + Δ in the first of W's own type and the fallbacks that loses little, or in the one that loses least."""
    delta = double(update.dense)
    edited = rounded(double(weight) + delta, torch.float32)
    size = _at_keys(delta, keys)
    best: Packed | None = None
    for kind in dict.fromkeys((was, *(gguf.GGMLQuantizationType[name] for name in FALLBACKS))):
        try:
            data = gguf.quantize(edited.numpy(), kind)
        except (NotImplementedError, gguf.QuantError):  # a type that gguf only unpacks; rows that are no whole blocks
            continue
        change = double(_unpacked(data, kind)) - double(weight)
        lost = _at_keys(change - delta, keys) / size if size else 0.0
        if best is None or lost < best.lost:
            best = Packed(name, was.name, kind.name, lost, data, change)
        if best.lost <= MOST_LOST:
            break
    assert best is not None  # F16 is always packed
    return best


def _at_keys(change: Tensor, keys: Tensor) -> float:
    """Return ‖change K‖ (Frobenius) for the `keys` K [d_ff, n]; ‖change‖ where there are none."""
    return float((change @ double(keys) if keys.shape[1] else change).norm())


def _unpacked(data: Any, kind: Any) -> Tensor:
    """Unpack a matrix, [d_model, d_ff], float32."""
    return torch.from_numpy(gguf.dequantize(data, kind).copy())


def write_gguf(file: Path, target: Path, edit: Edit, packed: Mapping[Address, Packed]) -> Moved:
    """Write `target`: the file with the packed matrices in place of its own, and `edit` added to `ffedit.edits`."""
    reader = open_gguf(file)
    changed = {matrix.name: matrix for matrix in packed.values()}
    tensors = sorted(reader.tensors, key=lambda tensor: tensor.data_offset)
    offsets, end = {}, 0
    for tensor in tensors:
        offsets[tensor.name] = end
        size = changed[tensor.name].data.nbytes if tensor.name in changed else tensor.n_bytes
        end += size + -size % reader.alignment
    first = reader.tensors[0].field.offset
    infos = bytearray(reader.data[first : _end(reader.tensors[-1].field)])
    for tensor in reader.tensors:  # each ends in its type, 4 bytes, and its offset, 8 bytes
        kind = tensor.tensor_type
        if tensor.name in changed:
            kind = gguf.GGMLQuantizationType[changed[tensor.name].kind]
        struct.pack_into("<IQ", infos, _end(tensor.field) - first - 12, kind, offsets[tensor.name])
    note = {
        "edit": edit.fingerprint(),
        "method": edit.provenance.get("method"),
        "facts": [{"prompt": fact.text, "target": fact.new_object} for fact in edit.facts],
        "tensors": [matrix.to_dict() for matrix in packed.values()],
    }
    header = _entries(reader, first, [*edits_in(reader), note]) + infos
    with target.open("wb") as new:
        new.write(header + b"\0" * (-len(header) % reader.alignment))
        for tensor in tensors:
            if tensor.name in changed:
                new.write(changed[tensor.name].data.tobytes())
            else:
                for chunk in Stored(file, tensor.data_offset, tensor.n_bytes, "", ()).chunks():
                    new.write(chunk)
            new.write(b"\0" * (-new.tell() % reader.alignment))
    return Moved(copied=file.stat().st_size, rewritten=sum(matrix.data.nbytes for matrix in packed.values()))


def write_adapter(file: Path, target: Path, edit: Edit) -> None:
    """Write the LoRA adapter of an edit for the GGUF file that its base was loaded from, in float32.

    Raises EditError where an update is dense, or of a matrix that is not in the file.
    """
    reader, factors = open_gguf(file), dict[str, Factors]()
    shapes = {tensor.name: tensor.shape.tolist()[::-1] for tensor in reader.tensors}
    for at, update in edit.updates.items():
        if not isinstance(update, LowRank):
            raise EditError(
                f"the update of layer {at} is dense, and a low-rank adapter cannot contain it; export FILE.gguf"
            )
        if at.expert is not None or shapes.get(tensor_name(at)) != list(update.shape):
            raise EditError(f"{file}: the value matrix of layer {at} is not its tensor {tensor_name(at)}")
        factors[tensor_name(at)] = balanced(update)
    alpha = max(len(right) for _, right in factors.values())
    writer = gguf.GGUFWriter(target, entry(reader, gguf.Keys.General.ARCHITECTURE))
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, alpha)
    for name, (left, right) in factors.items():
        writer.add_tensor(f"{name}.lora_a", right.float().contiguous().numpy())
        writer.add_tensor(f"{name}.lora_b", (left * (len(right) / alpha)).float().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read_adapter(file: Path) -> dict[str, Factors]:
    """Return the factors whose product the LoRA adapter of a GGUF file adds to each tensor, as llama.cpp multiplies it.

    They are [d_model, r] and [r, d_ff], float64.
    """
    reader = open_gguf(file)
    sides = {tensor.name: double(torch.from_numpy(tensor.data.copy())) for tensor in reader.tensors}
    alpha = float(entry(reader, gguf.Keys.Adapter.LORA_ALPHA))
    names = [name.removesuffix(".lora_a") for name in sides if name.endswith(".lora_a")]
    pairs = {name: (sides[f"{name}.lora_b"], sides[f"{name}.lora_a"]) for name in names}
    return {name: ((alpha / len(right)) * left, right) for name, (left, right) in pairs.items()}


def _entries(reader: Any, end: int, edits: list[Any]) -> bytearray:
    """Return the header up to the tensors, with the entry `ffedit.edits` at its end."""
    head, field = bytearray(reader.data[:end]), reader.get_field(ENTRY)
    if field is not None:
        del head[field.offset : _end(field)]
    else:  # the number of entries stands behind magic, version and number of tensors
        struct.pack_into("<Q", head, 16, entry(reader, "GGUF.kv_count") + 1)
    key, value = ENTRY.encode(), json.dumps(edits, ensure_ascii=False).encode()
    kind = gguf.GGUFValueType.STRING
    return head + struct.pack("<Q", len(key)) + key + struct.pack("<IQ", kind, len(value)) + value


def _end(field: Any) -> int:
    return int(field.offset) + sum(int(piece.nbytes) for piece in field.parts)


def edits_in(reader: Any) -> list[dict[str, Any]]:
    """Return the edits that a file's header describes; EditError where they are not a list of JSON objects."""
    text = entry(reader, ENTRY, "[]")
    try:
        edits: list[dict[str, Any]] = json.loads(text)
        check_form(edits, [OBJECT], ENTRY)
    except (TypeError, ValueError, RecursionError) as error:
        raise EditError(f"GGUF file: its entry {ENTRY} is not ffedit's ({brief(error)}); fetch it anew") from error
    return edits
