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

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ffedit.algebra.linalg import double
from ffedit.algebra.low_rank import LowRank, Update
from ffedit.editor.edit import Edit
from ffedit.inference.generation import log_softmax
from ffedit.inference.text import Corpus
from ffedit.inspector.corpus_pass.rows import Positions
from ffedit.inspector.distributions import MOST_LOGITS, Prefix, TokenProbability, token_text
from ffedit.inspector.slots import View
from ffedit.model.editable import Editable
from ffedit.model.hooks import capture
from ffedit.model.memory import Address
from ffedit.progress import Progress, silent


@dataclass(frozen=True, eq=False)
class RankOneMemory:
    """One memory of an update.

    Attributes:
        address: the layer that it is added to.
        key: w [d_ff], float64; its coefficient is w·m.
        value: v [d_model], float64.
        share: share of ‖Δ‖².
        written: whether c = 1 at a key that was solved for; else ‖w‖ = 1.
    """

    address: Address
    key: Tensor
    value: Tensor
    share: float
    written: bool


def added_memories(address: Address, update: Update, keys: Tensor, count: int) -> list[RankOneMemory]:
    """Decompose an update into memories and return the first `count`, the largest first.

    Args:
        address: the layer that changes.
        update: Δ [d_model, d_ff].
        keys: the keys that it was solved for, [d_ff, n]; n may be 0.
        count: largest number of memories.
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
    """A prefix of the corpus, with the predictions before and after the edit.

    Attributes:
        prefix: the text; the predictions are at its last token.
        coefficient: coefficient of the added memory, w·m; None where the passage is not a trigger of one.
        change: the largest ‖Δ m‖ / ‖o‖ over the layers: the edit's change relative to the layer's output o.
        before: the predicted next token.
        after: the predicted next token with the edit.
        kept: the probability of the token `before` with the edit.
    """

    prefix: Prefix
    coefficient: float | None
    change: float
    before: TokenProbability
    after: TokenProbability
    kept: float


@dataclass(frozen=True, eq=False)
class Reread:
    """Predictions at the n positions of a text, before and after an edit.

    Attributes:
        positions: the positions.
        coefficients: coefficient of each added memory at each position, [memories][n], float64.
        change: the largest ‖Δ m‖ / ‖o‖ over the layers, [n].
        before: the most probable next token, [n], and its probability, [n].
        after: the same with the edit.
        kept: p after of the token `before`, [n].
    """

    positions: Positions
    coefficients: tuple[Tensor, ...]
    change: Tensor
    before: tuple[Tensor, Tensor]
    after: tuple[Tensor, Tensor]
    kept: Tensor

    @property
    def lost(self) -> Tensor:
        """Probability that the prediction lost by the edit, [n]."""
        return self.before[1] - self.kept

    @property
    def changed(self) -> float:
        """Share of the positions at which another token is predicted."""
        return float((self.before[0] != self.after[0]).double().mean())

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
                change=float(self.change[i]),
                before=predicted(self.before, i),
                after=predicted(self.after, i),
                kept=float(self.kept[i]),
            )
            for i in self.positions.largest(scores, count)
        )


def reread(
    editable: Editable, edit: Edit, added: Sequence[RankOneMemory], corpus: Corpus, progress: Progress = silent
) -> Reread:
    """Run `corpus` through the model as it is and with `edit`.

    Raises:
        EditError: the corpus cannot be used, or the edit does not fit.
    """
    positions = Positions.of(editable, corpus, progress)
    size = MOST_LOGITS // editable.vocabulary
    coefficients: list[list[Tensor]] = [[] for _ in added]
    changes, before, after, kept, done = [], [], [], [], 0
    for ids, inside, _ in positions.batches(size):
        log_probs, keys, outputs = _read(editable, ids, inside, edit.updates)
        for memory, collected in zip(added, coefficients, strict=True):
            collected.append(double(keys[memory.address]) @ memory.key)
        changes.append(_relative(edit, keys, outputs))
        before.append(log_probs.max(-1))
        progress("reading text", done := done + len(log_probs), 2 * len(positions))
    with edit.applied(editable):
        for (ids, inside, _), old in zip(positions.batches(size), before, strict=True):
            log_probs, _, _ = _read(editable, ids, inside, ())
            after.append(log_probs.max(-1))
            kept.append(log_probs.gather(-1, old.indices[:, None])[:, 0].exp())
            progress("reading text", done := done + len(log_probs), 2 * len(positions))
    return Reread(
        positions=positions,
        coefficients=tuple(torch.cat(collected) for collected in coefficients),
        change=torch.cat(changes),
        before=(torch.cat([b.indices for b in before]), torch.cat([b.values.exp() for b in before])),
        after=(torch.cat([b.indices for b in after]), torch.cat([b.values.exp() for b in after])),
        kept=torch.cat(kept),
    )


@torch.no_grad()
def _read(
    editable: Editable, ids: Tensor, inside: Tensor, addresses: Iterable[Address]
) -> tuple[Tensor, dict[Address, Tensor], dict[int, Tensor]]:
    """Run ids [rows, t] and return the values at the positions `inside`.

    Returns:
        log p [n, vocabulary], the coefficients [n, d_ff] of the memories at `addresses`, and the outputs [n, d_model]
        of their layers.
    """
    changed = frozenset(addresses)
    layers = [editable.feed_forward[layer].only(changed) for layer in sorted({address.layer for address in changed})]
    with ExitStack() as stack:
        seen = [stack.enter_context(layer.keys()) for layer in layers]
        outputs = stack.enter_context(capture({layer.layer: layer.module for layer in layers}))
        logits = editable.run(input_ids=ids.to(editable.device), use_cache=False).logits

    def at_positions(values: Tensor) -> Tensor:
        return values.reshape(*ids.shape, -1).cpu()[inside]

    keys: dict[Address, Tensor] = {}
    for layer, joined in zip(layers, seen, strict=True):
        keys |= layer.split(at_positions(joined()), -1)
    return log_softmax(logits).cpu()[inside], keys, {layer: at_positions(output) for layer, output in outputs.items()}


def _relative(edit: Edit, keys: Mapping[Address, Tensor], outputs: Mapping[int, Tensor]) -> Tensor:
    """Return the largest ‖Δ m‖ / ‖o‖ over the layers, [n]: Δ m of a mixture is the sum over its experts."""
    changes = {layer: torch.zeros_like(double(output)) for layer, output in outputs.items()}
    for address, key in keys.items():
        changes[address.layer] += (edit.updates[address].cpu() @ double(key).T).T
    norms = [torch.linalg.vector_norm(changes[layer], dim=1) for layer in outputs]
    sizes = [torch.linalg.vector_norm(double(output), dim=1) for output in outputs.values()]
    return torch.stack([norm / size for norm, size in zip(norms, sizes, strict=True)]).amax(0)
