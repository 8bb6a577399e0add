"""The keys of a feed-forward layer: the rows of its first matrix.

    m = f(x Kᵀ + b)                        plain
    m = f(x Gᵀ + b_g) ⊙ (x Uᵀ + b_u)       gated: SwiGLU, GeGLU (Shazeer 2020, arXiv 2002.05202)

Row i of K is what Geva et al. 2021 (arXiv 2012.14913) call the key k_i: x is compared with it, and m_i is the weight of
the value v_i in the layer's output. f may depend on all coefficients at once, as softmax and SoLU do. Editing never
needs these rows, so they are searched for on first use: by role, then checked against what the model itself feeds to
its value matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu
from transformers.activations import ACT2FN
from transformers.pytorch_utils import Conv1D

from ffedit.errors import ModelError
from ffedit.model import offload
from ffedit.model.hooks import capture
from ffedit.model.quantized import is_quantised

Activation = Callable[[Tensor], Tensor]


class Role(NamedTuple):
    """Name of the first matrix, by role and not by model.

    Attributes:
        first: path of the module that holds K, or the gate G, in the module that holds the value matrix.
        up: path of the module that holds U, where the gate is a matrix of its own.
        fused: `first` holds G and, below it, U.
    """

    first: str
    up: str | None = None
    fused: bool = False


# The first row whose modules all exist is taken: pairs precede the single names that they contain.
ROLES = [
    Role("gate_proj", "up_proj"),
    Role("wi_0", "wi_1"),
    Role("w1", "w3"),
    Role("c_fc_0", "c_fc_1"),
    Role("gate_up_proj", fused=True),
    Role("input_linear", fused=True),
    Role("Wi", fused=True),
    *map(Role, ("c_fc", "fc1", "fc_in", "dense_h_to_4h", "wi", "lin1", "intermediate.dense", "up_proj", "w1")),
]
# Attributes in which feed-forward layers keep their activation: a module, a function, or the name of one.
ACTIVATION_ROLES = (
    *("act", "act_fn", "act_func", "activation", "activation_fn", "activation_func", "activation_function"),
    *("gelu_impl", "intermediate_act_fn", "intermediate.intermediate_act_fn"),
)
# Activations of feed-forward modules that have no such attribute, by class; and those that users register.
_REGISTERED: dict[str, Activation] = {"Lfm2MLP": silu}
# Code that error messages tell the reader to run.
NAME_KEYS = "from ffedit.model.first_layer import ROLES, Role; ROLES.insert(0, Role(...))"
REGISTER = 'from ffedit.model.first_layer import register_activation; register_activation("{}", function)'


def register_activation(name: str, function: Activation) -> None:
    """Register the function of an activation; it takes precedence over the model's own function of this name.

    Args:
        name: the name that the layer's activation attribute gives, the class or function that it holds, or, for a
            feed-forward module that has no such attribute, the class of this module.
        function: maps the outputs of the keys, [.., d_ff], to f of them, [.., d_ff].
    """
    _REGISTERED[name] = function


@dataclass(frozen=True, eq=False)
class KeyRows:
    """First matrix of a feed-forward layer, whatever its storage; its tensors are views of the model's weights.

    Attributes:
        role: the role that it was found by.
        first: the linear map that holds K or the gate, and U too where it is fused.
        second: the linear map that holds U, where it is a separate one.
        activation: f.
        activation_name: its name in the model.
    """

    role: Role
    first: nn.Module
    second: nn.Module | None
    activation: Activation
    activation_name: str

    @property
    def gated(self) -> bool:
        """True if the activated coefficients are multiplied by a second set."""
        return self.role.fused or self.second is not None

    @property
    def rows(self) -> Tensor:
        """K, or of a gated layer G, [d_ff, d_model]: one key per row."""
        weight = _weight(self.first)
        return weight.chunk(2)[0] if self.role.fused else weight

    @property
    def bias(self) -> Tensor | None:
        """Bias b, or b_g of the gate, [d_ff]."""
        bias = _bias(self.first)
        return bias.chunk(2)[0] if bias is not None and self.role.fused else bias

    @property
    def up(self) -> Tensor | None:
        """U [d_ff, d_model] of a gated layer."""
        if self.second is not None:
            return _weight(self.second)
        return _weight(self.first).chunk(2)[1] if self.role.fused else None

    @property
    def up_bias(self) -> Tensor | None:
        """b_u [d_ff]."""
        if self.second is not None:
            return _bias(self.second)
        bias = _bias(self.first)
        return bias.chunk(2)[1] if bias is not None and self.role.fused else None

    def coefficients(self, x: Tensor) -> Tensor:
        """Return the coefficients of the layer's values for `x`.

        Args:
            x: what the layer receives, behind its norm, [.., d_model].

        Returns:
            m [.., d_ff]; gradients flow to `x`.
        """
        m, up = self.activation(linear(x, self.rows, self.bias)), self.up
        return m if up is None else m * linear(x, up, self.up_bias)


def find(block: nn.Module, value: nn.Module, d_ff: int, name: str) -> KeyRows:
    """Find the key rows that belong to a value matrix, by role.

    Args:
        block: the layer of the model.
        value: the value matrix's module, somewhere inside.
        d_ff: number of its memories.
        name: its name in messages.

    Raises:
        ModelError: the first matrix or its activation was not recognised.
    """
    for holder in _holders(block, value):
        for role in ROLES:
            first, second = _part(holder, role.first), _part(holder, role.up) if role.up else None
            if not _is_linear(first) or (role.up and not _is_linear(second)):
                continue
            if all(len(_weight(module)) == d_ff * (1 + role.fused) for module in (first, second) if module is not None):
                called, activation = _activation(holder, name)
                return KeyRows(role, first, second, activation, called)
    children = ", ".join(path for path, module in block.named_modules() if path and not list(module.children()))
    known = "/".join(role.first + (f"+{role.up}" if role.up else "") for role in ROLES)
    raise ModelError(
        f"{name}: the keys of its {d_ff} memories were not recognised; {known} was expected, the layer holds "
        f"{children}; name them: {NAME_KEYS}"
    )


@torch.no_grad()
def check(rows: KeyRows, value: nn.Module, name: str, probe: Callable[[], object]) -> None:
    """Check with `probe`, a pass of the model over a few tokens, that `rows` computes the value matrix's input.

    Raises:
        ModelError: it does not.
    """
    with capture({"m": value, "x": rows.first}, inputs=True, first=True) as seen:
        probe()
    observed, computed = seen["m"].float(), rows.coefficients(seen["x"]).float()
    error = float((computed - observed).abs().max() / observed.abs().max().clamp(min=1e-12))
    if not error <= (1e-3 if seen["m"].dtype == torch.float32 else 5e-2):
        raise ModelError(
            f"{name}: coefficients computed with {rows.activation_name} differ from those observed by {error:.1e} of "
            f"their scale; say what it computes: {REGISTER.format(rows.activation_name)}, or which its keys are: "
            f"{NAME_KEYS}"
        )


def _holders(block: nn.Module, value: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules around the value matrix, the innermost first, up to the layer itself."""
    path = next(path for path, module in block.named_modules() if module is value)
    while path:
        path = path.rpartition(".")[0]
        yield block.get_submodule(path)


