"""Choose the value v* that the layer should return for a fact's key.

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
and a hard one reaches its target once they are low. κ does not decay, since the user asked for these answers to stay:
no value is final before every y is held, its divergence at most `HELD` and its likeliest tokens unchanged. If the new
object is more likely than not in every context from the start, δ is 0: a fact that was written before reaches a
slightly lower probability in single contexts than its value did, and should not be written again.

Many values are optimised together, each with its own loss and end, so that none depends on the others in its batch.

Adding δ changes nothing below the layer and nothing left of the token. So all texts are recorded once, each token that
they share once (`Objective`). A step resumes the texts whose values are still optimised, at the layer and their
subject's last token, in batches of similar numbers of positions, and unembeds only what the loss reads.
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
from ffedit.progress import Progress, part, silent

# A step aims at this multiple of the target probability, so that the last one does not end just below it.
AIM = 1.1
# Target at step 0, in every context: the new object is likelier than all else together.
SAID = 0.5
# Largest divergence of a `keep` prompt that is held, in nats; after the write it is a little larger.
HELD = 0.1
# Smallest meaningful gradient norm, in nats per unit of δ: below it the gradient is rounding error, as where the loss
# does not depend on δ.
FLAT = 1e-4
# Numbers in the recordings of a group of values, or in a batch of texts with its gradients: on a CPU 400 MB in float32,
# since larger batches leave its cache; on a GPU, one of SHARES shares of the free memory.
ROOM, SHARES = 10**8, 8
# Cost of one more batch, in positions that are run forward and backward.
BATCH_COST = 48
# Least seconds between two saves of an unfinished choice: each save writes all values so far.
SAVED_EVERY = 30.0
# Activations kept for the gradient, per token and layer, in multiples of d_model.
ACTIVATIONS = 16


@dataclass(frozen=True, eq=False)
class Value:
    """Value of one subject, found by `choose_values`."""

    v: Tensor  # v* = W k* + δ, [d_model], float64, on the CPU
    delta: Tensor  # δ, [d_model], float64, on the CPU
    losses: tuple[float, ...]  # the whole loss before each step, and after the last, nats
    probabilities: tuple[float, ...]  # probability of each fact's new object in its bare prompt with δ in place

    def then(self, more: Value) -> Value:
        """Return the sum of this value and of the δ of `more`, which was chosen with this value written."""
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

    `keys` are their keys in the layer `ff`. Each process of `group` chooses its share, and all receive all values.
    The file `unfinished` keeps the values so far, from which an interrupted choice resumes with the same bits; the
    caller deletes it.
    """
    outputs = ff.matrix @ keys.K
    current, units = outputs.T, outputs.norm(dim=0)
    if config.optimizer == "gradient":
        text = prompt_sets[0].prompts[0]
        output_map = group.in_all(lambda: find_output_map(editable, ff, text, outputs[:, 0]))
        units = output_map.units(outputs, keys.streams.to(outputs))
    share = slice(group.rank, None, group.size)
    values = group.in_all(
        lambda: _choose(editable, ff, prompt_sets[share], current[share], units[share], config, progress, unfinished)
    )
    v, delta = (group.exchange(side) for side in ([value.v for value in values], [value.delta for value in values]))
    curves = interleaved(group.gather([[value.losses, value.probabilities] for value in values]))
    return [Value(v, d, tuple(losses), tuple(probs)) for v, d, (losses, probs) in zip(v, delta, curves, strict=True)]


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
    """Choose the values of one process, in groups that fit into memory; `current` and `units` as in `_optimise`."""
    refusal = EditError("not enough memory to choose a single value; use fewer contexts, or a smaller dtype")
    values, saved = [] if unfinished is None else _read_values(unfinished), time.monotonic()
    with frozen(editable.model):
        sizes = [size(editable, ff, prompt_set) for prompt_set in prompt_sets]
        missing, budget = range(len(values), len(prompt_sets)), batch_budget(editable, ROOM, SHARES)
        for members in grouped(missing, lambda members: sum(sizes[i] for i in members), budget):
            advance = part(progress, members[0], len(members), len(prompt_sets))

            def choose(batch: Sequence[int], advance: Progress = advance) -> list[Value]:
                batch_sets = [prompt_sets[i] for i in batch]
                objective = Objective(editable, ff, batch_sets, config.kl_weight, config.keep_weight)
                return _optimise(objective, current[list(batch)], units[list(batch)], config, advance)

            values += [value for chosen in split_on_oom(choose, members, refusal) for value in chosen]
            if unfinished is not None and time.monotonic() - saved >= SAVED_EVERY:
                _save_values(unfinished, values)
                saved = time.monotonic()
    return values


