"""Products of states with a weight, on x86 processors: by oneDNN, where torch's own call of MKL is slower.

torch calls MKL for linear layers in float32. For few rows oneDNN is up to twice as fast: a step of generation
multiplies some rows by each weight, a step of v* some dozens. On AMD's processors with AVX-512, which MKL leaves unused
there, it is twice as fast for any number of rows; on Intel's, MKL is the faster one for many rows, and for gradients of
any number (`evaluations/benchmarks/products.py`). The choice depends on the processor, on shapes, and on whether a
weight learns, so that a computation has the same bits each time. Both are in torch.

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
    """Return the most rows of a product and of a gradient for which oneDNN is faster.

    `about` is what names the processor's vendor, and `unit` what its vectors are called by torch.
    """
    if "AuthenticAMD" in about and unit == "AVX512":
        return float("inf"), float("inf")
    return 256, 0 if "GenuineIntel" in about else 64


def _processor() -> str:
    """Return a text in which the vendor of this processor stands."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as about:
            return about.read(256)  # what is known of the first core begins with it
    except OSError:  # not Linux
        return platform.processor()


ROWS, ROWS_BACK = limits(_processor(), torch.backends.cpu.get_cpu_capability())
LARGE = 2**16  # fewest numbers of a weight; with a smaller one little is gained
AVAILABLE = (
    torch.backends.mkldnn.is_available()
    and platform.machine().lower() in {"x86_64", "amd64"}
    and hasattr(torch.ops.mkldnn, "_linear_pointwise")
)


@contextmanager
def fast_products(model: nn.Module) -> Iterator[None]:
    """In the block, linear layers of `model` on the CPU multiply by oneDNN where that is faster."""
    with ExitStack() as stack:
        for module in model.modules() if AVAILABLE else ():
            # Offloaded modules have a `forward` of accelerate's, which brings the weight; quantised weights are of
            # classes of their own.
            if (
                (type(module) is nn.Linear or type(module) is Conv1D)
                and type(weight := module.weight) is nn.Parameter
                and (weight.is_cpu and weight.dtype in (torch.float32, torch.bfloat16) and weight.numel() >= LARGE)
                and "forward" not in vars(module)
            ):
                stack.enter_context(replace_forward(module, partial(_forward, module)))
        yield


def _forward(layer: nn.Linear | Conv1D, states: Tensor) -> Tensor:
    weight, bias = layer.weight if type(layer) is nn.Linear else layer.weight.T, layer.bias
    learned = torch.is_grad_enabled() and (weight.requires_grad or (bias is not None and bias.requires_grad))
    plain = type(states) is Tensor and states.is_cpu and states.dtype == torch.float32 == weight.dtype
    count = states.numel() // weight.shape[1]
    if states.dim() > 2 and (weight.dtype == torch.bfloat16 or torch.is_autocast_enabled("cpu")):
        rows: Tensor = linear(states.flatten(0, -2), weight, bias)
        return rows.reshape(*states.shape[:-1], len(weight))
    if learned or not plain or not 0 < count <= ROWS or torch.is_autocast_enabled("cpu"):
        return linear(states, weight, bias)
    result: Tensor = _Product.apply(states, weight, bias)  # type: ignore[no-untyped-call]
    return result


def product(states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return what `torch.nn.functional.linear` does, [.., d_out], by oneDNN, without gradients."""
    result: Tensor = torch.ops.mkldnn._linear_pointwise(states, weight, bias, "none", [], "")
    return result


class _Product(torch.autograd.Function):
    """`product`, with the gradient of the states; that of a weight is not asked."""

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
    """Return the operations of `product`, two for each multiply and add, from shapes."""
    operations: int = 2 * prod(states) * weight[0]
    return operations


if AVAILABLE and torch.ops.mkldnn._linear_pointwise not in flop_registry:
    register_flop_formula(torch.ops.mkldnn._linear_pointwise)(_operations)
