"""A layer's memories as one linear associative memory: the outputs of their value matrices are added.

    FF(x) = W_1 k_1 + … + W_p k_p + b = W k        W = [W_1 … W_p],  k = [k_1; …; k_p]

A dense layer has one memory, a mixture one for each expert, whose key carries the router's weight. So an edit of any
layer is one problem: find Δ = [Δ_1 … Δ_p] with (W + Δ) k* = v*.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ffedit.algebra.linalg import double
from ffedit.model import storage
from ffedit.model.experts import Mixture, Routed
from ffedit.model.hooks import only_at, replace_input
from ffedit.model.memory import Address, KeyValueMemory


class Keys(NamedTuple):
    """Keys that one memory received in a pass."""

    rows: Tensor | None  # numbers of the tokens that reached it, [t], counted through the batch; None: all
    keys: Tensor  # the keys of these tokens, [t, d_ff]; those of other tokens are 0
    tokens: int  # number of tokens in the pass

    @property
    def whole(self) -> Tensor:
        """Keys of all tokens, [tokens, d_ff]."""
        if self.rows is None:
            return self.keys
        keys = self.keys.new_zeros(self.tokens, self.keys.shape[1])
        keys[self.rows] = self.keys
        return keys


@dataclass(frozen=True, eq=False)
class FeedForward:
    """Memories of one layer, or some of them."""

    layer: int  # number of the layer
    # its output is what the layer adds to the residual stream: the value matrix, or the block of a mixture
    module: nn.Module
    memories: tuple[KeyValueMemory, ...]  # in the order of their addresses
    mixture: Mixture | None = None  # router and experts, where the layer has them

    @property
    def sizes(self) -> list[int]:
        """Number of columns of W, d_ff, that each memory has."""
        return [memory.d_ff for memory in self.memories]

    @property
    def shape(self) -> tuple[int, int]:
        """(d_model, Σ d_ff)."""
        return self.memories[0].shape[0], self.d_ff

    @property
    def d_ff(self) -> int:
        """Number of memories: Σ d_ff."""
        return sum(self.sizes)

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the weights."""
        return self.memories[0].dtype

    @property
    def value(self) -> Tensor:
        """W = [W_1 … W_p], [d_model, Σ d_ff]; read-only."""
        values = [memory.value for memory in self.memories]
        return values[0] if len(values) == 1 else torch.cat(values, 1)

    @cached_property
    def solve_device(self) -> torch.device:
        """Device on which the layer's equations are solved: the second moment may not fit beside a model on its GPU."""
        d_model, _ = self.shape
        matrices = sum(4 * size**2 + 3 * d_model * size for size in self.sizes)
        return storage.solve_device(storage.device_of(self.memories[0].module), matrices)

    @property
    def matrix(self) -> Tensor:
        """W in float64 on `solve_device`, [d_model, Σ d_ff]."""
        return double(self.value.to(self.solve_device))

    def only(self, addresses: Iterable[Address]) -> FeedForward:
        """Return the layer restricted to the memories at `addresses`."""
        kept = set(addresses)
        return replace(self, memories=tuple(memory for memory in self.memories if memory.address in kept))

    def split(self, joined: Tensor, dim: int) -> dict[Address, Tensor]:
        """Split a tensor by memory along dimension `dim`, which has Σ d_ff entries."""
        pieces = joined.split(self.sizes, dim)
        return {memory.address: piece for memory, piece in zip(self.memories, pieces, strict=True)}

    def joined(self, keys: Mapping[Address, Tensor]) -> Tensor:
        """Join keys [tokens, d_ff] by memory to the layer's, [tokens, Σ d_ff], in float32 if there are several."""
        ordered = [keys[memory.address] for memory in self.memories]
        return ordered[0] if len(ordered) == 1 else torch.cat([key.float() for key in ordered], -1)

    def at(self, index: int) -> tuple[Address, int]:
        """Return the memory that column `index` of W belongs to, and the index in it."""
        for memory in self.memories:
            if index < memory.d_ff:
                return memory.address, index
            index -= memory.d_ff
        raise IndexError(index)

    def bias(self, routed: Routed | None = None) -> Tensor | None:
        """Return b: [n, d_model] for a mixture's routing, [1, d_model] for a dense layer, None without biases."""
        if self.mixture is None or routed is None:
            bias = self.memories[0].bias
            return None if bias is None else bias[None]
        return self.mixture.experts.bias(routed)

    @contextmanager
    def watched(self, take: Callable[[KeyValueMemory, Keys], None]) -> Iterator[None]:
        """Pass the keys of each memory to `take`, in every pass inside the block."""
        if self.mixture is None:
            (memory,) = self.memories

            def see(key: Tensor) -> Tensor:
                flat = key.detach().reshape(-1, key.shape[-1])
                take(memory, Keys(None, flat, len(flat)))
                return key

            with replace_input(memory.module, see):
                yield
            return
        by_number = {memory.address.expert or 0: memory for memory in self.memories}

        def shown(expert: int, rows: Tensor | None, keys: Tensor, tokens: int) -> None:
            take(by_number[expert], Keys(rows, keys, tokens))

        with self.mixture.watched(shown, only=frozenset(by_number)):
            yield

    @contextmanager
    def keys(self) -> Iterator[Callable[[], Tensor]]:
        """Capture the keys of a pass inside the block; the yielded function returns them, [tokens, Σ d_ff], once."""
        seen: dict[Address, Tensor] = {}

        def take(memory: KeyValueMemory, keys: Keys) -> None:
            # A copy: code that runs after a hook may overwrite the tensor in place.
            seen[memory.address] = keys.whole.clone()

        with self.watched(take):
            # Popped, so that a caller that reads many layers does not hold the keys of all.
            yield lambda: self.joined({memory.address: seen.pop(memory.address) for memory in self.memories})

    def idle(self) -> AbstractContextManager[None]:
        """Skip the layer's output where it is not read: a dense layer computes it for one token."""
        first = torch.tensor([0])
        return nullcontext() if self.mixture is not None else only_at(self.module, first, first)
