"""A feed-forward layer as a key-value memory.

    FF(x) = W m        m_i = f(x · k_i)        W = Vᵀ = [v_1 … v_d_ff]

Geva et al. 2021 (arXiv 2012.14913) call the rows of the first matrix *keys* and the rows of V *values*; m are the
memory coefficients. ROME (Meng et al. 2022, arXiv 2202.05262) reads the same layer as a linear associative memory in
which m itself is the key k* of a fact and W maps it to the value v* = W k*. An edit changes W, the *value matrix*, and
needs only to see its input (the key) and its output (the value).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ffedit.algebra.linalg import double
from ffedit.algebra.low_rank import LowRank, Update
from ffedit.errors import EditError, ModelError
from ffedit.files.tensor_ranges import sample_of
from ffedit.model import first_layer, storage
from ffedit.model.experts import Experts
from ffedit.model.hooks import replace_input

# Number of entries that are stored to identify a matrix.
SAMPLE = 64


@dataclass(frozen=True, order=True)
class Address:
    """Address of a memory: its layer, counted from 0 at the embedding's side, and its expert where it has one."""

    layer: int
    expert: int | None = None

    def __str__(self) -> str:
        return f"{self.layer}" if self.expert is None else f"{self.layer}.{self.expert}"


def as_layers(layers: int | Iterable[int]) -> list[int]:
    """Read one layer's number or several; EditError for anything else."""
    listed: list[Any] = [layers]
    if isinstance(layers, Iterable) and not isinstance(layers, (str, Tensor)):
        listed = list(layers)
    for layer in listed:
        kind = () if isinstance(layer, bool) else Integral
        EditError.require(layer, kind, "the number of a layer was expected; give a number or a list of numbers")
    return [int(layer) for layer in listed]


