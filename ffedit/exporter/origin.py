"""The base of an export as a stranger finds it: its id on the hub and its license, and no path of this machine."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import metadata_load

from ffedit.editor.edit_files import EDITS
from ffedit.loading.names import PACKAGES

# Entries of a model card that hold for the edited model, too.
INHERITED = ("license", "license_name", "license_link", "language")
CACHED = re.compile(r"models--(.+)")  # a folder in the hub's cache
OWNED = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


@dataclass(frozen=True)
class Origin:
    """The base model as a card names it.

    Attributes:
        name: its id on the hub; where it is not known to have one, the name of its folder or file, without the path.
        on_hub: True for an id.
        about: its license and language, as its own card has them.
    """

    name: str
    on_hub: bool = False
    about: Mapping[str, Any] = field(default_factory=dict)


def origin_of(name: str, folder: Path | None, source: Mapping[str, Any] | None = None) -> Origin:
    """Describe a base.

    Args:
        name: what it was loaded by.
        folder: the folder that was loaded; None for a model that is in memory only.
        source: the GGUF file that it was converted from (`loading.gguf.source_of`).
    """
    card = {} if folder is None else _card(folder)
    about = {entry: card[entry] for entry in INHERITED if card.get(entry)}
    if source is not None and source.get("license"):
        about = {"license": source["license"], **about}
    if folder is not None and (folder / EDITS).is_dir() and isinstance(card.get("base_model"), str):
        name, folder = card["base_model"], None  # the base of all edits, which the new card lists
    if (known := _hub_id(name, folder)) is not None:
        return Origin(known, True, about)
    path = Path(name)
    return Origin((path.resolve() if path.exists() else path).name, False, about)


def _hub_id(name: str, folder: Path | None) -> str | None:
    """Return the base's id on the hub; None where it is not known to have one."""
    if name in PACKAGES:
        return PACKAGES[name].hub_id
    if cached := [match for step in (folder or Path()).parts if (match := CACHED.fullmatch(step))]:
        return cached[-1][1].replace("--", "/")
    return name if OWNED.fullmatch(name) and not Path(name).exists() else None


def _card(folder: Path) -> dict[str, Any]:
    """Return the entries of the model card in a folder; none where it has no card that can be read."""
    try:
        return metadata_load(folder / "README.md") or {}
    except (OSError, ValueError, yaml.YAMLError):
        return {}
