"""Names of the methods, without an import of torch, which takes seconds: for lists of options, and for wrong names.

`ffedit.editor.methods.METHODS` has the methods themselves.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Literal, TypeAlias, get_args

from ffedit.errors import EditError, choices

GROUP = "ffedit.methods"
# The methods of ffedit; other packages add more, so that a method is a `MethodName | str`.
MethodName: TypeAlias = Literal["rome", "emmet", "memit", "alphaedit", "ft", "ft-l"]
OWN: tuple[MethodName, ...] = get_args(MethodName)


def method_names() -> list[str]:
    """Return the names of all methods, and of the entry points by which other packages add theirs."""
    return list(dict.fromkeys([*OWN, *(point.name for point in entry_points(group=GROUP))]))


def check_method_name(name: str) -> str:
    """Return the name; EditError if no method has it."""
    if name not in method_names():
        raise EditError(f"method {name!r} is not known; known are {choices(name, method_names())}")
    return name
