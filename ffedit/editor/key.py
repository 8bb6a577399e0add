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
from ffedit.inference.batching import split_on_oom
from ffedit.model.editable import Editable
from ffedit.model.feed_forward import FeedForward
from ffedit.model.hooks import capture
from ffedit.model.tokenization import Encoded, pad

# Cosine of a subject's key at the first position with its keys elsewhere, below which it is an attention sink's. Keys
# of one name in different contexts have far larger cosines, those of a sink and a name nearly 0.
SINK = 0.3
NO_ROOM = "not enough memory to read the key of a single text; use a smaller dtype, or another --device"


@dataclass(frozen=True, eq=False)
class LayerKeys:
    """Keys and residual stream of one layer on the texts of a prompt set, in the unchanged model.

    Attributes:
        k: k*, [d_ff], float64.
        stream: mean over the same texts of the residual stream behind the layer at the subject's last token,
            [d_model], float64.
        same: keys at the subject's last token in all texts, [texts, d_ff].
    """

    k: Tensor
    stream: Tensor
    same: Tensor

    def add_context_moment(self, C: Moment, weight: float) -> Moment:
        """Add the spread of this key over its contexts to C (`algebra.updates.add_context_moment`), [d_ff, d_ff]."""
        return updates.add_context_moment(C, self.k, self.same, weight) if weight else C


def read(editable: Editable, ff: FeedForward, prompt_set: PromptSet) -> LayerKeys:
    """Read the keys of `prompt_set` in a layer, concatenated over its memories; texts are split if memory runs out.

    Raises:
        EditError: memory does not suffice for a single text.
    """
    texts = [*prompt_set.prompts, *prompt_set.essence]
    parts = zip(*split_on_oom(partial(_run, editable, ff), texts, EditError(NO_ROOM)), strict=True)
    same, stream = (torch.cat(part) for part in parts)
    stated = torch.tensor([bool(e.target_ids) for e in texts])
    return LayerKeys(k=double(same[stated]).mean(0), stream=double(stream[stated]).mean(0), same=same)


def without_sinks(editable: Editable, ff: FeedForward, prompt_set: PromptSet) -> PromptSet:
    """Leave out the texts in which the subject's key is that of an attention sink, if other prompts remain."""
    texts = [*prompt_set.prompts, *prompt_set.essence]
    first = torch.tensor([text.site == 0 for text in texts])
    if not first.any() or first[: len(prompt_set.prompts)].all():
        return prompt_set
    parts = split_on_oom(partial(_run, editable, ff), texts, EditError(NO_ROOM))
    keys = double(torch.cat([keys for keys, _ in parts]))
    alike = torch.cosine_similarity(keys, keys[~first].mean(0, keepdim=True))
    return prompt_set.without([i for i, text in enumerate(texts) if text.site == 0 and float(alike[i]) < SINK])


def nothing(ff: FeedForward) -> Moment:
    """Return a zero second moment, [Σ d_ff, Σ d_ff], float64, on the device where the layer is solved."""
    return diagonal([torch.zeros(size, size, dtype=torch.float64, device=ff.solve_device) for size in ff.sizes])


def _run(editable: Editable, ff: FeedForward, texts: Sequence[Encoded]) -> tuple[Tensor, Tensor]:
    """Run `texts` up to a layer; return keys and residual stream at each subject's last token."""
    ids = pad([e.ids for e in texts])
    with ff.keys() as entering, capture({0: editable.layers[ff.layer]}) as leaving:
        replay.run_to(editable, ids, ff.layer)
    keys, stream = (found.reshape(*ids.shape, -1) for found in (entering(), leaving[0]))
    at = torch.arange(len(texts)), torch.tensor([e.site for e in texts])
    return keys[at], stream[at]
