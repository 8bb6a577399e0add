"""Sparse experts as key-value memories: each expert is a memory, and all of a layer form one memory.

    FF(x) = Σ_e g_e(x) (V_eᵀ m_e(x) + b_e)         g_e = 0 for an expert that the router did not choose
          = Σ_e W_e k_e + …                        k_e = g_e m_e

With the router's weight inside the key of a fact, k_e = g_e m_e, the layer is one linear associative memory
[W_1 … W_E] with the key [k_1; …; k_E], and the algebra of a dense layer applies unchanged. Where the router scales an
expert's *input* (Llama 4), k_e = m_e(g_e x).

transformers stores the matrices of all experts in one parameter each, [E, ..], and declares the layout on the module
(`has_gate`, `has_bias`, `is_transposed`, `_apply_gate`); a layout that is not declared is a row of `roles.LAYOUTS`. A
single expert has no module, so the router's choice is captured at the input of the experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ffedit.errors import ModelError
from ffedit.model import storage
from ffedit.model.first_layer import KeyRows, Rows
from ffedit.model.hooks import first_of
from ffedit.model.roles import LAYOUTS, Layout, Role

DECLARED = ("has_gate", "has_bias", "is_transposed", "_apply_gate", "down_proj")


class Routed(NamedTuple):
    """Input of a block of experts."""

    x: Tensor  # input of the block, [n, d_model]
    chosen: Tensor  # the experts that each token goes to, [n, k]; a number past the last expert means none
    weights: Tensor  # the router's weight g of each chosen expert, [n, k]

    def at(self, rows: Tensor) -> Routed:
        """Select tokens by their numbers."""
        return Routed(*(tensor[rows.to(tensor.device)] for tensor in self))


@dataclass(frozen=True, eq=False)
class Experts:
    """Block of experts in fused parameters."""

    module: Any  # nn.Module of the experts (not the block around them, which holds the router)

    def __post_init__(self) -> None:
        name = type(self.module).__name__
        missing = [attribute for attribute in DECLARED if not hasattr(self.module, attribute)]
        if name not in LAYOUTS and (missing or getattr(self.module, "has_post_expert_norm", False)):
            reason = f"without {', '.join(missing)}" if missing else "with a norm after each expert"
            raise ModelError(
                f"{name} {reason} is not a block of experts that ffedit can read; one that declares has_gate, has_bias "
                "and is_transposed, as transformers' own do, was expected; use a dense model, or declare its layout: "
                f"from ffedit.model.roles import LAYOUTS, Layout; LAYOUTS[{name!r}] = Layout(...)"
            )

    @property
    def layout(self) -> Layout:
        """Layout of the matrices."""
        module = self.module
        return LAYOUTS.get(type(module).__name__) or Layout(module.has_gate, module.has_bias, module.is_transposed)

    @property
    def first(self) -> str:
        """Name of the parameter of the first matrices in the module."""
        return "gate_up_proj" if self.layout.gate else "up_proj"

    def __len__(self) -> int:
        """Return the number of experts."""
        return len(self.module.down_proj)

    def weights(self, routed: Routed) -> Tensor:
        """Return g [n, E]: the router's weight of every expert, 0 where it was not chosen."""
        gates = torch.zeros(len(routed.x), len(self) + 1, dtype=routed.weights.dtype, device=routed.x.device)
        return gates.scatter_add(1, routed.chosen.clamp(max=len(self)), routed.weights)[:, : len(self)]

    def key_rows(self, expert: int) -> KeyRows:
        """Return the first matrix of one expert."""

        def tensors() -> Rows:
            matrix, bias = self._first(expert)
            if not self.layout.gate:
                return Rows(matrix, bias)
            gate, up = self.order
            gate_bias, up_bias = (None, None) if bias is None else (bias[gate], bias[up])
            return Rows(matrix[gate], gate_bias, matrix[up], up_bias)

        role = Role(self.first, fused=self.layout.gate)
        activation = type(getattr(self.module, "act_fn", self.module)).__name__
        return KeyRows(role, self.module, activation, tensors, partial(self.coefficients, expert))

    @cached_property
    def order(self) -> tuple[slice, slice]:
        """Rows of the gate, and rows of up, in a first matrix: two halves (Mixtral), or alternating (GPT-OSS).

        In the right order, the block's own gate applied to all columns equals the gate applied to each pair of columns.
        Raises ModelError where neither order fits.
        """

        def pairwise(gate: Tensor, up: Tensor) -> Tensor:
            return self.gated(torch.stack([gate, up], -1))[..., 0]

        matrix, _ = self._first(0)
        n = len(matrix) // 2
        z = torch.randn(8, 2 * n, generator=torch.Generator().manual_seed(0)).to(matrix.device)
        gate, up = z[:, :1], torch.tensor([-1.0, 0.0, 1.0]).to(z)
        output = pairwise(gate.expand(-1, 3), up.expand(8, -1))
        linear = torch.allclose(output[:, 2] - output[:, 1], output[:, 1] - output[:, 0], rtol=1e-3, atol=1e-5)
        for order in ((slice(0, n), slice(n, None)), (slice(0, None, 2), slice(1, None, 2))):
            alone = pairwise(z[:, order[0]], z[:, order[1]])
            if linear and torch.allclose(alone, self.gated(z), rtol=1e-3, atol=1e-5):
                return order
        raise ModelError(
            f"{type(self.module).__name__}: gate and up are neither two halves nor alternating rows, gate first, so "
            "its keys cannot be read; its coefficients and its values can"
        )

    def _first(self, expert: int) -> tuple[Tensor, Tensor | None]:
        """Return the first matrix of one expert, [outputs, d_model], and its bias."""
        matrix = storage.fetched(self.module, self.first)[expert]
        bias = storage.fetched(self.module, f"{self.first}_bias")[expert] if self.layout.bias else None
        return matrix.T if self.layout.transposed else matrix, bias

    def coefficients(self, expert: int, x: Tensor) -> Tensor:
        """Return m_e [.., d_ff] of one expert for its input `x` [.., d_model], without the router's weight."""
        matrix, bias = self._first(expert)
        m = x @ matrix.T
        if bias is not None:
            m = m + bias
        return self.gated(m) if self.layout.gate else self.module.act_fn(m)

    def gated(self, m: Tensor) -> Tensor:
        """Apply the gate to the outputs of gate and up, [.., 2 d_ff] to [.., d_ff]."""
        if hasattr(self.module, "_apply_gate"):
            return self.module._apply_gate(m)  # type: ignore[no-any-return]
        gate, up = m.chunk(2, -1)
        return self.module.act_fn(gate) * up  # type: ignore[no-any-return]

    def key(self, expert: int, routed: Routed) -> tuple[Tensor, Tensor]:
        """Return the tokens that went to an expert, [t], and its keys k_e at them, [t, d_ff], in float32 at least."""
        tokens, choices = (routed.chosen == expert).nonzero(as_tuple=True)
        x, g = routed.x[tokens], routed.weights[tokens, choices][:, None]
        wide = torch.promote_types(x.dtype, torch.float32)
        if self.layout.scales_input:
            return tokens, self.coefficients(expert, x * g.to(x)).to(wide)
        return tokens, self.coefficients(expert, x).to(wide) * g.to(wide)

    def bias(self, routed: Routed) -> Tensor | None:
        """Return Σ_e g_e b_e [n, d_model], which belongs to no memory; None without biases."""
        if not self.layout.bias:
            return None
        stored = storage.fetched(self.module, "down_proj_bias")
        return self.weights(routed).to(stored) @ stored

    def attend(self, routed: Routed) -> Tensor:
        """Return the block's output [n, d_model], as attention over the union of its experts' memories."""
        stored = storage.fetched(self.module, "down_proj")
        output = torch.zeros_like(routed.x, dtype=torch.promote_types(routed.x.dtype, torch.float32))
        for expert in routed.chosen.unique().tolist():
            if expert < len(self):
                tokens, key = self.key(expert, routed)
                output[tokens] += key @ (stored[expert] if self.layout.transposed else stored[expert].T).to(key)
        bias = self.bias(routed)
        return output if bias is None else output + bias.to(output)


