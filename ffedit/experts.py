"""Sparse experts as one key-value memory: attention over the union of all experts' keys and values.

    FF(x) = Σ_e g_e(x) (V_eᵀ m_e(x) + b_e)         g_e = 0 for an expert that the router did not choose

Each expert is a memory of its own (its keys, its coefficients m_e, its values V_e), and the router scales what it
gives. So the block is one memory of E · d_ff keys and values whose coefficients are g_e m_e. transformers keeps the
matrices of all experts in one parameter each, [E, ..], and says how on the module (`has_gate`, `has_bias`,
`is_transposed`, `_apply_gate`): nothing is read from a shape. No module stands around a single expert, so what the
router chose is seen where it enters the experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ffedit import placement
from ffedit.errors import ModelError

DECLARED = ("has_gate", "has_bias", "is_transposed", "_apply_gate", "down_proj")


class Routed(NamedTuple):
    """What entered a block of experts.

    Attributes:
        x: what the experts receive, [n, d_model].
        chosen: the experts that each token goes to, [n, k].
        weights: the router's weight g of each, [n, k].
    """

    x: Tensor
    chosen: Tensor
    weights: Tensor


@dataclass(frozen=True, eq=False)
class Experts:
    """A block of experts in fused parameters, and what it holds.

    Attributes:
        module: the experts (not the block around them, which holds the router).
    """

    module: nn.Module

    def __post_init__(self) -> None:
        module: Any = self.module
        missing = [name for name in DECLARED if not hasattr(module, name)]
        if missing or getattr(module, "has_post_expert_norm", False):
            found = f"without {', '.join(missing)}" if missing else "with a norm behind each expert"
            raise ModelError(
                f"{type(module).__name__} {found} is no block of experts that ffedit can read; one that declares "
                "has_gate, has_bias and is_transposed, as transformers' own do, was expected"
            )

    @property
    def values(self) -> Tensor:
        """V, the values of all experts, one below the other, [E · d_ff, d_model]."""
        stored = placement.fetched(self.module, "down_proj")
        return (stored if self.module.is_transposed else stored.transpose(1, 2)).flatten(0, 1)

    def gates(self, routed: Routed) -> Tensor:
        """g [n, E]: the router's weight of every expert, 0 where it was not chosen."""
        count = len(placement.fetched(self.module, "down_proj"))
        # An index beyond the last expert stands for none (experts spread over devices).
        gates = torch.zeros(len(routed.x), count + 1, dtype=routed.weights.dtype, device=routed.x.device)
        return gates.scatter_add(1, routed.chosen.clamp(max=count), routed.weights)[:, :count].to(routed.x.dtype)

    def coefficients(self, routed: Routed) -> Tensor:
        """g_e m_e of all experts, one behind the other, [n, E · d_ff]."""
        module: Any = self.module
        name = "gate_up_proj" if module.has_gate else "up_proj"
        keys = placement.fetched(module, name)
        m = torch.einsum("nd,edf->nef" if module.is_transposed else "nd,efd->nef", routed.x, keys)
        if module.has_bias:
            m = m + placement.fetched(module, f"{name}_bias")
        m = module._apply_gate(m) if module.has_gate else module.act_fn(m)
        scaled: Tensor = m * self.gates(routed)[:, :, None]
        return scaled.flatten(1)

    def attend(self, routed: Routed) -> Tensor:
        """The block's output [n, d_model], as attention over the union of its experts' memories."""
        output = self.coefficients(routed) @ self.values
        if self.module.has_bias:
            output = output + self.gates(routed) @ placement.fetched(self.module, "down_proj_bias")
        return output


@contextmanager
def routed(module: nn.Module) -> Iterator[list[Routed]]:
    """Collect what enters a block of experts: each token, the experts it goes to, and how much of each."""
    seen: list[Routed] = []

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x, chosen, weights = (*args, *kwargs.values())
        seen.append(Routed(x.clone(), chosen.clone(), weights.clone()))

    handle = module.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()
