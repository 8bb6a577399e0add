"""Fine-tuning the same value matrix: the baselines that every comparison needs.

    L(Δ) = − mean log P(o* | x, W + Δ)        ft-l: |Δ_ij| <= ε, after every step

FT and FT+L as ROME compares with them (Meng et al. 2022, arXiv 2202.05262, section 3.2; the constraint is Zhu et al.
2020, arXiv 2012.00363). Nothing is preserved, not even earlier edits. Δ has no low rank, and nothing is solved for.
As published: Adam without weight decay, at most 25 steps, and the end where the loss falls below 1e-2. Otherwise: ε and
the step size are relative to the root mean square of W, since the published ones (5e-4 both, of GPT-2 XL) are absolute;
the prompts have the contexts of the other methods; and every token of the object is predicted after those before it,
where the published code predicts all of them at the prompt's last token.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from ffedit.algebra.linalg import double
from ffedit.editor.config import check_numbers
from ffedit.editor.edit import Edit, restored
from ffedit.editor.job import Job, Method
from ffedit.editor.key import build_prompts
from ffedit.editor.provenance import Record
from ffedit.errors import EditError
from ffedit.inference import generation, replay
from ffedit.inference.batching import batches, split_on_oom
from ffedit.model.editable import Editable
from ffedit.model.feed_forward import FeedForward
from ffedit.model.hooks import frozen
from ffedit.model.storage import resident
from ffedit.model.tokenization import Encoded, pad

# Tokens in a batch; loss, in nats, below which training ends, as in ROME's published code (`baselines/ft/ft_main.py`).
TOKENS, STOP = 2048, 1e-2


@dataclass(frozen=True)
class FineTuneConfig:
    """Numbers of fine-tuning.

    Attributes:
        steps: Adam steps.
        rate: step size relative to the root mean square of W.
    """

    steps: int = 25
    rate: float = 0.02

    def __post_init__(self) -> None:
        check_numbers("ft", self, counts=("steps",), positive=("rate",))


@dataclass(frozen=True)
class BoundedFineTuneConfig(FineTuneConfig):
    """Numbers of fine-tuning within a bound.

    Attributes:
        bound: largest change of an entry of W, relative to the root mean square of W.
    """

    bound: float = 0.05

    def __post_init__(self) -> None:
        check_numbers("ft-l", self, counts=("steps",), positive=("rate", "bound"))


def tune(method: str, kind: type[FineTuneConfig], job: Job) -> Edit:
    """Train the value matrix of one layer on the prompts of the facts; numbers with a `bound` limit each entry of Δ."""
    editable, numbers = job.editable, job.config.of(method, kind)
    (ff,) = job.ff_layers
    record = Record(method, job)
    prompt_sets = build_prompts(editable, job.groups, job.config)
    texts = [text for prompt_set in prompt_sets for text in prompt_set.prompts]
    W = double(ff.value.clone())
    scale = float(W.square().mean().sqrt())
    # Trained in float32 at least, beside the stored weights: an Adam step may be smaller than a 16-bit rounding.
    delta = torch.zeros_like(W, dtype=torch.float32)
    adam = torch.optim.Adam([delta], lr=numbers.rate * scale)
    losses = []
    with ExitStack() as stack:
        for module in {memory.module for memory in ff.memories}:
            stack.enter_context(resident(module))
        stack.enter_context(restored(ff.memories))
        stack.enter_context(frozen(editable.model))
        for step in range(numbers.steps):
            loss, gradient = _loss_and_gradient(editable, ff, texts)
            delta.grad = gradient.to(delta.device)  # W is on the CPU where its device has no float64
            losses.append(loss)
            if loss < STOP:
                break
            adam.step()
            if isinstance(numbers, BoundedFineTuneConfig):
                delta.clamp_(-numbers.bound * scale, numbers.bound * scale)
            for memory, value in zip(ff.memories, ff.split(W + double(delta), 1).values(), strict=True):
                memory.set_(value)
            job.progress("fine-tuning", step + 1, numbers.steps)
    if not torch.isfinite(delta).all():
        raise EditError(f"the loss is not finite: the model overflows; use a smaller {method}.rate, or a wider dtype")
    record.add_dense(ff, delta)
    return record.edit([{"loss": losses, "contexts": list(prompt_sets[0].prefixes)}])


def _loss_and_gradient(editable: Editable, ff: FeedForward, texts: Sequence[Encoded]) -> tuple[float, Tensor]:
    """Return −mean log P(answer) over `texts`, nats, and its gradient for W, [d_model, Σ d_ff]."""
    leaves = {id(memory.leaf): memory.leaf for memory in ff.memories}

    def gradient_of(rows: Sequence[int]) -> tuple[float, Tensor]:
        batch = [texts[row] for row in rows]
        logits = replay.forward(editable, pad([e.ids for e in batch]), generation.answer_reads(batch))
        batch_loss = -generation.answer_sums(logits, batch).sum() / len(texts)
        gradients = dict(zip(leaves, torch.autograd.grad(batch_loss, list(leaves.values())), strict=True))
        pairs = [(memory.entry(gradients[id(memory.leaf)]), memory.stored_transposed) for memory in ff.memories]
        return float(batch_loss.detach()), torch.cat([(w.T if transposed else w).float() for w, transposed in pairs], 1)

    refusal = EditError("not enough memory for the gradient of a single text; use a smaller dtype, or another method")
    loss, gradient = 0.0, torch.zeros_like(ff.value, dtype=torch.float32)
    for leaf in leaves.values():
        leaf.requires_grad_(True)
    try:
        for rows in batches([len(e.ids) for e in texts], TOKENS):
            for batch_loss, batch_gradient in split_on_oom(gradient_of, rows, refusal):
                loss, gradient = loss + batch_loss, gradient + batch_gradient
    finally:
        for leaf in leaves.values():
            leaf.requires_grad_(False)
    return loss, gradient


FT = Method(
    "ft",
    solves="Adam on W for −log P(target)",
    choose="a baseline, not for use: it protects nothing else",
    source="Meng et al. 2022, arXiv 2202.05262, section 3.2; but in contexts, token by token, steps relative to W",
    compute=lambda job: job.process_group.in_all(lambda: tune("ft", FineTuneConfig, job)),
    numbers=FineTuneConfig,
    statistics=False,
)
FT_L = Method(
    "ft-l",
    solves="Adam on W for −log P(target), |Δ| <= ε in each entry",
    choose="a baseline that breaks less than ft",
    source="Zhu et al. 2020, arXiv 2012.00363; as ft, ε relative to W",
    compute=lambda job: job.process_group.in_all(lambda: tune("ft-l", BoundedFineTuneConfig, job)),
    numbers=BoundedFineTuneConfig,
    statistics=False,
)
