"""Files that hold a model's weights, listed without torch: one file, shards with an index, or parts in GGUF."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from ffedit.errors import ModelError, brief

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
GGUF_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
POINTER = b"version https://git-lfs."  # beginning of the file that Git keeps in place of a large one


def refuse_pickled(folder: Path, name: str) -> None:
    """Raise ModelError where a folder holds pickled weights; `name` is the model's name in the message."""
    if pickled := sorted(path.name for path in folder.glob("pytorch_model*.bin")):
        raise ModelError(
            f"{name}: its weights are pickled ({pickled[0]}), and ffedit reads no pickle; save them as safetensors, "
            f"and its tokenizer beside them: AutoModelForCausalLM.from_pretrained({str(folder)!r}).save_pretrained(DIR)"
        )


def is_pointer(file: Path) -> bool:
    """Return True if a file is a Git LFS pointer: a few lines of text in place of its content."""
    try:
        with file.open("rb") as opened:
            return opened.read(len(POINTER)) == POINTER
    except OSError:  # raised again by whoever reads the content
        return False


def read_index(index: Path) -> dict[str, str]:
    """Return the file that each tensor is in, by the tensor's name.

    Raises ModelError where the index cannot be read, names a tensor twice or a file outside the folder, or where a
    shard is missing.
    """
    try:
        shards: dict[str, str] = json.loads(index.read_text(encoding="utf-8"), object_pairs_hook=_once)["weight_map"]
        files = sorted(set(shards.values()))
        if any(Path(file).is_absolute() or ".." in Path(file).parts for file in files):
            raise ValueError("it names a file outside the folder")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{index}: cannot be read ({brief(error)}); fetch the checkpoint anew") from error
    if missing := [file for file in files if not (index.parent / file).is_file()]:
        raise ModelError(
            f"{index.parent}: {missing[0]} is missing, one of {len(files)} files that {index.name} names; fetch it, too"
        )
    return shards


def _once(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    """Return a JSON object; ValueError where a name stands in it twice."""
    for name, count in Counter(name for name, _ in pairs).most_common(1):
        if count > 1:
            raise ValueError(f"it names {name} twice")
    return dict(pairs)


def gguf_parts(file: Path) -> list[Path]:
    """Return the files of a model in GGUF, in order: all parts, of which `file` is one, or `file` alone.

    Raises ModelError where a part is missing.
    """
    name = GGUF_PART.fullmatch(file.name)
    if name is None or not 0 < int(name["number"]) <= int(name["count"]):
        return [file]
    count = int(name["count"])
    parts = [file.with_name(f"{name['stem']}-{i:05}-of-{count:05}{file.suffix}") for i in range(1, count + 1)]
    if missing := [part.name for part in parts if not part.is_file()]:
        raise ModelError(f"{file}: one of {count} parts, of which {missing[0]} is missing; fetch it, too")
    return parts
