"""A checkpoint folder made from another one: unchanged shards are linked or copied, changed matrices are patched.

A shard in which nothing changes becomes a hard link, which takes no space and no time. A shard in which a matrix
changes is copied first and then overwritten at that matrix's bytes. So memory use is the same for seven billion
parameters as for seventy billion.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ffedit.exporter.embedded_edits import EDITS
from ffedit.exporter.shard_plan import Plan
from ffedit.files.tensor_ranges import INDEX, Stored, patch

# Weights in other formats are not copied: they would be the base's unedited ones.
WEIGHTS = {
    ".bin",
    ".safetensors",
    ".pt",
    ".pth",
    ".ckpt",
    ".h5",
    ".msgpack",
    ".onnx",
    ".gguf",
    ".pkl",
    ".npz",
    ".tflite",
}
FOLDERS = ("additional_chat_templates",)


@dataclass
class Moved:
    """The bytes linked, copied and rewritten to fill a folder.

    Attributes:
        linked: bytes of shards that are hard links.
        copied: bytes of shards that were copied.
        rewritten: bytes of matrices that were rewritten.
    """

    linked: int = 0
    copied: int = 0
    rewritten: int = 0


def stream(base: Path, tensors: Mapping[str, Stored], plan: Plan, folder: Path) -> Moved:
    """Fill `folder` with the checkpoint in `base`, its tensors as in `plan`.

    Args:
        base: folder of the old checkpoint.
        tensors: the tensors in it.
        plan: the matrices that change.
        folder: an empty folder.
    """
    moved = Moved()
    for shard in sorted({stored.file for stored in tensors.values()}):
        target = folder / shard.relative_to(base)
        target.parent.mkdir(parents=True, exist_ok=True)
        changed = [name for name in plan if tensors[name].file == shard]
        size = shard.stat().st_size
        if not changed and _linked(shard, target):
            moved.linked += size
            continue
        shutil.copyfile(shard, target)
        moved.copied += size
        for name in changed:
            patch(replace(tensors[name], file=target), plan[name].blocks())
            moved.rewritten += tensors[name].size
    _copy_rest(base, folder)
    return moved


def _linked(shard: Path, target: Path) -> bool:
    """Make `target` a hard link to a file; return False if that fails (another file system, or one without links).

    The hub's cache holds symbolic links, which would dangle elsewhere: their target is linked.
    """
    try:
        os.link(shard.resolve(), target)
    except OSError:
        return False
    return True


def _copy_rest(base: Path, folder: Path) -> None:
    """Copy config, tokenizer and everything else but weights; the model card and the edits are written anew."""
    for path in sorted(base.iterdir()):
        if path.name.startswith(".") or path.name in ("README.md", EDITS):
            continue
        if path.is_dir() and path.name in FOLDERS:
            shutil.copytree(path, folder / path.name)
        elif (
            path.is_file()
            and path.suffix not in WEIGHTS
            and (path.name == INDEX or not path.name.endswith(".index.json"))
        ):
            shutil.copyfile(path, folder / path.name)
