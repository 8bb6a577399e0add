"""What addresses a fact, and what should be found there instead.

*Key*: k* is the mean, over contexts, of the memory coefficients at the subject's last token (ROME, arXiv 2202.05262,
eq. 3).

*Value*: v* = W k* + δ, where δ is added to the layer's output at that token and optimised until the model says the new
object, while its other distributions about the subject stay (eq. 4, with more to keep):

    L(δ) = − mean log P(o* | x, δ)  +  λ · mean KL(P(· | x') ‖ P(· | x', δ))  +  μ ‖δ‖² / ‖W k*‖²

What is kept is P with the old object's probability given to the new one. While the new object stays unlikely in some
context, the optimisation goes on with λ and μ eased: an edit that does not take keeps nothing.

The states below the layer and left of the subject do not depend on δ: they are recorded once, and every step runs
the model on from the layer at the subject's token only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ffedit import readout, replay
from ffedit.algebra import double, steadied
from ffedit.anatomy import Editable
from ffedit.editor.config import EditConfig
from ffedit.editor.wording import Phrasing, Wording
from ffedit.hooks import captured, frozen, replaced
from ffedit.memory import KeyValueMemory
from ffedit.progress import Progress, silent
from ffedit.tokens import pad


@dataclass(frozen=True, eq=False)
class Reading:
    """The texts of a wording, run once through the unedited model.

    Attributes:
        phrasings: prompts, then essence prompts, then own phrasings.
        recording: of all of them, with logits at the positions to be kept.
        keys: the memory's coefficients at every token, [texts, tokens, d_ff].
        k: k*, their mean at the subject's last token over the texts that state the fact, [d_ff], float64.
    """

    phrasings: tuple[Phrasing, ...]
    recording: replay.Recording
    keys: Tensor
    k: Tensor

    def steadied(self, C: Tensor, weight: float) -> Tensor:
        """C with the keys of these texts counted in (`algebra.steadied`), [d_ff, d_ff]."""
        beside = torch.zeros(self.keys.shape[:2], dtype=torch.bool)
        for row, phrasing in enumerate(self.phrasings):
            beside[row, : len(phrasing.text.ids)] = True
        at = torch.arange(len(self.phrasings)), torch.tensor([p.text.subject_last for p in self.phrasings])
        beside[at] = False
        return steadied(C, self.k, self.keys[at], self.keys[beside], weight)


def read(editable: Editable, memory: KeyValueMemory, wording: Wording) -> Reading:
    """Run the texts of `wording`; find k*, the mean of the keys over those that state the fact (ROME, eq. 3)."""
    phrasings = (*(Phrasing(e, ()) for e in wording.prompts), *wording.essence, *wording.phrasings)
    texts = [p.text for p in phrasings]
    reads = torch.tensor([(row, at) for row, p in enumerate(phrasings) for at in p.kept], dtype=torch.long)
    with captured({0: memory.module}, inputs=True) as entering:
        recording = replay.record(editable, pad([e.ids for e in texts]), reads.reshape(-1, 2))
    keys = entering[0].reshape(*recording.ids.shape, -1)
    stated = [keys[row, e.subject_last] for row, e in enumerate(texts) if e.target_ids]
    return Reading(phrasings, recording, keys, double(torch.stack(stated)).mean(0))


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
    """L(δ); each step runs some of the texts on from the layer."""

    def __init__(
        self, editable: Editable, memory: KeyValueMemory, wording: Wording, reading: Reading, config: EditConfig
    ) -> None:
        self.editable, self.memory, self.config = editable, memory, config
        self.texts = [p.text for p in reading.phrasings]
        self.kept = [p.kept for p in reading.phrasings]
        # Prompts and essence take part in every step, own phrasings in turn.
        self.prompts, self.always = len(wording.prompts), len(wording.prompts) + len(wording.essence)
        self.recording = reading.recording
        # What is kept is the model's distribution with the old object's probability given to the new one.
        before, (old, new) = self.recording.logits.float().softmax(-1), wording.swap
        if old != new:
            before[:, new] += before[:, old]
            before[:, old] = 0
        self.before = before.split([len(kept) for kept in self.kept])
        self.at = torch.tensor([e.subject_last for e in self.texts])

    def rows(self, step: int) -> list[int]:
        """Which texts take part in a step."""
        turn, count = len(self.texts) - self.always, self.config.phrasings_per_step
        own = {self.always + (step * count + i) % turn for i in range(min(count, turn))} if turn else set()
        return [*range(self.always), *sorted(own)]

    def terms(self, delta: Tensor, rows: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """With δ in place, for the texts `rows`, nats.

        Returns:
            log-probability of the new object in the prompts [p] and in own phrasings that state it [o], and the mean
            over texts of the KL divergence, summed along each text; the essence prompts by their own weight.
        """
        texts, kept = [self.texts[row] for row in rows], [self.kept[row] for row in rows]
        start = int(self.at[rows].min())
        longest = max(len(e.ids) for e in texts)
        # Counted from the end: a model that cannot be resumed runs whole rows.
        index, at = torch.tensor(rows), self.at[rows] - longest

        def add(output: Tensor) -> Tensor:
            moved = output.reshape(len(rows), -1, output.shape[-1]).clone()
            moved[torch.arange(len(rows)), at] += delta.to(output.dtype)
            return moved.reshape(output.shape)

        stated = [i for i, e in enumerate(texts) if e.target_ids]
        said = [texts[i] for i in stated]
        reads = readout.answer_reads(said)
        reads[:, 0] = torch.tensor(stated)[reads[:, 0]]
        kept_reads = torch.tensor([(i, p) for i, positions in enumerate(kept) for p in positions], dtype=torch.long)
        layer = self.memory.address.layer
        with replaced(self.memory.module, add):
            states = self.recording.states[layer][index, start:longest]
            both = torch.cat([reads, kept_reads.reshape(-1, 2)])
            logits = replay.resume(self.editable, self.recording, layer, states, index, start, both)
        log_probs = readout.answer_sums(logits[: len(reads)], said)
        before = torch.cat([self.before[row] for row in rows])
        after = logits[len(reads) :].float().log_softmax(-1)
        divergence = (torch.xlogy(before, before) - before * after).sum(-1)
        config, essence = self.config, self.always - self.prompts
        weights = torch.tensor(
            [config.essence if i < essence else config.keep / max(1, len(rows) - self.always)
             for i, positions in enumerate(kept[self.prompts :]) for _ in positions],
            device=divergence.device,
        )  # fmt: skip
        return log_probs[: self.prompts], log_probs[self.prompts :], (weights * divergence).sum()

    def loss(self, delta: Tensor, relative: Tensor, step: int, ease: float) -> Tensor:
        """L(δ) over the texts of a step; `relative` is δ / ‖W k*‖, `ease` scales what is kept and the decay."""
        prompts, own, divergence = self.terms(delta, self.rows(step))
        loss = ease * (divergence + self.config.weight_decay * relative.square().sum()) - prompts.mean()
        return loss - self.config.own * own.mean() if len(own) else loss


def choose_value(
    editable: Editable,
    memory: KeyValueMemory,
    wording: Wording,
    reading: Reading,
    config: EditConfig,
    progress: Progress = silent,
) -> Value:
    """Find v*.

    Args:
        editable: the model; nothing in it changes.
        memory: where the fact is to be written.
        wording: what is to be said and what is to be kept.
        reading: the texts of `wording`, with k*.
        config: steps, weights and bounds.
        progress: told how far it is.
    """
    objective = _Objective(editable, memory, wording, reading, config)
    current = (double(memory.value) @ reading.k).to(editable.device)
    scale = float(current.norm())
    # δ = scale · z / √d: an Adam step of size s on every entry of z moves δ by s · scale.
    root = len(current) ** 0.5
    z = torch.zeros(len(current), device=editable.device, requires_grad=True)
    losses: list[float] = []
    with frozen(editable.model):
        for attempt in range(config.attempts):
            adam = torch.optim.Adam([z], lr=config.step_size)
            # The steps shorten to nothing, so that the last ones average over the phrasings that take turns.
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, config.steps)
            for step in range(config.steps):
                loss = objective.loss(z * (scale / root), z / root, step, config.ease**attempt)
                losses.append(float(loss.detach()))
                (z.grad,) = torch.autograd.grad(loss, z)
                adam.step()
                schedule.step()
                with torch.no_grad():
                    z.mul_((config.clamp * root / z.norm()).clamp(max=1.0))
                progress("choosing the value", step + 1, config.steps)
            with torch.no_grad():
                delta = z * (scale / root)
                said, _, _ = objective.terms(delta, list(range(objective.prompts)))
            if float(said.min().exp()) >= config.enough:
                break
    delta = double(delta)
    return Value(current.to(delta.device) + delta, delta, tuple(losses), float(said[0].exp()))
