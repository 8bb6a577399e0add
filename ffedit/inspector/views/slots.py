"""Names of memories: `L.I`, the I-th key and value of layer L; `L.E.I` where layer L has experts.

Layers, experts and memories are counted from 0. A *scaling* names a memory and a factor for its coefficient: `L.I=0`
suppresses it, `L.I=3` amplifies it (Geva et al. 2022, arXiv 2203.14680).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

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
        """Parse `L.I` or `L.E.I`.

        Raises:
            EditError: the text is neither.
        """
        if not re.fullmatch(r"\s*[0-9]{1,9}(\.[0-9]{1,9}){1,2}\s*", text):
            raise EditError(f"{text!r} is no memory; write L.I for memory I of layer L (3.17), or L.E.I for expert E")
        layer, *expert, index = map(int, text.split("."))
        return cls(Address(layer, *expert), index)


def find(memories: Memories, name: str | Slot) -> tuple[Slot, KeyValueMemory]:
    """Find the memory that is called `name`, and the layer that holds it.

    Raises:
        EditError: the name is malformed, or the model has no such layer, expert or memory.
    """
    slot = name if isinstance(name, Slot) else Slot.parse(name)
    at = slot.address
    if at not in memories:
        of_layer = [found for found in memories if found.layer == at.layer]
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


def parse_scalings(words: Sequence[str]) -> dict[Slot, float]:
    """Parse several scalings, each `L.I=FACTOR`.

    Raises:
        EditError: one is malformed, or two name the same memory.
    """
    turns: dict[Slot, float] = {}
    for word in words:
        name, equals, factor = word.partition("=")
        try:
            number = float(factor) if equals else math.nan
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise EditError(
                f"{word!r} turns no memory; write L.I=FACTOR: 3.17=0 suppresses memory 3.17, 3.17=3 amplifies"
            )
        if (slot := Slot.parse(name)) in turns:
            raise EditError(f"memory {slot} is turned twice; give one factor")
        turns[slot] = number
    return turns


def check_scalings(memories: Memories, turns: Mapping[Slot, float] | Mapping[str, float]) -> dict[Slot, float]:
    """Check factors by memory and return them by slot.

    Raises:
        EditError: the model has no such memory, or a factor is no finite number of 32 bits.
    """
    found = {find(memories, name)[0]: float(factor) for name, factor in turns.items()}
    for slot, factor in found.items():
        if not abs(factor) <= torch.finfo(torch.float32).max:
            raise EditError(f"memory {slot} cannot be turned by {factor}; a finite factor of 32 bits was expected")
    return found


@contextmanager
def turned(memories: Memories, turns: Mapping[Slot, float]) -> Iterator[None]:
    """Multiply every coefficient of `turns` by its factor in every forward pass inside a `with` block."""
    by_layer: dict[Address, dict[int, float]] = {}
    for slot, factor in turns.items():
        by_layer.setdefault(slot.address, {})[slot.index] = factor
    with ExitStack() as stack:
        for address, factors in by_layer.items():
            stack.enter_context(memories[address].scaled(factors))
        yield
