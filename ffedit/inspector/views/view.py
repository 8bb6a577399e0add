"""What an inspection found, as a value: frozen, printable, and plain JSON by `to_dict`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from ffedit.inspector.views.slots import Slot
from ffedit.model.memory import Address


@dataclass(frozen=True)
class View:
    """The base of all views: its fields by name are its JSON."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return {field.name: _plain(getattr(self, field.name)) for field in fields(self)}


def _plain(value: Any) -> Any:
    """`value` with views as objects, tuples as lists, memories and layers by their names."""
    if isinstance(value, View):
        return value.to_dict()
    if isinstance(value, dict):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, Slot | Address) else value
