"""Save key statistics in a user's folder: one safetensors file for each memory, with a description of its origin.

Statistics of another model, layer or precision would silently make an edit worse. Each file holds the fingerprint of
all that its keys depend on, and the names of model, layer and precision, so that an error about a mismatch can name
them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ffedit.algebra.key_moments import KeyMoments
from ffedit.editor.statistics import EDITED, mismatch, unlike
from ffedit.errors import EditError
from ffedit.files.atomic import written
from ffedit.model.editable import Editable
from ffedit.model.memory import Address


def save_stats(stats: Mapping[Address, KeyMoments], folder: str | Path, force: bool = False) -> Path:
    """Write `stats` as a folder, whole or not at all.

    Args:
        stats: by address, as `ffedit.stats` returns them.
        folder: the folder to create.
        force: replace an existing folder.

    Returns:
        The folder.

    Raises:
        EditError: it exists, or cannot be written.
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

    On an edited model, statistics of the unedited one are accepted too, if the originals of the edited matrices are
    available.

    Args:
        folder: that `save_stats` wrote.
        editable: the model.

    Raises:
        EditError: it is no such folder, a file is damaged, or all are of another model, layer or precision.
    """
    memories = {str(address): memory for address, memory in editable.memories.items()}
    read = _read(Path(folder))
    found = {memories[one.address].address: one for one in read.values() if one.address in memories}
    odd = {memory.address for memory in unlike(editable, [editable.memories[at] for at in found], found)}
    stats = {at: moments for at, moments in found.items() if at not in odd}
    if not stats:
        path, moments = next(reversed(read.items()))
        memory = memories.get(moments.address)
        what = f"{editable.name} has layers 0 to {len(editable.layers) - 1}"
        if memory is not None:
            what = mismatch(moments, memory, editable) or EDITED
        raise EditError(f"{path}: statistics of {moments.of}, but {what}; collect them anew with `ffedit stats`")
    return stats


def merge_stats(folders: Sequence[str | Path]) -> dict[Address, KeyMoments]:
    """Merge the statistics of several folders into those of all their texts; a layer may be missing in some folders.

    Raises:
        EditError: a folder holds none, they are of different models, or a text is in two of them.
    """
    merged: dict[str, KeyMoments] = {}
    for folder in folders:
        for path, moments in _read(Path(folder)).items():
            before = merged.get(moments.address)
            try:
                merged[moments.address] = moments if before is None else before + moments
            except EditError as error:
                raise EditError(f"{path}: {error}") from error
    return {_address(name): merged[name] for name in sorted(merged, key=_address)}


def _address(name: str) -> Address:
    return Address(*map(int, name.split(".")))


def _read(folder: Path) -> dict[Path, KeyMoments]:
    """Read all statistics in a folder, by file, in the order of the layers."""
    if not folder.is_dir():
        raise EditError(f"{folder}: no such folder; one that `ffedit stats --out` wrote was expected")
    found = {path: KeyMoments.load(path) for path in folder.glob("layer-*.safetensors")}
    if not found:
        raise EditError(f"{folder}: holds no key statistics; a folder that `ffedit stats --out` wrote was expected")
    return dict(sorted(found.items(), key=lambda item: _address(item[1].address)))
