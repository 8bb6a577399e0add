"""The editing methods: one file each, and those that other packages add by entry points.

`METHODS` loads those of other packages when it is first asked. An entry point that cannot be loaded is left out and
named in `METHODS.broken`, so that the rest works.
"""

from __future__ import annotations

from dataclasses import replace

from ffedit.editor.config import EditConfig
from ffedit.editor.methods.alphaedit import ALPHAEDIT
from ffedit.editor.methods.emmet import EMMET
from ffedit.editor.methods.finetune import FT, FT_L
from ffedit.editor.methods.memit import MEMIT
from ffedit.editor.methods.method import Method
from ffedit.editor.methods.rome import ROME
from ffedit.errors import EditError, choices
from ffedit.files.entry_points import Registry

__all__ = ["METHODS", "Method", "check_method", "preset", "preset_names"]


def _added(point: str, package: str, loaded: object) -> Method:
    """Check what an entry point of another package holds."""
    if not isinstance(loaded, Method):
        raise EditError(f"{type(loaded).__name__} was found; an ffedit.editor.methods.Method was expected")
    return replace(loaded, package=package)


METHODS = Registry("ffedit.methods", (ROME, EMMET, MEMIT, ALPHAEDIT, FT, FT_L), _added)


def check_method(name: str) -> Method:
    """Return the method of this name.

    Raises:
        EditError: there is none.
    """
    if name not in METHODS:
        broken = "".join(f"; {point} could not be loaded: {why}" for point, why in METHODS.broken.items())
        raise EditError(f"method {name!r} is not known; there is {choices(name, METHODS)}{broken}")
    return METHODS[name]


def preset(name: str, method: str) -> EditConfig:
    """Return the numbers of a preset of a method (`Method.preset`).

    Raises:
        EditError: there is no such method, or no such preset of it.
    """
    return check_method(method).preset(name)


def preset_names() -> list[str]:
    """Return the names of all presets of all methods."""
    return list(dict.fromkeys(["default", *(name for method in METHODS.values() for name in method.presets)]))
