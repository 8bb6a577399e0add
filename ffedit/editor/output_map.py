"""Path of a feed-forward output to the residual stream: as it is, scaled (Granite), or normalised (Gemma 2, OLMo 2).

    h' = h + c · N(W k)

N is the norm between the feed-forward layer and the stream, or the identity (`discover.residual_add`). c is measured by
running one prompt with and without a probe added to W k; the change behind the layer also verifies N and c.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ffedit.algebra.linalg import double
from ffedit.inference import replay
from ffedit.model import discover, hooks
from ffedit.model.editable import Editable
from ffedit.model.feed_forward import FeedForward
from ffedit.model.storage import device_of
from ffedit.model.tokenization import Encoded, pad

# Largest relative deviation of the change in the residual stream from c (N(W k + δ) − N(W k)).
ADDED = 1e-2
# Gauss-Newton steps behind a norm, and steps of conjugate gradients in each.
NEWTON, CONJUGATE = 3, 12
# Damping of a step, relative to the norm's gain; squared gradient, relative to the first, below which a row is solved.
DAMPING, ROUNDING = 1e-2, 1e-8


@dataclass(frozen=True, eq=False)
class OutputMap:
    """Map from a layer's feed-forward output to what it adds to the residual stream: o -> c · N(o)."""

    norm: nn.Module | None  # N; None for the identity
    device: torch.device  # where N computes
    bias: Tensor | None = None  # of the value matrix, [1, d_model], which a norm sees, too
    factor: float = 1.0  # c
    gap: float = 0.0  # relative deviation between this map and what a probe changed in the stream
    known: bool = True  # False where the gap is more than rounding: something other than a module changes the output

    def __call__(self, outputs: Tensor) -> Tensor:
        """Return what `outputs` [d_model, n] add to the residual stream, [d_model, n]."""
        if self.norm is None:
            return self.factor * outputs
        with torch.no_grad():
            added: Tensor = double(self.factor * self.norm(self._rows(outputs)).T).to(outputs)
        return added

    def _rows(self, outputs: Tensor) -> Tensor:
        """Return `outputs` as the norm receives them, [n, d_model], in float32."""
        rows = outputs.T.to(self.device, torch.float32)
        return rows if self.bias is None else rows + self.bias.to(rows)

    def units(self, outputs: Tensor, streams: Tensor) -> Tensor:
        """Return the unit in which δ is measured, [n], of outputs W k* and residual streams h [d_model, n].

        A δ of one unit moves the stream by its own length ‖h‖ where the output is added to it, scaled or not. Behind a
        norm only the direction of W k* + δ counts, so that the unit is ‖W k*‖.
        """
        plain = self.norm is None and self.known
        units: Tensor = streams.norm(dim=0) / abs(self.factor) if plain else outputs.norm(dim=0)
        return units

    def output_change(self, outputs: Tensor, wanted: Tensor) -> Tensor:
        """Return changes d of `outputs` such that c N(o + d) − c N(o) is nearly `wanted`; all are [d_model, n].

        Behind a norm, d is found by Gauss-Newton; `wanted` may lie beyond what a normalised output can add. Since the
        length of o + d does not count there, it is that of o.
        """
        if self.norm is None:
            return wanted / self.factor
        norm, base = self.norm, self._rows(outputs)

        def added(rows: Tensor) -> Tensor:
            result: Tensor = self.factor * norm(rows)
            return result

        goal, current = added(base).detach() + wanted.T.to(base), base
        with hooks.frozen(norm):
            for _ in range(NEWTON):
                step = current + _step(added, current, goal)
                step = step * (base.norm(dim=1, keepdim=True) / step.norm(dim=1, keepdim=True))
                new_error, old_error = ((goal - added(rows)).norm(dim=1, keepdim=True) for rows in (step, current))
                current = torch.where(new_error < old_error, step, current)
        return double((current - base).detach().T).to(outputs)


def _step(added: Callable[[Tensor], Tensor], rows: Tensor, goal: Tensor) -> Tensor:
    """Return the Gauss-Newton step of `rows` [n, d_model] towards added(rows) = `goal`."""
    now, back = torch.func.vjp(added, rows)[:2]
    return least_squares(
        lambda change: torch.func.jvp(added, (rows,), (change,))[1], lambda image: back(image)[0], goal - now
    )


def least_squares(forward: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor], residual: Tensor) -> Tensor:
    """Return argmin_x ‖J x − r‖² + λ ‖x‖², for each row r of `residual` [n, d], by a few steps of CGLS from 0.

    `forward` is J, `back` its transpose. λ is `DAMPING` times the gain ‖Jᵀr‖² / ‖r‖²: along W k* a norm's gain is 0.
    """
    gradient = back(residual)
    size = gradient.square().sum(1, keepdim=True)
    weight = DAMPING * size / residual.square().sum(1, keepdim=True).clamp(min=1e-30)
    x, along, solved = torch.zeros_like(residual), gradient, ROUNDING * size
    for _ in range(CONJUGATE):
        image = forward(along)
        curvature = image.square().sum(1, keepdim=True) + weight * along.square().sum(1, keepdim=True)
        step = torch.where(size > solved, size / curvature.clamp(min=1e-30), 0.0)  # beyond, steps would follow rounding
        x, residual = x + step * along, residual - step * image
        gradient = back(residual) - weight * x
        new = gradient.square().sum(1, keepdim=True)
        along, size = gradient + new / size.clamp(min=1e-30) * along, new
    return x


@torch.no_grad()
def find_output_map(editable: Editable, ff: FeedForward, text: Encoded, output: Tensor) -> OutputMap:
    """Find how `output` [d_model], W k* at the subject in `text`, reaches the stream; two short passes."""
    ids, at, block = pad([text.ids[: text.site + 1]]), text.site, editable.layers[ff.layer]

    def stream(added: Tensor) -> tuple[Tensor, Tensor]:
        """Return the layer's own output in this text (W k* is a mean over several), and the stream behind it."""
        with (
            hooks.capture({"layer": ff.module, "block": block}) as seen,
            hooks.add_at(ff.module, torch.tensor([at]), added),
        ):
            replay.run_to(editable, ids, ff.layer)
        layer_output, leaving = (double(seen[name].reshape(*ids.shape, -1)[0, at]) for name in ("layer", "block"))
        return layer_output, leaving

    with discover.block_calls(block, ff) as seen:
        layer_output, before = stream(torch.zeros_like(output))
    added, bias = discover.residual_add(ff, seen).added, ff.bias()
    output_map = OutputMap(None if added is ff.module else added, device_of(ff.module), bias)
    # As large as the stream itself, so that the probe survives rounding in 16 bits.
    probe = (output * (before.norm().to(output.device) / output.norm())).to(before)
    if output_map.norm is not None:
        probe = probe.roll(1)  # along W k* itself a norm changes nothing
    moved, here = stream(probe)[1] - before, layer_output if bias is None else layer_output - double(bias[0])
    expected = (output_map((here + probe)[:, None]) - output_map(here[:, None]))[:, 0]
    factor = float(moved @ expected / (expected @ expected))
    gap = float((moved - factor * expected).norm() / moved.norm().clamp(min=1e-30))
    tolerance = max(ADDED, 8 * torch.finfo(ff.dtype).eps)
    return replace(output_map, factor=1.0 if abs(factor - 1) <= tolerance else factor, gap=gap, known=gap <= tolerance)
