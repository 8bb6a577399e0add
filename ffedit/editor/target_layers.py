"""To which memories of a layer is a fact written?

Of a dense layer, to its one. Of a mixture of experts, to those that the subject's last token really goes to: an expert
that at least half of the texts stating the fact come to, and every shared one. The router itself is never changed. What
it does is measured before and after: how much of its weight the written experts hold over contexts, and whether a text
goes to other experts once the edit is in the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ffedit.editor.edit import Edit
from ffedit.editor.job import Job, restored
from ffedit.editor.prompts import PromptSet
from ffedit.errors import EditError
from ffedit.inference.routing import Routes, mixtures, routes
from ffedit.model.editable import Editable
from ffedit.model.feed_forward import FeedForward
from ffedit.model.memory import Address

# In what share of the texts that state a fact its key must pass through an expert that is written to.
OFTEN = 0.5


def find_ff_layers(editable: Editable, layers: Sequence[int], prompt_sets: Sequence[PromptSet]) -> list[FeedForward]:
    """Return the memories of `layers` that the facts' keys pass through, by layer; a dense layer needs no prompts."""
    mixed = [layer for layer in layers if editable.feed_forward[layer].mixture is not None]
    found = routes(editable, [text for prompt_set in prompt_sets for text in prompt_set.prompts], mixed)
    return [
        editable.feed_forward[layer].only(_written(editable.feed_forward[layer], found[layer], prompt_sets))
        if layer in found
        else editable.feed_forward[layer]
        for layer in layers
    ]


def _written(layer: FeedForward, found: Routes, prompt_sets: Sequence[PromptSet]) -> list[Address]:
    """The addresses of the experts that some subject passes through, and of the shared ones."""
    routed = found.weights.shape[1]
    chosen = {part.address.expert for part in layer.parts if (part.address.expert or 0) >= routed}
    for rows in torch.arange(len(found.weights)).split([len(prompt_set.prompts) for prompt_set in prompt_sets]):
        shares = found.some(rows).shares
        chosen |= set((shares >= min(OFTEN, float(shares.max()))).nonzero()[:, 0].tolist())
    return [part.address for part in layer.parts if part.address.expert in chosen]


def check_routes(
    editable: Editable, ff: FeedForward, subjects: Sequence[str], prompt_sets: Sequence[PromptSet]
) -> None:
    """Make sure that the subjects still go to the experts of `ff`, with the layers below it edited.

    Raises:
        EditError: one no longer does.
    """
    if ff.mixture is None:
        return
    found = routes(editable, [text for prompt_set in prompt_sets for text in prompt_set.prompts], [ff.layer])[ff.layer]
    written = {part.address.expert for part in ff.parts}
    counts = [len(prompt_set.prompts) for prompt_set in prompt_sets]
    for subject, rows in zip(subjects, torch.arange(len(found.weights)).split(counts), strict=True):
        shares = found.some(rows).shares
        flipped = [e for e in (shares > OFTEN).nonzero()[:, 0].tolist() if e not in written]
        if flipped:
            raise EditError(
                f"the routing flips under the edit: {subject!r} goes to expert {ff.layer}.{flipped[0]} once "
                f"the layers below are edited, and was to be written to {_named(ff)}; write to one layer"
            )


def _named(ff: FeedForward) -> str:
    return ", ".join(str(part.address) for part in ff.parts)


def routed(job: Job, edit: Edit, prompt_sets: Sequence[PromptSet]) -> Edit:
    """The edit, with what the routers do before and after it in its provenance, where it changes a mixture.

    `provenance["routing"]` is plain JSON, by layer: `texts`, how many state the facts; `experts`, by number the `share`
    of them whose subject goes there and the mean `weight` that the expert has then; `moved`, the share that goes to
    other experts once the edit is in the model; of an edited layer, `written`, the experts, and `covered`, the share of
    the router's weight that they hold.
    """
    editable, mixed = job.editable, [ff for ff in job.ff_layers if ff.mixture is not None]
    if not mixed:
        return edit
    texts = [text for prompt_set in prompt_sets for text in prompt_set.prompts]
    before = routes(editable, texts, mixtures(editable))
    with restored(job.memories):
        for at, delta in edit.updates.items():
            editable.memories[at].write_(delta)
        after = routes(editable, texts, mixtures(editable))
    about = {str(layer): _described(found, after[layer]) for layer, found in before.items()}
    for ff in mixed:
        written, count = [part.address.expert or 0 for part in ff.parts], before[ff.layer].weights.shape[1]
        covered = before[ff.layer].covered([e for e in written if e < count])
        about[str(ff.layer)] |= {"written": written, "covered": covered}
    return edit.noted(routing=about)


def _described(before: Routes, after: Routes) -> dict[str, Any]:
    return {
        "texts": len(before.weights),
        "experts": {
            str(e): {"share": float(before.shares[e]), "weight": float(before.mean_weights[e])}
            for e in before.shares.nonzero()[:, 0].tolist()
        },
        "moved": float((before.chosen != after.chosen).any(1).double().mean()),
    }
