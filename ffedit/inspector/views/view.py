"""The results of an inspection as values: frozen, printable, and plain JSON by `to_dict`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from ffedit.inspector.views.slots import Slot
from ffedit.model.memory import Address


@dataclass(frozen=True)
class View:
    """Base of all views: its JSON is its fields by name."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON."""
        return {field.name: _plain(getattr(self, field.name)) for field in fields(self)}


def _plain(value: Any) -> Any:
    """Convert `value` to plain JSON: views as objects, tuples as lists, memories and layers by their names."""
    if isinstance(value, View):
        return value.to_dict()
    if isinstance(value, dict):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, Slot | Address) else value
