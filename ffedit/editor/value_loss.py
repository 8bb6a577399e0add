"""Compute the loss L(δ) of many values at once.

Adding δ to a layer's output at the subject's last token changes nothing below that layer and nothing left of that
token. So all texts are recorded once; a step resumes those of the values still optimised at the layer and their
subject's last token, in batches of texts with similar numbers of positions to run (buckets), and applies the
unembedding only at the positions that the loss reads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor

from ffedit.editor.prompts import PromptSet
from ffedit.inference import replay
from ffedit.inference.batching import batch_budget
from ffedit.inference.generation import log_softmax
from ffedit.model.editable import Editable
from ffedit.model.feed_forward import FeedForward
from ffedit.model.hooks import replace_output
from ffedit.model.tokenization import Encoded, pad

# Numbers that the recordings of a group of values may hold, or a batch of texts with its gradients: on a CPU 128 MB in
# float32; on a GPU, one of SHARES shares of the free memory.
ROOM, SHARES = 2**25, 8
# Cost of one more batch, in tokens: a batch of fewer tokens is dominated by reading the weights.
BATCH_COST = 32
# Activations kept for the gradient, per token and layer, in multiples of d_model.
ACTIVATIONS = 16


@dataclass(frozen=True, eq=False)
class _Bucket:
    """Recorded texts that are run together.

    Attributes:
        rows: indices of the texts in the objective, [r].
        starts: first position of each that is run again, [r]; no subject ends left of it.
        recording: of these texts.
        said: for each token of an answer: row in the bucket, position before it, token; [a, 3].
        kept: for each position whose distribution is preserved: row in the bucket, position; [k, 2].
        before: the distribution to preserve there, [k, vocabulary].
        entropy: of `before`, [k], nats.
    """

    rows: Tensor
    starts: Tensor
    recording: replay.Recording
    said: Tensor
    kept: Tensor
    before: Tensor
    entropy: Tensor


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
            self._texts += [*prompt_set.prompts, *prompt_set.essence]
            owners += [owner] * (len(self._texts) - len(owners))
        self._owner = torch.tensor(owners)
        self._at = torch.tensor([text.site for text in self._texts])
        self._end = torch.tensor([_end(text) for text in self._texts])
        self._facts = [prompt_set.facts for prompt_set in prompt_sets]
        # Weights of each text's −log P(answer) and of its KL term; those of a fact's contexts sum to 1.
        self._answers, self._kept = torch.zeros(len(owners)), torch.full((len(owners),), kl_weight)
        contexts = Counter((owner, fact) for owner, fact, _ in self._prompts)
        for owner, fact, row in self._prompts:
            self._answers[row], self._kept[row] = 1 / contexts[owner, fact], 0
        self._buckets = [self._record(rows) for bucket in self._cut() for rows in self._fitting(bucket)]

    def _cut(self) -> Iterator[Tensor]:
        """Partition the texts into buckets of least total cost, rows × positions that are run + `BATCH_COST` for each.

        A rerun begins where its subject ends. If the model can begin at a different position in each row, texts with
        similar numbers of positions to run share a bucket; else those whose subjects end at similar positions, since
        all rows begin at the leftmost. Yields indices of texts.
        """
        at, end = self._at.tolist(), self._end.tolist()
        key = [b - a for a, b in zip(at, end, strict=True)] if self._ragged else at
        keys = sorted(set(key))
        of = [[row for row in range(len(key)) if key[row] == length] for length in keys]
        # best[j]: least cost of all texts whose key is below keys[j], and the index where its last bucket begins.
        best: list[tuple[float, int]] = [(0.0, 0)]
        for j in range(1, len(keys) + 1):
            longest, weight, options = 0, 0, []
            for i in range(j - 1, -1, -1):
                longest = max(longest, *(end[row] for row in of[i]))
                weight += len(of[i])
                positions = keys[j - 1] if self._ragged else longest - keys[i]
                options.append((best[i][0] + weight * positions + BATCH_COST, i))
            best.append(min(options))
        last = len(keys)
        while last:
            first = best[last][1]
            # Sorted, so that the rows of most parts of a large bucket begin at one position, which needs no mask.
            yield torch.tensor(sorted((row for group in of[first:last] for row in group), key=lambda row: at[row]))
            last = first

    def _fitting(self, rows: Tensor) -> Sequence[Tensor]:
        """Split a bucket into parts whose attention keys and values in all layers fit into memory while recording."""
        longest = max(len(self._texts[row].ids) for row in rows.tolist())
        each = 2 * longest * len(self.editable.layers) * self.editable.d_model
        return _parts(rows, batch_budget(self.editable, ROOM, SHARES) // each)

    def _record(self, rows: Tensor) -> _Bucket:
        texts = [self._texts[row] for row in rows.tolist()]
        at = self._at[rows]
        starts = at if self._ragged else torch.full_like(at, int(at.min()))
        said = [
            (row, text.answer - 1 + i, token)
            for row, text in enumerate(texts)
            for i, token in enumerate(text.target_ids)
        ]
        kept = [(row, len(text.ids) - 1) for row, text in enumerate(texts) if not text.target_ids]
        reads = torch.tensor(kept, dtype=torch.long).reshape(-1, 2)
        layer = self.ff.layer
        ids = pad([text.ids for text in texts])
        recording = replay.record(self.editable, ids, reads, only=(layer, int(starts.max())))
        before = log_softmax(recording.logits).exp()
        entropy = -torch.xlogy(before, before).sum(-1)
        said_at = torch.tensor(said, dtype=torch.long).reshape(-1, 3)
        return _Bucket(rows, starts, recording, said_at, reads, before, entropy)

    def loss_and_gradient(
        self, delta: Tensor, going: Tensor, penalty: float = 1.0
    ) -> tuple[Tensor, Tensor, list[list[list[float]]]]:
        """Compute L without its weight decay, and its gradient, for the values of `delta` [n, d_model] in `going` [n].

        Args:
            delta: δ of each value, in the units of the layer's output.
            going: mask of the values to compute; the loss and gradient of the others are 0.
            penalty: factor on the KL term.

        Returns:
            the loss, [n], nats; its gradient, [n, d_model]; and by value and fact, the log-probability of the new
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

        Returns:
            log-probability of each text's answer (0 without one) and the KL divergence summed along it, [texts], nats.
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


def _end(text: Encoded) -> int:
    """Return the position after the last that is read."""
    return len(text.ids) - 1 if text.target_ids else len(text.ids)


def size(editable: Editable, ff: FeedForward, prompt_set: PromptSet) -> int:
    """Estimate how many numbers an `Objective` keeps for a prompt set."""
    width, layers = ff.shape[0], len(editable.layers) - ff.layer
    vocabulary = int(editable.model.config.get_text_config().vocab_size)
    texts = (*prompt_set.prompts, *prompt_set.essence)
    furthest = max(text.site for text in texts)
    held = sum(2 * layers * furthest + len(text.ids) for text in texts)
    return held * width + len(prompt_set.essence) * vocabulary
