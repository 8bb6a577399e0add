"""A layer's memories as one linear associative memory: what their value matrices give is added up.

    FF(x) = W_1 k_1 + … + W_p k_p + b = W k        W = [W_1 … W_p],  k = [k_1; …; k_p]

A dense layer has one part. The parts of a mixture are its experts, whose keys carry the router's weight (`experts`), so
that an edit of any layer is one problem: find Δ = [Δ_1 … Δ_p] with (W + Δ) k* = v*.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ffedit.model import offload
from ffedit.model.experts import Mixture, Routed
from ffedit.model.hooks import only_at, replace_input
from ffedit.model.memory import Address, KeyValueMemory


class Keys(NamedTuple):
    """What one memory received in a pass.

    Attributes:
        rows: the tokens at which it was asked, [t], counted through the batch; None: all.
        keys: what it received there, [t, d_ff]; it received 0 elsewhere.
        tokens: how many tokens there were.
    """

    rows: Tensor | None
    keys: Tensor
    tokens: int

    @property
    def whole(self) -> Tensor:
        """The keys of all tokens, [tokens, d_ff]."""
        if self.rows is None:
            return self.keys
        found = self.keys.new_zeros(self.tokens, self.keys.shape[1])
        found[self.rows] = self.keys
        return found


@dataclass(frozen=True, eq=False)
class FeedForward:
    """One layer's memories, or some of them.

    Attributes:
        layer: its number.
        module: gives what the layer adds to the residual stream: the value matrix, or the block of a mixture.
        parts: the memories, by address.
        mixture: router and experts, where the layer has them.
    """

    layer: int
    module: nn.Module
    parts: tuple[KeyValueMemory, ...]
    mixture: Mixture | None = None

    @property
    def sizes(self) -> list[int]:
        """d_ff of each part."""
        return [part.d_ff for part in self.parts]

    @property
    def shape(self) -> tuple[int, int]:
        """(d_model, Σ d_ff)."""
        return self.parts[0].shape[0], self.d_ff

    @property
    def d_ff(self) -> int:
        """Number of memories: Σ d_ff."""
        return sum(self.sizes)

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the weights."""
        return self.parts[0].dtype

    @property
    def value(self) -> Tensor:
        """W = [W_1 … W_p], [d_model, Σ d_ff]; to be read only."""
        values = [part.value for part in self.parts]
        return values[0] if len(values) == 1 else torch.cat(values, 1)

    @cached_property
    def solve_device(self) -> torch.device:
        """Where the layer's equations are solved: their second moment, beside a model, may leave no room on its GPU."""
        d_model, _ = self.shape
        matrices = sum(4 * size**2 + 3 * d_model * size for size in self.sizes)
        return offload.solve_device(offload.device_of(self.parts[0].module), matrices)

    @property
    def matrix(self) -> Tensor:
        """W in float64 where the equations are solved, [d_model, Σ d_ff]."""
        return self.value.to(self.solve_device).double()

    def only(self, addresses: Iterable[Address]) -> FeedForward:
        """The layer with these of its memories; the others stay as they are."""
        some = set(addresses)
        return replace(self, parts=tuple(part for part in self.parts if part.address in some))

    def split(self, joined: Tensor, dim: int) -> dict[Address, Tensor]:
        """Cut what runs over Σ d_ff in dimension `dim`, by part."""
        pieces = joined.split(self.sizes, dim)
        return {part.address: piece for part, piece in zip(self.parts, pieces, strict=True)}

    def at(self, index: int) -> tuple[Address, int]:
        """Which memory column `index` of W is: its part, and its number there."""
        for part in self.parts:
            if index < part.d_ff:
                return part.address, index
            index -= part.d_ff
        raise IndexError(index)

    def column(self, address: Address, index: int) -> int:
        """Which column of W memory `index` of a part is; `at` is the way back."""
        before = [part.address for part in self.parts].index(address)
        return sum(self.sizes[:before]) + index

    def bias(self, routed: Routed | None = None) -> Tensor | None:
        """b [n, d_model] for what the router of a mixture chose; [1, d_model] of a dense layer; None without biases."""
        if self.mixture is None or routed is None:
            found = self.parts[0].bias
            return None if found is None else found[None]
        return self.mixture.experts.bias(routed)

    @contextmanager
    def watched(self, take: Callable[[KeyValueMemory, Keys], None]) -> Iterator[None]:
        """Show `take` what each part receives, in every pass inside the block."""
        if self.mixture is None:
            (memory,) = self.parts

            def see(key: Tensor) -> Tensor:
                flat = key.detach().reshape(-1, key.shape[-1])
                take(memory, Keys(None, flat, len(flat)))
                return key

            with replace_input(memory.module, see):
                yield
            return
        by_number = {part.address.expert or 0: part for part in self.parts}

        def shown(expert: int, rows: Tensor | None, keys: Tensor, tokens: int) -> None:
            take(by_number[expert], Keys(rows, keys, tokens))

        with self.mixture.watched(shown, only=frozenset(by_number)):
            yield

    @contextmanager
    def keys(self) -> Iterator[Callable[[], Tensor]]:
        """Look at a pass inside the block; what comes is called for the keys, [tokens, Σ d_ff], afterwards, once."""
        seen: dict[Address, Tensor] = {}

        def take(memory: KeyValueMemory, keys: Keys) -> None:
            # A copy: what runs behind a hook may write over what it was shown.
            seen[memory.address] = keys.whole.clone()

        with self.watched(take):
            yield partial(self._joined, seen)

    def _joined(self, seen: dict[Address, Tensor]) -> Tensor:
        # Handed over: who looks at many layers would keep the keys of all.
        wide = [seen.pop(part.address) for part in self.parts]
        return wide[0] if len(wide) == 1 else torch.cat([keys.float() for keys in wide], -1)

    @contextmanager
    def idle(self) -> Iterator[None]:
        """What the layer gives is not read in the block: a dense one computes it for one token."""
        if self.mixture is not None:
            yield
            return
        nowhere = torch.tensor([0])
        with only_at(self.module, nowhere, nowhere):
            yield