def _part(holder: nn.Module, path: str) -> Any:
    """Return the attribute at the dotted `path` below `holder`; None where there is none."""
    found: Any = holder
    for step in path.split("."):
        found = getattr(found, step, None)
    return found


def _activation(holder: nn.Module, name: str) -> tuple[str, Activation]:
    """Return the name of f and f itself; a function registered under the name takes precedence."""
    kept = next((part for path in ACTIVATION_ROLES if (part := _part(holder, path)) is not None), None)
    if kept is None:
        called = type(holder).__name__
    else:
        called = kept if isinstance(kept, str) else str(getattr(kept, "__name__", type(kept).__name__))
    if called in _REGISTERED:
        return called, _REGISTERED[called]
    if callable(kept):
        return called, kept
    if kept is not None and called in ACT2FN:
        return called, ACT2FN[called]
    why = f"has no activation called {'/'.join(ACTIVATION_ROLES)}" if kept is None else "is an unknown activation"
    raise ModelError(f"{name}: {called} {why}; say what it computes: {REGISTER.format(called)}")


def _is_linear(module: nn.Module | None) -> bool:
    return isinstance(module, nn.Linear | Conv1D) or (module is not None and is_quantised(module))


def _weight(module: nn.Module) -> Tensor:
    """Return the weight of a linear map as [outputs, inputs]."""
    weight = offload.fetched(module)
    return weight.T if isinstance(module, Conv1D) else weight


def _bias(module: nn.Module) -> Tensor | None:
    return None if module.bias is None else offload.fetched(module, "bias")
