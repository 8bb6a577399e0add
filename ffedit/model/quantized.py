"""Quantised linear maps: the numbers of W are packed away, but what W does is there to be asked for.

Packings differ (8 bits, 4 bits, groups, outliers apart), and each has a library of its own. One thing they share: the
module still multiplies. So W is read by asking: what the module gives for the i-th unit vector is column i of W, in the
precision that it computes in, whatever the packing is.

It is not written to. A packing has 16 or 256 levels for an entry, which would swallow an edit or blow it up; an edit
stands beside it instead, as a LoRA adapter does.
"""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

# Unit vectors that are asked about at a time.
ROWS = 1024


def is_floating(weight: object) -> TypeGuard[Tensor]:
    """Whether a weight is, or passes for, a tensor of floating-point numbers of 16 bits or more."""
    return isinstance(weight, Tensor) and weight.is_floating_point() and weight.element_size() > 1


def is_plain(weight: object) -> bool:
    """Whether it is one, which can be read and written: no wrapper of packed numbers."""
    return is_floating(weight) and not is_traceable_wrapper_subclass(weight)


def is_quantised(module: nn.Module) -> bool:
    """Whether a module multiplies by a matrix that it does not hold as plain numbers."""
    sizes = (getattr(module, name, None) for name in ("in_features", "out_features"))
    return all(isinstance(size, int) for size in sizes) and not is_plain(getattr(module, "weight", None))


@torch.no_grad()
def asked(module: nn.Module, device: torch.device) -> Tensor:
    """W [out_features, in_features] of a quantised module that computes on `device`."""
    known: Any = module
    bias, size, dtype = known.bias, known.in_features, _taken(module)
    known.bias = None  # W e_i + b − b would be rounded twice
    try:
        # Not called: hooks are for what passes through the model.
        parts = [
            known.forward(unit_vectors(first, min(first + ROWS, size), size).to(device, dtype))
            for first in range(0, size, ROWS)
        ]
    finally:
        known.bias = bias
    return torch.cat(parts).T


def gives_gradient(module: nn.Module, device: torch.device) -> bool:
    """Whether gradients pass a quantised module; some kernels are for inference only."""
    known: Any = module
    with torch.enable_grad():
        x = torch.zeros(1, known.in_features, device=device, dtype=_taken(module), requires_grad=True)
        try:
            return bool(known.forward(x).requires_grad)
        except RuntimeError:  # a kernel that writes over what the gradient needs
            return False


def _taken(module: nn.Module) -> torch.dtype:
    """The precision in which a quantised module takes vectors; where its weight does not tell, it converts any."""
    weight = getattr(module, "weight", None)
    return weight.dtype if is_floating(weight) else torch.float32


def unit_vectors(first: int, last: int, size: int) -> Tensor:
    """Rows `first` to `last` (excluded) of the identity matrix, [last - first, size]."""
    rows = torch.zeros(last - first, size)
    rows[torch.arange(last - first), torch.arange(first, last)] = 1
    return rows


def packed(weight: Tensor) -> Tensor:
    """What a weight holds, as plain numbers of any kind; of a tensor that wraps others, the bytes of these."""
    if not is_traceable_wrapper_subclass(weight):
        return weight.detach()
    names, _ = weight.__tensor_flatten__()
    inner = (packed(getattr(weight, name)) for name in names)
    return torch.cat([one.contiguous().reshape(-1).view(torch.uint8) for one in inner])
