"""L(δ) for many values at once.

Adding δ to a layer's output at the subject's last token changes nothing below that layer and nothing left of that
token. So the texts of all wordings are recorded once; a step then runs those that take part on from the layer and from
their subject's last token, in batches of texts that run about as far (buckets), and reads the unembedding where the
loss is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor

from ffedit import replay
from ffedit.anatomy import Editable
from ffedit.editor.config import EditConfig
from ffedit.editor.wording import Phrasing, Wording
from ffedit.feed_forward import FeedForward
from ffedit.hooks import replaced
from ffedit.readout import log_softmax
from ffedit.room import room
from ffedit.tokens import pad

# How many numbers the recordings of a group of values may hold, or a batch of theirs with its gradients: on a CPU
# 128 MB in float32; on a GPU, a share of what is free.
ROOM, SHARES = 2**25, 8
# What one more batch costs, in tokens: with fewer, the weights are read for nearly nothing.
BATCH_COST = 32
# Activations that are kept for the gradient, per token and layer, in widths of the residual stream.
ACTIVATIONS = 16


@dataclass(frozen=True, eq=False)
class _Bucket:
    """Some texts, recorded.

    Attributes:
        rows: which of the objective's texts, [r].
        starts: first position of each that is run again, [r]; no subject ends left of it.
        recording: of these texts.
        said: for each token of an answer: row in the bucket, position before it, token; [a, 3].
        kept: for each position to be kept: row in the bucket, position; [k, 2].
        before: what is to be kept there, [k, vocabulary].
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
    """The texts of some wordings, recorded once on the unedited model; their loss at any δ.

    Args:
        editable: the model.
        place: the layer that δ is added to.
        wordings: one for each value, n in all.
        config: weights.
    """

    def __init__(self, editable: Editable, place: FeedForward, wordings: Sequence[Wording], config: EditConfig) -> None:
        self.editable, self.place, self.config, self.n = editable, place, config, len(wordings)
        self._ragged = editable.resumable and editable.ragged
        self._texts: list[Phrasing] = []
        about: list[tuple[int, int, int, int]] = []
        facts = 0
        for owner, wording in enumerate(wordings):
            turns = len(wording.phrasings)
            parts = ((wording.prompts, 0), (wording.essence, 0), (wording.phrasings, turns))
            for some, of in parts:
                self._texts += some
                about += [(owner, facts + p.fact, turn, of) for turn, p in enumerate(some)]
            facts += wording.facts
        # Per text: whose it is, which fact it states, and its turn among how many; 0 turns: always there.
        self._owner, self._fact, self._turn, self._turns = torch.tensor(about).unbind(1)
        self._at = torch.tensor([p.text.subject_last for p in self._texts])
        self._end = torch.tensor([_end(p) for p in self._texts])
        self._states = torch.tensor([bool(p.text.target_ids) for p in self._texts])
        self._swaps = [wording.swaps for wording in wordings]
        self._facts = [wording.facts for wording in wordings]
        self._buckets = [self._record(part) for rows in self._cut() for part in self._fitting(rows)]

    def _cut(self) -> Iterator[Tensor]:
        """Buckets of least cost: rows × positions that are run, and so much for each; indices of texts.

        A rerun begins where its subject ends. Where the model can begin in each row at another position, texts that run
        as far go together; else those whose subject ends at about the same place, since all begin at the leftmost.
        """
        at, end = self._at.tolist(), self._end.tolist()
        key = [b - a for a, b in zip(at, end, strict=True)] if self._ragged else at
        share = torch.where(self._turns > 0, self.config.phrasings_per_step / self._turns.clamp(min=1), 1.0).clamp(
            max=1
        )
        keys = sorted(set(key))
        of = [[row for row in range(len(key)) if key[row] == one] for one in keys]
        # best[j]: least cost of all texts whose key is below keys[j], and where its last bucket begins.
        best: list[tuple[float, int]] = [(0.0, 0)]
        for j in range(1, len(keys) + 1):
            longest, weight, options = 0, 0.0, []
            for i in range(j - 1, -1, -1):
                longest = max(longest, *(end[row] for row in of[i]))
                weight += float(share[of[i]].sum())
                positions = keys[j - 1] if self._ragged else longest - keys[i]
                options.append((best[i][0] + weight * positions + BATCH_COST, i))
            best.append(min(options))
        last = len(keys)
        while last:
            first = best[last][1]
            # Sorted, so that most parts of a large bucket begin at one position, which needs no mask.
            yield torch.tensor(sorted((row for group in of[first:last] for row in group), key=lambda row: at[row]))
            last = first

    def _fitting(self, rows: Tensor) -> Sequence[Tensor]:
        """A bucket in parts of which the keys and values of all layers have room, while they are recorded."""
        longest = max(len(self._texts[row].text.ids) for row in rows.tolist())
        each = 2 * longest * len(self.editable.layers) * self.editable.d_model
        return _parts(rows, room(self.editable, ROOM, SHARES) // each)

    def _record(self, rows: Tensor) -> _Bucket:
        texts = [self._texts[row] for row in rows.tolist()]
        at = self._at[rows]
        starts = at if self._ragged else torch.full_like(at, int(at.min()))
        said = [
            (row, p.text.answer - 1 + i, token)
            for row, p in enumerate(texts)
            for i, token in enumerate(p.text.target_ids)
        ]
        kept = torch.tensor([(row, at) for row, p in enumerate(texts) for at in p.kept], dtype=torch.long).reshape(
            -1, 2
        )
        layer = self.place.layer
        ids = pad([p.text.ids for p in texts])
        recording = replay.record(self.editable, ids, kept, only=(layer, int(starts.max())))
        before = log_softmax(recording.logits).exp()
        if self.config.swap:
            self._swap(before, self._owner[rows[kept[:, 0]]])
        entropy = -torch.xlogy(before, before).sum(-1)
        return _Bucket(
            rows, starts, recording, torch.tensor(said, dtype=torch.long).reshape(-1, 3), kept, before, entropy
        )

    def _swap(self, before: Tensor, owner: Tensor) -> None:
        """Give the old objects' probability to the new ones, in place; an old one of several facts, to each a part."""
        for i, swaps in enumerate(self._swaps):
            at = (owner == i).nonzero()[:, 0].to(before.device)
            pairs = [(old, new) for old, new in swaps if old != new]
            olds = [old for old, _ in pairs]
            moved = [before[at, old] / olds.count(old) for old in olds]
            for old in olds:
                before[at, old] = 0
            for (_, new), mass in zip(pairs, moved, strict=True):
                before[at, new] += mass

    def weights(self, step: int, ease: float) -> tuple[Tensor, Tensor]:
        """What −log P(answer) and the divergence of each text count in a step, [texts] each; 0 where it takes no part.

        Prompts and essence prompts take part always, own phrasings in turn.
        """
        config, own = self.config, self._turns > 0
        since = (self._turn - step * config.phrasings_per_step) % self._turns.clamp(min=1)
        part = ~own | (since < config.phrasings_per_step)
        answers = torch.zeros(len(part), dtype=torch.float64)
        for of, weight in ((~own, 1.0), (own, config.own)):
            some = part & of & self._states
            share = weight / torch.bincount(self._fact[some], minlength=int(self._fact.max()) + 1).double()
            answers[some] = share[self._fact[some]]
        some = part & own
        share = config.keep / torch.bincount(self._owner[some], minlength=self.n).clamp(min=1).double()
        kept = torch.where(some, share[self._owner], 0.0)
        kept[~own & ~self._states] = config.essence
        return answers, ease * kept

    def loss_and_gradient(
        self, delta: Tensor, going: Tensor, step: int, ease: float
    ) -> tuple[Tensor, Tensor, list[list[list[float]]]]:
        """L without its decay and its gradient at those values of `delta` [n, d_model] that are `going` [n].

        Returns:
            the loss, [n], nats; its gradient, [n, d_model]; and by value and fact, the log-probability of the new
            object in each prompt, nats.
        """
        answers, kept = (w.to(delta) for w in self.weights(step, ease))
        taking = going[self._owner] & ((answers > 0) | (kept > 0)).cpu()
        loss, gradient = delta.new_zeros(self.n), torch.zeros_like(delta)
        found = torch.zeros(len(taking))
        for bucket, some in self._batches(taking):
            leaf = delta.detach().clone().requires_grad_()
            said, moved = self._run(bucket, some, leaf)
            rows = bucket.rows[some]
            terms = kept[rows] * moved - answers[rows] * said
            gradient += torch.autograd.grad(terms.sum(), leaf)[0]
            loss.index_add_(0, self._owner[rows].to(delta.device), terms.detach())
            found[rows] = said.detach().float().cpu()
        return loss, gradient, self._by_fact(found)

    def _by_fact(self, found: Tensor) -> list[list[list[float]]]:
        """What was found for each prompt, [texts], by value and fact."""
        result: list[list[list[float]]] = [[[] for _ in range(count)] for count in self._facts]
        first = [0]
        for count in self._facts:
            first.append(first[-1] + count)
        for row in (self._states & (self._turns == 0)).nonzero()[:, 0].tolist():
            owner = int(self._owner[row])
            result[owner][int(self._fact[row]) - first[owner]].append(float(found[row]))
        return result

    def _batches(self, taking: Tensor) -> Iterator[tuple[_Bucket, Tensor]]:
        """The texts that take part, [texts], as indices within a bucket, no more at once than there is room for."""
        most = room(self.editable, ROOM, SHARES)
        layers = len(self.editable.layers) - self.place.layer
        for bucket in self._buckets:
            some = taking[bucket.rows].nonzero()[:, 0]
            if not len(some):
                continue
            reads = (len(bucket.said) + len(bucket.kept)) / len(bucket.rows)
            width = int((self._end[bucket.rows] - bucket.starts).max())
            each = width * layers * ACTIVATIONS * self.place.shape[0] + 3 * reads * bucket.before.shape[1]
            yield from ((bucket, part) for part in _parts(some, int(most // each)))

    def _run(self, bucket: _Bucket, some: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """Run texts `some` of a bucket with δ in place.

        Returns:
            log-probability of each text's answer (0 without one) and the KL divergence summed along it, [texts], nats.
        """
        editable, layer = self.editable, self.place.layer
        rows, starts = bucket.rows[some], bucket.starts[some]
        width = int((self._end[rows] - starts).max())
        each, at = torch.arange(len(some)), self._at[rows]
        owner = self._owner[rows].to(delta.device)

        def add(output: Tensor) -> Tensor:
            moved = output.reshape(len(some), -1, output.shape[-1]).clone()
            # A model that cannot be resumed runs whole rows.
            moved[each, at if moved.shape[1] > width else at - starts] += delta[owner].to(moved)
            return moved.reshape(output.shape)

        place = torch.full((len(bucket.rows),), -1)
        place[some] = each
        said = bucket.said[place[bucket.said[:, 0]] >= 0]
        which = place[bucket.kept[:, 0]] >= 0
        kept = bucket.kept[which]
        reads = torch.cat([said[:, :2], kept])
        reads = torch.stack([place[reads[:, 0]], reads[:, 1]], 1)
        run, from_end = reads[:, 0], reads[:, 1] - starts[reads[:, 0]] - width
        # Where δ is added to the last layer itself, that one runs whole.
        last = layer + 1 == len(editable.layers)
        with replaced(self.place.module, add), nullcontext() if last else replay.narrowed(editable, run, from_end):
            states = bucket.recording.states[layer]
            inside = (starts[:, None] + torch.arange(width)).clamp(max=states.shape[1] - 1)
            given = editable, bucket.recording, layer, states[some[:, None], inside], some
            if int(starts.min()) < int(starts.max()):
                logits = replay.resume_each(*given, starts, reads)
            else:
                logits = replay.resume(*given, int(starts[0]), reads)
        log_probs = log_softmax(logits)
        of_answers, of_kept = log_probs.split([len(said), len(kept)])
        answers = of_answers.gather(-1, said[:, 2:].to(log_probs.device))[:, 0]
        which = which.to(log_probs.device)
        divergence = -bucket.entropy[which] - (bucket.before[which] * of_kept).sum(-1)
        of = reads[:, 0].to(log_probs.device)
        zero = log_probs.new_zeros(len(some))
        return zero.index_add(0, of[: len(said)], answers), zero.index_add(0, of[len(said) :], divergence)


def _parts(rows: Tensor, most: int) -> tuple[Tensor, ...]:
    """Parts of at most so many rows, and of one at least; all about as long, since a short one costs nearly as much."""
    return rows.tensor_split(ceil(len(rows) / max(1, most)))


def _end(p: Phrasing) -> int:
    """One position behind the last that is read."""
    return max([*p.kept, *([len(p.text.ids) - 2] if p.text.target_ids else []), p.text.subject_last]) + 1


def size(editable: Editable, place: FeedForward, wording: Wording) -> int:
    """How many numbers an `Objective` keeps for a wording, about."""
    width, layers = place.shape[0], len(editable.layers) - place.layer
    vocabulary = int(editable.model.config.get_text_config().vocab_size)
    texts = (*wording.prompts, *wording.essence, *wording.phrasings)
    furthest = max(p.text.subject_last for p in texts)
    held = sum(2 * layers * furthest + len(p.text.ids) for p in texts)
    return held * width + sum(len(p.kept) for p in texts) * vocabulary
