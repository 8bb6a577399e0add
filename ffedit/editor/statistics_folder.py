"""Key statistics as a folder of the user's: one safetensors file for each layer, which says what it is of.

Statistics of another model, layer or precision would make an edit quietly worse. Each file carries the fingerprint of
all that its keys depend on, and in words the model, the layer and the precision, so that what does not fit can be
refused by name.
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
    """Write `stats` as a folder, which appears whole or not at all.

    Args:
        stats: by address, as `ffedit.stats` gives them.
        folder: the folder to make.
        force: replace a folder that is there.

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
    """What the file of one memory is called."""
    return f"layer-{address}.safetensors"


def load_stats(folder: str | Path, editable: Editable) -> dict[Address, KeyMoments]:
    """What `save_stats` wrote, for the model that it was collected from; layers that are of other weights are left out.

    On an edited model those of the unedited one serve, too, where the originals of what its edits changed are there.

    Args:
        folder: where it lies.
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
    """The statistics in several folders as those of all their texts; a layer may be in some of them only.

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
    """By file, what a folder holds, in the order of the layers."""
    if not folder.is_dir():
        raise EditError(f"{folder}: no such folder; one that `ffedit stats --out` wrote was expected")
    found = {path: KeyMoments.load(path) for path in folder.glob("layer-*.safetensors")}
    if not found:
        raise EditError(f"{folder}: holds no key statistics; a folder that `ffedit stats --out` wrote was expected")
    return dict(sorted(found.items(), key=lambda item: _address(item[1].address)))
