"""The editing methods: one file each, and those that other packages add by entry points.

`METHODS` finds them when it is first asked. An entry point that cannot be loaded is left out and named in
`broken_methods`, so that the rest works.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from importlib.metadata import EntryPoint, entry_points

from ffedit.editor.config import EditConfig
from ffedit.editor.methods.alphaedit import ALPHAEDIT
from ffedit.editor.methods.emmet import EMMET
from ffedit.editor.methods.finetune import FT, FT_L
from ffedit.editor.methods.memit import MEMIT
from ffedit.editor.methods.method import Method
from ffedit.editor.methods.rome import ROME
from ffedit.errors import EditError, brief

__all__ = ["METHODS", "Method", "broken_methods", "check_method", "preset", "preset_names"]

GROUP = "ffedit.methods"
OWN = (ROME, EMMET, MEMIT, ALPHAEDIT, FT, FT_L)


@cache
def _found() -> tuple[dict[str, Method], dict[str, str]]:
    """Return all methods by name, and why each entry point that is no method is none."""
    methods, broken = {method.name: method for method in OWN}, {}
    for point in entry_points(group=GROUP):
        package = point.dist.name if point.dist is not None else point.value
        try:
            method = _loaded(point)
            if method.name in methods:
                raise EditError(f"there is a method {method.name!r} already, of {methods[method.name].package}")
            methods[method.name] = replace(method, package=package)
        except Exception as error:  # whatever another package does wrong
            broken[f"{point.name} ({package})"] = brief(error)
    return methods, broken


def _loaded(point: EntryPoint) -> Method:
    """Import the method of an entry point.

    Raises:
        EditError: what it names is no `Method`.
    """
    found = point.load()
    if not isinstance(found, Method):
        raise EditError(f"{point.value} is {type(found).__name__}; an ffedit.editor.methods.method.Method was expected")
    return found


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
