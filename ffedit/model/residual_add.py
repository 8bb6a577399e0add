"""How a block adds its feed-forward output to the residual stream.

Blocks differ: some normalise the output before they add it (Gemma 2, OLMo 2), some normalise the sum (BERT, BART), some
scale it (Granite), some add attention and feed-forward output to the stream at once (GPT-J, Falcon). So it is
determined by probe passes: which modules run behind the value matrix, or a mixture's block, and what the stream is
without their output. The latter is measured in a second pass, in which the last layer adds nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ffedit.errors import ModelError
from ffedit.model.feed_forward import FeedForward
from ffedit.model.hooks import calls, capture, leaves, replace_output


@dataclass(frozen=True, eq=False)
class ResidualAdd:
    """Addition of one block's feed-forward output to the residual stream.

    Attributes:
        added: the module whose output is added: the value matrix or a mixture's block, or a norm behind it.
        norm: the module that receives the sum, where the block ends in one.
        factor: what the addend is multiplied by.
    """

    added: nn.Module
    norm: nn.Module | None
    factor: float = 1.0


@torch.no_grad()
def find_residual_adds(
    layers: Sequence[nn.Module], feed_forward: Sequence[FeedForward], probe: Callable[[], object]
) -> list[ResidualAdd]:
    """Find the residual add of every layer, from two passes of `probe`.

    Raises:
        ModelError: with the last layer's addend removed, its residual stream is not the remainder.
    """
    with ExitStack() as stack:
        seen = [
            stack.enter_context(calls(_steps(layer, one.module)))
            for layer, one in zip(layers, feed_forward, strict=True)
        ]
        probe()
    residual_adds = [_joint(one.module, inside) for one, inside in zip(feed_forward, seen, strict=True)]
    factor = _factor(layers[-1], residual_adds[-1], feed_forward[-1].parts[-1].name, probe)
    return [ResidualAdd(joint.added, joint.norm, factor) for joint in residual_adds]


def _steps(layer: nn.Module, value: nn.Module) -> list[nn.Module]:
    """Return the leaf modules of a layer; the module that gives the feed-forward output counts as one."""
    inside = set(value.modules())
    return [value, *(module for module in leaves(layer) if module not in inside)]


def _joint(value: nn.Module, seen: list[tuple[nn.Module, Tensor, Tensor]]) -> ResidualAdd:
    """Follow the feed-forward output through the modules that receive only it; one last module gets the sum."""
    start = next(i for i, (module, _, _) in enumerate(seen) if module is value)
    added, part = value, seen[start][2]
    rest = seen[start + 1 :]
    while rest and torch.equal(rest[0][1], part):
        module, _, given = rest.pop(0)
        if not torch.equal(given, part):  # a dropout changes nothing here
            added, part = module, given
    return ResidualAdd(added, rest[0][0] if len(rest) == 1 else None)


def _factor(layer: nn.Module, joint: ResidualAdd, name: str, probe: Callable[[], object]) -> float:
    """Measure what the addend is multiplied by: the change of the sum when it is removed."""

    def total() -> tuple[Tensor, Tensor]:
        ends = {"total": layer if joint.norm is None else joint.norm}
        with capture(ends, inputs=joint.norm is not None) as sums, capture({"added": joint.added}) as parts:
            probe()
        return sums["total"].double().flatten(), parts["added"].double().flatten()

    whole, part = total()
    with replace_output(joint.added, torch.zeros_like):
        moved = whole - total()[0]
    factor = float(moved @ part / (part @ part).clamp(min=1e-30))
    error = float((moved - factor * part).abs().max() / moved.abs().max().clamp(min=1e-30))
    if not error < 5e-2:
        raise ModelError(
            f"{name}: what it gives is not added to the residual stream (off by {error:.1e}); a block that adds its "
            "feed-forward output to the stream was expected"
        )
    return 1.0 if abs(factor - 1) < 1e-2 else factor
