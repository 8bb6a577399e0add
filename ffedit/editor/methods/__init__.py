"""The editing methods: one file each, and those that other packages add by entry points.

`METHODS` finds them when it is first asked. An entry point that cannot be loaded is left out and named in
`broken_methods`, so that the rest works.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache

from ffedit.editor.config import EditConfig
from ffedit.editor.methods.alphaedit import ALPHAEDIT
from ffedit.editor.methods.emmet import EMMET
from ffedit.editor.methods.finetune import FT, FT_L
from ffedit.editor.methods.memit import MEMIT
from ffedit.editor.methods.method import Method
from ffedit.editor.methods.rome import ROME
from ffedit.errors import EditError
from ffedit.files.entry_points import load_entry_points

__all__ = ["METHODS", "Method", "broken_methods", "check_method", "preset", "preset_names"]

GROUP = "ffedit.methods"
OWN = (ROME, EMMET, MEMIT, ALPHAEDIT, FT, FT_L)


@cache
def _found() -> tuple[dict[str, Method], dict[str, str]]:
    """Return all methods by name, and why each entry point that adds none adds none."""
    methods = {method.name: method for method in OWN}

    def check(point: str, package: str, found: object) -> Method:
        if not isinstance(found, Method):
            raise EditError(f"{type(found).__name__} was found; an ffedit.editor.methods.Method was expected")
        if found.name in methods:
            raise EditError(f"there is a method {found.name!r} already, of {methods[found.name].package}")
        methods[found.name] = replace(found, package=package)
        return methods[found.name]

    return methods, load_entry_points(GROUP, check)[1]


class _Methods(Mapping[str, Method]):
    """All methods by name, found when they are first asked for: a package that adds one imports ffedit itself."""

    def __getitem__(self, name: str) -> Method:
        return _found()[0][name]

    def __iter__(self) -> Iterator[str]:
        return iter(_found()[0])

    def __len__(self) -> int:
        return len(_found()[0])


METHODS: Mapping[str, Method] = _Methods()


def broken_methods() -> Mapping[str, str]:
    """Return, by entry point, why it added no method."""
    return _found()[1]


def check_method(name: str) -> Method:
    """Return the method of this name.

    Raises:
        EditError: there is none.
    """
    if name not in METHODS:
        broken = "".join(f"; {point} could not be loaded: {why}" for point, why in broken_methods().items())
        raise EditError(f"method {name!r} is not known; there is {', '.join(METHODS)}{broken}")
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
