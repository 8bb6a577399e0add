"""The keys of one expert: its rows of the first matrix, which all experts of a block share.

Where the matrix holds gate and up, their columns are two halves (Mixtral) or alternate (GPT-OSS). The block's own gate,
`Experts.gated`, determines which: applied to two columns alone, it shows its result for one gate and
one up; the order in which it gives the same for all columns at once is the order of the columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ffedit.errors import ModelError
from ffedit.model import offload
from ffedit.model.experts import Experts
from ffedit.model.first_layer import Role


@dataclass(frozen=True, eq=False)
class ExpertRows:
    """First matrix of one expert, as `KeyRows` of a dense layer; its tensors are views of the model's weights.

    Attributes:
        experts: the block.
        number: the number of the expert in it.
        name: its name in messages.
    """

    experts: Experts
    number: int
    name: str

    @property
    def gated(self) -> bool:
        """True if the activated coefficients are multiplied by a second set."""
        return self.experts.layout.gate

    @property
    def role(self) -> Role:
        """Role of the first matrix."""
        return Role("gate_up_proj", fused=True) if self.gated else Role("up_proj")

    @property
    def activation_name(self) -> str:
        """Name of the block's activation; the block's class name where it has no `act_fn`."""
        module = self.experts.module
        return type(getattr(module, "act_fn", module)).__name__

    @cached_property
    def order(self) -> tuple[slice, slice]:
        """Rows of the first matrix that are the gate's, and those that are up's.

        Raises:
            ModelError: they are neither two halves nor alternate, the gate first.
        """
        n = len(self._first) // 2
        z = torch.randn(8, 2 * n, generator=torch.Generator().manual_seed(0)).to(self._first.device)
        gate, up = z[:, :1], torch.tensor([-1.0, 0.0, 1.0]).to(z)
        made = self._pair(gate.expand(-1, 3), up.expand(8, -1))
        linear = torch.allclose(made[:, 2] - made[:, 1], made[:, 1] - made[:, 0], rtol=1e-3, atol=1e-5)
        for order in ((slice(0, n), slice(n, None)), (slice(0, None, 2), slice(1, None, 2))):
            alone = self._pair(z[:, order[0]], z[:, order[1]])
            if linear and torch.allclose(alone, self.experts.gated(z), rtol=1e-3, atol=1e-5):
                return order
        raise ModelError(
            f"{self.name}: gate and up of its experts stand neither in halves nor in turn, the gate first, so its keys "
            "cannot be told from the rest; its coefficients and its values can be read all the same"
        )

    def _pair(self, gate: Tensor, up: Tensor) -> Tensor:
        """Apply the gate to one column of each, for many such pairs at once."""
        return self.experts.gated(torch.stack([gate, up], -1))[..., 0]

    @property
    def rows(self) -> Tensor:
        """K, or of a gated expert G, [d_ff, d_model]: one key per row."""
        return self._first[self.order[0]] if self.gated else self._first

    @property
    def bias(self) -> Tensor | None:
        """Bias b, or b_g of the gate, [d_ff]."""
        return self._bias if self._bias is None or not self.gated else self._bias[self.order[0]]

    @property
    def up(self) -> Tensor | None:
        """U [d_ff, d_model] of a gated expert."""
        return self._first[self.order[1]] if self.gated else None

    @property
    def up_bias(self) -> Tensor | None:
        """b_u [d_ff]."""
        return self._bias[self.order[1]] if self._bias is not None and self.gated else None

    def coefficients(self, x: Tensor) -> Tensor:
        """Return m [.., d_ff] for the expert's input `x` [.., d_model]; gradients flow to `x`."""
        return self.experts.coefficients(self.number, x)

    @property
    def _first(self) -> Tensor:
        """[outputs, d_model]."""
        matrix = offload.fetched(self.experts.module, self.experts.first)[self.number]
        return matrix.T if self.experts.layout.transposed else matrix

    @property
    def _bias(self) -> Tensor | None:
        if not self.experts.layout.bias:
            return None
        return offload.fetched(self.experts.module, f"{self.experts.first}_bias")[self.number]
