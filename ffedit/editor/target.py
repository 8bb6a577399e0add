"""What should be found at a fact's key instead?

v* = W k* + δ, where δ is added to the layer's output at the subject's last token and optimised until the model says the
new object, while its other distributions about the subject stay (ROME, arXiv 2202.05262, eq. 4, with more to keep):

    L(δ) = − mean log P(o* | x, δ)  +  λ · mean KL(P(· | x') ‖ P(· | x', δ))  +  μ ‖δ‖² / ‖W k*‖²

While the new object stays unlikely in some context, the optimisation goes on with λ and μ eased: an edit that does not
take keeps nothing. Where the bare prompt says it from the start, δ is 0: in other contexts an edit arrives at keys
beside k*, so that one which is in the model already need not reach the same in all of them. Many values are optimised
together, each with its own loss, its own Adam and its own end, so that what is found for one does not depend on its
company.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import cos, exp, log, pi

import torch
from torch import Tensor

from ffedit.anatomy import Editable
from ffedit.editor.config import EditConfig
from ffedit.editor.objective import ROOM, SHARES, Objective, size
from ffedit.editor.wording import Wording
from ffedit.errors import EditError
from ffedit.feed_forward import FeedForward
from ffedit.hooks import frozen
from ffedit.linalg import double
from ffedit.progress import Progress, silent
from ffedit.room import halving, room


@dataclass(frozen=True, eq=False)
class Value:
    """What `choose_values` found for one subject.

    Attributes:
        v: v* = W k* + δ, [d_model], float64.
        delta: δ, [d_model], float64.
        losses: the whole loss before each step, nats.
        probabilities: of each fact's new object in its bare prompt with δ in place.
    """

    v: Tensor
    delta: Tensor
    losses: tuple[float, ...]
    probabilities: tuple[float, ...]


def choose_values(
    editable: Editable,
    place: FeedForward,
    wordings: Sequence[Wording],
    keys: Tensor,
    lengths: Tensor,
    config: EditConfig,
    progress: Progress = silent,
) -> list[Value]:
    """Find v* for each of `wordings`.

    Args:
        editable: the model; nothing in it changes.
        place: where the facts are to be written.
        wordings: what is to be said and what is to be kept, one for each subject.
        keys: k* of each, [d_ff, n].
        lengths: the unit in which δ is measured, [n]: the norm of the residual stream behind the layer.
        config: steps, weights and bounds.
        progress: told how far it is.

    Raises:
        EditError: the loss is not finite, or there is no memory for a single subject.
    """
    refusal = EditError(
        "not enough memory to choose a single value; use fewer phrasings or contexts, or a smaller dtype"
    )
    W = place.matrix
    current = (W @ keys.to(W.device)).T
    units = current.norm(dim=1) if config.absolute else lengths.to(current)
    values: list[Value] = []
    with frozen(editable.model):
        for first, last in _groups(editable, place, wordings):

            def advance(stage: str, done: int, total: int, first: int = first, count: int = last - first) -> None:
                progress(stage, first * total + done * count, len(wordings) * total)

            def choose(some: Sequence[int], advance: Progress = advance) -> list[Value]:
                one = Objective(editable, place, [wordings[i] for i in some], config)
                return _optimise(one, current[list(some)], units[list(some)], config, advance)

            values += [value for part in halving(choose, range(first, last), refusal) for value in part]
    return values


def _groups(editable: Editable, place: FeedForward, wordings: Sequence[Wording]) -> Iterator[tuple[int, int]]:
    """Runs of wordings whose recordings fit into memory together."""
    most, first, held = room(editable, ROOM, SHARES), 0, 0
    for i, wording in enumerate(wordings):
        one = size(editable, place, wording)
        if i > first and held + one > most:
            yield first, i
            first, held = i, 0
        held += one
    yield first, len(wordings)


def _optimise(
    objective: Objective, current: Tensor, lengths: Tensor, config: EditConfig, progress: Progress
) -> list[Value]:
    """Minimise each loss; `current` is W k* of each value, [n, d_model], float64, and `lengths` the unit of δ, [n]."""
    device, n = objective.editable.device, len(current)
    dtype = torch.promote_types(objective.place.dtype, torch.float32)
    unit = lengths.to(device, dtype)[:, None]
    z, mean, square = (torch.zeros(n, current.shape[1], dtype=dtype, device=device) for _ in range(3))
    losses: list[list[float]] = [[] for _ in range(n)]
    said: list[list[list[float]]] = [[] for _ in range(n)]
    going, missing = torch.ones(n, dtype=torch.bool), torch.zeros(n, dtype=dtype, device=device)
    for attempt in range(config.attempts):
        if attempt:
            going = torch.tensor([exp(min(map(min, facts))) < config.enough for facts in said])
        for step in range(config.steps + 1):
            ease = config.ease**attempt * config.fall**step
            loss, gradient, found = objective.loss_and_gradient(z * unit, going, step, ease)
            loss += ease * config.weight_decay * z.square().sum(1)
            gradient = unit * gradient + 2 * ease * config.weight_decay * z
            for i in going.nonzero()[:, 0].tolist():
                said[i] = found[i]
                losses[i].append(float(loss[i]))
                least = exp(min(map(min, said[i])))
                missing[i] = log(1.1 * min(config.target_probability, 1.0)) - log(max(least, 1e-30))
                going[i] = not (least >= config.target_probability or losses[i][-1] < config.stop)
            if step == config.steps or not going.any():
                break
            if config.absolute:
                mean, square = 0.9 * mean + 0.1 * gradient, 0.999 * square + 0.001 * gradient.square()
                root = (square / (1 - 0.999 ** (step + 1))).sqrt() + 1e-8
                move = config.step_size / unit * (mean / (1 - 0.9 ** (step + 1))) / root
            else:
                slope = gradient.norm(dim=1, keepdim=True).clamp(min=1e-30)
                move = (missing[:, None] / slope).clamp(max=config.step_size) * gradient / slope
            if config.anneal:
                move = move * 0.5 * (1 + cos(pi * step / config.steps))
            z = torch.where(going.to(device)[:, None], z - move, z)
            z = z * (config.clamp / z.norm(dim=1, keepdim=True).clamp(min=1e-30)).clamp(max=1.0)
            progress("choosing the value", step + 1, config.steps)
    deltas = double(z * unit)
    if not torch.isfinite(deltas).all():
        raise EditError("the loss is not finite: the model overflows; compute in a wider dtype")
    return [
        Value(W_k + delta, delta, tuple(curve), tuple(exp(fact[0]) for fact in facts))
        for W_k, delta, curve, facts in zip(current.to(deltas), deltas, losses, said, strict=True)
    ]