def _save_values(path: Path, values: Sequence[Value]) -> None:
    """Keep the values so far, if the cache can be written."""
    tensors = {"v": torch.stack([value.v for value in values]), "delta": torch.stack([value.delta for value in values])}
    curves = [[value.losses, value.probabilities] for value in values]
    cache.write(path, partial(save_state, tensors=tensors, values=curves))


def _read_values(path: Path) -> list[Value]:
    """Return the values that `_save_values` wrote; none where the file is missing or damaged."""
    try:
        tensors, curves = load_state(path, "holds no values")
        sides = zip(tensors["v"], tensors["delta"], curves, strict=True)
        return [Value(v, delta, tuple(losses), tuple(probs)) for v, delta, (losses, probs) in sides]
    except (EditError, KeyError, TypeError, ValueError):
        return []


def _optimise(
    objective: Objective, current: Tensor, units: Tensor, config: ValueConfig, progress: Progress
) -> list[Value]:
    """Minimise each loss; `current` is W k* of each value, [n, d_model], float64, and `units` the units of δ, [n]."""
    device, n = objective.editable.device, len(current)
    dtype = torch.promote_types(objective.ff.dtype, torch.float32)
    unit = units.to(device, dtype)[:, None]
    # δ = unit · z.
    z = torch.zeros(n, current.shape[1], dtype=dtype, device=device)
    gradient_step = partial(_gradient_step, config.step_size)
    step_of = gradient_step if config.optimizer == "gradient" else _adam_steps(config, unit)
    losses: list[list[float]] = [[] for _ in range(n)]
    log_probs: list[list[list[float]]] = [[] for _ in range(n)]
    going = torch.ones(n, dtype=torch.bool)
    # Log-probability that the new object lacks in its least likely context, relative to the aim; plus `keep_loss`.
    aim, missing = log(AIM * min(config.target_probability, 1.0)), torch.zeros(n, dtype=dtype, device=device)
    for step in range(config.steps + 1):
        penalty = config.penalty_decay**step
        loss, gradient_of, answered, keep_loss = objective.loss_and_gradient(z * unit, going, penalty)
        loss += penalty * config.weight_decay * z.square().sum(1)
        for i in going.nonzero()[:, 0].tolist():
            log_probs[i] = answered[i]
            losses[i].append(float(loss[i]))
            least, target = min(map(min, log_probs[i])), config.target_probability
            if step == 0 and target <= 1:
                target = min(target, SAID)
            reached = exp(least) >= target or losses[i][-1] < config.target_loss
            going[i] = not reached or bool(keep_loss[i])
            missing[i] = max(aim - least, 0.0) + keep_loss[i]
        if step == config.steps or not going.any():
            break
        gradient = unit * gradient_of() + 2 * penalty * config.weight_decay * z
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
        for W_k, delta, curve, facts in zip(current.to(deltas), deltas, losses, log_probs, strict=True)
    ]


def _gradient_step(longest: float, gradient: Tensor, missing: Tensor) -> Tensor:
    """Return steps along the gradient, [n, d_model], up to `longest`, that gain `missing` nats to first order."""
    slope = gradient.norm(dim=1, keepdim=True).clamp(min=FLAT)
    step: Tensor = (missing / slope).clamp(max=longest) * gradient / slope
    return step


