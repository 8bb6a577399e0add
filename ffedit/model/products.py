"""Products of states with a weight on x86 processors, where torch has a faster way than its own choice.

torch calls MKL for linear layers in float32. For few rows oneDNN is up to three times as fast: a step of generation
multiplies some rows by each weight, a step of v* some dozens. On AMD's processors it is faster for any number of rows,
and for gradients of few rows. On those with AVX-512, which MKL leaves unused there, it is twice as fast, for all
gradients, too. All other gradients are faster in MKL, as are products of many rows on Intel's processors
(`evaluations/benchmarks/products.py`). The choice depends on the processor, the shapes, and whether a weight needs a
gradient, so that a computation has the same bits each time. torch contains both libraries.

In bfloat16 torch calls oneDNN itself, except for a slice of states, such as those of the last tokens, for which it
takes 15 to 200 times as long: there the rows are passed as a matrix. A processor without instructions for bfloat16
emulates such a product, which takes up to 35 times as long as in float32. There a weight is converted to float32 block
by block, and each product is rounded to bfloat16 once, as the instructions do.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry, register_flop_formula
from transformers.pytorch_utils import Conv1D

from ffedit.model.hooks import replace_forward


def limits(about: str, unit: str) -> tuple[float, float]:
    """Return the largest number of rows for which oneDNN is faster, of a product and of a gradient.

    `about` is a text that names the processor's vendor, `unit` torch's name for its vector instructions.
    """
    if "AuthenticAMD" in about:
        return float("inf"), float("inf") if unit == "AVX512" else 32
    return 256, 0


def _processor() -> str:
    """Return a text that names the vendor of this processor."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return file.read(256)  # beginning of the first core's description
    except OSError:  # not Linux
        return platform.processor()


ROWS, ROWS_BACK = limits(_processor(), torch.backends.cpu.get_cpu_capability())
LARGE = 2**16  # fewest entries of a weight; a smaller one gains little
BFLOAT16 = torch.cpu._is_avx512_bf16_supported()  # whether this processor multiplies bfloat16; true with AMX, too
BLOCK = 2**19  # entries of a weight that are converted at once: 2 MB, which stay in the processor's cache
GROUPED = {"_grouped_mm", "grouped_mm_fallback"}  # functions of torch and transformers, called for experts
AVAILABLE = (
    torch.backends.mkldnn.is_available()
    and platform.machine().lower() in {"x86_64", "amd64"}
    and hasattr(torch.ops.mkldnn, "_linear_pointwise")
)


@contextmanager
def fast_products(model: nn.Module) -> Iterator[None]:
    """Make `model` multiply on the CPU by oneDNN inside the block, or by way of float32, where that is faster."""
    with ExitStack() as stack:
        for module in model.modules() if AVAILABLE else ():
            # Offloaded modules have accelerate's `forward`, which loads the weight; quantised weights, other classes.
            if (
                (type(module) is nn.Linear or type(module) is Conv1D)
                and type(weight := module.weight) is nn.Parameter
                and (weight.is_cpu and weight.dtype in (torch.float32, torch.bfloat16) and weight.numel() >= LARGE)
                and "forward" not in vars(module)
            ):
                stack.enter_context(replace_forward(module, partial(_forward, module)))
        if AVAILABLE and not BFLOAT16 and any(weight.dtype == torch.bfloat16 for weight in model.parameters()):
            stack.enter_context(_Converting())
        yield


def _forward(layer: nn.Linear | Conv1D, *args: Tensor, **named: Tensor) -> Tensor:
    (states,) = (*args, *named.values())  # nn.Linear calls them `input`, Conv1D `x`
    weight, bias = layer.weight if type(layer) is nn.Linear else layer.weight.T, layer.bias
    plain = type(states) is Tensor and states.is_cpu and states.dtype == torch.float32 == weight.dtype
    count = states.numel() // weight.shape[1]
    if states.dim() > 2 and (weight.dtype == torch.bfloat16 or torch.is_autocast_enabled("cpu")):
        rows: Tensor = linear(states.flatten(0, -2), weight, bias)
        return rows.reshape(*states.shape[:-1], len(weight))
    if _learns(weight, bias) or not plain or not 0 < count <= ROWS or torch.is_autocast_enabled("cpu"):
        return linear(states, weight, bias)
    result: Tensor = _Product.apply(states, weight, bias)  # type: ignore[no-untyped-call]
    return result


