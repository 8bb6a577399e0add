"""Checksums that show damage to a file: the file itself holds the CRC-32 of the rest of it.

safetensors and JSON notice a flipped bit only where it breaks their form; in a number it would be a wrong number in
silence. A checksum is for accidents (disks, copies, memory), not against somebody who would compute it anew. CRC-32
notices every error of up to 32 bits in a row and all but one in four billion others, at about a second per gigabyte.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zlib import crc32

NAME, BLANK = "crc32", "00000000"
UNSEALED = {NAME: BLANK}  # in the metadata of a safetensors file that `seal` is called on
MARK = re.compile(rb'"crc32":"([0-9a-f]{8})"')
CHUNK = 1 << 22  # bytes


def seal(path: Path) -> None:
    """Put the checksum into a new safetensors file whose metadata has `UNSEALED`."""
    at, _, checksum = _checksums(path)
    with path.open("r+b") as file:
        file.seek(at)
        file.write(checksum)


def check(path: Path) -> None:
    """Raise ValueError where a safetensors file is not as `seal` left it."""
    _, stored, checksum = _checksums(path)
    if stored != checksum:
        raise ValueError("it is not as it was written: its checksum differs")


def _checksums(path: Path) -> tuple[int, bytes, bytes]:
    """Return the position of the checksum in a safetensors file, the checksum there, and that of the content."""
    with path.open("rb") as file:
        size = file.read(8)
        length = int.from_bytes(size, "little")
        header = file.read(length) if length < path.stat().st_size else b""
        if (match := MARK.search(header)) is None:
            raise ValueError("it has no checksum")
        first, last = match.span(1)
        total = crc32(header[last:], crc32(size + header[:first] + BLANK.encode()))
        while chunk := file.read(CHUNK):
            total = crc32(chunk, total)
    return 8 + first, match[1], f"{total:08x}".encode()


def file_checksum(path: Path) -> str:
    """Return the checksum of any file, for another file to hold."""
    total = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            total = crc32(chunk, total)
    return f"{total:08x}"


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JSON object with the checksum of its other entries."""
    return {**content, NAME: _of_json(content)}


def unsealed(content: Any) -> dict[str, Any]:
    """Return what `sealed` was called on; ValueError where it was changed since, or has no checksum."""
    if not isinstance(content, dict) or NAME not in content:
        raise ValueError("it has no checksum")
    rest = {name: value for name, value in content.items() if name != NAME}
    if content[NAME] != _of_json(rest):
        raise ValueError("it is not as it was written: its checksum differs")
    return rest


def _of_json(content: Mapping[str, Any]) -> str:
    plain = json.loads(json.dumps(content))  # as it will be read back: JSON has no tuples, and only strings as keys
    return f"{crc32(json.dumps(plain, sort_keys=True).encode()):08x}"
