"""Choosing v* as published, for comparison: one fact at a time, the whole model in every step.

The procedure of ROME (Meng et al. 2022, arXiv 2202.05262, section 3.1, step 2). δ is added to what the layer's value
matrix gives at the subject's last token, in every text, and moved by Adam:

    L(δ) = − mean log P(o* | x, δ)  +  λ Σ KL(P(· | x') ‖ P(· | x', δ))  +  μ ‖δ‖² / ‖W k*‖²

with the mean over the texts x that state the fact, behind each context, and the sum over essence prompts x', read at
their last token (one, in the paper); v* = W k* + δ, and k* is the mean of the value matrix's inputs at the subject's
last token over the texts x. All texts are one batch, padded on the right; each step runs all layers at all tokens and
unembeds all of them. The gradient is taken for δ alone, so the backward pass ends at the layer by itself.

It is the oracle that values are compared with and the opponent that speed is measured against. So it does nothing
beyond what was published, neither waste (no cache is built, no parameter asks for a gradient, what does not depend on δ
is read once) nor cleverness, and it knows nothing of ffedit. Three things are not as in equation 4: it gives the
divergence with its arguments exchanged, and no decay; and the steps may be relative to ‖W k*‖ and shorten, as ffedit's
do by default.
"""

from __future__ import annotations

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
        losses: L before each step, nats.
    """

    v: Tensor
    delta: Tensor
    losses: tuple[float, ...]


class Objective:
    """L(δ) of one fact.

    Attributes:
        current: W k*, [d_model], float64.
        scale: ‖W k*‖.
    """

    def __init__(
        self,
        model: nn.Module,
        value_module: nn.Module,
        W: Tensor,
        texts: Sequence[Text],
        essence: Sequence[Text],
        weight_decay: float,
        kl_weight: float,
    ) -> None:
        """Run all texts once, unedited: what they give for k* and for the essence is what the steps refer to."""
        self.model, self.module, self.texts = model, value_module, list(texts)
        self.weight_decay, self.kl_weight = weight_decay, kl_weight
        rows = [*texts, *essence]
        longest = max(len(text.ids) for text in rows)
        self.ids = torch.tensor([[*t.ids, *[0] * (longest - len(t.ids))] for t in rows], device=W.device)
        self.at = torch.arange(len(rows)), torch.tensor([text.subject_last for text in rows])
        self.last = torch.arange(len(texts), len(rows)), torch.tensor([len(text.ids) - 1 for text in essence]).long()
        entering: list[Tensor] = []
        with (
            torch.no_grad(),
            hooked(value_module.register_forward_pre_hook(lambda _, given: entering.append(given[0]))),
        ):
            logits = self.logits()
        self.before = logits[self.last].log_softmax(-1)
        # Some models flatten texts and tokens before the feed-forward layer.
        keys = entering[0].reshape(len(rows), longest, -1)[self.at][: len(texts)]
        self.current = W.detach().double() @ keys.double().mean(0)
        self.scale = float(self.current.norm())

    def logits(self) -> Tensor:
        """Of all texts at all tokens, [texts, tokens, vocabulary]."""
        logits: Tensor = self.model(input_ids=self.ids, use_cache=False).logits
        return logits

    def __call__(self, delta: Tensor) -> Tensor:
        """L(δ), nats; δ is [d_model]."""

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
        divergence = (self.before.exp() * (self.before - log_probs[self.last])).sum()
        decay = delta.square().sum() / self.scale**2
        return self.kl_weight * divergence + self.weight_decay * decay - torch.stack(said).mean()


def plain_value(
    model: nn.Module,
    value_module: nn.Module,
    W: Tensor,
    texts: Sequence[Text],
    essence: Sequence[Text],
    *,
    steps: int,
    step_size: float,
    relative: bool,
    cosine: bool,
    clamp: float,
    weight_decay: float,
    kl_weight: float,
    stop: float = 0.0,
) -> PlainValue:
    """Find v* for one fact.

    Args:
        model: a causal language model of transformers, in float32 or float64, in which it then computes.
        value_module: the linear map whose output δ is added to.
        W: its weight, [d_model, d_ff].
        texts: the prompt with the new object behind it, after each context.
        essence: prompts whose next-token distribution is to stay.
        steps: of Adam.
        step_size: Adam's. A first step moves each entry of δ by so much or, `relative`, δ by so much of ‖W k*‖.
        relative: δ = ‖W k*‖ z / √d_model, with Adam on z; else Adam on δ.
        cosine: the steps' length falls to nothing along a cosine.
        clamp: largest ‖δ‖ relative to ‖W k*‖, held after each step.
        weight_decay: μ, nats.
        kl_weight: λ.
        stop: where L is below this, nats, no further step is taken.
    """
    with frozen(model):
        objective = Objective(model, value_module, W, texts, essence, weight_decay, kl_weight)
        unit = objective.scale / len(W) ** 0.5 if relative else 1.0
        z = torch.zeros(len(W), dtype=W.dtype, device=W.device, requires_grad=True)
        adam = torch.optim.Adam([z], lr=step_size)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, steps) if cosine else None
        losses: list[float] = []
        for _ in range(steps):
            loss = objective(unit * z)
            losses.append(loss.item())
            if losses[-1] < stop:
                break
            adam.zero_grad()
            loss.backward()
            adam.step()
            if schedule is not None:
                schedule.step()
            with torch.no_grad():
                z *= (clamp * objective.scale / (unit * z.norm())).clamp(max=1.0)
    delta = (unit * z.detach()).double()
    return PlainValue(objective.current + delta, delta, tuple(losses))


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
