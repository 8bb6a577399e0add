"""A text run before and after an edit: the triggers of the memories that it adds, and the predictions that change.

Two passes over the same rows keep a few numbers for each position. Only the passages that are shown are decoded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ffedit.algebra.linalg import double
from ffedit.inference.generation import log_softmax
from ffedit.inference.text import Corpus
from ffedit.inspector.analyses.distributions import MOST_LOGITS, Prefix, Said, named, prefix
from ffedit.inspector.corpus_pass.positions import Positions
from ffedit.inspector.interventions.edit_as_memory import Added, Change
from ffedit.inspector.views.view import View
from ffedit.model.editable import Editable
from ffedit.model.hooks import capture
from ffedit.model.memory import Address
from ffedit.progress import Progress, silent


@dataclass(frozen=True)
class Passage(View):
    """A prefix of the corpus, with the predictions before and after the edit.

    Attributes:
        prefix: the text; the predictions are at its last token.
        coefficient: coefficient of the added memory, w·m; None where the passage is not a trigger of one.
        change: the largest ‖Δ m‖ / ‖o‖ over the layers: the edit's part relative to the layer's output o.
        before: the predicted next token.
        after: the predicted next token with the edit.
        kept: the probability of the token `before` with the edit.
    """

    prefix: Prefix
    coefficient: float | None
    change: float
    before: Said
    after: Said
    kept: float


@dataclass(frozen=True, eq=False)
class Reread:
    """Predictions at the n positions of a text, before and after an edit.

    Attributes:
        positions: the positions.
        added: the added memories.
        coefficients: coefficient of each at each position, [added][n], float64.
        change: the largest ‖Δ m‖ / ‖o‖ over the layers, [n].
        before: the most probable next token, [n], and its probability, [n].
        after: the same with the edit.
        kept: p after of the token `before`, [n].
    """

    positions: Positions
    added: tuple[Added, ...]
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


def reread(
    editable: Editable, edit: Change, added: Sequence[Added], corpus: Corpus, progress: Progress = silent
) -> Reread:
    """Run `corpus` through the model as it is and with `edit`.

    Raises:
        EditError: the corpus cannot be used, or the edit does not fit.
    """
    positions = Positions.of(editable, corpus, progress)
    size = MOST_LOGITS // int(editable.model.config.get_text_config().vocab_size)
    coefficients: list[list[Tensor]] = [[] for _ in added]
    changes, before, after, kept, done = [], [], [], [], 0
    for ids, inside, _ in positions.batches(size):
        log_probs, keys, outputs = _read(editable, ids, inside, edit.updates)
        for one, found in zip(added, coefficients, strict=True):
            found.append(double(keys[one.address]) @ one.key)
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
        added=tuple(added),
        coefficients=tuple(torch.cat(found) for found in coefficients),
        change=torch.cat(changes),
        before=(torch.cat([b.indices for b in before]), torch.cat([b.values.exp() for b in before])),
        after=(torch.cat([b.indices for b in after]), torch.cat([b.values.exp() for b in after])),
        kept=torch.cat(kept),
    )


@torch.no_grad()
def _read(
    editable: Editable, ids: Tensor, inside: Tensor, changed: Iterable[Address]
) -> tuple[Tensor, dict[Address, Tensor], dict[int, Tensor]]:
    """Run ids [rows, t] and return the values at the positions `inside`.

    Returns:
        log p [n, vocabulary], the coefficients [n, d_ff] of the memories `changed`, and the outputs [n, d_model] of
        their layers.
    """
    some = frozenset(changed)
    places = [editable.feed_forward[layer].only(some) for layer in sorted({address.layer for address in some})]
    with ExitStack() as stack:
        seen = [stack.enter_context(place.keys()) for place in places]
        outputs = stack.enter_context(capture({place.layer: place.module for place in places}))
        logits = editable.run(input_ids=ids.to(editable.device), use_cache=False).logits

    def there(found: Tensor) -> Tensor:
        return found.reshape(*ids.shape, -1).cpu()[inside]

    keys = [place.split(there(joined()), -1) for place, joined in zip(places, seen, strict=True)]
    return (
        log_softmax(logits).cpu()[inside],
        {address: key for some in keys for address, key in some.items()},
        {layer: there(output) for layer, output in outputs.items()},
    )


def _relative(edit: Change, keys: Mapping[Address, Tensor], outputs: Mapping[int, Tensor]) -> Tensor:
    """Return the largest ‖Δ m‖ / ‖o‖ over the layers, [n]: Δ m of a mixture is the sum over its experts."""
    changes = {layer: torch.zeros_like(double(output)) for layer, output in outputs.items()}
    for address, key in keys.items():
        changes[address.layer] += (edit.updates[address].cpu() @ double(key).T).T
    norms = [torch.linalg.vector_norm(changes[layer], dim=1) for layer in outputs]
    sizes = [torch.linalg.vector_norm(double(output), dim=1) for output in outputs.values()]
    return torch.stack([norm / size for norm, size in zip(norms, sizes, strict=True)]).amax(0)


def passage(
    tokenizer: PreTrainedTokenizerBase, found: Reread, position: int, coefficients: Tensor | None = None
) -> Passage:
    """Return the prefix of a position of the text, with the predictions before and after the edit."""
    before, after = (
        Said(int(ids[position]), named(tokenizer, int(ids[position])), float(p[position]))
        for ids, p in (found.before, found.after)
    )
    return Passage(
        prefix=prefix(tokenizer, *found.positions.context(position)),
        coefficient=None if coefficients is None else float(coefficients[position]),
        change=float(found.change[position]),
        before=before,
        after=after,
        kept=float(found.kept[position]),
    )
