"""A feed-forward layer as a key-value memory.

    FF(x) = W m        m_i = f(x · k_i)        W = Vᵀ = [v_1 … v_d_ff]

Geva et al. 2021 (arXiv 2012.14913) call the rows of the first matrix *keys* and the rows of V *values*; m are the
memory coefficients. ROME (Meng et al. 2022, arXiv 2202.05262) reads the same layer as a linear associative memory in
which m itself is the key k* of a fact and W maps it to the value v* = W k*. An edit changes W, the *value matrix*, and
needs only to see its input (the key) and its output (the value).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ffedit import key_rows, placement
from ffedit.algebra import double
from ffedit.errors import ModelError
from ffedit.hooks import fed
from ffedit.lowrank import Update

# Entries of a matrix that are written down to recognise it by.
SAMPLE = 64


@dataclass(frozen=True, order=True)
class Address:
    """Where a memory stands: its layer, counted from 0 at the embedding's side, and its expert where it has one."""

    layer: int
    expert: int | None = None

    def __str__(self) -> str:
        return f"{self.layer}" if self.expert is None else f"{self.layer}.{self.expert}"


@dataclass(frozen=True, eq=False)
class KeyValueMemory:
    """One feed-forward layer's value matrix, whatever its storage.

    Attributes:
        address: where it stands.
        name: the module's path in the model.
        module: the linear map; its input is the key [.., d_ff], its output the value [.., d_model] plus bias.
        stored_transposed: the weight is kept as [d_ff, d_model] (GPT-2's Conv1D), not as [d_model, d_ff].
        saved_dtype: precision of the checkpoint, to which every write is rounded; the weight's own may be higher
            (float16 checkpoints are computed in float32 on a CPU).
        block: the model's layer, in which the key rows are looked for.
        probe: runs the model over a few tokens, to check what is found.
    """

    address: Address
    name: str
    module: nn.Module
    stored_transposed: bool
    saved_dtype: torch.dtype
    block: nn.Module | None = None
    probe: Callable[[], object] | None = None

    @property
    def weight(self) -> Tensor:
        """The stored parameter, in its own orientation and dtype; empty (on the meta device) where it is offloaded."""
        weight = self.module.weight
        assert isinstance(weight, Tensor)
        return weight

    @property
    def parameter(self) -> str:
        """The parameter's name in the model's state dict."""
        return f"{self.name}.weight"

    @property
    def value(self) -> Tensor:
        """W, always seen as [d_model, d_ff]; to be read only, since it is a copy where the weight is offloaded."""
        weight = placement.fetched(self.module)
        return weight.T if self.stored_transposed else weight

    @property
    def shape(self) -> torch.Size:
        """[d_model, d_ff]."""
        return (self.weight.T if self.stored_transposed else self.weight).shape

    @property
    def bias(self) -> Tensor | None:
        """b [d_model]; it is no part of the algebra."""
        return placement.fetched(self.module, "bias") if isinstance(self.module.bias, Tensor) else None

    @property
    def d_ff(self) -> int:
        """Number of memories: the length of a key."""
        return self.shape[1]

    @cached_property
    def key_rows(self) -> key_rows.KeyRows:
        """K, the first matrix; found and checked when it is first asked for.

        Raises:
            ModelError: it was not recognised, or does not give the coefficients that were observed.
        """
        if self.block is None or self.probe is None:
            raise ModelError(f"{self.name}: this memory stands in no model; its keys are read from a loaded model")
        found = key_rows.find(self.block, self.module, self.d_ff, self.name)
        key_rows.check(found, self.module, self.name, self.probe)
        return found

    def coefficients(self, x: Tensor) -> Tensor:
        """m [.., d_ff] for what the layer receives, behind its norm, `x` [.., d_model]."""
        return self.key_rows.coefficients(x)

    def attend(self, x: Tensor) -> Tensor:
        """The layer as attention over d_ff static keys and values, f in the place of softmax.

        Sukhbaatar et al. 2019 (arXiv 1907.01470): a feed-forward layer as persistent memory vectors.

        Args:
            x: the queries: what the layer receives, behind its norm, [.., d_model].

        Returns:
            Σ_i m_i v_i + b [.., d_model], the layer's own output.
        """
        return linear(self.coefficients(x), self.value, self.bias)

    @contextmanager
    def scaled(self, factors: Mapping[int, float]) -> Iterator[None]:
        """Turn memories up or down: coefficient i times `factors[i]` in every forward pass inside the block.

        Geva et al. 2022 (arXiv 2203.14680).

        Raises:
            ModelError: there is no memory of this number.
        """
        outside = [i for i in factors if not 0 <= i < self.d_ff]
        if outside:
            raise ModelError(f"{self.name}: its memories are 0 … {self.d_ff - 1}, found {outside[0]}; name one of them")
        scale = torch.ones(self.d_ff)
        for i, factor in factors.items():
            scale[i] = factor
        with fed(self.module, lambda m: m * scale.to(m)):
            yield

    def set_(self, value: Tensor) -> None:
        """W ← `value` [d_model, d_ff], rounded to the weight's dtype; it lands where the weight is."""
        placement.write_(self.module, value.T if self.stored_transposed else value)

    def write_(self, delta: Update) -> None:
        """W ← W + Δ, summed in float64 and rounded once to the checkpoint's dtype."""
        total = double(self.value)
        total = total + delta.dense.to(total.device)
        self.set_(total.to(self.saved_dtype))


def identity(memory: KeyValueMemory) -> dict[str, Any]:
    """What tells one stored matrix from all others, in another precision too, without loading the model.

    Returns:
        Plain JSON: `parameter` (its name), `transposed`, `shape` as it is stored, and `sample`: up to `SAMPLE` entries
        at a fixed stride of max(1, entries // SAMPLE) in the stored order.
    """
    weight = placement.fetched(memory.module)
    flat = weight.reshape(-1)
    sample = flat[:: max(1, len(flat) // SAMPLE)][:SAMPLE]
    return {
        "parameter": memory.parameter,
        "transposed": memory.stored_transposed,
        "shape": list(weight.shape),
        "sample": sample.float().tolist(),
    }


class Memories(Mapping[Address, KeyValueMemory]):
    """The memories of a model, by `Address`; where a layer has one memory only, by its number too."""

    def __init__(self, memories: list[KeyValueMemory]) -> None:
        self._at = {memory.address: memory for memory in memories}

    def __getitem__(self, at: Address | int) -> KeyValueMemory:
        return self._at[Address(at) if isinstance(at, int) else at]

    def __iter__(self) -> Iterator[Address]:
        return iter(self._at)

    def __len__(self) -> int:
        return len(self._at)
