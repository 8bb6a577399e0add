"""What addresses a fact, and what should be found there instead.

*Key*: k* is the mean, over contexts, of the memory coefficients at the subject's last token (ROME, arXiv 2202.05262, eq. 3).

*Value*: v* = W k* + δ, where δ is added to the layer's output at that token and optimised until the model says the new
object, while its other distributions about the subject stay (eq. 4, with more to keep):

    L(δ) = − mean log P(o* | x, δ)  +  λ · mean KL(P(· | x') ‖ P(· | x', δ))  +  μ ‖δ‖² / ‖W k*‖²

The states below the layer and left of the subject do not depend on δ: they are recorded once, and every step runs the model
on from the layer at the subject's token only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ffedit import readout, replay
from ffedit.algebra import double
from ffedit.anatomy import Editable
from ffedit.editor.config import EditConfig
from ffedit.editor.wording import Wording
from ffedit.hooks import captured, frozen, replaced
from ffedit.memory import KeyValueMemory
from ffedit.progress import Progress, silent
from ffedit.tokens import Encoded, pad


@torch.no_grad()
def read_key(editable: Editable, memory: KeyValueMemory, wording: Wording) -> Tensor:
    """k*, the mean of the coefficients at the subject's last token over all contexts, [d_ff], float64."""
    texts = (*wording.prompts, *wording.own)
    ids = pad([e.ids[: e.subject_last + 1] for e in texts])
    with captured({0: memory.module}, inputs=True) as keys:
        replay.forward(editable, ids, torch.tensor([[0, 0]]))
    rows = keys[0].reshape(*ids.shape, -1)
    return double(torch.stack([rows[i, e.subject_last] for i, e in enumerate(texts)])).mean(0)


@dataclass(frozen=True, eq=False)
class Value:
    """What `choose_value` found.

    Attributes:
        v: v* = W k* + δ, [d_model], float64.
        delta: δ, [d_model], float64.
        losses: the whole loss before each step, nats.
        probability: of the new object in the bare prompt with δ in place.
    """

    v: Tensor
    delta: Tensor
    losses: tuple[float, ...]
    probability: float


class _Objective:
    """The texts of a wording in one batch, recorded up to the layer."""

    def __init__(self, editable: Editable, memory: KeyValueMemory, wording: Wording, config: EditConfig) -> None:
        self.editable, self.memory, self.config = editable, memory, config
        self.said: Sequence[Encoded] = (*wording.prompts, *wording.own)
        self.prompts = len(wording.prompts)
        kept = [*wording.kept, *((e, (len(e.ids) - 1,)) for e in wording.essence)]
        texts = [*self.said, *(e for e, _ in kept)]
        offset = len(self.said)
        self.kept_reads = torch.tensor(
            [(offset + row, position) for row, (_, positions) in enumerate(kept) for position in positions]
        )
        # Every kept text counts by its positions; the essence by its own weight.
        weights = [config.keep] * sum(len(p) for _, p in wording.kept) + [config.essence] * len(wording.essence)
        positions = max(1, sum(len(p) for _, p in wording.kept))
        self.kept_weights = torch.tensor(
            [w / positions if i < len(weights) - len(wording.essence) else w for i, w in enumerate(weights)],
            device=editable.device,
        )
        said_reads = readout.answer_reads(self.said)
        self.reads = torch.cat([said_reads, self.kept_reads])
        self.split = len(said_reads)
        self.recording = replay.record(editable, pad([e.ids for e in texts]), self.reads)
        self.before = self.recording.logits[self.split :].float().log_softmax(-1)
        self.at = torch.tensor([e.subject_last for e in texts])
        self.start = int(self.at.min())
        self.rows = torch.arange(len(texts))

    def log_probs(self, delta: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probability of the new object in each said text [n], and KL at each kept position [k], nats."""

        def add(output: Tensor) -> Tensor:
            moved = output.reshape(len(self.rows), -1, output.shape[-1]).clone()
            # Counted from the end: a model that cannot be resumed runs the positions before `start` too.
            moved[self.rows, self.at - self.recording.ids.shape[1]] += delta.to(output.dtype)
            return moved.reshape(output.shape)

        layer = self.memory.address.layer
        with replaced(self.memory.module, add):
            states = self.recording.states[layer][:, self.start :]
            logits = replay.resume(self.editable, self.recording, layer, states, self.rows, self.start, self.reads)
        said = readout.answer_sums(logits[: self.split], self.said)
        after = logits[self.split :].float().log_softmax(-1)
        divergence = (self.before.exp() * (self.before - after)).sum(-1)
        return said, divergence

    def loss(self, said: Tensor, divergence: Tensor, relative: Tensor) -> Tensor:
        """L(δ); `relative` is δ / ‖W k*‖."""
        prompt, own = said[: self.prompts].mean(), said[self.prompts :]
        loss = -prompt + (self.kept_weights * divergence).sum() + self.config.weight_decay * relative.square().sum()
        return loss - self.config.own * own.mean() if len(own) else loss


def choose_value(
    editable: Editable,
    memory: KeyValueMemory,
    wording: Wording,
    k: Tensor,
    config: EditConfig,
    progress: Progress = silent,
) -> Value:
    """Find v*.

    Args:
        editable: the model; nothing in it changes.
        memory: where the fact is to be written.
        wording: what is to be said and what is to be kept.
        k: k*, [d_ff].
        config: steps, weights and bounds.
        progress: told how far it is.
    """
    objective = _Objective(editable, memory, wording, config)
    current = (double(memory.value) @ double(k)).to(editable.device)
    scale = float(current.norm())
    # δ = scale · z / √d: an Adam step of size s on every entry of z moves δ by s · scale.
    root = len(current) ** 0.5
    z = torch.zeros(len(current), device=editable.device, requires_grad=True)
    adam = torch.optim.Adam([z], lr=config.step_size)
    losses: list[float] = []
    best, best_z = float("inf"), z.detach().clone()
    with frozen(editable.model):
        for step in range(config.steps):
            said, divergence = objective.log_probs(z * (scale / root))
            loss = objective.loss(said, divergence, z / root)
            losses.append(float(loss.detach()))
            if losses[-1] < best:
                best, best_z = losses[-1], z.detach().clone()
            (z.grad,) = torch.autograd.grad(loss, z)
            adam.step()
            with torch.no_grad():
                z.mul_((config.clamp * root / z.norm()).clamp(max=1.0))
            progress("choosing the value", step + 1, config.steps)
        delta = best_z * (scale / root)
        with torch.no_grad():
            said, _ = objective.log_probs(delta)
    delta = double(delta)
    return Value(current.to(delta.device) + delta, delta, tuple(losses), float(said[0].exp()))
