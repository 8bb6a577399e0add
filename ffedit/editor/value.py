"""Choose the value v* that a fact's key is to give.

v* = W k* + δ, where δ is added to the layer's output at the subject's last token and optimised until the model predicts
the new object in every context (ROME, arXiv 2202.05262, eq. 4):

    L(δ) = − mean log P(o* | x, δ)  +  ρᵗ ( λ · mean KL(P(· | x') ‖ P(· | x', δ))  +  μ ‖δ‖² / u² )
           + κ · mean KL(P(· | y) ‖ P(· | y, δ))

x are the texts that state the fact, x' the essence prompts, and y the fact's `keep` prompts with their answers, at each
token of which the divergence is summed.

u is the unit of every length (`OutputMap.units`): a δ of this length moves the residual stream h by ‖h‖, while ‖W k*‖
differs tenfold between the layers of one model; behind a norm, where only the direction of W k* + δ counts, it is
‖W k*‖. Steps follow the gradient: Adam at first moves every entry of δ by the same amount, which makes δ longer than
necessary. The weights of the two penalties decay from step to step (ρ < 1), so that an easy fact ends with a small δ,
and a hard one reaches its target once they are low; κ does not decay, since what the user asks to keep is no price, and
a value is not done before each of y is held, its divergence at most `HELD` and its likeliest tokens what they were. If
the new object is more likely than not in every context from the start, δ is 0: an edit that is in the model already
reaches a slightly lower probability in single contexts than its value did, and is not to be written again.

Many values are optimised together, each with its own loss and end, so that none depends on the others in its batch.

Adding δ changes nothing below the layer and nothing left of the token. So all texts are recorded once, each token that
they share once (`Objective`); a step resumes those of the values still optimised at the layer and their subject's last
token, in batches of similar numbers of positions to run, and applies the unembedding only where the loss reads it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from math import exp, log
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ffedit.algebra.linalg import double
from ffedit.editor.config import ValueConfig
from ffedit.editor.key import LayerKeys, PromptSet
from ffedit.editor.output_map import find_output_map
from ffedit.errors import EditError
from ffedit.files import cache
from ffedit.files.resuming import load_state, save_state
from ffedit.inference import replay
from ffedit.inference.batching import TOKENS, batch_budget, batches, grouped, split_on_oom
from ffedit.inference.contexts import Context, passes
from ffedit.inference.distributed import ALONE, ProcessGroup, interleaved
from ffedit.inference.generation import log_softmax
from ffedit.inference.replay import Prefix
from ffedit.model.editable import Editable
from ffedit.model.feed_forward import FeedForward
from ffedit.model.hooks import add_at, capture, frozen
from ffedit.model.tokenization import Encoded, pad
from ffedit.progress import Progress, silent

# A step aims at this multiple of the target probability, so that the last one does not end just below it.
AIM = 1.1
# Target at step 0, in every context: the new object is likelier than all else together.
SAID = 0.5
# Largest divergence of a `keep` prompt that is held, nats: what is measured after the write is a little larger.
HELD = 0.1
# Smallest meaningful gradient norm, in nats per unit of δ: below it the gradient is rounding error, as where nothing
# that is read depends on δ.
FLAT = 1e-4
# Numbers in the recordings of a group of values, or in a batch of texts with its gradients: on a CPU 400 MB in float32,
# since larger batches leave its cache; on a GPU, one of SHARES shares of the free memory.
ROOM, SHARES = 10**8, 8
# Cost of one more batch, in positions that are run there and back.
BATCH_COST = 48
# Seconds, at least, between two states of an unfinished choice: each holds all values so far.
SAVED_EVERY = 30.0
# Activations kept for the gradient, per token and layer, in multiples of d_model.
ACTIVATIONS = 16


@dataclass(frozen=True, eq=False)
class Value:
    """Value of one subject, found by `choose_values`."""

    v: Tensor  # v* = W k* + δ, [d_model], float64, on the CPU
    delta: Tensor  # δ, [d_model], float64, on the CPU
    losses: tuple[float, ...]  # the whole loss before each step, and after the last, nats
    probabilities: tuple[float, ...]  # of each fact's new object in its bare prompt with δ in place

    def then(self, more: Value) -> Value:
        """Return this value with what was chosen on top of it, in a model where it is written."""
        losses = more.losses if len(more.losses) > 1 else self.losses
        return Value(self.v + more.delta, self.delta + more.delta, losses, more.probabilities)


def choose_values(
    editable: Editable,
    ff: FeedForward,
    prompt_sets: Sequence[PromptSet],
    keys: LayerKeys,
    config: ValueConfig,
    progress: Progress = silent,
    group: ProcessGroup = ALONE,
    unfinished: Path | None = None,
) -> list[Value]:
    """Choose v* for each of n `prompt_sets`, of one subject each; EditError where the loss is not finite.

    `keys` are those of each in the layer `ff`. Each process of `group` chooses its share, and all receive all values.
    The file `unfinished` keeps the values so far, from which an interrupted choice goes on with the same bits; the
    caller deletes it.
    """
    outputs = ff.matrix @ keys.K
    current, units = outputs.T, outputs.norm(dim=0)
    if config.optimizer == "gradient":
        text = prompt_sets[0].prompts[0]
        way = group.in_all(lambda: find_output_map(editable, ff, text, outputs[:, 0]))
        units = way.units(outputs, keys.streams.to(outputs))
    own = slice(group.rank, None, group.size)
    values = group.in_all(
        lambda: _choose(editable, ff, prompt_sets[own], current[own], units[own], config, progress, unfinished)
    )
    v, delta = (group.exchange(side) for side in ([value.v for value in values], [value.delta for value in values]))
    curves = interleaved(group.gather([[value.losses, value.probabilities] for value in values]))
    return [Value(v, d, tuple(losses), tuple(said)) for v, d, (losses, said) in zip(v, delta, curves, strict=True)]


def _choose(
    editable: Editable,
    ff: FeedForward,
    prompt_sets: Sequence[PromptSet],
    current: Tensor,
    units: Tensor,
    config: ValueConfig,
    progress: Progress,
    unfinished: Path | None,
) -> list[Value]:
    """Choose the values of one process, in groups that fit into memory; `current` and `units` as of `_optimise`."""
    refusal = EditError("not enough memory to choose a single value; use fewer contexts, or a smaller dtype")
    values, saved = [] if unfinished is None else _read_values(unfinished), time.monotonic()
    with frozen(editable.model):
        sizes = [size(editable, ff, prompt_set) for prompt_set in prompt_sets]
        missing, budget = range(len(values), len(prompt_sets)), batch_budget(editable, ROOM, SHARES)
        for members in grouped(missing, lambda members: sum(sizes[i] for i in members), budget):

            def advance(stage: str, done: int, total: int, first: int = members[0], count: int = len(members)) -> None:
                progress(stage, first * total + done * count, len(prompt_sets) * total)

            def choose(batch: Sequence[int], advance: Progress = advance) -> list[Value]:
                prompted = [prompt_sets[i] for i in batch]
                objective = Objective(editable, ff, prompted, config.kl_weight, config.keep_weight)
                return _optimise(objective, current[list(batch)], units[list(batch)], config, advance)

            values += [value for chosen in split_on_oom(choose, members, refusal) for value in chosen]
            if unfinished is not None and time.monotonic() - saved >= SAVED_EVERY:
                _save_values(unfinished, values)
                saved = time.monotonic()
    return values


def _save_values(path: Path, values: Sequence[Value]) -> None:
    """Keep the values so far, if the cache can be written."""
    tensors = {"v": torch.stack([value.v for value in values]), "delta": torch.stack([each.delta for each in values])}
    curves = [[value.losses, value.probabilities] for value in values]
    cache.write(path, partial(save_state, tensors=tensors, values=curves))


def _read_values(path: Path) -> list[Value]:
    """Return what `_save_values` kept; nothing where there is no such file, or a damaged one."""
    try:
        tensors, curves = load_state(path, "holds no values")
        sides = zip(tensors["v"], tensors["delta"], curves, strict=True)
        return [Value(v, delta, tuple(losses), tuple(said)) for v, delta, (losses, said) in sides]
    except (EditError, KeyError, TypeError, ValueError):
        return []


def _optimise(
    objective: Objective, current: Tensor, units: Tensor, config: ValueConfig, progress: Progress
) -> list[Value]:
    """Minimise each loss; `current` is W k* of each value, [n, d_model], float64, and `units` those of δ, [n]."""
    device, n = objective.editable.device, len(current)
    dtype = torch.promote_types(objective.ff.dtype, torch.float32)
    unit = units.to(device, dtype)[:, None]
    # δ = unit · z.
    z = torch.zeros(n, current.shape[1], dtype=dtype, device=device)
    along = partial(_gradient_step, config.step_size)
    step_of = along if config.optimizer == "gradient" else _adam_steps(config, unit)
    losses: list[list[float]] = [[] for _ in range(n)]
    said: list[list[list[float]]] = [[] for _ in range(n)]
    going = torch.ones(n, dtype=torch.bool)
    # Log-probability that the new object lacks in its least likely context, relative to the aim; and what is lost.
    aim, missing = log(AIM * min(config.target_probability, 1.0)), torch.zeros(n, dtype=dtype, device=device)
    for step in range(config.steps + 1):
        penalty = config.penalty_decay**step
        loss, gradient, answered, lost = objective.loss_and_gradient(z * unit, going, penalty)
        loss += penalty * config.weight_decay * z.square().sum(1)
        gradient = unit * gradient + 2 * penalty * config.weight_decay * z
        for i in going.nonzero()[:, 0].tolist():
            said[i] = answered[i]
            losses[i].append(float(loss[i]))
            least, enough = min(map(min, said[i])), config.target_probability
            if step == 0 and enough <= 1:
                enough = min(enough, SAID)
            reached = exp(least) >= enough or losses[i][-1] < config.target_loss
            going[i] = not reached or bool(lost[i])
            missing[i] = max(aim - least, 0.0) + lost[i]
        if step == config.steps or not going.any():
            break
        moved = z - step_of(gradient, missing[:, None])
        moved *= (config.max_delta_norm / moved.norm(dim=1, keepdim=True)).clamp(max=1.0)
        z = torch.where(going.to(device)[:, None], moved, z)
        progress("choosing the value", step + 1, config.steps)
    progress("choosing the value", config.steps, config.steps)
    deltas = double(z * unit).cpu()
    if not torch.isfinite(deltas).all():
        raise EditError("the loss is not finite: the model overflows; compute in a wider dtype")
    return [
        Value(W_k + delta, delta, tuple(curve), tuple(exp(fact[0]) for fact in facts))
        for W_k, delta, curve, facts in zip(current.to(deltas), deltas, losses, said, strict=True)
    ]


def _gradient_step(most: float, gradient: Tensor, missing: Tensor) -> Tensor:
    """Return steps along the gradient, [n, d_model], at most `most` long, which gain the log-probability `missing`.

    That is to first order.
    """
    slope = gradient.norm(dim=1, keepdim=True).clamp(min=FLAT)
    step: Tensor = (missing / slope).clamp(max=most) * gradient / slope
    return step


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


class Objective:
    """Loss of `prompt_sets`, one for each of n values, at any δ that is added to the output of the layer `ff`."""

    def __init__(
        self,
        editable: Editable,
        ff: FeedForward,
        prompt_sets: Sequence[PromptSet],
        kl_weight: float,
        keep_weight: float = 0.0,
    ) -> None:
        self.editable, self.ff, self.n = editable, ff, len(prompt_sets)
        self._texts: list[Encoded] = []
        owners: list[int] = []
        # For each text that states a fact: indices of the value, of the fact within it, and of the text.
        self._prompts: list[tuple[int, int, int]] = []
        # Weights of each text's −log P(answer) and of its KL term, which decays for essence prompts and not for `keep`:
        # those of a fact's contexts sum to 1, those of a value's essence prompts to `kl_weight`, of `keep` to
        # `keep_weight`.
        weights: list[tuple[float, float, float]] = []
        for owner, each in enumerate(prompt_sets):
            self._prompts += [(owner, fact, len(owners) + i) for i, fact in enumerate(each.fact_of)]
            self._texts += each.texts
            owners += [owner] * len(each.texts)
            contexts = Counter(each.fact_of)
            weights += [(1 / contexts[fact], 0.0, 0.0) for fact in each.fact_of]
            weights += [(0.0, kl_weight / len(each.essence), 0.0) for _ in each.essence]
            weights += [(0.0, 0.0, keep_weight / len(each.keep)) for _ in each.keep]
        self._answers, self._decaying, self._lasting = torch.tensor(weights).unbind(1)
        self._preserved = self._answers.eq(0).nonzero()[:, 0].tolist()
        self._owner = torch.tensor(owners)
        self._at = torch.tensor([text.site for text in self._texts])
        # First position of each text that is run again: a model that cannot be resumed runs whole texts.
        self._first = self._at if editable.resumable else torch.zeros_like(self._at)
        # Number of positions from there to the last that is read: of an answer, the last token is predicted only.
        ends = torch.tensor([len(text.ids) - bool(text.target_ids) for text in self._texts])
        self._count = ends - self._first
        self._facts = [prompt_set.facts for prompt_set in prompt_sets]
        self._record()

    def _record(self) -> None:
        """Run every text once, each token once, and keep what is run again, and the distributions to preserve."""
        editable, layer, last = self.editable, self.ff.layer, len(self.editable.layers)
        spans = list(zip(self._texts, self._first.tolist(), self._count.tolist(), strict=True))
        again = [[text.ids[: first + i + 1] for i in range(count)] for text, first, count in spans]

        def read(ids: Tensor, inputs: dict[str, Any], at: Tensor) -> tuple[Tensor, Tensor]:
            with (
                capture({layer: editable.layers[layer]}, inputs=True) as entering,
                capture({last: editable.layers[-1]}) as leaving,
                editable.without_logits(),
            ):
                editable.run(input_ids=ids, **inputs)
            states, final = (side.reshape(*ids.shape, -1)[tuple(at.T)] for side in (entering[layer], leaving[last]))
            return states, final

        index: dict[Context, int] = {}
        prefixes: list[Prefix] = []
        parts: list[tuple[Tensor, Tensor]] = []
        numbers: list[int] = []
        contexts = {context for own in again for context in own}
        for done in passes(editable, contexts, TOKENS, read, MemoryError(), editable.resumable):
            index |= {context: len(index) + i for i, context in enumerate(done.contexts)}
            if done.prefixes:
                past = done.prefixes[0].past.above(layer)
                prefixes += [replace(prefix, past=past) for prefix in done.prefixes]
            numbers += [len(parts)] * len(done.contexts)
            parts.append(done.read)
        states, final = (torch.cat(side) for side in zip(*parts, strict=True))
        where = [[index[context] for context in own] for own in again]
        # Entering the layer, at each distinct context; of each text, its contexts there, right-padded, and its tokens.
        self._states, self._where = states, pad(where)
        self._ids = pad([text.ids[first : first + count] for text, first, count in spans])
        # Number of the pass that each text ended in, and the keys and values of its tokens left of those.
        self._pass = torch.tensor([numbers[own[0]] for own in where])
        self._prefixes = [
            replace(prefixes[own[0]], columns=prefixes[own[0]].columns[:first])
            for own, (_, first, _) in zip(where, spans, strict=True)
            if prefixes
        ]
        # Of each text whose distributions are preserved, where it is read, at the tokens before those of its answer or
        # at its last one: (position from `_first`, row of `_before`, the distribution, and of `_entropy`, nats).
        self._held: dict[int, list[tuple[int, int]]] = {}
        rows: list[int] = []
        for row in self._preserved:
            positions = range(len(where[row]))[-max(1, len(self._texts[row].target_ids)) :]
            self._held[row] = [(position, len(rows) + i) for i, position in enumerate(positions)]
            rows += [where[row][position] for position in positions]
        self._before = final.new_zeros(0, editable.vocabulary)
        if rows:
            self._before = log_softmax(editable.logits_of(final[rows])).exp()
        self._entropy = -torch.xlogy(self._before, self._before).sum(-1)

    def loss_and_gradient(
        self, delta: Tensor, going: Tensor, penalty: float = 1.0
    ) -> tuple[Tensor, Tensor, list[list[list[float]]], Tensor]:
        """Compute L without its weight decay at δ = `delta` [n, d_model], its essence term times `penalty`.

        Only of the values `going`, a mask [n]; the loss and gradient of the others are 0. Returned are the loss, [n],
        nats; its gradient, [n, d_model]; by value and fact, the log-probability of the new object in each prompt, nats;
        and of the loss, what is due to `keep` prompts whose answer is not held, [n], nats.
        """
        answers, kept = self._answers.to(delta), penalty * self._decaying.to(delta) + self._lasting.to(delta)
        loss, lost, gradient = delta.new_zeros(self.n), delta.new_zeros(self.n), torch.zeros_like(delta)
        answered = torch.zeros(len(self._texts), dtype=delta.dtype)
        for rows in self._batches(going[self._owner]):
            leaf = delta.detach().clone().requires_grad_()
            said, moved, not_held = self._run(rows, leaf)
            terms = kept[rows] * moved - answers[rows] * said
            gradient += torch.autograd.grad(terms.sum(), leaf)[0]
            of = self._owner[rows].to(delta.device)
            loss.index_add_(0, of, terms.detach())
            lost.index_add_(0, of, self._lasting.to(delta)[rows] * moved.detach() * not_held)
            answered[rows] = said.detach().to(answered)
        by_fact: list[list[list[float]]] = [[[] for _ in range(count)] for count in self._facts]
        for owner, fact, row in self._prompts:
            by_fact[owner][fact].append(float(answered[row]))
        return loss, gradient, by_fact, lost

    def _batches(self, taking: Tensor) -> Iterator[Tensor]:
        """Yield the texts selected by `taking`, [texts], in batches that fit, with as little padding as can be.

        Where not each row of a batch can be run from its own position, all begin at the same one.
        """
        rows = taking.nonzero()[:, 0]
        tokens = sum(max(1, len(self._texts[row].target_ids)) for row in rows.tolist())
        layers = len(self.editable.layers) - self.ff.layer
        reads = tokens / int(self._count[rows].sum())
        each = layers * ACTIVATIONS * self.ff.shape[0] + 3 * self._before.shape[1] * reads
        most = int(batch_budget(self.editable, ROOM, SHARES) / each)
        starts = self._first[rows]
        alike = [rows] if self.editable.ragged else [rows[starts == start] for start in starts.unique()]
        for some in alike:
            for batch in batches(self._count[some].tolist(), most, BATCH_COST):
                # In the order of passes, whose keys and values are then taken together.
                yield some[batch][self._pass[some[batch]].argsort(stable=True)]

    def _run(self, rows: Tensor, delta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Run the texts `rows` with δ in place.

        Return the log-probability of each text's answer, 0 where its distributions are preserved; the KL divergence
        from these, summed along it, nats; and True where it is too large, or their likeliest token another than before.
        """
        editable, layer, texts = self.editable, self.ff.layer, rows.tolist()
        width, at = int(self._count[rows].max()), (self._at - self._first)[rows]
        owner = self._owner[rows].to(delta.device)

        # (row of the batch, position, token) for each token of an answer; (row, position) of what is preserved.
        said = torch.tensor(
            [
                (i, self._texts[row].answer - 1 - int(self._first[row]) + j, token)
                for i, row in enumerate(texts)
                if row not in self._held
                for j, token in enumerate(self._texts[row].target_ids)
            ],
            dtype=torch.long,
        ).reshape(-1, 3)
        kept = torch.tensor(
            [(i, position, before) for i, row in enumerate(texts) for position, before in self._held.get(row, ())],
            dtype=torch.long,
        ).reshape(-1, 3)
        reads = torch.cat([said[:, :2], kept[:, :2]])
        # If δ is added to the last layer itself, that layer must run at all positions.
        last = layer + 1 == len(editable.layers)
        with (
            add_at(self.ff.module, at, delta[owner]),
            nullcontext() if last else replay.narrowed(editable, reads[:, 0], reads[:, 1] - width),
        ):
            states = self._states[self._where[rows, :width]]
            prefixes = [self._prefixes[row] for row in texts] if self._prefixes else []
            logits = replay.resume_after(editable, prefixes, layer, self._ids[rows, :width], states, reads)
        log_probs = log_softmax(logits)
        of_answers, of_kept = log_probs.split([len(said), len(kept)])
        answers = of_answers.gather(-1, said[:, 2:].to(log_probs.device))[:, 0]
        which = kept[:, 2].to(self._before.device)
        divergence = -self._entropy[which] - (self._before[which] * of_kept).sum(-1)
        of = reads[:, 0].to(log_probs.device)
        zero = log_probs.new_zeros(len(texts))
        other = (of_kept.argmax(-1) != self._before[which].argmax(-1)).to(zero)
        of_said, of_held = of.split([len(said), len(kept)])
        moved = zero.index_add(0, of_held, divergence)
        lost = (zero.index_add(0, of_held, other) > 0) | (moved > HELD)
        return zero.index_add(0, of_said, answers), moved, lost


def size(editable: Editable, ff: FeedForward, prompt_set: PromptSet) -> int:
    """Estimate how many numbers an `Objective` keeps for a prompt set, whose texts share few tokens."""
    config = editable.model.config.get_text_config()
    queries, keys = (getattr(config, f"num_{kind}_heads", None) for kind in ("attention", "key_value"))
    shared = keys / queries if keys and queries else 1  # grouped queries share keys and values
    tokens = sum(len(text.ids) for text in prompt_set.texts)
    layers = len(editable.layers) - ff.layer
    held = len(prompt_set.essence) + sum(max(1, len(text.target_ids)) for text in prompt_set.keep)
    return int(2 * tokens * layers * ff.shape[0] * shared) + held * editable.vocabulary
