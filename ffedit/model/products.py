"""Products of states with a weight, on x86 processors: by oneDNN, where torch's own call of MKL is slower.

torch calls MKL for linear layers in float32. For few rows oneDNN is up to twice as fast: a step of generation
multiplies some rows by each weight, a step of v* some dozens. On AMD's processors with AVX-512, which MKL leaves unused
there, it is twice as fast for any number of rows; on Intel's, MKL is faster for many rows, and for gradients of any
number of rows (`evaluations/benchmarks/products.py`). The choice depends on the processor, the shapes, and whether
a weight needs a gradient, so that a computation has the same bits each time. torch contains both libraries.

In bfloat16 torch calls oneDNN itself, except for a slice of states, such as those of the last tokens, for which it
takes 15 to 200 times as long: there the rows are passed as a matrix.
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
from torch.utils.flop_counter import flop_registry, register_flop_formula
from transformers.pytorch_utils import Conv1D

from ffedit.model.hooks import replace_forward


def limits(about: str, unit: str) -> tuple[float, float]:
    """Return the largest number of rows for which oneDNN is faster, of a product and of a gradient.

    `about` is a text that names the processor's vendor, `unit` torch's name for its vector instructions.
    """
    if "AuthenticAMD" in about and unit == "AVX512":
        return float("inf"), float("inf")
    return 256, 0 if "GenuineIntel" in about else 64


def _processor() -> str:
    """Return a text that names the vendor of this processor."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return file.read(256)  # beginning of the first core's description
    except OSError:  # not Linux
        return platform.processor()


ROWS, ROWS_BACK = limits(_processor(), torch.backends.cpu.get_cpu_capability())
LARGE = 2**16  # fewest entries of a weight; a smaller one gains little
AVAILABLE = (
    torch.backends.mkldnn.is_available()
    and platform.machine().lower() in {"x86_64", "amd64"}
    and hasattr(torch.ops.mkldnn, "_linear_pointwise")
)


@contextmanager
def fast_products(model: nn.Module) -> Iterator[None]:
    """Make linear layers of `model` on the CPU multiply by oneDNN inside the block, where that is faster."""
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
        yield


def _forward(layer: nn.Linear | Conv1D, *args: Tensor, **named: Tensor) -> Tensor:
    (states,) = (*args, *named.values())  # nn.Linear calls them `input`, Conv1D `x`
    weight, bias = layer.weight if type(layer) is nn.Linear else layer.weight.T, layer.bias
    needs_gradient = torch.is_grad_enabled() and (weight.requires_grad or (bias is not None and bias.requires_grad))
    plain = type(states) is Tensor and states.is_cpu and states.dtype == torch.float32 == weight.dtype
    count = states.numel() // weight.shape[1]
    if states.dim() > 2 and (weight.dtype == torch.bfloat16 or torch.is_autocast_enabled("cpu")):
        rows: Tensor = linear(states.flatten(0, -2), weight, bias)
        return rows.reshape(*states.shape[:-1], len(weight))
    if needs_gradient or not plain or not 0 < count <= ROWS or torch.is_autocast_enabled("cpu"):
        return linear(states, weight, bias)
    result: Tensor = _Product.apply(states, weight, bias)  # type: ignore[no-untyped-call]
    return result


def product(states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return what `torch.nn.functional.linear` does, [.., d_out], by oneDNN, without gradients."""
    result: Tensor = torch.ops.mkldnn._linear_pointwise(states, weight, bias, "none", [], "")
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


def _operations(states: Any, weight: Any, *others: Any, **named: Any) -> int:
    """Count the floating-point operations of `product` from shapes: two for each multiply-add."""
    operations: int = 2 * prod(states) * weight[0]
    return operations


if AVAILABLE and torch.ops.mkldnn._linear_pointwise not in flop_registry:
    register_flop_formula(torch.ops.mkldnn._linear_pointwise)(_operations)
