"""Strict reader of the header of a GGUF file: the model it holds, its number types, and whether it is complete.

A GGUF file (version 2 or 3, little-endian) is the magic "GGUF", version, number of tensors and of entries; the entries
(name, type, value); of each tensor name, shape, type and offset; and, aligned, the numbers. It has no checksum, so
every length is checked against the file's size before it is used: a file that was cut off, or damaged in its
header, is refused with an error instead of being read without end.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Any

from ffedit.errors import ModelError

MAGIC, VERSIONS = b"GGUF", (2, 3)
ENCODINGS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
MOST_DIMENSIONS = 4


@dataclass(frozen=True)
class Header:
    """Entries and tensors of a GGUF file.

    Attributes:
        entries: by name; of an array, its length.
        elements: number of elements of each tensor, by name.
        kinds: GGML type of each tensor, by name.
    """

    entries: Mapping[str, Any]
    elements: Mapping[str, int]
    kinds: Mapping[str, int]

    @property
    def architecture(self) -> str:
        """Architecture of the model, as llama.cpp calls it."""
        return str(self.entries.get("general.architecture", "unknown"))

    @property
    def is_encoder(self) -> bool:
        """True if it reads in both directions: BERT's kind, and the encoder half of T5."""
        causal = self.entries.get(f"{self.architecture}.attention.causal", True)
        return causal is False or "bert" in self.architecture or self.architecture == "t5encoder"

    def by_weight(self) -> list[int]:
        """Return the GGML types, that of most numbers first."""
        counts: Counter[int] = Counter()
        for name, kind in self.kinds.items():
            counts[kind] += self.elements[name]
        return [kind for kind, _ in counts.most_common()]


def read_header(path: Path, sizes: Mapping[int, tuple[int, int]]) -> Header:
    """Read the header of a GGUF file and check that the file holds all that it announces.

    Args:
        path: the file.
        sizes: by GGML type, the number of elements of a block, and its bytes.

    Raises:
        ModelError: it is no GGUF file, of a version or with a type that is not known, damaged or cut off.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        return _Reader(path, file).header(sizes)


class _Reader:
    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self.path, self.file, self.size = path, file, path.stat().st_size

    def header(self, sizes: Mapping[int, tuple[int, int]]) -> Header:
        if (magic := self.file.read(4)) != MAGIC:
            raise ModelError(f"{self.path}: no GGUF file (it begins with {magic!r}; {MAGIC!r} was expected)")
        version, tensors, entries = self.take("IQQ")
        if version not in VERSIONS:
            known = " or ".join(map(str, VERSIONS))
            raise ModelError(f"{self.path}: GGUF version {version} is not known; version {known} was expected")
        values = dict(self.entry() for _ in range(entries))
        shapes = [self.tensor() for _ in range(tensors)]
        if not shapes:
            raise ModelError(
                f"{self.path}: holds no weights (a vocabulary alone?); a GGUF file of a model was expected"
            )
        end = 0
        for name, shape, kind, offset in shapes:
            if kind not in sizes:
                raise ModelError(f"{self.path}: {name} is of GGML type {kind}, which is not known; update gguf")
            per_block, size = sizes[kind]
            end = max(end, offset + prod(shape) // per_block * size)
        alignment = values.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise self.damaged()
        needed = -(-self.file.tell() // alignment) * alignment + end
        if needed > self.size:
            raise ModelError(
                f"{self.path}: cut off: {needed:,} bytes were expected, found {self.size:,}; fetch it anew"
            )
        return Header(values, {n: prod(s) for n, s, _, _ in shapes}, {n: kind for n, _, kind, _ in shapes})

    def entry(self) -> tuple[str, Any]:
        name = self.string()
        (kind,) = self.take("I")
        return name, self.value(kind)

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            return self.take(self.encoding(kind))[0]
        kind, count = self.take("IQ")
        if kind == STRING:
            for _ in range(count):
                self.skip(*self.take("Q"))
        else:
            self.skip(count * struct.calcsize(self.encoding(kind)))
        return count

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.string()
        (dimensions,) = self.take("I")
        if dimensions > MOST_DIMENSIONS:
            raise self.damaged()
        return name, self.take(f"{dimensions}Q"), *self.take("IQ")

    def encoding(self, kind: int) -> str:
        if kind not in ENCODINGS:
            raise self.damaged()
        return ENCODINGS[kind]

    def string(self) -> str:
        (length,) = self.take("Q")
        return self.bytes(length).decode("utf-8", "replace")

    def take(self, form: str) -> tuple[Any, ...]:
        return struct.unpack("<" + form, self.bytes(struct.calcsize("<" + form)))

    def bytes(self, count: int) -> bytes:
        if count > self.size or len(found := self.file.read(count)) < count:
            raise self.damaged()
        return found

    def skip(self, count: int) -> None:
        if self.file.tell() + count > self.size:
            raise self.damaged()
        self.file.seek(count, 1)

    def damaged(self) -> ModelError:
        return ModelError(f"{self.path}: damaged, or cut off in its header ({self.size:,} bytes); fetch it anew")
