"""Tensors of a checkpoint as byte ranges of its files, read and written a block of rows at a time.

A safetensors file is eight bytes with the length of a header (little-endian), the header (JSON: for each tensor its
dtype, shape and byte range) and the numbers. So one tensor can be read, or rewritten in place, with seek, read and
write, and memory holds one block of rows however large the file is. Nothing is mapped: mapped pages count as resident.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ffedit.errors import ModelError, brief
from ffedit.files.seal import UNSEALED, seal
from ffedit.files.shards import INDEX, SINGLE, is_pointer, read_index, refuse_pickled

FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
NAMES = {dtype: name for name, dtype in FLOATS.items()}
KINDS = {**NAMES, torch.int32: "I32"}  # token ids
BLOCK = 1 << 18  # entries of a block; a few blocks are in memory at a time
CHUNK = 1 << 22  # bytes that are read at once
# A matrix to be written: dtype, shape, consecutive blocks of rows.
Matrix: TypeAlias = "tuple[torch.dtype, tuple[int, ...], Iterable[Tensor]]"


@dataclass(frozen=True)
class Stored:
    """Location of one tensor in a file."""

    file: Path
    start: int  # its first byte in the file
    size: int  # its bytes
    kind: str  # its dtype as safetensors calls it ("BF16")
    shape: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of a float tensor; ModelError where it is stored in another kind of number."""
        if self.kind not in FLOATS:
            raise ModelError(
                f"{self.file}: a value matrix is stored as {self.kind} (quantised?); "
                f"{', '.join(FLOATS)} was expected: edit the model in 16 or 32 bits and quantise the result"
            )
        return FLOATS[self.kind]

    def rows(self, first: int, last: int) -> Tensor:
        """Read rows `first` to `last` (excluded) of a matrix, [last - first, columns]."""
        width = self.shape[1] * self.dtype.itemsize
        with self.file.open("rb") as file:
            file.seek(self.start + first * width)
            numbers = self._read(file, (last - first) * width)
        return _tensor(numbers, self.dtype).reshape(last - first, self.shape[1])

    def blocks(self) -> Iterator[Tensor]:
        """Yield a matrix in blocks of rows."""
        for first, last in row_blocks(*self.shape):
            yield self.rows(first, last)

    def matrix(self) -> Matrix:
        """Return the tensor as `write` takes it."""
        return self.dtype, self.shape, self.blocks()

    def sample(self, count: int) -> Tensor:
        """Read up to `count` entries of the flattened tensor at stride max(1, entries // count), float64."""
        entries, numbers = prod(self.shape), bytearray()
        with self.file.open("rb", buffering=0) as file:  # a buffer would be filled at every seek
            for i in range(0, entries, max(1, entries // count))[:count]:
                file.seek(self.start + i * self.dtype.itemsize)
                numbers += self._read(file, self.dtype.itemsize)
        return _tensor(numbers, self.dtype).cpu().double()

    def chunks(self) -> Iterator[bytes]:
        """Yield its bytes, a few MiB at a time."""
        with self.file.open("rb") as file:
            file.seek(self.start)
            for start in range(0, self.size, CHUNK):
                yield bytes(self._read(file, min(CHUNK, self.size - start)))

    def _read(self, file: BinaryIO, size: int) -> bytearray:
        """Read exactly `size` bytes of a file, which end within the tensor."""
        content = bytearray(size)
        if file.readinto(content) < size:  # type: ignore[attr-defined]
            raise ModelError(f"{self.file}: ends too early; the file is damaged, fetch it anew")
        return content

    def same_bytes(self, other: Stored) -> bool:
        """Return True if two tensors are equal in kind, shape and every bit; two names of one range are not read."""
        if (self.kind, self.shape, self.size) != (other.kind, other.shape, other.size):
            return False
        if self.start == other.start and os.path.samefile(self.file, other.file):
            return True
        return all(a == b for a, b in zip(self.chunks(), other.chunks(), strict=True))


def _tensor(numbers: bytearray, dtype: torch.dtype) -> Tensor:
    """Return bytes as a tensor that shares them; torch takes no empty buffer."""
    return torch.frombuffer(numbers, dtype=dtype) if numbers else torch.empty(0, dtype=dtype)


def of_expert(parameter: str) -> tuple[str, int | None]:
    """Split `name[3]` into name and 3; return None as the number for a name of no expert."""
    name, _, expert = parameter.removesuffix("]").partition("[")
    return name, int(expert) if expert else None


def sample_of(tensor: Tensor, count: int) -> Tensor:
    """Return the entries of a tensor in memory that `Stored.sample` reads from a file."""
    flat = tensor.reshape(-1)
    return flat[:: max(1, len(flat) // count)][:count].cpu().double()


def row_blocks(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of rows that cover a matrix, at most `BLOCK` entries each."""
    step = max(1, BLOCK // max(1, columns))
    for first in range(0, rows, step):
        yield first, min(rows, first + step)


def read_header(path: Path) -> dict[str, Stored]:
    """List the tensors of a safetensors file; matrices of one with three dimensions are `name[0]`, `name[1]` and so on.

    Raises ModelError where there is no such file, or it is damaged.
    """
    try:
        if is_pointer(path):
            raise ValueError("a Git LFS pointer stands in its place")
        # safetensors checks the header against the file, but does not tell where the tensors are.
        with safe_open(path, framework="pt"), path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(f"{path}: no safetensors file that can be read ({brief(error)}); fetch it anew") from error
    header.pop("__metadata__", None)
    tensors: dict[str, Stored] = {}
    for name, entry in header.items():
        (first, last), shape = entry["data_offsets"], tuple(entry["shape"])
        start, size = 8 + length + first, last - first
        if len(shape) == 3 and all(shape):  # experts
            size //= shape[0]
            for i in range(shape[0]):
                tensors[f"{name}[{i}]"] = Stored(path, start + i * size, size, entry["dtype"], shape[1:])
        else:
            tensors[name] = Stored(path, start, size, entry["dtype"], shape)
    return tensors


def contents(folder: Path) -> dict[str, Stored]:
    """Return all tensors of a checkpoint folder, by name.

    Raises ModelError where there are none, a shard or a tensor of the index is missing, a tensor is in two shards, or
    the weights are pickled.
    """
    index = folder / INDEX
    if index.is_file():
        shards = read_index(index)
        tensors: dict[str, Stored] = {}
        for file in sorted(set(shards.values())):
            shard = read_header(folder / file)
            if twice := sorted(shard.keys() & tensors.keys()):
                first = tensors[twice[0]].file.name
                raise ModelError(f"{folder}: {twice[0]} is in both {first} and {file}; fetch the checkpoint anew")
            tensors |= shard
        if lost := sorted(name for name in shards if name not in tensors and f"{name}[0]" not in tensors):
            raise ModelError(f"{index}: names {lost[0]}, which no shard holds; fetch the checkpoint anew")
        return tensors
    if (folder / SINGLE).is_file():
        return read_header(folder / SINGLE)
    refuse_pickled(folder, str(folder))
    raise ModelError(f"{folder}: no {SINGLE} and no {INDEX} in it; a checkpoint in safetensors was expected")


def patch(stored: Stored, blocks: Iterable[Tensor]) -> None:
    """Overwrite a matrix in its file with consecutive blocks of rows in the same dtype."""
    with stored.file.open("r+b") as file:
        file.seek(stored.start)
        file.writelines(map(_bytes, blocks))


def write(path: Path, matrices: Mapping[str, Matrix], **metadata: str) -> None:
    """Write a new safetensors file, with a checksum; the same content, the same bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata, **UNSEALED}}
    end = 0
    # The widest numbers first, as safetensors does, so that all are aligned.
    ordered = sorted(matrices.items(), key=lambda item: -item[1][0].itemsize)
    for name, (dtype, shape, _) in ordered:
        first, end = end, end + prod(shape) * dtype.itemsize
        header[name] = {"dtype": KINDS[dtype], "shape": list(shape), "data_offsets": [first, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, (_, _, blocks) in ordered:
            file.writelines(map(_bytes, blocks))
    seal(path)


def _bytes(block: Tensor) -> Any:
    """Return the bytes of a tensor, on the CPU without a copy."""
    return block.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
