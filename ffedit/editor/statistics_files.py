"""Key statistics on disk: a folder with one file for each memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import huggingface_hub

from ffedit.algebra.key_moments import KeyMoments
from ffedit.editor.edit_files import ADDRESS
from ffedit.editor.statistics import differing, misfit
from ffedit.errors import EditError, brief
from ffedit.facts.fact import show
from ffedit.files.atomic import written
from ffedit.model.editable import Editable
from ffedit.model.memory import Address


def save_stats(stats: Mapping[Address, KeyMoments], folder: str | Path, *, force: bool = False) -> Path:
    """Write statistics as a folder, whole or not at all, and return its path.

    Raises:
        EditError: the folder exists and `force` is False, or it cannot be written.
    """
    with written(Path(folder), force) as made:
        for address, moments in stats.items():
            moments.save(made / file_name(address))
    return Path(folder)


def file_name(address: Address) -> str:
    """Return the file name of one memory."""
    return f"layer-{address}.safetensors"


def load_stats(folder: str | Path, editable: Editable) -> dict[Address, KeyMoments]:
    """Read what `save_stats` wrote for this model; layers collected with other weights are left out.

    On an edited model, statistics of the unedited one are accepted too, where the originals of its matrices are known.

    Args:
        folder: a folder, or the name of a repository of the hub that holds one ("user/name"), which is downloaded.
        editable: the model.

    Raises:
        EditError: there is no such folder, it cannot be downloaded, a file is damaged, or all are of another model,
            layer or precision.
    """
    by_path = read_folder(_downloaded(folder))
    fitting = {at: moments for at, moments in by_path.values() if at in editable.memories}
    differ = {memory.address for memory in differing(editable, [editable.memories[at] for at in fitting], fitting)}
    stats = {at: moments for at, moments in fitting.items() if at not in differ}
    if not stats:
        path, (at, moments) = next(reversed(by_path.items()))
        raise EditError(f"{path}: {misfit(moments, editable.memories.get(at), editable)}")
    return stats


def _downloaded(folder: str | Path) -> Path:
    """Return the folder of statistics: the one on this machine, or else that of a repository of the hub."""
    name = str(folder)
    if Path(folder).exists() or name.count("/") != 1 or name.startswith((".", "~", "/")):
        return Path(folder)
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns="layer-*.safetensors"))
    except (OSError, ValueError) as error:  # all errors of the hub are these
        raise EditError(f"{name}: no such folder, nor can it be downloaded from the hub ({brief(error)})") from error


def read_folder(folder: Path) -> dict[Path, tuple[Address, KeyMoments]]:
    """Read all statistics in a folder with the addresses of their memories, by file, in the order of the layers."""
    if not folder.is_dir():
        raise EditError(f"{folder}: no such folder; one that `ffedit stats --out` wrote was expected")
    by_path = {}
    for path in folder.glob("layer-*.safetensors"):
        moments = KeyMoments.load(path)
        if not ADDRESS.fullmatch(moments.address):
            raise EditError(f"{path}: statistics of {show(moments.address)}, which is not a layer; collect them anew")
        by_path[path] = Address(*map(int, moments.address.split("."))), moments
    if not by_path:
        raise EditError(f"{folder}: holds no key statistics; a folder that `ffedit stats --out` wrote was expected")
    return dict(sorted(by_path.items(), key=lambda item: (item[1][0].layer, item[1][0].expert or 0)))
