"""Choose the value v* that a fact's key is to give.

v* = W k* + δ, where δ is added to the layer's output at the subject's last token and optimised until the model predicts
the new object in every context (ROME, arXiv 2202.05262, eq. 4):

    L(δ) = − mean log P(o* | x, δ)  +  ρᵗ ( λ · mean KL(P(· | x') ‖ P(· | x', δ))  +  μ ‖δ‖² / ‖h‖² )

h is the residual stream behind the layer, and ‖h‖ the unit of every length: δ acts on the stream, while ‖W k*‖ differs
tenfold between the layers of one model. Steps follow the gradient: Adam at first moves every entry of δ by the same
amount, which makes δ longer than necessary. The weights of the two penalties decay from step to step (ρ < 1), so that
an easy fact ends with a small δ while they are high, and a hard one reaches its target once they are low. If the new
object is more likely than not in every context from the start, δ is 0: an edit that is in the model already reaches a
slightly lower probability in single contexts than its value did, and is not to be written again.

Many values are optimised together, each with its own loss and end, so that none depends on the others in its batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, log

import torch
from torch import Tensor

from ffedit.algebra.linalg import double
from ffedit.editor.config import ValueConfig
from ffedit.editor.prompts import PromptSet
from ffedit.editor.value_loss import ROOM, SHARES, Objective, size
from ffedit.errors import EditError
from ffedit.inference.batching import batch_budget, grouped, split_on_oom
from ffedit.model.editable import Editable
from ffedit.model.feed_forward import FeedForward
from ffedit.model.hooks import frozen
from ffedit.progress import Progress, silent

# A step aims at this multiple of the target probability, so that the last one does not end just below it.
AIM = 1.1
# Target at step 0, in every context: the new object is likelier than all else together.
SAID = 0.5
# Smallest meaningful gradient norm, in nats per ‖h‖: below it the gradient is rounding error, as where no output that
# is read depends on δ (behind the last layer, except at the subject itself), and gives no direction.
FLAT = 1e-4


@dataclass(frozen=True, eq=False)
class Value:
    """Value of one subject, found by `choose_values`.

    Attributes:
        v: v* = W k* + δ, [d_model], float64.
        delta: δ, [d_model], float64.
        losses: the whole loss before each step, and after the last, nats.
        probabilities: of each fact's new object in its bare prompt with δ in place.
    """

    v: Tensor
    delta: Tensor
    losses: tuple[float, ...]
    probabilities: tuple[float, ...]


def choose_values(
    editable: Editable,
    ff: FeedForward,
    prompt_sets: Sequence[PromptSet],
    keys: Tensor,
    lengths: Tensor,
    config: ValueConfig,
    progress: Progress = silent,
) -> list[Value]:
    """Choose v* for each of `prompt_sets`, of one subject each.

    Args:
        editable: the model; it is not changed.
        ff: the layer that the facts are to be written to.
        prompt_sets: n in all.
        keys: k* of each, [d_ff, n].
        lengths: the unit in which δ is measured, [n]: the norm of the residual stream behind the layer.
        config: steps, weights and bounds.
        progress: called with the progress.

    Raises:
        EditError: the loss is not finite, or memory does not suffice for a single subject.
    """
    refusal = EditError("not enough memory to choose a single value; use fewer contexts, or a smaller dtype")
    W = ff.matrix
    current = (W @ keys.to(W.device)).T
    units = lengths.to(current) if config.optimizer == "gradient" else current.norm(dim=1)
    values: list[Value] = []
    with frozen(editable.model):
        sizes = [size(editable, ff, prompt_set) for prompt_set in prompt_sets]
        budget = batch_budget(editable, ROOM, SHARES)
        for group in grouped(range(len(prompt_sets)), lambda members: sum(sizes[i] for i in members), budget):

            def advance(stage: str, done: int, total: int, first: int = group[0], count: int = len(group)) -> None:
                progress(stage, first * total + done * count, len(prompt_sets) * total)

            def choose(batch: Sequence[int], advance: Progress = advance) -> list[Value]:
                objective = Objective(editable, ff, [prompt_sets[i] for i in batch], config.kl_weight)
                return _optimise(objective, current[list(batch)], units[list(batch)], config, advance)

            values += [value for chosen in split_on_oom(choose, group, refusal) for value in chosen]
    return values


def _optimise(
    objective: Objective, current: Tensor, lengths: Tensor, config: ValueConfig, progress: Progress
) -> list[Value]:
    """Minimise each loss; `current` is W k* of each value, [n, d_model], float64, and `lengths` the unit of δ, [n]."""
    device, n = objective.editable.device, len(current)
    dtype = torch.promote_types(objective.ff.dtype, torch.float32)
    unit = lengths.to(device, dtype)[:, None]
    # δ = unit · z.
    z = torch.zeros(n, current.shape[1], dtype=dtype, device=device)
    step_of = _gradient_steps(config) if config.optimizer == "gradient" else _adam_steps(config, unit)
    losses: list[list[float]] = [[] for _ in range(n)]
    said: list[list[list[float]]] = [[] for _ in range(n)]
    going = torch.ones(n, dtype=torch.bool)
    # Log-probability that the new object lacks in its least likely context, relative to the aim.
    aim, missing = log(AIM * min(config.target_probability, 1.0)), torch.zeros(n, dtype=dtype, device=device)
    for step in range(config.steps + 1):
        penalty = config.penalty_decay**step
        loss, gradient, answered = objective.loss_and_gradient(z * unit, going, penalty)
        loss += penalty * config.weight_decay * z.square().sum(1)
        gradient = unit * gradient + 2 * penalty * config.weight_decay * z
        for i in going.nonzero()[:, 0].tolist():
            said[i] = answered[i]
            losses[i].append(float(loss[i]))
            least, enough = min(map(min, said[i])), config.target_probability
            if step == 0 and enough <= 1:
                enough = min(enough, SAID)
            going[i] = not (exp(least) >= enough or losses[i][-1] < config.target_loss)
            missing[i] = aim - least
        if step == config.steps or not going.any():
            break
        moved = z - step_of(gradient, missing[:, None])
        moved *= (config.max_delta_norm / moved.norm(dim=1, keepdim=True)).clamp(max=1.0)
        z = torch.where(going.to(device)[:, None], moved, z)
        progress("choosing the value", step + 1, config.steps)
    progress("choosing the value", config.steps, config.steps)
    deltas = double(z * unit)
    if not torch.isfinite(deltas).all():
        raise EditError("the loss is not finite: the model overflows; compute in a wider dtype")
    return [
        Value(W_k + delta, delta, tuple(curve), tuple(exp(fact[0]) for fact in facts))
        for W_k, delta, curve, facts in zip(current.to(deltas), deltas, losses, said, strict=True)
    ]


def _gradient_steps(config: ValueConfig) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the function of steps along the gradient, [n, d_model], which gain the log-probability that is missing.

    That is to first order; a step is at most `step_size` long.
    """

    def step_of(gradient: Tensor, missing: Tensor) -> Tensor:
        slope = gradient.norm(dim=1, keepdim=True).clamp(min=FLAT)
        step: Tensor = (missing / slope).clamp(max=config.step_size) * gradient / slope
        return step

    return step_of


def _adam_steps(config: ValueConfig, unit: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the function of Adam's steps in units of `unit` [n, 1]; as published, Adam works on δ itself."""
    mean = square = torch.zeros(())
    count = 0

    def step_of(gradient: Tensor, missing: Tensor) -> Tensor:
        nonlocal mean, square, count
        count += 1
        of_delta = gradient / unit
        mean = 0.9 * mean.to(gradient) + 0.1 * of_delta
        square = 0.999 * square.to(gradient) + 0.001 * of_delta.square()
        root = (square / (1 - 0.999**count)).sqrt() + 1e-8
        step: Tensor = config.step_size / unit * (mean / (1 - 0.9**count)) / root
        return step

    return step_of