@dataclass(frozen=True, eq=False)
class Mixture:
    """Sparse block of a layer: a router, its experts, and experts that every token goes to."""

    block: nn.Module  # its output is the layer's feed-forward output
    experts: Experts  # the experts among which the router chooses
    # value matrices of the shared experts, which all tokens go to, by expert number: the routed experts' come first
    shared: Mapping[int, nn.Module]
    shared_gate: nn.Module | None  # gives the logit of the shared experts' weight; None: their output is not scaled

    @contextmanager
    def watched(
        self,
        see: Callable[[int, Tensor | None, Tensor, int], None] | None = None,
        routes: Callable[[Routed], None] | None = None,
        only: frozenset[int] | None = None,
    ) -> Iterator[None]:
        """In every pass inside the block, pass each expert's keys to `see` and the router's choice to `routes`.

        `see` takes an expert's number, the tokens that went to it [t] (None: all), its keys at them [t, d_ff], and the
        number of tokens in the pass; with `only`, it is called for these experts alone.
        """
        received: list[Tensor] = []

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = first_of(args, kwargs)
            received[:] = [x.detach().reshape(-1, x.shape[-1])]

        def route(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            inputs = [tensor.detach() for tensor in (*args, *kwargs.values())]
            routed = self._unscaled(received[0], inputs[0]) if self.experts.layout.scales_input else Routed(*inputs)
            if routes is not None:
                routes(routed)
            for expert in range(len(self.experts)):
                if see is not None and (only is None or expert in only):
                    see(expert, *self.experts.key(expert, routed), len(routed.x))

        def share(number: int, module: nn.Module, args: tuple[Any, ...]) -> None:
            keys = args[0].detach().reshape(-1, args[0].shape[-1])
            if self.shared_gate is not None:
                keys = keys * self._shared_weight(received[0]).to(keys)
            if see is not None:
                see(number, None, keys, len(keys))

        with ExitStack() as stack:
            stack.enter_context(self.block.register_forward_pre_hook(enter, with_kwargs=True))
            stack.enter_context(self.experts.module.register_forward_pre_hook(route, with_kwargs=True))
            for number, module in self.shared.items() if see else ():
                if only is None or number in only:
                    stack.enter_context(module.register_forward_pre_hook(partial(share, number)))
            yield

    def weights(self, routed: Routed) -> Tensor:
        """Return g [n, E + shared]: the router's weight of every expert, then the weight of the shared ones."""
        shared = self._shared_weight(routed.x).expand(-1, len(self.shared))
        return torch.cat([self.experts.weights(routed).float(), shared.float()], 1)

    def _shared_weight(self, x: Tensor) -> Tensor:
        """Return the weight of the shared experts' output, [n, 1]."""
        return x.new_ones(len(x), 1) if self.shared_gate is None else torch.sigmoid(self.shared_gate(x))

    def _unscaled(self, x: Tensor, received: Tensor) -> Routed:
        """Recover the router's choice where all experts receive g_e x: g_e = ⟨g_e x, x⟩ / ⟨x, x⟩, or 0 where x is 0."""
        scaled = received.reshape(len(self.experts), len(x), -1)
        g = torch.einsum("end,nd->ne", scaled.float(), x.float())
        g = g / x.float().square().sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
        most = int((g != 0).sum(-1).max())
        weights, chosen = g.topk(most, -1)
        return Routed(x, torch.where(weights != 0, chosen, len(self.experts)), weights)

    def attend(self, routed: Routed, shared: Mapping[int, Tensor]) -> Tensor:
        """Return the block's output [n, d_model] from the router's choice and the `shared` experts' keys [n, d_ff]."""
        output = self.experts.attend(routed)
        for number, keys in shared.items():
            output = output + (keys @ storage.fetched(self.shared[number]).T.to(keys)).to(output)
        return output
