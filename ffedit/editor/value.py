"""What should be found at a fact's key instead?

v* = W k* + δ, where δ is added to the layer's output at the subject's last token and optimised until the model says the
new object in every context (ROME, arXiv 2202.05262, eq. 4):

    L(δ) = − mean log P(o* | x, δ)  +  ρᵗ ( λ · mean KL(P(· | x') ‖ P(· | x', δ))  +  μ ‖δ‖² / ‖h‖² )

h is the residual stream behind the layer, the unit of every length here: what δ has to turn is the stream, while ‖W k*‖
differs tenfold between the layers of one model. Steps go along the gradient, each a share of ‖h‖ long: Adam moves every
entry of δ alike at first, which makes δ longer than it has to be. The two penalties weigh less from step to step
(ρ < 1), so that an easy fact ends small while they are high, and a hard one is reached once they are low. Where every
context says the new object from the start, more likely than not, δ is 0: an edit that is in the model already reaches
somewhat less in single contexts than its value did when it was chosen, and is not to be written again.

Many values are optimised together, each with its own loss and its own end, so that what is found for one does not
depend on its company.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import exp, log

import torch
from torch import Tensor

from ffedit.algebra.linalg import double
from ffedit.editor.config import EditConfig
from ffedit.editor.prompts import PromptSet
from ffedit.editor.value_loss import ROOM, SHARES, Objective, size
from ffedit.errors import EditError
from ffedit.inference.batching import batch_budget, split_on_oom
from ffedit.model.editable import Editable
from ffedit.model.feed_forward import FeedForward
from ffedit.model.hooks import frozen
from ffedit.progress import Progress, silent

# A step aims at this multiple of the target probability, so that the last one does not end just below it.
AIM = 1.1
# Of a new object that is said from the start, in every context: likelier than all else together.
SAID = 0.5
# Nats that a δ as long as the residual stream would gain: less is rounding, as where nothing that is read depends on δ
# (behind the last layer, but at the subject itself), and gives no direction.
FLAT = 1e-4


@dataclass(frozen=True, eq=False)
class Value:
    """What `choose_values` found for one subject.

    Attributes:
        v: v* = W k* + δ, [d_model], float64.
        delta: δ, [d_model], float64.
        losses: the whole loss before each step, and behind the last, nats.
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
    config: EditConfig,
    progress: Progress = silent,
) -> list[Value]:
    """Find v* for each of `prompt_sets`.

    Args:
        editable: the model; nothing in it changes.
        ff: where the facts are to be written.
        wordings: what is to be said and what is to be kept, one for each subject.
        keys: k* of each, [d_ff, n].
        lengths: the unit in which δ is measured, [n]: the norm of the residual stream behind the layer.
        config: steps, weights and bounds.
        progress: told how far it is.

    Raises:
        EditError: the loss is not finite, or there is no memory for a single subject.
    """
    refusal = EditError("not enough memory to choose a single value; use fewer contexts, or a smaller dtype")
    W = ff.matrix
    current = (W @ keys.to(W.device)).T
    units = lengths.to(current) if config.optimizer == "gradient" else current.norm(dim=1)
    values: list[Value] = []
    with frozen(editable.model):
        for first, last in _groups(editable, ff, prompt_sets):

            def advance(stage: str, done: int, total: int, first: int = first, count: int = last - first) -> None:
                progress(stage, first * total + done * count, len(prompt_sets) * total)

            def choose(some: Sequence[int], advance: Progress = advance) -> list[Value]:
                one = Objective(editable, ff, [prompt_sets[i] for i in some], config)
                return _optimise(one, current[list(some)], units[list(some)], config, advance)

            values += [value for part in split_on_oom(choose, range(first, last), refusal) for value in part]
    return values


def _groups(editable: Editable, ff: FeedForward, prompt_sets: Sequence[PromptSet]) -> Iterator[tuple[int, int]]:
    """Runs of wordings whose recordings fit into memory together."""
    most, first, held = batch_budget(editable, ROOM, SHARES), 0, 0
    for i, prompt_set in enumerate(prompt_sets):
        one = size(editable, ff, prompt_set)
        if i > first and held + one > most:
            yield first, i
            first, held = i, 0
        held += one
    yield first, len(prompt_sets)


def _optimise(
    objective: Objective, current: Tensor, lengths: Tensor, config: EditConfig, progress: Progress
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
    # How much log-probability the new object misses in the context that says it least; aimed at is a little more.
    aim, missing = log(AIM * min(config.target_probability, 1.0)), torch.zeros(n, dtype=dtype, device=device)
    for step in range(config.steps + 1):
        penalty = config.penalty_decay**step
        loss, gradient, found = objective.loss_and_gradient(z * unit, going, penalty)
        loss += penalty * config.weight_decay * z.square().sum(1)
        gradient = unit * gradient + 2 * penalty * config.weight_decay * z
        for i in going.nonzero()[:, 0].tolist():
            said[i] = found[i]
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


def _gradient_steps(config: EditConfig) -> Callable[[Tensor, Tensor], Tensor]:
    """Steps along the gradient, [n, d_model], to where it says that nothing is missing; of `step_size` at most."""

    def step_of(gradient: Tensor, missing: Tensor) -> Tensor:
        slope = gradient.norm(dim=1, keepdim=True).clamp(min=FLAT)
        step: Tensor = (missing / slope).clamp(max=config.step_size) * gradient / slope
        return step

    return step_of


def _adam_steps(config: EditConfig, unit: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """Adam's steps of each value on its own, in units of `unit` [n, 1]; as published, entries of δ move alike."""
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
