"""Keys of a feed-forward layer: the rows of its first matrix.

    m = f(x Kᵀ + b)                        plain
    m = f(x Gᵀ + b_g) ⊙ (x Uᵀ + b_u)       gated: SwiGLU, GeGLU (Shazeer 2020, arXiv 2002.05202)

Row i of K is what Geva et al. 2021 (arXiv 2012.14913) call the key k_i: x is compared with it, and m_i is the weight of
the value v_i in the layer's output. f may depend on all coefficients at once, as softmax and SoLU do. Editing never
needs these rows, so they are searched for on first use: by role, then checked against what the model itself feeds to
its value matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.activations import ACT2FN
from transformers.pytorch_utils import Conv1D

from ffedit.errors import ModelError
from ffedit.model import storage
from ffedit.model.hooks import capture
from ffedit.model.roles import ACTIVATION_ROLES, ACTIVATIONS, KEY_ROLES, Role

# Code that error messages tell the reader to run.
NAME_KEYS = "from ffedit.model.roles import KEY_ROLES, Role; KEY_ROLES.insert(0, Role(...))"
REGISTER = 'from ffedit.model.roles import register_activation; register_activation("{}", function)'


class Rows(NamedTuple):
    """Tensors of a first matrix, views of the model's weights; None where there is none."""

    rows: Tensor  # K, or of a gated layer G, [d_ff, d_model]: one key per row
    bias: Tensor | None  # b, or b_g of the gate, [d_ff]
    up: Tensor | None = None  # U [d_ff, d_model] of a gated layer
    up_bias: Tensor | None = None  # b_u [d_ff]


@dataclass(frozen=True, eq=False)
class KeyRows:
    """First matrix of a feed-forward layer or of one expert, whatever its storage."""

    role: Role  # the role by which it was recognised
    first: nn.Module  # the module that holds K or the gate
    activation_name: str  # the name of f in the model
    tensors: Callable[[], Rows]  # returns the matrices as they are now
    # maps the layer's input behind its norm, [.., d_model], to m [.., d_ff]; gradients pass through
    coefficients: Callable[[Tensor], Tensor]

    @property
    def gated(self) -> bool:
        """True if the activated coefficients are multiplied by a second set."""
        return self.role.fused or self.role.up is not None


def find(block: nn.Module, value: nn.Module, d_ff: int, name: str) -> KeyRows:
    """Find the key rows of a value matrix with `d_ff` memories in a layer `block`; ModelError where no role fits."""
    path = next(path for path, module in block.named_modules() if module is value)
    while path:  # the modules around the value matrix, the innermost first, up to the layer itself
        path = path.rpartition(".")[0]
        holder = block.get_submodule(path)
        for role in KEY_ROLES:
            maps = [_attribute(holder, path) for path in (role.first, role.up) if path]
            if all(_is_linear(module) and len(_weight(module)) == d_ff * (1 + role.fused) for module in maps):
                activation_name, activation = _activation(holder, name)
                tensors = partial(_tensors, role.fused, *maps)
                return KeyRows(role, maps[0], activation_name, tensors, partial(_coefficients, activation, tensors))
    children = ", ".join(path for path, module in block.named_modules() if path and not list(module.children()))
    expected = "/".join(role.first + (f"+{role.up}" if role.up else "") for role in KEY_ROLES)
    raise ModelError(
        f"{name}: the keys of its {d_ff} memories were not recognised; {expected} was expected, the layer holds "
        f"{children}; name them: {NAME_KEYS}"
    )


@torch.no_grad()
def check(rows: KeyRows, value: nn.Module, name: str, probe: Callable[[], object]) -> None:
    """Check with `probe`, a pass over a few tokens, that `rows` computes the input of the value matrix."""
    with capture({"m": value, "x": rows.first}, inputs=True, first=True) as seen:
        probe()
    observed, computed = seen["m"].float(), rows.coefficients(seen["x"]).float()
    error = float((computed - observed).abs().max() / observed.abs().max().clamp(min=1e-12))
    if not error <= (1e-3 if seen["m"].dtype.itemsize >= 4 else 5e-2):
        raise ModelError(
            f"{name}: coefficients computed with {rows.activation_name} differ from those observed by {error:.1e} of "
            f"their scale; define this activation: {REGISTER.format(rows.activation_name)}, or name the keys: "
            f"{NAME_KEYS}"
        )


def _tensors(fused: bool, first: nn.Module, second: nn.Module | None = None) -> Rows:
    if second is not None:
        return Rows(_weight(first), _bias(first), _weight(second), _bias(second))
    weight, bias = _weight(first), _bias(first)
    if not fused:
        return Rows(weight, bias)
    (gate, up), (gate_bias, up_bias) = weight.chunk(2), (None, None) if bias is None else bias.chunk(2)
    return Rows(gate, gate_bias, up, up_bias)


def _coefficients(f: Callable[[Tensor], Tensor], tensors: Callable[[], Rows], x: Tensor) -> Tensor:
    rows, bias, up, up_bias = tensors()
    m = f(linear(x, rows, bias))
    return m if up is None else m * linear(x, up, up_bias)


def _attribute(holder: nn.Module, path: str) -> Any:
    """Return the attribute at the dotted `path` below `holder`; None where there is none."""
    attribute: Any = holder
    for step in path.split("."):
        attribute = getattr(attribute, step, None)
    return attribute


def _activation(holder: nn.Module, name: str) -> tuple[str, Callable[[Tensor], Tensor]]:
    """Return the name of f and f itself; a function registered under the name takes precedence."""
    attributes = (_attribute(holder, path) for path in ACTIVATION_ROLES)
    activation = next((attribute for attribute in attributes if attribute is not None), None)
    source = holder if activation is None else activation
    f_name = source if isinstance(source, str) else str(getattr(source, "__name__", type(source).__name__))
    if f_name in ACTIVATIONS:
        return f_name, ACTIVATIONS[f_name]
    if callable(activation):
        return f_name, activation
    if activation is not None and f_name in ACT2FN:
        return f_name, ACT2FN[f_name]
    why = f"has no activation called {'/'.join(ACTIVATION_ROLES)}" if activation is None else "is an unknown activation"
    raise ModelError(f"{name}: {f_name} {why}; define it: {REGISTER.format(f_name)}")


def _is_linear(module: Any) -> bool:
    return isinstance(module, nn.Linear | Conv1D) or storage.is_quantised(module)


def _weight(module: nn.Module) -> Tensor:
    """Return the weight of a linear map as [outputs, inputs]."""
    weight = storage.fetched(module)
    return weight.T if isinstance(module, Conv1D) else weight


def _bias(module: nn.Module) -> Tensor | None:
    return None if module.bias is None else storage.fetched(module, "bias")