def product(states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return what `torch.nn.functional.linear` does, [.., d_out], by oneDNN, without gradients."""
    result: Tensor = torch.ops.mkldnn._linear_pointwise(states, weight, bias, "none", [], "")
    return result


def converted(states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return what `torch.nn.functional.linear` does in bfloat16, [.., d_out], by way of float32, without gradients."""
    rows, result = states.float(), states.new_empty(*states.shape[:-1], len(weight))
    for block, part in _blocks(weight):
        result[..., block] = linear(rows, part, None if bias is None else bias[block].float())
    return result


class _Product(torch.autograd.Function):
    """`product`, with a gradient for the states, but none for weight and bias."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply."""
        ctx.save_for_backward(weight)
        return product(states, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of the states."""
        (weight,) = ctx.saved_tensors
        by_onednn = gradient.numel() <= ROWS_BACK * gradient.shape[-1]
        return product(gradient, weight.T) if by_onednn else gradient @ weight, None, None


class _Converted(torch.autograd.Function):
    """`converted`, with a gradient for the states, but none for weight and bias."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply."""
        ctx.save_for_backward(weight)
        return converted(states, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of the states; its sum over the blocks is rounded once."""
        (weight,) = ctx.saved_tensors
        rows = gradient.reshape(-1, len(weight)).float()
        result = rows.new_zeros(len(rows), weight.shape[1])
        for block, part in _blocks(weight):
            result.addmm_(rows[:, block], part)
        return result.to(gradient.dtype).reshape(*gradient.shape[:-1], -1), None, None


def _multiplied(states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `converted` with its gradient."""
    result: Tensor = _Converted.apply(states, weight, bias)  # type: ignore[no-untyped-call]
    return result


class _Converting(TorchFunctionMode):
    """Inside, products in bfloat16 on the CPU, of linear layers and of experts, are `converted`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Multiply by a weight, or by each expert's the rows that it gets; call any other function as it is."""
        named = kwargs or {}
        if func is linear and not named and _convertible(*args):
            return _multiplied(*args)
        if getattr(func, "__name__", None) in GROUPED and len(args) == 2 and _convertible(*args):
            states, weights = args  # [n, d_in], [experts, d_in, d_out]
            rows = states.tensor_split(named["offs"].tolist())  # each expert's, and those behind, which none gets
            products = [_multiplied(own, weight.T) for own, weight in zip(rows, weights, strict=False) if len(own)]
            return torch.cat([*products, states.new_zeros(len(rows[-1]), weights.shape[2])])
        return func(*args, **named)


def _convertible(states: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Return True if states and a weight are plain tensors in bfloat16 on the CPU, and the weight does not learn."""
    plain = type(weight) in (Tensor, nn.Parameter) and states.is_cpu
    return plain and states.dtype == weight.dtype == torch.bfloat16 and not _learns(weight, bias)


def _learns(weight: Tensor, bias: Tensor | None) -> bool:
    """Return True if a weight or its bias gets a gradient."""
    return torch.is_grad_enabled() and (weight.requires_grad or (bias is not None and bias.requires_grad))


def _blocks(weight: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield each block of a weight's rows with its numbers in float32, which are overwritten by the next block's."""
    step = max(1, BLOCK // weight.shape[1])
    numbers = torch.empty(min(step, len(weight)), weight.shape[1])
    for start in range(0, len(weight), step):
        rows = weight[start : start + step]
        yield slice(start, start + step), numbers[: len(rows)].copy_(rows)


def _operations(states: Any, weight: Any, *others: Any, **named: Any) -> int:
    """Count the floating-point operations of `product` from shapes: two for each multiply-add."""
    operations: int = 2 * prod(states) * weight[0]
    return operations


if AVAILABLE and torch.ops.mkldnn._linear_pointwise not in flop_registry:
    register_flop_formula(torch.ops.mkldnn._linear_pointwise)(_operations)
