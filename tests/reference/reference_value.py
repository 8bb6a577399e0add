"""Choosing v* as published, for comparison: one fact at a time, the whole model in every step.

The procedure of ROME (Meng et al. 2022, arXiv 2202.05262, section 3.1, step 2). δ is added to what the layer's value
matrix gives at the subject's last token, in every text, and moved by Adam or by steps of one length:

    L(δ) = − mean log P(o* | x, δ)  +  ρᵗ ( λ mean KL(P(· | x') ‖ P(· | x', δ))  +  μ ‖δ‖² / u² )

with the mean over the texts x that state the fact, behind each context, and over essence prompts x', read at their
last token (one, in the paper); v* = W k* + δ, and k* is the mean of the value matrix's inputs at the subject's
last token over the texts x. All texts are one batch, padded on the right; each step runs all layers at all tokens and
unembeds all of them. The gradient is taken for δ alone, so the backward pass ends at the layer by itself.

It is the oracle that values are compared with and the opponent that speed is measured against. So it does nothing
beyond what was published, neither waste (no cache is built, no parameter asks for a gradient, what does not depend on δ
is read once) nor cleverness, and it knows nothing of ffedit. Not as in equation 4 are the direction of the divergence
and the square of the decay; and by ffedit's default, the steps are of one length, that and the unit u are of the
residual stream (published: Adam's, u = ‖W k*‖), the penalties fall from step to step (published: ρ = 1), and a value is
done once every text gives the new object some probability (published: at a loss).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Text:
    """A text about the subject, in tokens.

    Attributes:
        ids: its token ids.
        answer: index of the new object's first token; `len(ids)` in an essence prompt.
        subject_last: index of the subject's last token.
    """

    ids: tuple[int, ...]
    answer: int
    subject_last: int


@dataclass(frozen=True, eq=False)
class PlainValue:
    """What the reference gives.

    Attributes:
        v: v* = W k* + δ, [d_model], float64.
        delta: δ, [d_model], float64.
        losses: L before each step, and behind the last, nats.
    """

    v: Tensor
    delta: Tensor
    losses: tuple[float, ...]


class Objective:
    """The terms of L(δ) of one fact.

    Attributes:
        current: W k*, [d_model], float64.
        stream: mean over the texts x of the residual stream behind the layer at the subject's last token, [d_model],
            float64.
    """

    def __init__(
        self,
        model: nn.Module,
        block: nn.Module,
        value_module: nn.Module,
        W: Tensor,
        texts: Sequence[Text],
        essence: Sequence[Text],
    ) -> None:
        """Run all texts once, unedited: what they give for k* and for the essence is what the steps refer to."""
        self.model, self.module, self.texts = model, value_module, list(texts)
        rows = [*texts, *essence]
        longest = max(len(text.ids) for text in rows)
        self.ids = torch.tensor([[*t.ids, *[0] * (longest - len(t.ids))] for t in rows], device=W.device)
        self.at = torch.arange(len(rows)), torch.tensor([text.subject_last for text in rows])
        self.last = torch.arange(len(texts), len(rows)), torch.tensor([len(text.ids) - 1 for text in essence]).long()
        entering: list[Tensor] = []
        leaving: list[Any] = []
        with (
            torch.no_grad(),
            hooked(value_module.register_forward_pre_hook(lambda _, given: entering.append(given[0]))),
            hooked(block.register_forward_hook(lambda _, __, result: leaving.append(result))),
        ):
            logits = self.logits()
        self.before = logits[self.last].log_softmax(-1)
        # Some models flatten texts and tokens before the feed-forward layer, and some blocks return a tuple.
        keys = entering[0].reshape(len(rows), longest, -1)[self.at][: len(texts)]
        stream = leaving[0][0] if isinstance(leaving[0], tuple) else leaving[0]
        self.stream = stream.reshape(len(rows), longest, -1)[self.at][: len(texts)].double().mean(0)
        self.current = W.detach().double() @ keys.double().mean(0)

    def logits(self) -> Tensor:
        """Of all texts at all tokens, [texts, tokens, vocabulary]."""
        logits: Tensor = self.model(input_ids=self.ids, use_cache=False).logits
        return logits

    def __call__(self, delta: Tensor) -> tuple[Tensor, Tensor]:
        """log P(o* | x, δ) of each text, [texts], and the mean KL over the essence prompts, nats; δ is [d_model]."""

        def add(_: nn.Module, __: Any, output: Tensor) -> Tensor:
            moved = output.reshape(*self.ids.shape, -1).clone()
            moved[self.at] += delta
            return moved.reshape(output.shape)

        with hooked(self.module.register_forward_hook(add)):
            log_probs = self.logits().log_softmax(-1)
        said = [
            log_probs[row, text.answer - 1 : len(text.ids) - 1]
            .gather(-1, self.ids[row, text.answer : len(text.ids), None])
            .sum()
            for row, text in enumerate(self.texts)
        ]
        divergence = (self.before.exp() * (self.before - log_probs[self.last])).sum() / max(1, len(self.last[0]))
        return torch.stack(said), divergence


def plain_value(
    model: nn.Module,
    block: nn.Module,
    value_module: nn.Module,
    W: Tensor,
    texts: Sequence[Text],
    essence: Sequence[Text],
    *,
    optimizer: str,
    steps: int,
    step_size: float,
    max_delta_norm: float,
    weight_decay: float,
    kl_weight: float,
    penalty_decay: float = 1.0,
    target_probability: float = 2.0,
    target_loss: float = 0.0,
    added: float | None = 1.0,
) -> PlainValue:
    """Find v* for one fact.

    Args:
        model: a causal language model of transformers, in float32 or float64, in which it then computes.
        block: the layer as a whole, whose output is the residual stream.
        value_module: the linear map whose output δ is added to.
        W: its weight, [d_model, d_ff].
        texts: the prompt with the new object behind it, after each context.
        essence: prompts whose next-token distribution is to stay.
        optimizer: "adam", or "gradient" for steps of one length; it decides on u, ‖W k*‖ or the residual stream's norm.
        steps: how many, at most.
        step_size: Adam's, of each entry of δ; or a step's length in u.
        max_delta_norm: largest ‖δ‖ in u, held after each step.
        weight_decay: μ, nats.
        kl_weight: λ.
        penalty_decay: ρ.
        target_probability: of the new object; where every text gives it that, no further step is taken.
        target_loss: nor where L is below this, nats.
        added: factor on the layer's output where it is added to the residual stream; None where it is normalised
            before, so that u is ‖W k*‖.
    """
    with frozen(model):
        objective = Objective(model, block, value_module, W, texts, essence)
        if optimizer == "adam" or added is None:
            unit = float(objective.current.norm())
        else:
            unit = float(objective.stream.norm()) / added
        delta = torch.zeros(len(W), dtype=W.dtype, device=W.device, requires_grad=True)
        adam = torch.optim.Adam([delta], lr=step_size)
        losses: list[float] = []
        for step in range(steps + 1):
            said, divergence = objective(delta)
            decay = weight_decay * delta.square().sum() / unit**2
            loss = penalty_decay**step * (kl_weight * divergence + decay) - said.mean()
            losses.append(loss.item())
            done = said.min().exp().item() >= target_probability or losses[-1] < target_loss
            if step == steps or done:
                break
            (delta.grad,) = torch.autograd.grad(loss, delta)
            if optimizer == "adam":
                adam.step()
            with torch.no_grad():
                if optimizer == "gradient":
                    slope = unit * delta.grad.norm()
                    missing = math.log(1.1 * min(target_probability, 1.0)) - float(said.min())
                    delta -= min(step_size, missing / float(slope)) * unit * delta.grad / delta.grad.norm()
                delta *= (max_delta_norm * unit / delta.norm()).clamp(max=1.0)
    found = delta.detach().double()
    return PlainValue(objective.current + found, found, tuple(losses))


@contextmanager
def hooked(handle: torch.utils.hooks.RemovableHandle) -> Iterator[None]:
    """Keep a hook for the length of a `with` block."""
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """No parameter asks for a gradient."""
    asked = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in asked:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in asked:
            parameter.requires_grad_(True)
