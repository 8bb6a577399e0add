"""Objects that other packages offer by entry points; one that cannot be loaded is named, and the rest works."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any, TypeVar

from ffedit.errors import FFEditError, brief

Found = TypeVar("Found")


def load_entry_points(group: str, check: Callable[[str, str, Any], Found]) -> tuple[dict[str, Found], dict[str, str]]:
    """Load all entry points of a group.

    Args:
        group: its name.
        check: given the entry point's name, its package and what was loaded, the object to keep; raises where that is
            not of the kind that was expected.

    Returns:
        the objects by the entry point's name, and by "name (package)" why the others could not be loaded.
    """
    found: dict[str, Found] = {}
    broken: dict[str, str] = {}
    for point in entry_points(group=group):
        package = point.dist.name if point.dist is not None else point.value
        try:
            if point.name in found:
                raise FFEditError(f"another package adds {point.name!r} already")
            found[point.name] = check(point.name, package, point.load())
        except Exception as error:  # whatever another package does wrong is said, in one line
            broken[f"{point.name} ({package})"] = brief(error)
    return found, broken
