"""Choose the value v* that a fact's key is to give.

v* = W k* + δ, where δ is added to the layer's output at the subject's last token and optimised until the model predicts
the new object in every context (ROME, arXiv 2202.05262, eq. 4):

    L(δ) = − mean log P(o* | x, δ)  +  ρᵗ ( λ · mean KL(P(· | x') ‖ P(· | x', δ))  +  μ ‖δ‖² / ‖h‖² )

h is the residual stream behind the layer, and ‖h‖ the unit of every length: δ acts on the stream, while ‖W k*‖ differs
tenfold between the layers of one model. Steps follow the gradient: Adam at first moves every entry of δ by the same
amount, which makes δ longer than necessary. The weights of the two penalties decay from step to step (ρ < 1), so that
an easy fact ends with a small δ, and a hard one reaches its target once they are low. If the new object is more likely
than not in every context from the start, δ is 0: an edit that is in the model already reaches a slightly lower
probability in single contexts than its value did, and is not to be written again.

Many values are optimised together, each with its own loss and end, so that none depends on the others in its batch.

Adding δ changes nothing below the layer and nothing left of the token. So all texts are recorded once (`Objective`); a
step resumes those of the values still optimised at the layer and their subject's last token, in batches of texts with
similar numbers of positions to run (buckets), and applies the unembedding only at the positions that the loss reads.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from math import ceil, exp, log
from pathlib import Path

import torch
from torch import Tensor

from ffedit.algebra.linalg import double
from ffedit.editor.config import ValueConfig
from ffedit.editor.key import PromptSet
from ffedit.errors import EditError
from ffedit.files.resuming import load_state, save_state
from ffedit.inference import replay
from ffedit.inference.batching import BATCH_COST, batch_budget, grouped, least_cost_runs, split_on_oom
from ffedit.inference.generation import log_softmax
from ffedit.loading.distributed import ALONE, ProcessGroup, interleaved
from ffedit.model.editable import Editable
from ffedit.model.feed_forward import FeedForward
from ffedit.model.hooks import frozen, replace_output
from ffedit.model.tokenization import Encoded, pad
from ffedit.progress import Progress, silent

# A step aims at this multiple of the target probability, so that the last one does not end just below it.
AIM = 1.1
# Target at step 0, in every context: the new object is likelier than all else together.
SAID = 0.5
# Smallest meaningful gradient norm, in nats per ‖h‖: below it the gradient is rounding error, as where nothing that is
# read depends on δ.
FLAT = 1e-4
# Numbers in the recordings of a group of values, or in a batch of texts with its gradients: on a CPU 512 MB in float32;
# on a GPU, one of SHARES shares of the free memory.
ROOM, SHARES = 2**27, 8
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


def choose_values(
    editable: Editable,
    ff: FeedForward,
    prompt_sets: Sequence[PromptSet],
    keys: Tensor,
    lengths: Tensor,
    config: ValueConfig,
    progress: Progress = silent,
    group: ProcessGroup = ALONE,
    unfinished: Path | None = None,
) -> list[Value]:
    """Choose v* for each of n `prompt_sets`, of one subject each; EditError where the loss is not finite.

    Args:
        editable: the model.
        ff: the layer that the values are of.
        prompt_sets: the texts of each value.
        keys: k* of each in this layer, [d_ff, n].
        lengths: norm of the residual stream behind the layer, [n]: the unit in which δ is measured.
        config: how a value is chosen.
        progress: called with the progress.
        group: processes of which each chooses its share; all receive all values.
        unfinished: file that keeps the values so far, and from which an interrupted choice goes on with the same bits;
            the caller deletes it.
    """
    W = ff.matrix
    current = (W @ keys.to(W.device)).T
    units = lengths.to(current) if config.optimizer == "gradient" else current.norm(dim=1)
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
                objective = Objective(editable, ff, [prompt_sets[i] for i in batch], config.kl_weight)
                return _optimise(objective, current[list(batch)], units[list(batch)], config, advance)

            values += [value for chosen in split_on_oom(choose, members, refusal) for value in chosen]
            if unfinished is not None and time.monotonic() - saved >= SAVED_EVERY:
                _save_values(unfinished, values)
                saved = time.monotonic()
    return values


def _save_values(path: Path, values: Sequence[Value]) -> None:
    """Keep the values so far, if the cache can be written."""
    tensors = {"v": torch.stack([value.v for value in values]), "delta": torch.stack([each.delta for each in values])}
    try:
        save_state(path, tensors, [[value.losses, value.probabilities] for value in values])
    except EditError:  # a full disk costs an interrupted choice its time, and this one nothing
        return


def _read_values(path: Path) -> list[Value]:
    """Return what `_save_values` kept; nothing where there is no such file, or a damaged one."""
    try:
        tensors, curves = load_state(path, "holds no values")
        sides = zip(tensors["v"], tensors["delta"], curves, strict=True)
        return [Value(v, delta, tuple(losses), tuple(said)) for v, delta, (losses, said) in sides]
    except (EditError, KeyError, TypeError, ValueError):
        return []


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
    deltas = double(z * unit).cpu()
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


@dataclass(frozen=True, eq=False)
class _Bucket:
    """Recorded texts that are run together."""

    rows: Tensor  # indices of the texts in the objective, [r]
    starts: Tensor  # first position of each that is run again, [r]; no subject ends left of it
    recording: replay.Recording
    said: Tensor  # for each token of an answer: row in the bucket, position before it, token; [a, 3]
    kept: Tensor  # for each position whose distribution is preserved: row in the bucket, position; [k, 2]
    before: Tensor  # the distribution to preserve there, [k, vocabulary]
    entropy: Tensor  # of `before`, [k], nats


class Objective:
    """Loss of `prompt_sets`, one for each of n values, at any δ that is added to the output of the layer `ff`."""

    def __init__(self, editable: Editable, ff: FeedForward, prompt_sets: Sequence[PromptSet], kl_weight: float) -> None:
        self.editable, self.ff, self.n = editable, ff, len(prompt_sets)
        self._ragged = editable.resumable and editable.ragged
        self._texts: list[Encoded] = []
        owners: list[int] = []
        # For each text that states a fact: indices of the value, of the fact within it, and of the text.
        self._prompts: list[tuple[int, int, int]] = []
        for owner, prompt_set in enumerate(prompt_sets):
            self._prompts += [(owner, fact, len(owners) + i) for i, fact in enumerate(prompt_set.fact_of)]
            self._texts += prompt_set.texts
            owners += [owner] * (len(self._texts) - len(owners))
        self._owner = torch.tensor(owners)
        self._at = torch.tensor([text.site for text in self._texts])
        # Position after the last that is read: of an answer, the last token is predicted only.
        self._end = torch.tensor([len(text.ids) - bool(text.target_ids) for text in self._texts])
        self._facts = [prompt_set.facts for prompt_set in prompt_sets]
        # Weights of each text's −log P(answer) and of its KL term; those of a fact's contexts sum to 1.
        self._answers, self._kept = torch.zeros(len(owners)), torch.full((len(owners),), kl_weight)
        contexts = Counter((owner, fact) for owner, fact, _ in self._prompts)
        for owner, fact, row in self._prompts:
            self._answers[row], self._kept[row] = 1 / contexts[owner, fact], 0
        self._buckets = [self._record(rows) for bucket in self._cut() for rows in self._fitting(bucket)]

    def _cut(self) -> Iterator[Tensor]:
        """Yield indices of texts, in buckets of least total cost: rows × positions run + `BATCH_COST` for each bucket.

        A rerun begins where its subject ends. If the model can begin at a different position in each row, texts with
        similar numbers of positions to run share a bucket; else those whose subjects end at similar positions.
        """
        at, end = self._at.tolist(), self._end.tolist()
        key = [b - a for a, b in zip(at, end, strict=True)] if self._ragged else at
        keys = sorted(set(key))
        of = [[row for row in range(len(key)) if key[row] == length] for length in keys]

        def cost(first: int, last: int) -> int:
            rows = [row for group in of[first:last] for row in group]
            positions = keys[last - 1] if self._ragged else max(end[row] for row in rows) - keys[first]
            return int(len(rows) * positions + BATCH_COST)

        for first, last in least_cost_runs(len(keys), cost):
            # Sorted, so that the rows of most parts of a large bucket begin at one position, which needs no mask.
            yield torch.tensor(sorted((row for group in of[first:last] for row in group), key=lambda row: at[row]))

    def _fitting(self, rows: Tensor) -> Sequence[Tensor]:
        """Split a bucket into parts whose attention keys and values of all layers fit into memory while recording."""
        longest = max(len(self._texts[row].ids) for row in rows.tolist())
        each = 2 * longest * len(self.editable.layers) * self.editable.d_model
        return _parts(rows, batch_budget(self.editable, ROOM, SHARES) // each)

    def _record(self, rows: Tensor) -> _Bucket:
        texts = [self._texts[row] for row in rows.tolist()]
        at = self._at[rows]
        starts = at if self._ragged else torch.full_like(at, int(at.min()))
        said = [(row, t.answer - 1 + i, token) for row, t in enumerate(texts) for i, token in enumerate(t.target_ids)]
        kept = [(row, len(text.ids) - 1) for row, text in enumerate(texts) if not text.target_ids]
        reads = torch.tensor(kept, dtype=torch.long).reshape(-1, 2)
        ids, only = pad([text.ids for text in texts]), (self.ff.layer, int(starts.max()))
        recording = replay.record(self.editable, ids, reads, only=only)
        before = log_softmax(recording.logits).exp()
        entropy = -torch.xlogy(before, before).sum(-1)
        said_at = torch.tensor(said, dtype=torch.long).reshape(-1, 3)
        return _Bucket(rows, starts, recording, said_at, reads, before, entropy)

    def loss_and_gradient(
        self, delta: Tensor, going: Tensor, penalty: float = 1.0
    ) -> tuple[Tensor, Tensor, list[list[list[float]]]]:
        """Compute L without its weight decay, and its gradient, at δ = `delta` [n, d_model].

        Args:
            delta: δ of each value, in the units of the layer's output.
            going: mask of the values to compute, [n]; the loss and gradient of the others are 0.
            penalty: factor on the KL term.

        Returns:
            The loss, [n], nats; its gradient, [n, d_model]; and by value and fact, the log-probability of the new
            object in each prompt, nats.
        """
        answers, kept = self._answers.to(delta), penalty * self._kept.to(delta)
        loss, gradient = delta.new_zeros(self.n), torch.zeros_like(delta)
        answered = torch.zeros(len(self._texts))
        for bucket, indices in self._batches(going[self._owner]):
            leaf = delta.detach().clone().requires_grad_()
            said, moved = self._run(bucket, indices, leaf)
            rows = bucket.rows[indices]
            terms = kept[rows] * moved - answers[rows] * said
            gradient += torch.autograd.grad(terms.sum(), leaf)[0]
            loss.index_add_(0, self._owner[rows].to(delta.device), terms.detach())
            answered[rows] = said.detach().float().cpu()
        by_fact: list[list[list[float]]] = [[[] for _ in range(count)] for count in self._facts]
        for owner, fact, row in self._prompts:
            by_fact[owner][fact].append(float(answered[row]))
        return loss, gradient, by_fact

    def _batches(self, taking: Tensor) -> Iterator[tuple[_Bucket, Tensor]]:
        """Yield the texts selected by `taking`, [texts], as (bucket, indices within it), in batches that fit."""
        most = batch_budget(self.editable, ROOM, SHARES)
        layers = len(self.editable.layers) - self.ff.layer
        for bucket in self._buckets:
            indices = taking[bucket.rows].nonzero()[:, 0]
            if not len(indices):
                continue
            reads = (len(bucket.said) + len(bucket.kept)) / len(bucket.rows)
            width = int((self._end[bucket.rows] - bucket.starts).max())
            each = width * layers * ACTIVATIONS * self.ff.shape[0] + 3 * reads * bucket.before.shape[1]
            yield from ((bucket, batch) for batch in _parts(indices, int(most // each)))

    def _run(self, bucket: _Bucket, indices: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """Run texts `indices` of a bucket with δ in place.

        Return the log-probability of each text's answer (0 without one) and the KL divergence summed along it, nats.
        """
        editable, layer = self.editable, self.ff.layer
        rows, starts = bucket.rows[indices], bucket.starts[indices]
        width = int((self._end[rows] - starts).max())
        each, at = torch.arange(len(indices)), self._at[rows]
        owner = self._owner[rows].to(delta.device)

        def add(output: Tensor) -> Tensor:
            moved = output.reshape(len(indices), -1, output.shape[-1]).clone()
            # A model that cannot be resumed runs whole rows, so positions count from the row's beginning.
            moved[each, at if moved.shape[1] > width else at - starts] += delta[owner].to(moved)
            return moved.reshape(output.shape)

        ff = torch.full((len(bucket.rows),), -1)
        ff[indices] = each
        said = bucket.said[ff[bucket.said[:, 0]] >= 0]
        which = ff[bucket.kept[:, 0]] >= 0
        kept = bucket.kept[which]
        reads = torch.cat([said[:, :2], kept])
        reads = torch.stack([ff[reads[:, 0]], reads[:, 1]], 1)
        run, from_end = reads[:, 0], reads[:, 1] - starts[reads[:, 0]] - width
        # If δ is added to the last layer itself, that layer must run at all positions.
        last = layer + 1 == len(editable.layers)
        with (
            replace_output(self.ff.module, add),
            nullcontext() if last else replay.narrowed(editable, run, from_end),
        ):
            states = bucket.recording.states[layer]
            inside = (starts[:, None] + torch.arange(width)).clamp(max=states.shape[1] - 1)
            rerun = editable, bucket.recording, layer, states[indices[:, None], inside], indices
            if int(starts.min()) < int(starts.max()):
                logits = replay.resume_each(*rerun, starts, reads)
            else:
                logits = replay.resume(*rerun, int(starts[0]), reads)
        log_probs = log_softmax(logits)
        of_answers, of_kept = log_probs.split([len(said), len(kept)])
        answers = of_answers.gather(-1, said[:, 2:].to(log_probs.device))[:, 0]
        which = which.to(log_probs.device)
        divergence = -bucket.entropy[which] - (bucket.before[which] * of_kept).sum(-1)
        of = reads[:, 0].to(log_probs.device)
        zero = log_probs.new_zeros(len(indices))
        return zero.index_add(0, of[: len(said)], answers), zero.index_add(0, of[len(said) :], divergence)


def _parts(rows: Tensor, most: int) -> tuple[Tensor, ...]:
    """Split `rows` into parts of 1 to `most` rows, of about equal length, since a short part costs nearly as much."""
    return rows.tensor_split(ceil(len(rows) / max(1, most)))


def size(editable: Editable, ff: FeedForward, prompt_set: PromptSet) -> int:
    """Estimate how many numbers an `Objective` keeps for a prompt set."""
    width, layers = ff.shape[0], len(editable.layers) - ff.layer
    vocabulary = int(editable.model.config.get_text_config().vocab_size)
    furthest = max(text.site for text in prompt_set.texts)
    held = sum(2 * layers * furthest + len(text.ids) for text in prompt_set.texts)
    return held * width + len(prompt_set.essence) * vocabulary
