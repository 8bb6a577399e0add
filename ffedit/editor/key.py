"""Read the key k* of a fact: the memory coefficients at the subject's last token.

k* is their mean over the texts that state the fact (ROME, arXiv 2202.05262, eq. 3); the same vector is used wherever
the algebra needs a key.

Without a BOS, the first token of a text may be an attention sink: its key is nearly that of any other first token and
carries nothing of the subject. Texts that begin with a subject of one token are therefore left out (`without_sinks`):
a change at that key would affect every text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ffedit.algebra import updates
from ffedit.algebra.linalg import Moment, diagonal, double
from ffedit.editor.prompts import PromptSet
from ffedit.errors import EditError
from ffedit.inference import replay
from ffedit.inference.batching import batches, split_on_oom
from ffedit.model.editable import Editable
from ffedit.model.feed_forward import FeedForward
from ffedit.model.hooks import capture
from ffedit.model.tokenization import Encoded, pad

# Cosine of a subject's key at the first position with its keys elsewhere, below which it is an attention sink's: of one
# name's keys in different contexts it is far larger, of a sink's and a name's nearly 0.
SINK = 0.3
# How many tokens a batch holds.
TOKENS = 4096


@dataclass(frozen=True, eq=False)
class LayerKeys:
    """Keys and residual stream of one layer on the texts of n prompt sets, in the model as it is.

    Attributes:
        K: k* of each, [Σ d_ff, n], float64, on the device where the layer is solved.
        streams: mean over the same texts of the residual stream behind the layer at the subject's last token,
            [d_model, n], float64.
        same: of each, the keys at the subject's last token in all texts, [texts, Σ d_ff].
    """

    K: Tensor
    streams: Tensor
    same: Sequence[Tensor]

    @property
    def lengths(self) -> Tensor:
        """Norms of the residual stream, [n]: the unit in which δ is measured."""
        norms: Tensor = self.streams.norm(dim=0).cpu()
        return norms

    def add_context_moment(self, C: Moment, weight: float) -> Moment:
        """Add the spread of each key over its contexts to C (`algebra.updates.add_context_moment`)."""
        return updates.add_context_moment(C, zip(self.K.T, self.same, strict=True), weight) if weight else C


def read_keys(editable: Editable, ff: FeedForward, prompt_sets: Sequence[PromptSet]) -> LayerKeys:
    """Read the keys of all prompt sets in a layer, concatenated over its memories; their texts share batches.

    Raises:
        EditError: memory does not suffice for a single text.
    """
    sets = [_texts(prompt_set) for prompt_set in prompt_sets]
    counts = [len(texts) for texts in sets]
    keys, streams = (read.split(counts) for read in _read(editable, ff, [text for texts in sets for text in texts]))
    # The keys of the essence prompts belong to the spread, but not to the mean.
    stated = [torch.tensor([bool(text.target_ids) for text in texts]) for texts in sets]
    K, means = (
        torch.stack([double(rows[mask]).mean(0) for rows, mask in zip(read, stated, strict=True)], 1)
        for read in (keys, streams)
    )
    return LayerKeys(K.to(ff.solve_device), means, keys)


def without_sinks(editable: Editable, ff: FeedForward, prompt_sets: Sequence[PromptSet]) -> list[PromptSet]:
    """Leave out the texts in which the subject's key is that of an attention sink, if other prompts remain."""
    kept = list(prompt_sets)
    for i, prompt_set in enumerate(prompt_sets):
        texts = _texts(prompt_set)
        first = torch.tensor([text.site == 0 for text in texts])
        if not first.any() or first[: len(prompt_set.prompts)].all():
            continue
        keys = double(_read(editable, ff, texts)[0])
        alike = torch.cosine_similarity(keys, keys[~first].mean(0, keepdim=True))
        kept[i] = prompt_set.without([row for row in first.nonzero()[:, 0].tolist() if float(alike[row]) < SINK])
    return kept


def _texts(prompt_set: PromptSet) -> list[Encoded]:
    return [*prompt_set.prompts, *prompt_set.essence]


def zero_moment(ff: FeedForward) -> Moment:
    """Return a zero second moment, [Σ d_ff, Σ d_ff], float64, on the device where the layer is solved."""
    return diagonal([torch.zeros(size, size, dtype=torch.float64, device=ff.solve_device) for size in ff.sizes])


def _read(editable: Editable, ff: FeedForward, texts: Sequence[Encoded]) -> tuple[Tensor, Tensor]:
    """Return keys [texts, Σ d_ff] and residual stream [texts, d_model] at each subject's last token."""
    refusal = EditError("not enough memory to read the key of a single text; use a smaller dtype, or another --device")
    order = list(batches([len(text.ids) for text in texts], TOKENS))
    run = partial(_run, editable, ff)
    read = [pair for batch in order for pair in split_on_oom(run, [texts[i] for i in batch], refusal)]
    back = torch.tensor([i for batch in order for i in batch]).argsort()
    keys, streams = (torch.cat(rows) for rows in zip(*read, strict=True))
    return keys[back], streams[back]


def _run(editable: Editable, ff: FeedForward, texts: Sequence[Encoded]) -> tuple[Tensor, Tensor]:
    """Run one batch up to the layer; return what `_read` returns."""
    ids = pad([text.ids for text in texts])
    with ff.keys() as entering, capture({0: editable.layers[ff.layer]}) as leaving:
        replay.run_to(editable, ids, ff.layer)
    keys, stream = (read.reshape(*ids.shape, -1) for read in (entering(), leaving[0]))
    at = torch.arange(len(texts)), torch.tensor([text.site for text in texts])
    return keys[at], stream[at]
