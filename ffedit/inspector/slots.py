"""Names of memories, and results that name them as values: frozen, printable, and plain JSON by `to_dict`.

`L.I` is the I-th key and value of layer L; `L.E.I` that of expert E where layer L has experts; all counted from 0.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Any

from ffedit.errors import EditError
from ffedit.model.memory import Address, KeyValueMemory, Memories


@dataclass(frozen=True, order=True)
class Slot:
    """One memory of a model.

    Attributes:
        address: the feed-forward layer, and the expert where it has experts.
        index: index among its d_ff keys and values.
    """

    address: Address
    index: int

    def __str__(self) -> str:
        return f"{self.address}.{self.index}"

    @classmethod
    def parse(cls, text: str) -> Slot:
        """Parse `L.I` or `L.E.I`; EditError where the text is neither."""
        if not re.fullmatch(r"\s*[0-9]{1,9}(\.[0-9]{1,9}){1,2}\s*", text):
            raise EditError(f"{text!r} is no memory; write L.I for memory I of layer L (3.17), or L.E.I for expert E")
        layer, *expert, index = map(int, text.split("."))
        return cls(Address(layer, *expert), index)


def find(memories: Memories, name: str | Slot) -> tuple[Slot, KeyValueMemory]:
    """Find a memory and the matrix that holds it; EditError where the name is malformed, or the model has no such."""
    slot = name if isinstance(name, Slot) else Slot.parse(name)
    at = slot.address
    if at not in memories:
        of_layer = [address for address in memories if address.layer == at.layer]
        if not of_layer:
            raise EditError(f"{slot}: the model has no layer {at.layer}; it has layers 0 to {max(memories).layer}")
        if of_layer == [Address(at.layer)]:
            raise EditError(f"{slot}: layer {at.layer} has no experts; write L.I, without an expert")
        last = max(of_layer).expert
        raise EditError(f"{slot}: layer {at.layer} has experts 0 to {last}; write L.E.I for memory I of expert E")
    memory = memories[at]
    if not 0 <= slot.index < memory.d_ff:
        raise EditError(f"{slot}: layer {at} has memories 0 to {memory.d_ff - 1}; {slot.index} is none of them")
    return slot, memory


@dataclass(frozen=True)
class View:
    """Base of all results of an inspection: its JSON is its fields by name."""

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
