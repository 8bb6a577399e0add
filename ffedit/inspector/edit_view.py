"""An edit as key-value memories that it adds to a layer, and a text that is read without and with them.

    W + Δ,  Δ = v wᵀ:    (W + Δ) m = W m + (w·m) v

An update of rank one is one more memory in the layer. Its coefficient is c = w·m, so its key is a pattern over the
coefficients of all others; its value is v. An update of higher rank is several memories, those of its singular value
decomposition. Each is scaled so that c = 1 at the key it was solved for: v = Δ k* is then what the edit adds to the
layer's output at the fact, and c the multiple of v that it adds on another text.

Two passes over the same rows, without and with the edit, keep a few numbers for each position: the predictions, and the
coefficients of the added memories, which are largest at their triggers.
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
from ffedit.editor.edit import Edit, check_edit
from ffedit.editor.statistics import by_layer
from ffedit.errors import EditError
from ffedit.facts.text import change
from ffedit.inference.corpus import Corpus, check_corpus
from ffedit.inference.generation import log_softmax
from ffedit.inspector.memory_view import READ_TOKENS
from ffedit.inspector.prompt_view import PromptView, inspect_prompt
from ffedit.inspector.rows import Positions
from ffedit.inspector.views import (
    MAX_LOGITS,
    Distribution,
    Prefix,
    TokenProbability,
    View,
    log_probabilities,
    token_text,
)
from ffedit.model.editable import Editable, check_model
from ffedit.model.memory import Address
from ffedit.notebook import Displayed
from ffedit.progress import Progress, silent

# Number of added memories that are shown for each layer.
MOST_ADDED = 3
# Number of facts with prompts that are inspected before and after the edit.
MOST_FACTS = 3


@dataclass(frozen=True)
class Passage(View):
    """A prefix of the corpus, with the predictions before and after the edit."""

    prefix: Prefix  # the text; the predictions are at its last token
    coefficient: float | None  # coefficient of the added memory, w·m; None where the passage is not a trigger of one
    before: TokenProbability  # the predicted next token
    after: TokenProbability  # the predicted next token with the edit
    kept: float  # the probability of the token `before` with the edit


@dataclass(frozen=True)
class AddedMemory(View):
    """A memory that the update adds."""

    share: float  # share of ‖Δ‖²
    written: bool  # whether the coefficient is 1 at a key that was solved for; else the key has norm 1
    value: Distribution  # v through final norm and unembedding
    triggers: tuple[Passage, ...]  # prefixes of the corpus with the largest coefficients w·m


@dataclass(frozen=True)
class LayerChange(View):
    """One layer that changed, or one expert of a layer."""

    address: Address
    norm: float  # ‖Δ‖
    relative: float  # ‖Δ‖ / ‖W‖
    added: tuple[AddedMemory, ...]


@dataclass(frozen=True)
class EditView(View, Displayed):
    """An edit in terms of memories."""

    model: str  # the model's name
    edit: str  # the edit's fingerprint
    facts: tuple[str, ...]  # what each fact changes, in words
    layers: tuple[LayerChange, ...]  # the changes, layer by layer and expert by expert
    corpus: str  # the text that was read
    tokens: int  # number of positions that were read
    changed: float  # share of them at which the model predicts another token than before
    passages: tuple[Passage, ...]  # those at which the predicted token lost most probability, the largest loss first
    prompts: tuple[tuple[PromptView, PromptView], ...]  # views of the first facts' prompts, before and after

    def __repr__(self) -> str:
        layers = ", ".join(str(layer.address) for layer in self.layers)
        return (
            f"EditView of {self.edit} in {self.model}: layers {layers}\n  the prediction changes after "
            f"{self.changed:.2%} of {self.tokens:,} tokens of {self.corpus}"
        )


def inspect_edit(
    editable: Editable,
    edit: Edit,
    *,
    corpus: Corpus | None = None,
    top: int = 5,
    progress: Progress = silent,
) -> EditView:
    """Return an edit as the memories that it adds. The model is left unchanged.

    Args:
        editable: the model that the edit was computed on, without it.
        edit: the edit.
        corpus: the text to read; by default text that the model samples.
        top: number of triggers, passages and tokens that are shown, each.
        progress: progress callback.

    Raises:
        EditError: the edit does not fit the model or is applied already, or the corpus or `top` cannot be used.
    """
    check_model(editable)
    check_edit(edit)
    check_corpus(corpus)
    top = EditError.whole("top", top, 1)
    edit.check(editable)
    corpus, tokenizer = corpus or Corpus(tokens=READ_TOKENS), editable.tokenizer
    updates = {address: edit.updates[address].cpu() for address in sorted(edit.updates)}
    memories = [m for at, update in updates.items() for m in added_memories(at, update, edit.keys[at], MOST_ADDED)]
    text = _read_twice(editable, edit, memories, corpus, progress)
    added: dict[Address, list[AddedMemory]] = {address: [] for address in updates}
    for memory, coefficients in zip(memories, text.coefficients, strict=True):
        value = Distribution.of(tokenizer, log_probabilities(editable, memory.value[None].float())[0], top)
        triggers = text.largest(tokenizer, coefficients, top, coefficients)
        added[memory.address].append(AddedMemory(memory.share, memory.written, value, triggers))
    layers = []
    for address, update in updates.items():
        norm = update.norm()
        relative = norm / float(torch.linalg.matrix_norm(editable.memories[address].value.float()))
        layers.append(LayerChange(address, norm, relative, tuple(added[address])))
    prompts = [fact.text for fact in edit.facts[:MOST_FACTS]]
    before = [inspect_prompt(editable, prompt, top=top) for prompt in prompts]
    with edit.applied(editable):
        after = [inspect_prompt(editable, prompt, top=top) for prompt in prompts]
    return EditView(
        model=editable.name,
        edit=edit.fingerprint(),
        facts=tuple(change(fact.subject, fact.previous, fact.target) for fact in edit.facts),
        layers=tuple(layers),
        corpus=str(corpus),
        tokens=len(text.kept),
        changed=float(double(text.before[0] != text.after[0]).mean()),
        passages=text.largest(tokenizer, text.before[1] - text.kept, top),
        prompts=tuple(zip(before, after, strict=True)),
    )


@dataclass(frozen=True, eq=False)
class RankOneMemory:
    """One memory of an update."""

    address: Address  # the layer that it is added to
    key: Tensor  # w [d_ff], float64; its coefficient is w·m
    value: Tensor  # v [d_model], float64
    share: float  # share of ‖Δ‖²
    written: bool  # whether c = 1 at a key that was solved for; else ‖w‖ = 1


def added_memories(address: Address, update: Update, keys: Tensor, count: int) -> list[RankOneMemory]:
    """Decompose Δ [d_model, d_ff], solved for `keys` [d_ff, n], and return the `count` largest memories."""
    if isinstance(update, LowRank):  # from the factors
        (q, r), (p, s) = (torch.linalg.qr(double(side)) for side in (update.left, update.right.T))
        inner, sizes, outer = torch.linalg.svd(r @ s.T, full_matrices=False)
        left, right = q @ inner, outer @ p.T
    else:
        left, sizes, right = torch.linalg.svd(double(update.dense), full_matrices=False)
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


@dataclass(frozen=True, eq=False)
class _Text:
    """Predictions at the n positions of a text, before and after an edit."""

    positions: Positions
    coefficients: list[Tensor]  # coefficient of each added memory at each position, [memories][n], float64
    before: tuple[Tensor, Tensor]  # the most probable next token, [n], and its probability, [n]
    after: tuple[Tensor, Tensor]  # the same with the edit
    kept: Tensor  # probability of the token `before` with the edit, [n]

    def largest(
        self, tokenizer: PreTrainedTokenizerBase, scores: Tensor, count: int, coefficients: Tensor | None = None
    ) -> tuple[Passage, ...]:
        """Return the passages of the `count` largest `scores` [n], with the `coefficients` [n] of an added memory."""

        def predicted(prediction: tuple[Tensor, Tensor], i: int) -> TokenProbability:
            token = int(prediction[0][i])
            return TokenProbability(token, token_text(tokenizer, token), float(prediction[1][i]))

        return tuple(
            Passage(
                prefix=Prefix.of(tokenizer, self.positions.prefix(i)),
                coefficient=None if coefficients is None else float(coefficients[i]),
                before=predicted(self.before, i),
                after=predicted(self.after, i),
                kept=float(self.kept[i]),
            )
            for i in self.positions.largest(scores, count)
        )


def _read_twice(
    editable: Editable, edit: Edit, added: Sequence[RankOneMemory], corpus: Corpus, progress: Progress
) -> _Text:
    """Run `corpus` through the model as it is and with `edit`; EditError where one of them cannot be used."""
    positions = Positions.of(editable, corpus, progress)
    size = MAX_LOGITS // editable.vocabulary
    before, after, kept, coefficients, completed = [], [], [], [], 0
    for ids, inside in positions.batches(size):
        log_probs, keys = _read(editable, ids, inside, edit.updates)
        coefficients.append([double(keys[memory.address]) @ memory.key for memory in added])
        before.append(log_probs.max(-1))
        progress("reading text", completed := completed + len(log_probs), 2 * len(positions))
    with edit.applied(editable):
        for (ids, inside), old in zip(positions.batches(size), before, strict=True):
            log_probs, _ = _read(editable, ids, inside, ())
            after.append(log_probs.max(-1))
            kept.append(log_probs.gather(-1, old.indices[:, None])[:, 0].exp())
            progress("reading text", completed := completed + len(log_probs), 2 * len(positions))
    old_best, new_best = (
        (torch.cat([b.indices for b in best]), torch.cat([b.values.exp() for b in best])) for best in (before, after)
    )
    return _Text(positions, [*map(torch.cat, zip(*coefficients, strict=True))], old_best, new_best, torch.cat(kept))


@torch.no_grad()
def _read(
    editable: Editable, ids: Tensor, inside: Tensor, addresses: Iterable[Address]
) -> tuple[Tensor, dict[Address, Tensor]]:
    """Run ids [rows, t]; return log p [n, vocabulary] and coefficients [n, d_ff] at `addresses`, all where `inside`."""
    layers = by_layer(editable, addresses)
    with ExitStack() as stack:
        readers = [stack.enter_context(layer.keys()) for layer in layers]
        logits = editable.run(input_ids=ids.to(editable.device), use_cache=False).logits
    keys: dict[Address, Tensor] = {}
    for layer, read_keys in zip(layers, readers, strict=True):
        keys |= layer.split(read_keys().reshape(*ids.shape, -1).cpu()[inside], -1)
    return log_softmax(logits).cpu()[inside], keys
