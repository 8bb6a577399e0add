"""Quantised linear maps: the numbers of W are packed, but its products can be computed.

Packings differ (8 bits, 4 bits, groups, separate outliers), and each has a library of its own. All of them can
multiply. So W is read by multiplication: the module's output for the i-th unit vector is column i of W, in the
precision that it computes in, whatever the packing is.

W is not written. A packing has 16 or 256 levels for an entry, which would lose an edit or magnify it; an edit
is kept beside it instead, as a LoRA adapter is.
"""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

# Unit vectors in a batch.
ROWS = 1024


def is_floating(weight: object) -> TypeGuard[Tensor]:
    """Return True if a weight is, or passes for, a tensor of floating-point numbers of 16 bits or more."""
    return isinstance(weight, Tensor) and weight.is_floating_point() and weight.element_size() > 1


def is_plain(weight: object) -> bool:
    """Return True if `weight` is such a tensor and can be read and written: no wrapper of packed numbers."""
    return is_floating(weight) and not is_traceable_wrapper_subclass(weight)


def is_quantised(module: nn.Module) -> bool:
    """Return True if a module multiplies by a matrix that it does not hold as plain numbers."""
    sizes = (getattr(module, name, None) for name in ("in_features", "out_features"))
    return all(isinstance(size, int) for size in sizes) and not is_plain(getattr(module, "weight", None))


@torch.no_grad()
def asked(module: nn.Module, device: torch.device) -> Tensor:
    """Return W [out_features, in_features] of a quantised module that computes on `device`."""
    known: Any = module
    bias, size, dtype = known.bias, known.in_features, _taken(module)
    known.bias = None  # W e_i + b − b would be rounded twice
    try:
        # `forward` instead of a call: hooks are only for what passes through the model.
        parts = [
            known.forward(unit_vectors(first, min(first + ROWS, size), size).to(device, dtype))
            for first in range(0, size, ROWS)
        ]
    finally:
        known.bias = bias
    return torch.cat(parts).T


def gives_gradient(module: nn.Module, device: torch.device) -> bool:
    """Return True if gradients pass a quantised module; some kernels are for inference only."""
    known: Any = module
    with torch.enable_grad():
        x = torch.zeros(1, known.in_features, device=device, dtype=_taken(module), requires_grad=True)
        try:
            return bool(known.forward(x).requires_grad)
        except RuntimeError:  # a kernel that overwrites what the gradient needs
            return False


def _taken(module: nn.Module) -> torch.dtype:
    """Return the precision of a quantised module's inputs; float32 where its weight does not tell: it converts any."""
    weight = getattr(module, "weight", None)
    return weight.dtype if is_floating(weight) else torch.float32


def unit_vectors(first: int, last: int, size: int) -> Tensor:
    """Return rows `first` to `last` (excluded) of the identity matrix, [last - first, size]."""
    rows = torch.zeros(last - first, size)
    rows[torch.arange(last - first), torch.arange(first, last)] = 1
    return rows


def packed(weight: Tensor) -> Tensor:
    """Return a weight's content as plain numbers of any kind; of a tensor that wraps others, the bytes of these."""
    if not is_traceable_wrapper_subclass(weight):
        return weight.detach()
    names, _ = weight.__tensor_flatten__()
    inner = (packed(getattr(weight, name)) for name in names)
    return torch.cat([one.contiguous().reshape(-1).view(torch.uint8) for one in inner])
