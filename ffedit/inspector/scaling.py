"""Scale memories: factor 0 suppresses a memory, 3 amplifies it (Geva et al. 2022, arXiv 2203.14680)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from numbers import Real

import torch
from torch import Tensor

from ffedit.errors import EditError
from ffedit.inference import replay
from ffedit.inference.generation import log_softmax
from ffedit.inspector.views import MemoryIndex
from ffedit.model.editable import Editable
from ffedit.model.memory import Address, Memories


def parse_scalings(words: Sequence[str]) -> dict[MemoryIndex, float]:
    """Parse scalings, each `L.I=FACTOR`; EditError where one is malformed, or two name the same memory."""
    scalings: dict[MemoryIndex, float] = {}
    for word in words:
        name, _, factor = word.partition("=")
        try:
            number = float(factor)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            how = "write L.I=FACTOR: 3.17=0 suppresses memory 3.17, 3.17=3 amplifies"
            raise EditError(f"{word!r} scales no memory; {how}")
        if (slot := MemoryIndex.parse(name)) in scalings:
            raise EditError(f"memory {slot} is scaled twice; give one factor")
        scalings[slot] = number
    return scalings


def check_scalings(
    memories: Memories, scalings: Mapping[MemoryIndex, float] | Mapping[str, float]
) -> dict[MemoryIndex, float]:
    """Return factors by slot; EditError for an unknown memory, one scaled twice, or a factor that is not finite."""
    EditError.require(scalings, Mapping, "factors by memory were expected, such as {'3.17': 0}")
    by_slot = {}
    for name, factor in scalings.items():
        EditError.require(factor, Real, f"a factor of memory {name} was expected")
        slot, number = MemoryIndex.find(memories, name), float(factor)
        if not abs(number) <= torch.finfo(torch.float32).max:
            raise EditError(f"memory {slot} cannot be scaled by {number}; a finite factor of 32 bits was expected")
        if slot in by_slot:
            raise EditError(f"memory {slot} is scaled twice; give one factor")
        by_slot[slot] = number
    return by_slot


@contextmanager
def scaled_memories(memories: Memories, scalings: Mapping[MemoryIndex, float]) -> Iterator[None]:
    """Multiply the coefficient of every memory in `scalings` by its factor in every forward pass inside the block."""
    by_layer: dict[Address, dict[int, float]] = {}
    for slot, factor in scalings.items():
        by_layer.setdefault(slot.address, {})[slot.index] = factor
    with ExitStack() as stack:
        for address, factors in by_layer.items():
            stack.enter_context(memories[address].scaled(factors))
        yield


@torch.no_grad()
def next_log_probs(editable: Editable, ids: Tensor) -> Tensor:
    """Return log p [vocabulary] of the token after `ids` [1, n], on the CPU."""
    last = torch.tensor([[0, ids.shape[1] - 1]])
    return log_softmax(replay.forward(editable, ids, last))[0].cpu()