@dataclass(frozen=True, eq=False)
class KeyValueMemory:
    """Value matrix of one feed-forward layer, whatever its storage.

    Attributes:
        address: its layer and expert.
        name: the module's path in the model.
        module: the linear map; its input is the key [.., d_ff], its output the value [.., d_model] plus bias. For a
            routed expert, the module that holds the matrices of all experts.
        stored_transposed: the weight is stored as [d_ff, d_model] (GPT-2's Conv1D), not as [d_model, d_ff].
        saved_dtype: precision of the checkpoint, to which every write is rounded; the weight's own may be another
            (float16 checkpoints are computed in float32 on a CPU).
        block: the model's layer, in which the key rows are searched for.
        probe: runs the model over a few tokens, to check the key rows.
        own: the parameter's name in the module.
        slot: index of the matrix in a parameter that holds one for each expert.
        saved_as: the matrix's name in the files of a checkpoint, where they store experts separately.
    """

    address: Address
    name: str
    module: nn.Module
    stored_transposed: bool
    saved_dtype: torch.dtype
    block: nn.Module | None = None
    probe: Callable[[], object] | None = None
    own: str = "weight"
    slot: int | None = None
    saved_as: str = ""

    def __repr__(self) -> str:
        return f"KeyValueMemory({self.address}: {self.parameter}, {list(self.shape)})"

    @property
    def leaf(self) -> Tensor:
        """Stored parameter, of all experts where they share one; empty (meta device) where it is offloaded."""
        parameter = getattr(self.module, self.own)
        assert isinstance(parameter, Tensor)
        return parameter

    @property
    def held(self) -> list[Tensor]:
        """Tensors that hold W: its parameter, or all tensors of a quantised module except the bias."""
        if not self.quantised:
            return [self.leaf]
        tensors = (*self.module.named_parameters(recurse=False), *self.module.named_buffers(recurse=False))
        return [tensor for name, tensor in tensors if name != "bias"]

    @property
    def weight(self) -> Tensor:
        """Stored matrix, in its own orientation and dtype; empty (on the meta device) where it is offloaded."""
        return self.entry(self.leaf)

    def entry(self, parameter: Tensor) -> Tensor:
        """Return this memory's matrix in a tensor that is shaped like its parameter."""
        return parameter if self.slot is None else parameter[self.slot]

    @property
    def stored(self) -> Tensor:
        """Stored matrix as the next forward would use it; read-only."""
        return self.entry(storage.fetched(self.module, self.own))

    @property
    def parameter(self) -> str:
        """Name of the parameter in the model's state dict; `name[3]` is the fourth matrix of one that holds several."""
        return f"{self.name}.{self.own}" + ("" if self.slot is None else f"[{self.slot}]")

    @property
    def value(self) -> Tensor:
        """W, always seen as [d_model, d_ff]; read-only, since it is a copy where the weight is offloaded."""
        return self.stored.T if self.stored_transposed else self.stored

    @property
    def quantised(self) -> bool:
        """True if the weight is packed, so that W can be read but not written."""
        return storage.is_quantised(self.module)

    @property
    def dtype(self) -> torch.dtype:
        """Precision that the layer computes in."""
        return self.saved_dtype if self.quantised else self.weight.dtype

    @property
    def shape(self) -> torch.Size:
        """[d_model, d_ff]."""
        if self.quantised:
            module: Any = self.module
            return torch.Size((module.out_features, module.in_features))
        return (self.weight.T if self.stored_transposed else self.weight).shape

    @property
    def bias(self) -> Tensor | None:
        """Bias b, [d_model]; not part of the algebra."""
        name = "bias" if self.slot is None else f"{self.own}_bias"
        has_bias = isinstance(getattr(self.module, name, None), Tensor)
        return self.entry(storage.fetched(self.module, name)) if has_bias else None

    @property
    def d_ff(self) -> int:
        """Number of memories: the length of a key."""
        return self.shape[1]

    @cached_property
    def key_rows(self) -> first_layer.KeyRows:
        """K, the first matrix, recognised and checked on first use (ModelError); an expert's is declared."""
        if self.slot is not None:
            return Experts(self.module).key_rows(self.slot)
        if self.block is None or self.probe is None:
            raise ModelError(f"{self.name}: this memory belongs to no model; its keys are read from a loaded model")
        rows = first_layer.find(self.block, self.module, self.d_ff, self.name)
        first_layer.check(rows, self.module, self.name, self.probe)
        return rows

    def coefficients(self, x: Tensor) -> Tensor:
        """Return m [.., d_ff], without a router's weight, for the layer's input behind its norm, `x` [.., d_model]."""
        return self.key_rows.coefficients(x)

    def attend(self, x: Tensor) -> Tensor:
        """Compute the layer as attention over d_ff static keys and values, with f in place of softmax.

        Sukhbaatar et al. 2019 (arXiv 1907.01470): a feed-forward layer as persistent memory vectors. The queries `x`
        are what the layer receives, behind its norm, [.., d_model]; the result is Σ_i m_i v_i + b [.., d_model], the
        layer's own output, or an expert's without the router's weight.
        """
        return linear(self.coefficients(x), self.value, self.bias)

    @contextmanager
    def scaled(self, factors: Mapping[int, float]) -> Iterator[None]:
        """Scale memories: coefficient i times `factors[i]` in every forward pass inside the block.

        Geva et al. 2022 (arXiv 2203.14680). A single expert has no module whose coefficients could be
        scaled: for an expert, v_i is scaled in the weights instead, and restored bit for bit.

        Raises:
            EditError: the matrix of an expert is quantised.
            ModelError: there is no memory of this number.
        """
        outside = [i for i in factors if not 0 <= i < self.d_ff]
        if outside:
            raise ModelError(f"{self.name}: its memories are 0 … {self.d_ff - 1}, found {outside[0]}; name one of them")
        scale = torch.ones(self.d_ff)
        for i, factor in factors.items():
            scale[i] = factor
        if self.slot is None:
            with replace_input(self.module, lambda m: m * scale.to(m)):
                yield
            return
        before = self.value.clone()
        self.set_(before * scale.to(before))
        try:
            yield
        finally:
            self.set_(before)

    def set_(self, value: Tensor) -> None:
        """Set W to `value` [d_model, d_ff], rounded to the weight's dtype; EditError where it is quantised."""
        self.check_writable()
        storage.write_(self.module, value.T if self.stored_transposed else value, self.own, self.slot)

    def write_(self, delta: Update) -> None:
        """Add Δ to W, summed in float64 and rounded once to the checkpoint's dtype, and the weight's if coarser."""
        total = double(self.value)
        total = total + delta.dense.to(total.device)
        self.set_(total.to(self.saved_dtype))

    def check_writable(self) -> None:
        """Refuse a quantised weight with an EditError."""
        if self.quantised:
            raise EditError(
                f"{self.name} is quantised, so it cannot be changed; export the edit as an adapter (--format adapter), "
                "or edit the model in 16 or 32 bits and quantise the result"
            )

    @contextmanager
    def beside(self, delta: Update) -> Iterator[None]:
        """Make the layer compute W k + Δ k in every pass inside the block without changing W, like a LoRA adapter."""
        factors = (delta.right, delta.left) if isinstance(delta, LowRank) else (delta.dense,)
        device = storage.device_of(self.module)
        matrices = [factor.to(device, torch.float32) for factor in factors]

        def add(module: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
            change = args[0].float()
            for matrix in matrices:
                change = linear(change, matrix)
            return output + change.to(output)

        with self.module.register_forward_hook(add):
            yield


def identity(memory: KeyValueMemory) -> dict[str, Any]:
    """Return a description that identifies one stored matrix, also in another precision, without loading the model.

    It is plain JSON: `parameter` (its name), `saved_as` (its name in files, where that is another), `experts` (how
    many share the parameter) and `declared` (whether their module says that it is transposed), `transposed`, `shape` as
    it is stored, and `sample`: up to `SAMPLE` entries at a stride of max(1, entries // SAMPLE) in the stored order.
    """
    weight, declared = memory.stored, bool(getattr(memory.module, "is_transposed", False))
    return {
        "parameter": memory.parameter,
        **({"saved_as": memory.saved_as} if memory.saved_as else {}),
        **({} if memory.slot is None else {"experts": len(memory.leaf), "declared": declared}),
        "transposed": memory.stored_transposed,
        "shape": list(weight.shape),
        "sample": sample_of(weight, SAMPLE).float().tolist(),
    }


class Memories(Mapping[Address, KeyValueMemory]):
    """Mapping of a model's memories by `Address`; where a layer has only one memory, by its number too."""

    def __init__(self, memories: list[KeyValueMemory]) -> None:
        self._at = {memory.address: memory for memory in memories}

    def __repr__(self) -> str:
        return f"Memories({', '.join(map(str, self))})"

    def __getitem__(self, at: Address | int) -> KeyValueMemory:
        return self._at[Address(at) if isinstance(at, int) else at]

    def __iter__(self) -> Iterator[Address]:
        return iter(self._at)

    def __len__(self) -> int:
        return len(self._at)