def _adam_steps(config: ValueConfig, unit: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function that gives Adam's steps in units of `unit` [n, 1]; as published, Adam works on δ itself."""
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
    """Loss of n values, one for each of `prompt_sets`, at any δ that is added to the output of the layer `ff`."""

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
        for owner, prompt_set in enumerate(prompt_sets):
            self._prompts += [(owner, fact, len(owners) + i) for i, fact in enumerate(prompt_set.fact_of)]
            self._texts += prompt_set.texts
            owners += [owner] * len(prompt_set.texts)
            contexts = Counter(prompt_set.fact_of)
            weights += [(1 / contexts[fact], 0.0, 0.0) for fact in prompt_set.fact_of]
            weights += [(0.0, kl_weight / len(prompt_set.essence), 0.0) for _ in prompt_set.essence]
            weights += [(0.0, 0.0, keep_weight / len(prompt_set.keep)) for _ in prompt_set.keep]
        self._answers, self._decaying, self._lasting = torch.tensor(weights).unbind(1)
        self._preserved = self._answers.eq(0).nonzero()[:, 0].tolist()
        self._owner = torch.tensor(owners)
        self._at = torch.tensor([text.site for text in self._texts])
        # First position of each text that a step runs: a model that cannot be resumed runs whole texts.
        self._first = self._at if editable.resumable else torch.zeros_like(self._at)
        # Number of positions from there to the last that is read: an answer's last token is only predicted.
        ends = torch.tensor([len(text.ids) - bool(text.target_ids) for text in self._texts])
        self._count = ends - self._first
        self._facts = [prompt_set.facts for prompt_set in prompt_sets]
        self._record()

    def _record(self) -> None:
        """Run every text once, shared tokens once; keep the states that steps resume, and distributions to preserve."""
        editable, layer, last = self.editable, self.ff.layer, len(self.editable.layers)
        spans = list(zip(self._texts, self._first.tolist(), self._count.tolist(), strict=True))
        contexts_by_text = [[text.ids[: first + i + 1] for i in range(count)] for text, first, count in spans]

        def read(ids: Tensor, inputs: dict[str, Any], ends: Tensor) -> tuple[Tensor, Tensor]:
            with (
                capture({layer: editable.layers[layer]}, inputs=True) as entering,
                capture({last: editable.layers[-1]}) as leaving,
                editable.without_logits(),
            ):
                editable.run(input_ids=ids, **inputs)
            states, final = (side.reshape(*ids.shape, -1)[tuple(ends.T)] for side in (entering[layer], leaving[last]))
            return states, final

        index: dict[Context, int] = {}
        prefixes: list[Prefix] = []
        reads: list[tuple[Tensor, Tensor]] = []
        pass_of: list[int] = []
        contexts = {context for text_contexts in contexts_by_text for context in text_contexts}
        for batch in passes(editable, contexts, TOKENS, read, MemoryError(), editable.resumable):
            index |= {context: len(index) + i for i, context in enumerate(batch.contexts)}
            if batch.prefixes:
                past = batch.prefixes[0].past.above(layer)
                prefixes += [replace(prefix, past=past) for prefix in batch.prefixes]
            pass_of += [len(reads)] * len(batch.contexts)
            reads.append(batch.read)
        states, final = (torch.cat(side) for side in zip(*reads, strict=True))
        rows_by_text = [[index[context] for context in text_contexts] for text_contexts in contexts_by_text]
        # States entering the layer at each distinct context; for each text, their rows, right-padded, and its tokens.
        self._states, self._where = states, pad(rows_by_text)
        self._ids = pad([text.ids[first : first + count] for text, first, count in spans])
        # For each text, the pass that ran its first such position, and the keys and values of the tokens left of it.
        self._pass = torch.tensor([pass_of[text_rows[0]] for text_rows in rows_by_text])
        self._prefixes = [
            replace(prefixes[text_rows[0]], columns=prefixes[text_rows[0]].columns[:first])
            for text_rows, (_, first, _) in zip(rows_by_text, spans, strict=True)
            if prefixes
        ]
        # For each text whose distributions are preserved, where they are read, before each token of its answer or at
        # its last token: (position from `_first`, row of `_before`, the distributions, and of `_entropy`, in nats).
        self._held: dict[int, list[tuple[int, int]]] = {}
        rows: list[int] = []
        for row in self._preserved:
            positions = range(len(rows_by_text[row]))[-max(1, len(self._texts[row].target_ids)) :]
            self._held[row] = [(position, len(rows) + i) for i, position in enumerate(positions)]
            rows += [rows_by_text[row][position] for position in positions]
        self._before = final.new_zeros(0, editable.vocabulary)
        if rows:
            self._before = log_softmax(editable.logits_of(final[rows])).exp()
        self._entropy = -torch.xlogy(self._before, self._before).sum(-1)

    def loss_and_gradient(
        self, delta: Tensor, going: Tensor, penalty: float = 1.0
    ) -> tuple[Tensor, Callable[[], Tensor], list[list[list[float]]], Tensor]:
        """Compute L without weight decay at δ = `delta` [n, d_model], with its essence term times `penalty`.

        Loss and gradient are 0 except for the values of the mask `going` [n]. Returned are the loss, [n], nats; a
        function that returns its gradient, [n, d_model], once, which the last step does not need; by value and fact,
        the log-probability of the new object in each prompt, nats; and the part of the loss due to `keep` prompts whose
        answer is not held, [n], nats.
        """
        weights, kl_weights = self._answers.to(delta), penalty * self._decaying.to(delta) + self._lasting.to(delta)
        loss, keep_loss, gradient = delta.new_zeros(self.n), delta.new_zeros(self.n), torch.zeros_like(delta)
        answered = torch.zeros(len(self._texts), dtype=delta.dtype)
        planned, later = list(self._batches(going[self._owner])), []
        for rows in planned:
            leaf = delta.detach().clone().requires_grad_()
            log_probs, divergences, not_held = self._run(rows, leaf)
            terms = kl_weights[rows] * divergences - weights[rows] * log_probs
            later.append(partial(torch.autograd.grad, terms.sum(), leaf))
            if len(planned) > 1:  # memory has room for what one batch keeps for its gradient
                gradient += later.pop()()[0]
            owners = self._owner[rows].to(delta.device)
            loss.index_add_(0, owners, terms.detach())
            keep_loss.index_add_(0, owners, self._lasting.to(delta)[rows] * divergences.detach() * not_held)
            answered[rows] = log_probs.detach().to(answered)
        by_fact: list[list[list[float]]] = [[[] for _ in range(count)] for count in self._facts]
        for owner, fact, row in self._prompts:
            by_fact[owner][fact].append(float(answered[row]))
        return loss, lambda: sum((part()[0] for part in later), gradient), by_fact, keep_loss

    def _batches(self, taking: Tensor) -> Iterator[Tensor]:
        """Yield the texts of the mask `taking`, [texts], in batches that fit into memory, with little padding.

        Where the model cannot run each row from its own position, all rows of a batch begin at the same position.
        """
        rows = taking.nonzero()[:, 0]
        tokens = sum(max(1, len(self._texts[row].target_ids)) for row in rows.tolist())
        layers = len(self.editable.layers) - self.ff.layer
        reads = tokens / int(self._count[rows].sum())
        per_position = layers * ACTIVATIONS * self.ff.shape[0] + 3 * self._before.shape[1] * reads
        budget = int(batch_budget(self.editable, ROOM, SHARES) / per_position)
        starts = self._first[rows]
        groups = [rows] if self.editable.ragged else [rows[starts == start] for start in starts.unique()]
        for group in groups:
            for batch in batches(self._count[group].tolist(), budget, BATCH_COST):
                # Sorted by pass, so that the keys and values of a pass are taken together.
                yield group[batch][self._pass[group[batch]].argsort(stable=True)]

    def _run(self, rows: Tensor, delta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Run the texts `rows` with δ in place.

        Return for each text the log-probability of its answer, 0 where distributions are preserved; the KL divergence
        from these, summed, nats; and True where it is too large, or the likeliest token of one has changed.
        """
        editable, layer, texts = self.editable, self.ff.layer, rows.tolist()
        width, sites = int(self._count[rows].max()), (self._at - self._first)[rows]
        owner = self._owner[rows].to(delta.device)

        # For each token of an answer: (row of the batch, position, token); for each preserved distribution: (row of the
        # batch, position, row of `_before`).
        answered = torch.tensor(
            [
                (i, self._texts[row].answer - 1 - int(self._first[row]) + j, token)
                for i, row in enumerate(texts)
                if row not in self._held
                for j, token in enumerate(self._texts[row].target_ids)
            ],
            dtype=torch.long,
        ).reshape(-1, 3)
        preserved = torch.tensor(
            [(i, position, before) for i, row in enumerate(texts) for position, before in self._held.get(row, ())],
            dtype=torch.long,
        ).reshape(-1, 3)
        reads = torch.cat([answered[:, :2], preserved[:, :2]])
        # If δ is added to the last layer itself, that layer must run at all positions.
        last = layer + 1 == len(editable.layers)
        with (
            add_at(self.ff.module, sites, delta[owner]),
            nullcontext() if last else replay.narrowed(editable, reads[:, 0], reads[:, 1] - width),
        ):
            states = self._states[self._where[rows, :width]]
            prefixes = [self._prefixes[row] for row in texts] if self._prefixes else []
            logits = replay.resume_after(editable, prefixes, layer, self._ids[rows, :width], states, reads)
        log_probs = log_softmax(logits)
        answer_log_probs, preserved_log_probs = log_probs.split([len(answered), len(preserved)])
        answers = answer_log_probs.gather(-1, answered[:, 2:].to(log_probs.device))[:, 0]
        before_rows = preserved[:, 2].to(self._before.device)
        read_divergences = -self._entropy[before_rows] - (self._before[before_rows] * preserved_log_probs).sum(-1)
        read_rows = reads[:, 0].to(log_probs.device)
        zero = log_probs.new_zeros(len(texts))
        changed = (preserved_log_probs.argmax(-1) != self._before[before_rows].argmax(-1)).to(zero)
        answer_rows, preserved_rows = read_rows.split([len(answered), len(preserved)])
        divergences = zero.index_add(0, preserved_rows, read_divergences)
        not_held = (zero.index_add(0, preserved_rows, changed) > 0) | (divergences > HELD)
        return zero.index_add(0, answer_rows, answers), divergences, not_held


def size(editable: Editable, ff: FeedForward, prompt_set: PromptSet) -> int:
    """Estimate how many numbers an `Objective` keeps for a prompt set, as if its texts shared no tokens."""
    config = editable.model.config.get_text_config()
    queries, keys = (getattr(config, f"num_{kind}_heads", None) for kind in ("attention", "key_value"))
    kv_share = keys / queries if keys and queries else 1  # grouped queries share keys and values
    tokens = sum(len(text.ids) for text in prompt_set.texts)
    layers = len(editable.layers) - ff.layer
    distributions = len(prompt_set.essence) + sum(max(1, len(text.target_ids)) for text in prompt_set.keep)
    return int(2 * tokens * layers * ff.shape[0] * kv_share) + distributions * editable.vocabulary
