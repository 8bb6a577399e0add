"""An edit as key-value memories that it adds to a layer, and a text that is read without and with them.

    W + Δ,  Δ = v wᵀ:    (W + Δ) m = W m + (w·m) v

An update of rank one is one more memory in the layer. Its coefficient is c = w·m, so its key is a pattern over the
coefficients of all others; its value is v. An update of higher rank is several memories, those of its singular value
decomposition. Each is scaled so that c = 1 at the key it was solved for: v = Δ k* is then what the edit adds to the
layer's output at the fact, and c the multiple of v that it adds on another text.

Two passes over the same rows, without and with the edit, keep a few numbers for each position: the coefficients of the
added memories, whose largest are their triggers, and the predictions that change.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ffedit.algebra.linalg import double
from ffedit.algebra.low_rank import LowRank, Update
from ffedit.editor.edit import Edit
from ffedit.inference.corpus import Corpus
from ffedit.inference.generation import log_softmax
from ffedit.inspector.corpus_pass.rows import Positions
from ffedit.inspector.distributions import MOST_LOGITS, Prefix, TokenProbability, token_text
from ffedit.inspector.slots import View
from ffedit.model.editable import Editable
from ffedit.model.memory import Address
from ffedit.progress import Progress, silent


@dataclass(frozen=True, eq=False)
class RankOneMemory:
    """One memory of an update."""

    address: Address  # the layer that it is added to
    key: Tensor  # w [d_ff], float64; its coefficient is w·m
    value: Tensor  # v [d_model], float64
    share: float  # share of ‖Δ‖²
    written: bool  # whether c = 1 at a key that was solved for; else ‖w‖ = 1


def added_memories(address: Address, update: Update, keys: Tensor, count: int) -> list[RankOneMemory]:
    """Decompose Δ [d_model, d_ff] into memories and return the first `count`, the largest first.

    `keys` [d_ff, n] are those that the update was solved for; n may be 0.
    """
    left, sizes, right = _singular(update)
    total = float(sizes.square().sum()) or 1.0
    memories = []
    for u, size, w in zip(left.T[:count], sizes[:count], right[:count], strict=True):
        if float(size) <= 1e-12 * float(sizes[0]):
            break
        responses = w @ double(keys.cpu())
        strongest = responses[responses.abs().argmax()] if len(responses) else responses.new_zeros(())
        written = bool(strongest.abs() > 1e-12)
        scale = strongest if written else w[w.abs().argmax()].sign()
        memories.append(RankOneMemory(address, w / scale, u * size * scale, float(size) ** 2 / total, written))
    return memories


def _singular(update: Update) -> tuple[Tensor, Tensor, Tensor]:
    """Return Δ = U diag(σ) Vᵀ in float64: U [d_model, r], σ [r], Vᵀ [r, d_ff]; from the factors of a `LowRank` Δ."""
    if not isinstance(update, LowRank):
        left, sizes, right = torch.linalg.svd(double(update.dense), full_matrices=False)
        return left, sizes, right
    (q, r), (p, s) = (torch.linalg.qr(double(side)) for side in (update.left, update.right.T))
    left, sizes, right = torch.linalg.svd(r @ s.T, full_matrices=False)
    return q @ left, sizes, right @ p.T


@dataclass(frozen=True)
class Passage(View):
    """A prefix of the corpus, with the predictions before and after the edit."""

    prefix: Prefix  # the text; the predictions are at its last token
    coefficient: float | None  # coefficient of the added memory, w·m; None where the passage is not a trigger of one
    before: TokenProbability  # the predicted next token
    after: TokenProbability  # the predicted next token with the edit
    kept: float  # the probability of the token `before` with the edit


@dataclass(frozen=True, eq=False)
class Reread:
    """Predictions at the n positions of a text, before and after an edit."""

    positions: Positions  # the positions
    coefficients: tuple[Tensor, ...]  # coefficient of each added memory at each position, [memories][n], float64
    before: tuple[Tensor, Tensor]  # the most probable next token, [n], and its probability, [n]
    after: tuple[Tensor, Tensor]  # the same with the edit
    kept: Tensor  # p after of the token `before`, [n]

    @property
    def lost(self) -> Tensor:
        """Probability that the prediction lost by the edit, [n]."""
        return self.before[1] - self.kept

    @property
    def changed(self) -> float:
        """Share of the positions at which another token is predicted."""
        return float(double(self.before[0] != self.after[0]).mean())

    def largest(
        self, tokenizer: PreTrainedTokenizerBase, scores: Tensor, count: int, coefficients: Tensor | None = None
    ) -> tuple[Passage, ...]:
        """Return the passages of the `count` largest `scores` [n], with the `coefficients` [n] of an added memory."""

        def predicted(prediction: tuple[Tensor, Tensor], i: int) -> TokenProbability:
            token = int(prediction[0][i])
            return TokenProbability(token, token_text(tokenizer, token), float(prediction[1][i]))

        return tuple(
            Passage(
                prefix=Prefix.of(tokenizer, *self.positions.context(i)),
                coefficient=None if coefficients is None else float(coefficients[i]),
                before=predicted(self.before, i),
                after=predicted(self.after, i),
                kept=float(self.kept[i]),
            )
            for i in self.positions.largest(scores, count)
        )


def reread(
    editable: Editable, edit: Edit, added: Sequence[RankOneMemory], corpus: Corpus, progress: Progress = silent
) -> Reread:
    """Run `corpus` through the model as it is and with `edit`; EditError where one of them cannot be used."""
    positions = Positions.of(editable, corpus, progress)
    size = MOST_LOGITS // editable.vocabulary
    coefficients: list[list[Tensor]] = [[] for _ in added]
    before, after, kept, done = [], [], [], 0
    for ids, inside, _ in positions.batches(size):
        log_probs, keys = _read(editable, ids, inside, edit.updates)
        for memory, collected in zip(added, coefficients, strict=True):
            collected.append(double(keys[memory.address]) @ memory.key)
        before.append(log_probs.max(-1))
        progress("reading text", done := done + len(log_probs), 2 * len(positions))
    with edit.applied(editable):
        for (ids, inside, _), old in zip(positions.batches(size), before, strict=True):
            log_probs, _ = _read(editable, ids, inside, ())
            after.append(log_probs.max(-1))
            kept.append(log_probs.gather(-1, old.indices[:, None])[:, 0].exp())
            progress("reading text", done := done + len(log_probs), 2 * len(positions))
    return Reread(
        positions=positions,
        coefficients=tuple(torch.cat(collected) for collected in coefficients),
        before=(torch.cat([b.indices for b in before]), torch.cat([b.values.exp() for b in before])),
        after=(torch.cat([b.indices for b in after]), torch.cat([b.values.exp() for b in after])),
        kept=torch.cat(kept),
    )


@torch.no_grad()
def _read(
    editable: Editable, ids: Tensor, inside: Tensor, addresses: Iterable[Address]
) -> tuple[Tensor, dict[Address, Tensor]]:
    """Run ids [rows, t]; return log p [n, vocabulary] and the coefficients [n, d_ff] at `addresses`, both `inside`."""
    changed = frozenset(addresses)
    layers = [editable.feed_forward[layer].only(changed) for layer in sorted({address.layer for address in changed})]
    with ExitStack() as stack:
        seen = [stack.enter_context(layer.keys()) for layer in layers]
        logits = editable.run(input_ids=ids.to(editable.device), use_cache=False).logits
    keys: dict[Address, Tensor] = {}
    for layer, joined in zip(layers, seen, strict=True):
        keys |= layer.split(joined().reshape(*ids.shape, -1).cpu()[inside], -1)
    return log_softmax(logits).cpu()[inside], keys
